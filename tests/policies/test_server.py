"""A policy server answers as the policy would, refuses in words, and keeps nothing of a robot."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from forked import command, started
from messages import mentions
from pairwise import repeated
from small_policies import observations, small_policy

from policies.build import build_policy
from policies.encoders.vit import VitEncoderConfig
from policies.errors import ConfigError, ExportError, ServingError
from policies.export.export import export_onnx
from policies.export.folder import Surroundings
from policies.policy import Policy
from policies.policy_config import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.runner import draw_noise
from policies.samplers.ode import Euler
from policies.serving.batching import Batcher, Request
from policies.serving.client import Client, RemotePolicy
from policies.serving.encryption import make_keys
from policies.serving.messages import VERSION, Schema, pack, to_wire, unpack
from policies.serving.metrics import metrics_page
from policies.serving.served_policy import ServedFolder, ServedPolicy
from policies.serving.server import Server, ServerSettings
from policies.storage.features import Feature
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.candidates import Candidates

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
"""How long an answer may take on a machine that is busy; nothing is measured by it."""


def flow() -> Policy:
    return small_policy(RectifiedFlow(), Euler(steps=2), obs_steps=2)


def chosen(**values: Any) -> Policy:
    """A policy that chooses among candidates, with edits or ascent."""
    torch.manual_seed(0)
    return Candidates(critic_dims=(8,), edit_dims=(8,), **values).wrap(flow()).eval()


BEST_OF_N = {"num_candidates": 3}
EDITED = {"num_candidates": 3, "num_edited": 2, "edit_scale": 0.3}
RESIDUAL = {"num_candidates": 1, "num_edited": 1, "keeps_base": False, "edit_scale": 0.3}
CLIMBING = {"num_candidates": 3, "num_ascended": 2, "ascent_steps": 2, "ascent_lr": 0.1}


def patient(**settings: Any) -> ServerSettings:
    """Settings under which nothing is refused because a machine is slow, or a process has grown meanwhile."""
    return ServerSettings(**({"port": 0, "deadline_ms": 1e3 * PATIENCE_S, "max_backlog_mb": 1e6} | settings))


@contextmanager
def running(served: Any, **settings: Any) -> Iterator[Server]:
    """Serve in a thread meanwhile."""
    with Server(served, patient(**settings)) as server:
        thread = Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join(PATIENCE_S)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], Any], work: Callable[[], Any]) -> None:
    """Work, or pause, until something has happened."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        work()


@contextmanager
def kept_port() -> Iterator[int]:
    """A port that no program is given by chance while servers come and go on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def client_of(server: Server, **more: Any) -> Client:
    return Client(server.endpoint, **({"timeout_s": PATIENCE_S / 4, "retries": 3} | more))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(ServedPolicy(flow())) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with client_of(server) as client:
        yield client


def observed(seed: int = 0, steps: int = 2) -> dict[str, Any]:
    return {"observation": observations(1, steps, seed)[0].numpy()}


# -- what it answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        flow(),
        small_policy(VPDiffusion(num_levels=4), obs_steps=2),
        small_policy(goal_dim=3, obs_steps=2),
        *(chosen(**values) for values in (BEST_OF_N, EDITED, RESIDUAL, CLIMBING)),
    ],
)
def test_a_served_policy_acts_as_it_does_itself(policy: Policy) -> None:
    obs = observed() | ({"goal": np.ones(3, np.float32)} if policy.goal_dim else {})
    with running(ServedPolicy(policy)) as server, client_of(server) as client:
        assert client.schema.obs_steps == 2 and client.schema.action.shape == (2, 2)
        for key in ((7, 0, 1), None):
            noise = (
                np.zeros(policy.noise_shape, np.float32)
                if key is None
                else draw_noise(key, policy.noise_shape)
            )
            own = policy.act(
                {("state" if k == "observation" else k): v[None] for k, v in obs.items()},
                noise=torch.from_numpy(noise)[None],
            )
            np.testing.assert_allclose(client.decide(obs, key), own[0].numpy(), rtol=1e-5, atol=1e-6)


def test_the_answer_does_not_depend_on_who_asks_at_the_same_time() -> None:
    policy = flow()
    with Server(ServedPolicy(policy), ServerSettings(port=0, max_batch=8)) as server:
        rows = [observed(i)["observation"] for i in range(5)]
        requests = [Request(b"", i, {"observation": row}, (3, i), 0.0, 1.0) for i, row in enumerate(rows)]
        alone = [server._actions([request])[0] for request in requests]
        for order in ([0, 1, 2, 3, 4], [4, 2, 0], [3, 1]):
            together = server._actions([requests[i] for i in order])
            for i, actions in zip(order, together, strict=True):
                np.testing.assert_allclose(actions, alone[i], rtol=1e-5, atol=1e-6)


def test_robots_that_wait_are_decided_together() -> None:
    with Server(ServedPolicy(flow()), patient(max_batch=3, max_wait_ms=1e9)) as server:
        body = {"type": "act", "schema": server._fingerprint, "obs": {"observation": array()}}
        with Raw(server) as one, Raw(server) as two, Raw(server) as three:
            for number, raw in enumerate((one, two, three)):
                raw.socket.send(pack({**body, "id": number, "key": [number]}))
            wait_until(lambda: server.metrics.counts["decisions"] == 3, server.step)
            answers = [raw.receive() for raw in (one, two, three)]
    assert server.metrics.counts["batches"] == 1
    assert [(one["type"], one["batch"], one["id"]) for one in answers] == [
        ("actions", 3, i) for i in range(3)
    ]


def test_history_and_chunk_are_kept_by_the_client(client: Client) -> None:
    robot = RemotePolicy(client, seed=5)
    states = observations(3)[:, 0].numpy()
    actions = [robot.act(state) for state in states]
    first = client.decide({"observation": np.stack([states[0], states[0]])}, (5, 0, 0))
    second = client.decide({"observation": np.stack([states[1], states[2]])}, (5, 0, 1))
    np.testing.assert_allclose(actions, [first[0], first[1], second[0]], rtol=1e-5, atol=1e-6)


def test_actions_are_cut_off_at_the_limits_of_the_task() -> None:
    around = Surroundings(task="avoid", control_hz=20.0, action_low=[-0.1, -0.1], action_high=[0.1, 0.1])
    with running(ServedPolicy(flow(), around)) as server, client_of(server) as client:
        assert client.schema.control_hz == 20.0
        state = observations(1)[0, 0].numpy()
        assert np.abs(RemotePolicy(client).act(state)).max() == pytest.approx(0.1)
        assert np.abs(RemotePolicy(client, is_clipped=False).act(state)).max() > 0.2


def test_limits_are_those_of_the_policy_that_the_server_has_by_now() -> None:
    def around(limit: float) -> Surroundings:
        return Surroundings("avoid", 10 / limit, action_low=[-limit] * 2, action_high=[limit] * 2)

    states = observations(6)[:, 0].numpy()
    with kept_port() as port:
        with running(ServedPolicy(flow(), around(0.2)), port=port) as server:
            client = client_of(server, timeout_s=2.0, retries=20)
            robot = RemotePolicy(client, act_steps=1)
            assert np.abs([robot.act(state) for state in states]).max() == pytest.approx(0.2)
        with running(ServedPolicy(flow(), around(0.1), "other weights"), port=port), client:
            assert np.abs([robot.act(state) for state in states]).max() == pytest.approx(0.1)
            assert (robot.schema.control_hz, robot.schema.policy) == (100.0, "other weights")


def test_commands_of_a_robot_change_by_no_more_than_the_jump(client: Client) -> None:
    states = observations(6)[:, 0].numpy()
    free, bounded = (RemotePolicy(client, max_jump=jump) for jump in (None, 0.05))
    wild, tame = (np.diff([robot.act(state) for state in states], axis=0) for robot in (free, bounded))
    assert np.abs(wild).max() > 0.1 and np.abs(tame).max() <= 0.05 + 1e-6
    assert (free.limited, bounded.limited > 0) == (0, True)
    with pytest.raises(ConfigError, match=mentions("max_jump 0 positive")):
        RemotePolicy(client, max_jump=0.0)


@pytest.mark.parametrize("values", repeated([BEST_OF_N, None, EDITED, RESIDUAL]))
def test_an_exported_folder_is_served_as_the_policy_it_was(
    values: dict[str, Any] | None, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    policy = flow() if values is None else chosen(**values)
    export_onnx(policy, tmp_path / "exported", batch_sizes=(1, 3), latency_batches=())
    served, own = ServedFolder(tmp_path / "exported"), ServedPolicy(policy)
    assert served.schema.inputs == own.schema.inputs and served.schema.action == own.schema.action
    assert served.noise_shape == own.noise_shape
    inputs = {"observation": observations(3, 2).numpy()}
    noise = np.stack([draw_noise((i,), own.noise_shape) for i in range(3)])
    np.testing.assert_allclose(served.decide(inputs, noise), own.decide(inputs, noise), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"inputs": NaN}', "{}", '{"inputs": {"noise": {"shape": ["B"]}}}']
)
def test_a_folder_whose_signature_lies_is_not_served(text: str, tmp_path: Path) -> None:
    (tmp_path / "signature.json").write_text(text)
    with pytest.raises(ExportError, match=re.escape(str(tmp_path))):
        ServedFolder(tmp_path)


# -- what it refuses ----------------------------------------------------------------------------------------

GOOD = observed()["observation"].astype(np.float32)
WRONG: dict[str, tuple[Any, str, str]] = {
    "an entry is missing": ({}, "missing", "['observation']"),
    "an entry too much": ({"observation": GOOD, "image": GOOD}, "missing", "must have"),
    "another history": ({"observation": GOOD[:1]}, "shape", "shape (2, 5) (1, 5)"),
    "another width": ({"observation": GOOD[:, :4]}, "shape", "shape"),
    "a batch": ({"observation": GOOD[None]}, "shape", "shape"),
    "NaN": ({"observation": GOOD * np.nan}, "nan", "finite"),
    "inf": ({"observation": GOOD + np.inf}, "nan", "finite"),
    "too large": ({"observation": GOOD * 1e9}, "range", "1e+06"),
    "bytes": ({"observation": GOOD.astype(np.uint8)}, "dtype", "float32 uint8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_observations_that_do_not_fit_are_refused_by_name(case: str, client: Client) -> None:
    obs, reason, message = WRONG[case]
    body = {
        "type": "act",
        "obs": {k: to_wire(v) for k, v in obs.items()},
        "schema": client.schema.fingerprint,
    }
    with pytest.raises(ServingError, match=mentions(message)) as refused:
        client.request(body | {"key": [0]})
    assert refused.value.reason == reason


def test_images_that_are_no_bytes_are_refused_before_they_are_sent() -> None:
    """Floats of a frame can have more bytes than the server takes, and it would not answer."""
    encoder = VitEncoderConfig(width=16, features=8)
    config = PolicyConfig(RectifiedFlow(), encoder, sampler=Euler(steps=1))
    made = build_policy(config, obs_dim=5, action_dim=2, images={"eye": (16, 16, 3)})
    frame = np.full((16, 16, 3), 200)
    with running(ServedPolicy(made)) as server, client_of(server) as client:
        robot = RemotePolicy(client)
        for wrong in (frame / 255, frame.astype(np.float64), frame - 201, frame + 56):
            with pytest.raises(ServingError, match=mentions(f"'eye' uint8 {wrong.dtype}")) as refused:
                robot.act({"observation": np.zeros(5), "eye": wrong})
            assert refused.value.reason == "dtype"
        taken = [robot.act({"observation": np.zeros(5), "eye": one}) for one in (frame, frame.astype("u1"))]
        assert np.isfinite(taken).all()


def array(**changes: Any) -> dict[str, Any]:
    return to_wire(GOOD) | changes


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "an array that is a list": ({"obs": {"observation": [1.0, 2.0]}}, "malformed"),
    "an unknown type": ({"obs": {"observation": array(dtype="object")}}, "dtype"),
    "a type that is a list": ({"obs": {"observation": array(dtype=["f4"])}}, "dtype"),
    "a giant shape": ({"obs": {"observation": array(shape=[2**31 - 1] * 8)}}, "malformed"),
    "a negative shape": ({"obs": {"observation": array(shape=[-2, -5])}}, "malformed"),
    "a shape of truths": ({"obs": {"observation": array(shape=[True, 5])}}, "malformed"),
    "a shape that no array has": (
        {"obs": {"observation": array(shape=[0] + [2**31 - 1] * 7, data=b"")}},
        "malformed",
    ),
    "a shape of many dimensions": ({"obs": {"observation": array(shape=[1] * 100)}}, "malformed"),
    "bytes that are missing": ({"obs": {"observation": array(data=b"1234")}}, "malformed"),
    "data as text": ({"obs": {"observation": array(data="1234")}}, "malformed"),
    "a further entry": ({"obs": {"observation": array(code="x")}}, "malformed"),
    "observations as a list": ({"obs": [1]}, "missing"),
    "a negative key": ({"key": [-1]}, "malformed"),
    "a key without end": ({"key": [0] * 9}, "malformed"),
    "a key of text": ({"key": "0"}, "malformed"),
    "a deadline in the past": ({"deadline_ms": -1.0}, "malformed"),
    "a deadline that is NaN": ({"deadline_ms": float("nan")}, "malformed"),
    "another policy": ({"schema": "0" * 16}, "schema"),
    "another version": ({"v": VERSION + 1}, "version"),
    "no version": ({"v": None}, "version"),
    "an unknown question": ({"type": "eval"}, "malformed"),
    "a name that is no text": ({"id": "one"}, "malformed"),
}


class Raw:
    """Sends frames as they are."""

    def __init__(self, server: Server) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(server.endpoint)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(linger=0)
        self.context.term()

    def ask(self, *frames: bytes) -> dict[str, Any]:
        self.socket.send_multipart(frames)
        return self.receive()

    def receive(self) -> dict[str, Any]:
        assert self.socket.poll(1e3 * PATIENCE_S), "no answer"
        return unpack(self.socket.recv())


@pytest.mark.parametrize("case", MALFORMED)
def test_messages_that_lie_are_refused_with_a_reason(case: str, server: Server) -> None:
    changes, reason = MALFORMED[case]
    body = {
        "type": "act",
        "id": 1,
        "schema": server._fingerprint,
        "obs": {"observation": array()},
        "key": [0],
    }
    with Raw(server) as raw:
        answer = raw.ask(msgpack.packb({"v": VERSION, **body, **changes}))
        assert (answer["type"], answer["reason"]) == ("error", reason) and answer["message"]
        assert raw.ask(pack(body))["type"] == "actions", "the server goes on"


FRAMES: dict[str, tuple[tuple[bytes, ...], str]] = {
    "nothing": ((b"",), "malformed"),
    "noise": ((b"\xc1\xff\x00garbage",), "malformed"),
    "a pickle": ((b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix.",), "malformed"),
    "nesting without end": ((b"\x91" * 3000,), "malformed"),
    "a version nested as deep as msgpack reads": (
        (b"\x83\xa1v" + b"\x91" * 1000 + b"\x01" + msgpack.packb("type") + b"\xa5hello\xa2id\x01",),
        "malformed",
    ),
    "a list that claims billions": ((b"\xdd\xff\xff\xff\xff",), "malformed"),
    "a map that claims billions": ((b"\xdf\xff\xff\xff\xff",), "malformed"),
    "a type of its own": ((b"\xc7\x04\x05abcd",), "malformed"),
    "a number": ((b"\x01",), "malformed"),
    "a map with two meanings": ((b"\x82\x01\x02\x03\x04",), "malformed"),
    "two frames": ((b"", pack({"type": "hello", "id": 1})), "malformed"),
    "many frames": ((b"x",) * 500, "malformed"),
    "too many bytes": ((b"\xc6\x00\x00\x27\x10" + bytes(10_000),), "oversize"),
}


@pytest.mark.parametrize("case", FRAMES)
def test_frames_that_are_no_message_are_refused_with_a_reason(case: str, server: Server) -> None:
    frames, reason = FRAMES[case]
    with Raw(server) as raw:
        answer = raw.ask(*frames)
        assert (answer["type"], answer["reason"]) == ("error", reason)
        assert raw.ask(pack({"type": "hello", "id": 2}))["type"] == "welcome"


def test_who_speaks_another_language_is_disconnected_and_others_are_served(server: Server) -> None:
    host, port = server.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(4096))
        with client_of(server) as client:
            assert client.decide(observed(), (0,)).shape == (2, 2)


def test_a_frame_beyond_all_limits_ends_its_connection_only(server: Server) -> None:
    with Raw(server) as raw, client_of(server) as client:
        raw.socket.send(bytes(50 * server._max_message))
        assert client.decide(observed(), (0,)).shape == (2, 2)


# -- the queue ----------------------------------------------------------------------------------------------


def request(
    client: bytes = b"a", number: int = 0, *, arrived: float = 0.0, deadline: float = 10.0
) -> Request:
    return Request(client, number, {}, None, arrived, deadline)


def test_the_queue_is_bounded_in_all_and_per_client() -> None:
    queue = Batcher(max_queue=3, max_per_client=2, max_batch=2, max_wait_s=0.0)
    for number in range(2):
        assert queue.refusal(b"a") == ""
        queue.add(request(b"a", number))
    assert "of this client" in queue.refusal(b"a") and queue.refusal(b"b") == ""
    queue.add(request(b"b"))
    assert "3 requests are waiting" in queue.refusal(b"c")
    queue.take(0.0)
    assert queue.refusal(b"a") == "" and len(queue) == 1


def test_a_batch_is_due_when_it_is_full_or_its_oldest_has_waited() -> None:
    queue = Batcher(max_queue=9, max_per_client=9, max_batch=2, max_wait_s=0.5)
    assert queue.due_in(0.0) is None
    queue.add(request(arrived=1.0))
    assert queue.due_in(1.1) == pytest.approx(0.4) and queue.due_in(2.0) == 0.0
    queue.add(request(arrived=1.1))
    assert queue.due_in(1.1) == 0.0


def test_who_waited_past_the_deadline_is_not_decided() -> None:
    queue = Batcher(max_queue=9, max_per_client=9, max_batch=2, max_wait_s=0.0)
    for number, deadline in enumerate((1.0, 5.0, 1.5, 5.0, 5.0)):
        queue.add(request(number=number, deadline=deadline))
    batch, late = queue.take(2.0)
    assert [one.id for one in batch] == [1, 3] and [one.id for one in late] == [0, 2]


def test_requests_that_are_late_or_too_many_are_told_so() -> None:
    now = [0.0]
    settings = patient(max_queue=2, max_per_client=2, max_wait_ms=1e6)
    with Server(ServedPolicy(flow()), settings, clock=lambda: now[0]) as server, Raw(server) as raw:
        body = {"type": "act", "schema": server._fingerprint, "obs": {"observation": array()}, "key": [0]}
        for number in range(3):
            raw.socket.send(pack({**body, "id": number, "deadline_ms": 100.0}))
        wait_until(lambda: server.metrics.counts["messages"] == 3, server.step)
        now[0] = 1.0
        server.stop()
        server.run()
        answers = [raw.receive() for _ in range(3)]
        assert {one["id"]: one["reason"] for one in answers} == {0: "late", 1: "late", 2: "busy"}
        assert server.metrics.rejected["late"] == 2 and server.metrics.counts["decisions"] == 0


def test_what_waits_is_answered_before_it_stops_and_what_comes_is_refused() -> None:
    with Server(ServedPolicy(flow()), patient(max_wait_ms=1e6)) as server, Raw(server) as raw:
        body = {"type": "act", "schema": server._fingerprint, "obs": {"observation": array()}, "key": [0]}
        raw.socket.send(pack({**body, "id": 1}))
        wait_until(lambda: server.metrics.counts["messages"] == 1, server.step)
        server.stop()
        raw.socket.send(pack({**body, "id": 2}))
        wait_until(lambda: server.metrics.counts["messages"] == 2, server.step)
        server.run()
        answers = [raw.receive() for _ in range(2)]
        told = {answer["id"]: answer.get("reason", answer["type"]) for answer in answers}
        assert told == {1: "actions", 2: "stopping"}


class Failing:
    """Fails at rows that begin with a 1, and gives NaN at those that begin with a 2."""

    schema = Schema({"observation": Feature((1, 1))}, Feature((1, 1)))
    noise_shape = (1,)

    def decide(self, inputs: Any, noise: Any) -> Any:
        first = inputs["observation"][:, :, :1]
        if (first == 1).any():
            raise RuntimeError("broken")
        return np.where(first == 2, np.nan, first)


def test_a_policy_that_fails_for_one_robot_serves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    with Server(Failing(), ServerSettings(port=0), clock=lambda: 0.0) as server:
        rows = [
            Request(b"", i, {"observation": np.full((1, 1), i, np.float32)}, None, 0.0, 1.0) for i in range(4)
        ]
        assert [None if row is None else float(row[0, 0]) for row in server._actions(rows)] == [
            0,
            None,
            None,
            3,
        ]
        for row in rows:
            server._queue.add(row)
        server._decide()
        assert (server.metrics.counts["decisions"], server.metrics.rejected["failed"]) == (2, 2)
    assert (
        "broken" in caplog.text and "NaN or inf for 1 of 1" in caplog.text
    )  # where clients are sent to look


def test_a_policy_that_always_fails_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "decide", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Server(Failing(), ServerSettings(port=0))


# -- memory -------------------------------------------------------------------------------------------------


def test_a_client_that_does_not_read_takes_no_memory() -> None:
    with Server(ServedPolicy(flow()), ServerSettings(port=0)) as server, Raw(server) as raw:
        hello = pack({"type": "hello", "id": 1})
        for _ in range(100_000):
            with contextlib.suppress(zmq.Again):  # the server reads in this thread: nothing may wait for it
                for _ in range(500):
                    raw.socket.send(hello, zmq.NOBLOCK)
            server.step(timeout_ms=1)
            if server.metrics.counts["slow"]:
                break
        assert server.metrics.counts["slow"] > 0


def test_connections_that_hold_too_much_memory_are_dropped_and_come_back() -> None:
    with (
        running(ServedPolicy(flow())) as server,
        client_of(server, timeout_s=5.0, retries=20) as client,
    ):
        before = client.decide(observed(), (1,))
        server._settings.max_backlog_mb = -1e6  # whatever it holds is too much
        wait_until(lambda: server.metrics.counts["reopened"], lambda: Event().wait(0.01))
        server._settings.max_backlog_mb = 1e6
        np.testing.assert_allclose(client.decide(observed(), (1,)), before, rtol=1e-6)


# -- places, keys, metrics ----------------------------------------------------------------------------------


def test_other_machines_must_be_asked_in() -> None:
    with pytest.raises(ConfigError, match=mentions("host=0.0.0.0 allow_remote")):
        ServerSettings(host="0.0.0.0")
    assert ServerSettings(host="0.0.0.0", allow_remote=True).host == "0.0.0.0"


def test_a_place_that_cannot_be_listened_at_is_said(server: Server) -> None:
    port = int(server.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match=mentions("listen tcp://127.0.0.1")):
        Server(ServedPolicy(flow()), ServerSettings(port=port))
    with pytest.raises(ConfigError, match=mentions("listen tcp://nowhere.invalid host")):
        Server(ServedPolicy(flow()), ServerSettings(host="nowhere.invalid", allow_remote=True))


@pytest.mark.skipif(not socket.has_ipv6, reason="has no IPv6")
def test_a_client_reaches_the_address_of_version_6_that_a_server_prints() -> None:
    with running(ServedPolicy(flow()), host="::1") as server, client_of(server) as client:
        assert server.endpoint.startswith("tcp://[::1]:")
        assert client.decide(observed(), (0,)).shape == (2, 2)


@pytest.mark.skipif(not socket.has_ipv6, reason="has no IPv6")
def test_a_name_with_addresses_of_both_versions_is_listened_at_where_clients_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [one for host in ("::1", "127.0.0.1") for one in socket.getaddrinfo(host, 0, type=1)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with Server(Failing(), ServerSettings(port=0, host="localhost")) as server:
        assert server.endpoint.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:5750", "tcp://127.0.0.1", "udp://127.0.0.1:5750"])
def test_an_address_that_is_none_is_said(endpoint: str) -> None:
    told = pytest.raises(ConfigError, match=mentions(f"{endpoint} tcp://<host>:<port>"))
    with Client(endpoint, timeout_s=0.1, retries=0) as client, told:
        client.metrics()


def test_only_who_has_a_key_is_answered(tmp_path: Path) -> None:
    secret = make_keys(tmp_path / "keys", "robot")
    stranger = make_keys(tmp_path / "others", "robot")
    public = tmp_path / "keys" / "server.key"
    assert secret.stat().st_mode & 0o077 == 0
    with running(ServedPolicy(flow()), keys=str(tmp_path / "keys")) as server:
        with client_of(server, secret_key=secret, server_key=public) as client:
            assert client.decide(observed(), (0,)).shape == (2, 2)
        for keys in ({}, {"secret_key": stranger, "server_key": public}):
            with client_of(server, timeout_s=0.5, retries=0, **keys) as client:
                with pytest.raises(ServingError, match=mentions("timeout_s")) as refused:
                    client.decide(observed(), (0,))
                assert refused.value.reason == "timeout"


@pytest.mark.parametrize("given", ["secret_key", "server_key"])
def test_one_key_without_the_other_is_not_taken_for_none(given: str, tmp_path: Path) -> None:
    secret, public = make_keys(tmp_path / "keys", "robot"), tmp_path / "keys" / "server.key"
    with pytest.raises(ConfigError, match=mentions(f"secret_key server_key {given}")):
        Client("tcp://127.0.0.1:1", **{given: secret if given == "secret_key" else public})


@pytest.mark.parametrize("cut", [5, 25, 10_000])
@pytest.mark.parametrize("name", ["server.key_secret", "clients/robot.key", "robot.key_secret", "server.key"])
def test_a_key_that_was_cut_off_is_named(name: str, cut: int, tmp_path: Path) -> None:
    keys = {"secret_key": make_keys(tmp_path, "robot"), "server_key": tmp_path / "server.key"}
    make_keys(tmp_path, "other")
    (tmp_path / name).write_text((tmp_path / name).read_text().rstrip()[:-cut])
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / name))):
        if name in ("server.key_secret", "clients/robot.key"):
            Server(Failing(), ServerSettings(port=0, keys=str(tmp_path)))
        else:
            Client("tcp://127.0.0.1:1", **keys)


def test_new_keys_do_not_shut_out_a_robot_to_which_its_secret_was_moved(tmp_path: Path) -> None:
    make_keys(tmp_path, "robot").unlink()
    known = (tmp_path / "clients" / "robot.key").read_text()
    with pytest.raises(ConfigError, match=mentions("keys 'robot'")):
        make_keys(tmp_path, "robot")
    assert (tmp_path / "clients" / "robot.key").read_text() == known


def test_keys_that_are_not_there_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=mentions("clients/ new_client=")):
        Server(ServedPolicy(flow()), ServerSettings(port=0, keys=str(tmp_path)))
    make_keys(tmp_path, "a")
    with pytest.raises(ConfigError, match=mentions("keys 'a'")):
        make_keys(tmp_path, "a")
    with pytest.raises(ConfigError, match=mentions("server")):
        make_keys(tmp_path, "../a")


def test_what_was_counted_is_told_by_message_and_by_page() -> None:
    with running(ServedPolicy(flow())) as server, client_of(server) as client:
        client.decide(observed(), (0,))
        with pytest.raises(ServingError):
            client.request({"type": "act", "schema": "x"})
        counted = client.metrics()
        assert (counted["decisions"], counted["rejected"]["schema"], counted["messages"]) == (1, 1, 4)
        assert counted["decide_ms"]["0.5"] > 0
        with metrics_page(server.metrics, 0) as port:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            page = opener.open(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S).read().decode()
        assert "burnish_decisions_total 1\n" in page and 'burnish_rejected_total{reason="schema"} 1\n' in page
        for line in page.splitlines():
            assert line.startswith("# TYPE burnish_") or float(line.rpartition(" ")[2]) >= 0


# -- processes ----------------------------------------------------------------------------------------------


def serve_light(policy: Path, port: int) -> None:
    """Serve without the rest of the command."""
    with Server(ServedPolicy(load_policy(policy)), ServerSettings(port=port)) as server:
        server.run()


WITHOUT_TORCH = """
import sys
for name in ("torch", "safetensors", "hydra", "gymnasium", "mujoco"):
    sys.modules[name] = None
import numpy as np
from policies.serving.client import Client, RemotePolicy
with Client(sys.argv[1], timeout_s=120) as client:
    robot = RemotePolicy(client, seed=1)
    for step in range(5):
        action = robot.act(np.full(5, 3.0))
    sys.stdout.write(" ".join(f"{x:.6f}" for x in action))
"""


def test_a_server_that_is_killed_and_started_again_goes_on_where_it_was(tmp_path: Path) -> None:
    save_policy(flow(), tmp_path / "policy")
    with kept_port() as port:
        light = started(serve_light, tmp_path / "policy", port)
        endpoint = f"tcp://127.0.0.1:{port}"
        asked = [sys.executable, "-c", WITHOUT_TORCH, endpoint]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=5 * PATIENCE_S)
        assert done.returncode == 0, done.stderr
        client = Client(endpoint, timeout_s=PATIENCE_S / 4, retries=9)
        before = client.decide(observed(), (4,))
        light.kill()
        light.join()
        with client, command(tmp_path, "serve", "policy=policy", f"port={port}") as (server, printed):
            assert printed.readline().startswith(f"serving: {endpoint}")
            np.testing.assert_allclose(client.decide(observed(), (4,)), before, rtol=1e-6)
            server.terminate()
            server.join(PATIENCE_S)
            assert server.exitcode == 0


@pytest.mark.parametrize("version", [VERSION + 1, None, "one"])
def test_a_server_of_another_version_is_named_at_once(version: Any) -> None:
    """One answer is enough: nothing is waited for, and nothing is sent again."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    asked: list[bytes] = []

    def answer() -> None:
        while router.poll(1e3 * PATIENCE_S):
            who, frame = router.recv_multipart()
            asked.append(frame)
            body = {"v": version, "type": "error", "id": None, "reason": "version", "message": "no"}
            router.send_multipart([who, msgpack.packb(body)])
            return

    thread = Thread(target=answer)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    thread.start()
    try:
        patient = Client(f"tcp://127.0.0.1:{port}", timeout_s=PATIENCE_S, retries=3)
        told = pytest.raises(ServingError, match=f"must use version {VERSION} .* it uses")
        with patient as client, told as refused:
            client.decide(observed(), (0,))
        assert refused.value.reason == "version" and str(version) in str(refused.value)
        thread.join(PATIENCE_S)
        assert len(asked) == 1
    finally:
        thread.join(PATIENCE_S)
        router.close(linger=0)
        context.term()


def test_a_client_says_when_nobody_answers_and_when_another_policy_does() -> None:
    patience = (PATIENCE_S / 4, 9)
    with kept_port() as port, Client(f"tcp://127.0.0.1:{port}") as client:
        client._timeout_s, client._retries = patience
        with running(ServedPolicy(flow(), fingerprint="a"), port=port):
            client.decide(observed(), (0,))
        client._timeout_s, client._retries = 0.1, 1
        with pytest.raises(ServingError, match=mentions("2 0.1")):
            client.decide(observed(), (0,))
        client._timeout_s, client._retries = patience
        with running(ServedPolicy(flow(), fingerprint="b"), port=port):  # other weights, same shapes
            client.decide(observed(), (0,))
        with running(ServedPolicy(small_policy(), fingerprint="c"), port=port):
            with pytest.raises(ServingError, match=mentions("policy")) as caught:
                client.decide(observed(), (0,))
            assert caught.value.reason == "schema"


class Hasty:
    """A socket that once says it can send, as if its server went away just after."""

    def __init__(self, socket: Any) -> None:
        self._socket, self.has_lied = socket, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def poll(self, timeout: float, flags: int = zmq.POLLIN) -> int:
        if flags == zmq.POLLOUT and not self.has_lied:
            self.has_lied = True
            return int(zmq.POLLOUT)
        return int(self._socket.poll(timeout, flags))


@pytest.mark.timeout(60)
def test_a_client_whose_server_goes_away_as_it_sends_does_not_hang() -> None:
    with kept_port() as port, Client(f"tcp://127.0.0.1:{port}", timeout_s=0.1, retries=0) as client:
        client._socket = hasty = Hasty(client._connected())
        with pytest.raises(ServingError, match=mentions("1 0.1")):
            client.metrics()
        assert hasty.has_lied


# -- many connections -----------------------------------------------------------------------------------


FEW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import numpy as np
from policies.serving.server import Server, ServerSettings
from policies.serving.messages import Schema
from policies.storage.features import Feature

class Still:
    schema = Schema({"observation": Feature((2, 3))}, Feature((1, 2)), "still", 10.0)
    noise_shape = (1,)
    def decide(self, inputs, noise):
        return np.zeros((len(noise), 1, 2), np.float32)

with Server(Still(), ServerSettings(port=int(sys.argv[1]), deadline_ms=1e5)) as server:
    server.run()
"""


GREETING = b"\xff" + bytes(8) + b"\x7f\3\0NULL" + bytes(16) + bytes(32)
READY = b"\4\x29\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0"


def greeted(port: int) -> socket.socket | None:
    """Connect as a client of ZeroMQ that says nothing more; None where nobody listens."""
    one = socket.socket()
    one.settimeout(0.05)
    try:
        one.connect(("127.0.0.1", port))
        one.sendall(GREETING + READY)
    except OSError:
        one.close()
        return None
    return one


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors as Linux shows them")
def test_a_server_outlives_more_connections_than_it_has_descriptors() -> None:
    with kept_port() as port, contextlib.ExitStack() as stack:
        asked = [sys.executable, "-c", FEW, str(port)]  # a copy of this process would have its descriptors
        served = stack.enter_context(subprocess.Popen(asked, cwd=ROOT))
        stack.callback(served.kill)
        endpoint = f"tcp://127.0.0.1:{port}"
        robot = stack.enter_context(Client(endpoint, timeout_s=PATIENCE_S / 4, retries=3))
        seen = {"observation": np.zeros((2, 3), np.float32)}
        robot.decide(seen, None)
        crowd = [greeted(port) for _ in range(90)]
        for _ in range(20):  # those who are connected are served on
            assert robot.decide(seen, None).shape == (1, 2)
        assert served.poll() is None
        assert None in crowd  # not everybody was let in
        for one in crowd:
            if one is not None:
                one.close()
        with Client(endpoint, timeout_s=PATIENCE_S / 4, retries=3) as late:  # and others are let in again
            assert late.decide(seen, None).shape == (1, 2)
        assert robot.metrics()["crowded"] >= 1
