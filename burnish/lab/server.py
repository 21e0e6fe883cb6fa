"""The server of the page: on this machine only, with a token in the address.

Everything is refused without the token, which is compared in constant time; under a host name other than that
of this machine, which keeps out pages that resolve their name to it; and with any method but GET, except for
POST to /run where runs may be stopped and continued. A message of a visitor has at most `MESSAGE_BYTES`, of
which the newest of each kind is kept, and there are at most `MOST_VISITORS`. Pages take nothing from
elsewhere and run no script but the one that comes with them.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.resources import files
from threading import Event, Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from burnish.lab.controls import Subject
from burnish.lab.run_control import RunControl
from burnish.lab.runs import RunFolder
from burnish.lab.session import Session, compared
from burnish.reports.html import render
from policies.errors import BurnishError, ConfigError
from policies.extras import require
from policies.serving.endpoint import LOOPBACK
from policies.storage.strict_json import parse_json

_log = logging.getLogger(__name__)

MESSAGE_BYTES, MOST_VISITORS, MOST_CONNECTIONS = 2**15, 4, 64
KINDS = ("controls", "play", "seed", "move", "slide", "step", "compare")
"""Kinds of messages: the keys of the object that a visitor sends, beside its number `id`."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_PAUSE_S = 1.0  # between the end of an episode and the next one

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Guard:
    """Answers what is allowed, and refuses the rest before anything reads it."""

    def __init__(self, app: Any, token: str, *, may_write: bool = False) -> None:
        self._app, self._token, self._may_write = app, token.encode(), may_write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif status := self.refusal(scope):
            await _refuse(scope["type"], status, send)
        else:
            await self._app(scope, receive, _with_headers(send))

    def refusal(self, scope: Scope) -> int:
        """Return the status with which a request is refused; 0: it is not."""
        headers = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or _host_of(f"//{hosts[0]}") not in LOOPBACK:
            return 421
        if any(value != f"http://{hosts[0]}" for name, value in headers if name == b"origin"):
            return 403
        try:
            query = parse_qs(scope["query_string"].decode("ascii"), max_num_fields=8)
        except ValueError:
            return 400
        given = query.get("token", [])
        if len(given) != 1 or not hmac.compare_digest(given[0].encode(), self._token):
            return 403
        if scope["type"] == "websocket" or scope["method"] == "GET":
            return 0
        return 0 if self._may_write and (scope["method"], scope["path"]) == ("POST", "/run") else 405


def _host_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


async def _refuse(kind: str, status: int, send: Send) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    start = {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]}
    await _with_headers(send)(start)
    await send({"type": "http.response.body", "body": b"open the address that burnish lab printed\n"})


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message["headers"] = [*message.get("headers", []), *added]
        await send(message)

    return sending


class Inbox:
    """Messages of a visitor that wait: of every kind the newest."""

    def __init__(self) -> None:
        self._waiting: dict[str, Any] = {}
        self._arrived = asyncio.Event()

    def put(self, text: str) -> None:
        """Add a message (ConfigError, ValueError: it is none)."""
        message = parse_json(text, "the message")
        if unknown := sorted(set(message) - {*KINDS, "id"}):
            raise ConfigError(f"a message has the keys id and {', '.join(KINDS)}; got {unknown[0][:40]}.")
        self._waiting |= message
        self._arrived.set()

    def close(self) -> None:
        self._waiting = {"closed": True}
        self._arrived.set()

    async def take(self, until: float | None) -> dict[str, Any]:
        """Return what waits; nothing if nothing arrives until then [s of the loop's clock]."""
        left = None if until is None else max(until - time.monotonic(), 0.0)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), left)
        taken, self._waiting = self._waiting, {}
        self._arrived.clear()
        return taken


class Lab:
    """What the page shows.

    Args:
        subject: Policy and task; None: runs only.
        runs: Runs that are shown as they grow; None: none.
        control: Stops and continues them; None: they are only shown.
    """

    def __init__(
        self, subject: Subject | None, runs: RunFolder | None = None, control: RunControl | None = None
    ) -> None:
        self.subject, self.runs, self.control = subject, runs, control
        used = {"lab.js": subject is not None, "runs.js": runs is not None}
        self._scripts = [name for name, is_used in used.items() if is_used]
        self.token = secrets.token_urlsafe(24)
        self._visitors = 0
        self._computing = ThreadPoolExecutor(1, "lab")  # policies share what they cache
        self._reading = ThreadPoolExecutor(1, "lab-runs")
        self._comparing = Lock()

    def app(self) -> Guard:
        """Return the application (ASGI)."""
        starlette = require("starlette.applications", extra="lab", what="burnish lab")
        routing: Any = require("starlette.routing", extra="lab")
        routes = [
            routing.Route("/", self._page),
            routing.Route("/runs", self._runs),
            routing.Route("/run", self._run_shown, methods=["GET"]),
            routing.Route("/run", self._run_changed, methods=["POST"]),
            routing.Route("/{name}", self._asset),
            routing.WebSocketRoute("/live", self._live),
        ]
        return Guard(starlette.Starlette(routes=routes), self.token, may_write=self.control is not None)

    async def _page(self, request: Any) -> Any:
        return _response(render("lab.html", query=f"?token={self.token}", scripts=self._scripts), "text/html")

    async def _asset(self, request: Any) -> Any:
        name = request.path_params["name"]
        if name == "lab.css":
            return _response(render(name), "text/css")
        if name in self._scripts:
            text = (files("burnish.lab") / "templates" / name).read_text(encoding="utf-8")
            return _response(text, "text/javascript")
        return _response("there is no such page\n", "text/plain", 404)

    async def _runs(self, request: Any) -> Any:
        found = [] if self.runs is None else await self._read(self.runs.listed)
        return _response(json.dumps(found), "application/json")

    async def _run_shown(self, request: Any) -> Any:
        name, version = (request.query_params.get(key, "") for key in ("name", "version"))
        found = None if self.runs is None else await self._read(self.runs.shown, name, version)
        if found is not None and self.control is not None:
            with suppress(ConfigError):  # the run has gone
                found |= await self._read(self.control.state, name)
        return _response(json.dumps(found), "application/json", 404 if found is None else 200)

    async def _run_changed(self, request: Any) -> Any:
        name, do = (request.query_params.get(key, "") for key in ("name", "do"))
        try:
            assert self.control is not None
            await self._read(self.control.change, name, do)
        except ConfigError as error:
            return _response(f"{error}\n", "text/plain", 409)
        return _response("", "text/plain")

    # -- a visitor ------------------------------------------------------------------------------------

    async def _live(self, socket: Any) -> None:
        await socket.accept()
        if self._visitors >= MOST_VISITORS or self.subject is None:
            full = f"{MOST_VISITORS} pages are open already" if self.subject else "there is no policy here"
            await socket.send_json({"error": full})
            await socket.close(1013)
            return
        self._visitors += 1
        inbox = Inbox()
        receiving = asyncio.create_task(_receive(socket, inbox))
        try:
            with suppress(_ended()):
                await self._visit(socket, inbox, self.subject)
        finally:
            self._visitors -= 1
            receiving.cancel()

    async def _visit(self, socket: Any, inbox: Inbox, subject: Subject) -> None:
        left = Event()
        try:
            session = await self._run(Session, subject)
        except Exception as error:
            await socket.send_json({"error": _told(error)})
            await socket.close(1011)
            return
        try:
            await socket.send_json({"facts": session.facts(), **await self._run(session.reset, 0)})
            await self._converse(socket, inbox, session, left)
        finally:
            left.set()
            await self._run(session.close)

    async def _converse(self, socket: Any, inbox: Inbox, session: Session, left: Event) -> None:
        playing, due, period = False, 0.0, 1.0 / session.subject.env.spec.control_hz
        comparison: asyncio.Task[Any] | None = None
        while True:
            message = await inbox.take(due if playing else None)
            if "closed" in message:
                return
            answer: dict[str, Any] = {"id": message["id"]} if "id" in message else {}
            try:
                for kind, do in session.actions.items():
                    if kind in message:
                        answer |= await self._run(do, message[kind])
                if "play" in message:
                    playing, due = message["play"] is True, time.monotonic()
                if "step" in message or (playing and time.monotonic() >= due):
                    frame = await self._run(session.step)
                    answer |= frame
                    due = max(due + period, time.monotonic() - period)
                    if frame["end"]:
                        due = time.monotonic() + _PAUSE_S
                if "compare" in message and (comparison is None or comparison.done()):
                    doing = self._compare(socket, session, left, message["compare"])
                    comparison = asyncio.create_task(doing)
            except Exception as error:  # also of a task or policy of one's own
                answer["error"], due = _told(error), time.monotonic() + _PAUSE_S
                if "compare" in message:
                    answer |= {"compared": {}, "round": message["compare"]}
            if answer:
                await socket.send_json(answer)

    async def _compare(self, socket: Any, session: Session, left: Event, number: Any) -> None:
        """Play the compared starts beside the episode, one comparison at a time; the answer has a number."""
        controls, plane, subject = session.controls, session.plane, session.subject
        try:
            answer: dict[str, Any] = {
                "compared": await asyncio.to_thread(self._compared, subject, plane, controls, left)
            }
        except Exception as error:
            answer = {"error": _told(error), "compared": {}}
        with suppress(_ended(), RuntimeError):  # the latter from Starlette, once it has seen the end
            await socket.send_json(answer | {"round": number})

    def _compared(self, *arguments: Any) -> dict[str, Any]:
        with self._comparing:
            return compared(*arguments)

    async def _run(self, do: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._computing, do, *arguments)

    async def _read(self, do: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._reading, do, *arguments)


def _told(error: Exception) -> str:
    """Return what a visitor reads of an error; the traceback of one that is not ours is logged."""
    if not isinstance(error, (BurnishError, ValueError)):
        _log.error("what a page asked for failed", exc_info=error)
    return str(error) or type(error).__name__


def _ended() -> type[Exception]:
    """Return what sending raises when the visitor has left."""
    kind: type[Exception] = require("starlette.websockets", extra="lab").WebSocketDisconnect
    return kind


async def _receive(socket: Any, inbox: Inbox) -> None:
    """Put the messages of a visitor into the inbox until the connection ends."""
    try:
        async for text in socket.iter_text():
            try:
                inbox.put(text)
            except ValueError as error:  # a ConfigError too
                await socket.send_json({"error": str(error)})
    except Exception:  # bytes, or an end in the middle
        _log.debug("a visitor left", exc_info=True)
    finally:
        inbox.close()


def _response(content: str, media: str, status: int = 200) -> Any:
    responses: Any = require("starlette.responses", extra="lab")
    return responses.Response(content, status, media_type=media)


class LabServer:
    """A running laboratory; `address` opens its page.

    Args:
        lab: What it shows.
        port: 0: any free port.

    Raises:
        ConfigError: If the port cannot be used.
        MissingExtraError: If the extra `lab` is not installed.
    """

    def __init__(self, lab: Lab, port: int = 0) -> None:
        uvicorn: Any = require("uvicorn", extra="lab", what="burnish lab")
        require("websockets", extra="lab", what="burnish lab")
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK[0], port))
            self._socket.listen(MOST_CONNECTIONS)  # who comes before `run` waits
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"port={port} cannot be used: {error.strerror}. Choose another.") from None
        self.port = int(self._socket.getsockname()[1])
        self.address = f"http://{LOOPBACK[0]}:{self.port}/?token={lab.token}"
        self._server = uvicorn.Server(uvicorn.Config(
            lab.app(), log_level="warning", access_log=False, server_header=False, date_header=False,
            ws="websockets-sansio", ws_max_size=MESSAGE_BYTES, ws_per_message_deflate=False,
            limit_concurrency=MOST_CONNECTIONS, h11_max_incomplete_event_size=2**14,
            timeout_graceful_shutdown=2, http="h11",
        ))  # fmt: skip

    def run(self) -> None:
        """Serve until a stop signal, or `stop`."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Make `run` return; may be called from another thread."""
        self._server.should_exit = True
