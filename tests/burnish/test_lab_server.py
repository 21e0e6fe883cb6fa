"""The laboratory's server: no token, no data; strangers are refused, bounded, and change nothing."""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from forked import command
from messages import mentions
from pairwise import everything
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from burnish.commands.lab import LabConfig, subject_of
from burnish.lab.run_control import RunControl
from burnish.lab.runs import RunFolder
from burnish.lab.server import HEADERS, MESSAGE_BYTES, MOST_VISITORS, Guard, Lab, LabServer
from policies.errors import ConfigError
from policies.serving.metrics import resident_mb

OLD = "tests/fixtures/version_0_1/policies/cloned"


@pytest.fixture(scope="module")
def server() -> Iterator[LabServer]:
    with serving(Lab(subject_of(LabConfig(policy=OLD)))) as made:
        yield made


@contextmanager
def serving(lab: Lab) -> Iterator[LabServer]:
    made = LabServer(lab)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join(30)
    assert not thread.is_alive()


def token_of(server: LabServer) -> str:
    return server.address.rpartition("=")[2]


def ask(
    server: LabServer, path: str, *, method: str = "GET", token: str | None = "", headers: Any = None
) -> tuple[int, dict[str, str], str]:
    """Send a request; the token is the right one unless given, and left out for None."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    query = "" if token is None else f"?token={token or token_of(server)}"
    connection.request(method, f"{path}{query}", headers=headers or {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text


@contextmanager
def visit(server: LabServer, *, token: str | None = None, **options: Any) -> Iterator[ClientConnection]:
    """Connect, and read the first message: facts, or the reason of a refusal."""
    key = token_of(server) if token is None else token
    address = f"ws://127.0.0.1:{server.port}/live?token={key}"
    with connect(address, **({"compression": None, "proxy": None, "max_size": None} | options)) as visitor:
        visitor.first = json.loads(visitor.recv(timeout=60))
        yield visitor


def talk(visitor: ClientConnection, message: Any, has: str) -> Any:
    """Send a message, and return the first answer that has a key."""
    visitor.send(message if isinstance(message, (str, bytes)) else json.dumps(message))
    while True:
        answer = json.loads(visitor.recv(timeout=60))
        if has in answer:
            return answer


def test_nothing_listens_beyond_this_machine(server: LabServer) -> None:
    assert server.address.startswith("http://127.0.0.1:")
    assert server._socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/", "/lab.js", "/lab.css", "/live", "/runs", "/run", "/other"])
@pytest.mark.parametrize("token", [None, "x", "é" * 9])
def test_without_the_token_there_is_no_data(server: LabServer, path: str, token: str | None) -> None:
    asked = None if token is None else "".join(f"%{byte:02x}" for byte in token.encode())
    status, headers, text = ask(server, path, token=asked)
    assert status == 403 and "burnish lab printed" in text and token_of(server) not in text
    assert HEADERS.items() <= headers.items()


def test_pages_come_with_a_policy_that_forbids_everything_else(server: LabServer) -> None:
    for path, media in (("/", "text/html"), ("/lab.js", "text/javascript"), ("/lab.css", "text/css")):
        status, headers, text = ask(server, path)
        assert status == 200 and headers["content-type"].startswith(media)
        assert HEADERS.items() <= headers.items() and "unsafe" not in headers["content-security-policy"]
        assert not any(word in text for word in ("style=", "onclick", "https://", "eval("))
    assert ask(server, "/other")[0] == ask(server, "/runs.js")[0] == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "example.org"}, 421),
        ({"Host": "127.0.0.1.example.org"}, 421),
        ({"Host": "["}, 421),
        ({"Host": "localhost:1"}, 200),
        ({"Origin": "http://example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[evil"}, 403),
        ({"Host": "localhost:1", "Origin": "https://localhost:1"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
    ],
)
def test_pages_of_others_are_kept_out(server: LabServer, headers: dict[str, str], status: int) -> None:
    assert ask(server, "/", headers=headers)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "OTHER"])
def test_pages_are_only_read(server: LabServer, method: str) -> None:
    assert ask(server, "/", method=method)[0] == 405


def test_runs_are_changed_where_that_was_asked_for_and_by_this_page_alone(tmp_path: Path) -> None:
    assert Guard(None, "t").refusal(asked("POST", "/run")) == 405
    guard = Guard(None, "t", may_write=True)
    assert guard.refusal(asked("POST", "/run")) == 0
    assert guard.refusal(asked("POST", "/run", token="x")) == 403
    assert guard.refusal(asked("POST", "/run", origin="http://example.org")) == 403
    assert guard.refusal(asked("POST", "/")) == guard.refusal(asked("PUT", "/run")) == 405
    runs = RunFolder(tmp_path)
    with serving(Lab(None, runs, RunControl(runs))) as server:
        for query in ("name=..&do=stop", "name=&do=continue", "name=run&do=x", ""):
            token = f"{token_of(server)}&{query}"
            assert ask(server, "/run", method="POST", token=token)[0] == 409


def asked(method: str, path: str, *, token: str = "t", origin: str = "http://localhost") -> dict[str, Any]:
    """A request as the guard sees it."""
    headers = [(b"host", b"localhost"), (b"origin", origin.encode())]
    query = f"token={token}".encode()
    return {"type": "http", "method": method, "path": path, "headers": headers, "query_string": query}


def test_a_run_is_given_by_its_name_alone(server: LabServer) -> None:
    assert ask(server, "/runs")[2] == "[]"
    token = token_of(server)
    for name in ("..", "../../etc", "%2e%2e", "/etc/passwd", "", "run%00"):
        assert ask(server, "/run", token=f"{token}&name={name}")[0] == 404


def test_a_visitor_needs_the_token_and_the_page_of_this_server(server: LabServer) -> None:
    for options in ({"token": "x"}, {"origin": "http://example.org"}):
        with pytest.raises(InvalidStatus) as refused, visit(server, **options):
            pass
        assert refused.value.response.status_code == 403
    with visit(server, origin=f"http://127.0.0.1:{server.port}") as visitor:
        assert visitor.first["facts"]["task"] == "avoid"


def test_an_answer_bears_the_number_of_its_question(server: LabServer) -> None:
    with visit(server) as visitor:
        assert talk(visitor, {"id": 17, "controls": {"plans": 2}}, "id")["id"] == 17
        assert len(talk(visitor, {"id": 18, "controls": {"plans": 3}}, "id")["plans"]) == 3
        assert talk(visitor, {"step": True}, "step")["step"] == 1


def test_a_played_episode_arrives_frame_by_frame_until_it_is_stopped(server: LabServer) -> None:
    with visit(server) as visitor:
        talk(visitor, {"seed": 2}, "scene")
        steps = [talk(visitor, {"play": True}, "step")["step"]]
        steps += [json.loads(visitor.recv(timeout=60))["step"] for _ in range(5)]
        assert steps == [1, 2, 3, 4, 5, 6]
        visitor.send(json.dumps({"play": False}))
        while True:
            try:
                visitor.recv(timeout=0.5)
            except TimeoutError:
                break


def test_starts_are_compared_while_the_episode_goes_on(server: LabServer) -> None:
    with visit(server) as visitor:
        visitor.send(json.dumps({"compare": True, "play": True}))
        kinds = []
        while not kinds or "compared" not in kinds[-1]:
            kinds.append(set(json.loads(visitor.recv(timeout=60))))
        assert any("step" in kind for kind in kinds[:-1])  # a server that waits would answer "compared" first


def test_a_comparison_that_is_refused_is_answered(server: LabServer) -> None:
    with visit(server) as visitor:
        answer = talk(visitor, {"controls": {"plans": 99}, "compare": 7}, "compared")
        assert answer["compared"] == {} and answer["round"] == 7 and "plans" in answer["error"]
        answer = talk(visitor, {"controls": {"noise": 0.5}, "compare": 8}, "compared")
        assert answer["compared"] == {} and answer["round"] == 8 and "noise" in answer["error"]


@pytest.mark.parametrize(
    "message",
    [
        *("", "[]", "{", "null", "1e999", '{"id": NaN}', "[" * 2000, '{"a": 1, "a": 2}', '{"\ud800": 1}'),
        *('{"other": 1}', '{"controls": 3}', '{"controls": {"plans": 1e9}}', '{"seed": "0"}', '{"seed": -1}'),
        *('{"move": "../.."}', '{"move": [1e308, 1e308, 1]}', '{"seed": 99999999999999999999}'),
    ],
)
def test_a_wrong_message_is_answered_and_the_visitor_goes_on(server: LabServer, message: str) -> None:
    with visit(server) as visitor:
        assert talk(visitor, message.encode("utf-8", "replace").decode(), "error")["error"]
        assert talk(visitor, {"step": True}, "step")["step"] == 1


def test_a_task_that_fails_is_answered_now_and_then_and_the_visitor_goes_on(
    server: LabServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("the simulator is unstable")

    with visit(server) as visitor:
        with monkeypatch.context() as broken:
            broken.setattr("burnish.lab.session.Session.step", failing)
            broken.setattr("burnish.lab.server.compared", failing)
            assert talk(visitor, {"compare": 3}, "compared")["error"] == "the simulator is unstable"
            assert talk(visitor, {"play": True}, "error")["error"] == "the simulator is unstable"
            with pytest.raises(TimeoutError):
                visitor.recv(timeout=0.3)
            visitor.send(json.dumps({"play": False}))
        assert talk(visitor, {"step": True}, "step")["step"] == 1


def test_a_task_that_cannot_begin_says_why(server: LabServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise OSError("too many open files")

    monkeypatch.setattr("burnish.lab.server.Session", failing)
    with visit(server) as visitor:
        assert visitor.first == {"error": "too many open files"}
        with pytest.raises(ConnectionClosed):
            visitor.recv(timeout=10)


def test_messages_are_bounded(server: LabServer) -> None:
    for message in ("x" * (MESSAGE_BYTES + 1), b"\x00bytes"):
        with visit(server) as visitor, pytest.raises(ConnectionClosed):
            talk(visitor, message, "never")


def test_many_questions_are_answered_by_the_newest(server: LabServer) -> None:
    with visit(server) as visitor:
        for number in range(300):
            visitor.send(json.dumps({"id": number, "controls": {"plans": 1 + number % 64}}))
        seen = []
        while not seen or seen[-1] != 299:
            answer = json.loads(visitor.recv(timeout=60))
            seen += [answer["id"]] if "id" in answer else []
        assert len(seen) < 300 and seen == sorted(seen)


def test_visitors_are_few(server: LabServer) -> None:
    with ExitStack() as stack:
        visitors = [stack.enter_context(visit(server)) for _ in range(MOST_VISITORS)]
        assert all("facts" in one.first for one in visitors)
        with visit(server) as another:
            assert str(MOST_VISITORS) in another.first["error"]
            with pytest.raises(ConnectionClosed):
                another.recv(timeout=60)
    with visit(server) as after:
        assert "facts" in after.first


def hostile_bytes(draw: random.Random) -> bytes:
    """Return a request that no browser sends."""

    def line(path: str, *headers: str) -> bytes:
        return "\r\n".join([f"GET {path} HTTP/1.1", *headers, "", ""]).encode("latin-1")

    host = "Host: 127.0.0.1"
    upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
    strange = ["evil.example", "[", "", "127.0.0.1, x", "127.0.0.1:99999"]
    climb = "/".join([".."] * draw.randint(1, 9))
    makers: list[Callable[[], bytes]] = [
        lambda: draw.randbytes(draw.randint(0, 3000)),
        lambda: line(f"/{climb}/etc/passwd", host),
        lambda: line(f"/%2e%2e%2f{climb}%00?token={'x' * draw.randint(0, 2000)}", host),
        lambda: line("/" + "a" * draw.randint(2**13, 2**17), host),
        lambda: line("/?" + "&".join(f"token={i}" for i in range(draw.randint(1, 99))), host),
        lambda: line("/?token=%ff%fe", host),
        lambda: line("/", f"Host: {draw.choice(strange)}"),
        lambda: line("/", host, host),
        lambda: line("/", *(f"X-{i}: {'y' * 99}" for i in range(draw.randint(1, 400)))),
        lambda: line("/live", host, *upgrade, f"Sec-WebSocket-Key: {draw.randbytes(9).hex()}"),
        lambda: line("/", host, "Transfer-Encoding: chunked") + b"fffffff\r\n" + draw.randbytes(99),
        lambda: line("/", host, f"Content-Length: {draw.choice(['-1', '1e9', '99999999999', 'x'])}"),
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(50),
        lambda: b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n",
    ]
    return draw.choice(makers)()


def test_hostile_requests_leave_it_alive(server: LabServer) -> None:
    """A visitor meanwhile is answered; no data is given away, and memory is not."""
    draw, secret, before = random.Random(0), token_of(server).encode(), resident_mb()
    with visit(server) as visitor:
        talk(visitor, {"id": 0, "controls": {"plans": 1}}, "id")
        for number in range(1, 1001 if everything else 301):
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as hostile:
                try:
                    hostile.sendall(hostile_bytes(draw))
                    hostile.shutdown(socket.SHUT_WR)
                    answer = b"".join(iter(lambda: hostile.recv(2**16), b""))
                except ConnectionError:
                    answer = b""
            assert secret not in answer and b"HTTP/1.1 200" not in answer and b" 101 " not in answer[:20]
            if number % 100 == 0:
                assert talk(visitor, {"id": number, "controls": {"plans": 1}}, "id")["id"] == number
    assert ask(server, "/")[0] == 200
    assert resident_mb() - before < 64


def test_a_port_that_is_taken_is_named(server: LabServer) -> None:
    with pytest.raises(ConfigError, match=mentions(f"port={server.port}")):
        LabServer(Lab(None), server.port)


def test_the_command_prints_the_address_and_ends_by_a_signal() -> None:
    with command(Path.cwd(), "lab", f"policy={OLD}", "runs=null") as (process, printed):
        address = printed.readline().removeprefix("laboratory: ").strip()
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert b"burnish lab" in answer.read()
        process.terminate()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
