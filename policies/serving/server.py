"""Policy server: one loop that reads requests, batches them, computes actions and answers.

The server keeps no client state but queued requests; the noise follows from the key in the request. An answer
does not depend on the other requests of its batch (up to rounding).

All client-controlled quantities are bounded: message bytes, queued messages in total and per client,
unfetched answers, and connections. ZeroMQ accepts connections until descriptors run out, so the kernel holds
new ones back while there are `max_connections` (Linux only). ZeroMQ buffers multi-frame messages before they
can be read; if these exceed `max_backlog_mb`, all connections are dropped and accepted again.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import resource
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from policies.bounds import Checked, bounded
from policies.errors import ConfigError, ServingError
from policies.execution.history import Array
from policies.paths import path_field
from policies.runner import draw_noise
from policies.serving.batching import Batcher, Request
from policies.serving.encryption import server_keys, start_authenticator
from policies.serving.messages import PORT, VERSION, Schema, pack, read_observation, require, to_wire, unpack
from policies.serving.metrics import Metrics, resident_mb

_log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLL_MS = 50  # poll interval [ms], maximum delay of a stop
_DRAIN = 256  # messages read before the queue is checked again
_REOPEN_S = 60.0  # timeout for the old socket to free the port [s]
_BACKLOG = 16  # connections pending in the kernel for ZeroMQ to accept
_SPARE = 8 + _BACKLOG  # descriptors reserved from connections
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # Linux socket options
_DROP = (0x06, 0, 0, 0)  # BPF instruction "return 0": drops the packet
_HARD = 4  # larger frames, in multiples of a valid request's bytes, are not read


class Served(Protocol):
    """Object that can be served."""

    schema: Schema
    noise_shape: tuple[int, ...]

    def decide(self, inputs: dict[str, Array], noise: Array) -> Array:
        """Map inputs (B, ...) and noise (B, *noise_shape) to actions (B, Ta, Da), physical."""
        ...


@dataclass
class ServerSettings(Checked):
    """Settings of a policy server.

    Attributes:
        max_wait_ms: Maximum wait of a request for others; 0: only while the server is busy.
        max_backlog_mb: Memory growth above which all connections are dropped once.
    """

    host: str = "127.0.0.1"  # network interface; other than loopback requires allow_remote=true
    port: int = bounded(PORT, ge=0, lt=65536)  # request port; 0: any free port
    allow_remote: bool = False  # accept connections from other machines
    keys: str | None = path_field()  # folder with CURVE keys; null: no encryption or authentication
    max_batch: int = bounded(16, ge=1)  # maximum requests per batch
    max_wait_ms: float = bounded(0.0, ge=0)
    max_queue: int = bounded(64, ge=1)  # maximum queued requests; further ones are refused
    max_per_client: int = bounded(4, ge=1)  # maximum queued requests per client
    deadline_ms: float = bounded(1000.0, gt=0)  # default deadline of a request [ms]
    max_connections: int = bounded(256, ge=1)  # simultaneous, limited by descriptors; others wait
    max_abs: float = bounded(1e6, gt=0)  # larger magnitudes in observations are refused
    max_backlog_mb: float = bounded(256.0, gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host not in LOOPBACK and not self.allow_remote:
            raise ConfigError(
                f"host={self.host} lets other machines command the robot and needs allow_remote=true (and "
                f"keys=<folder>); got allow_remote=false. Or keep host=127.0.0.1."
            )


class Server:
    """Serve a policy at `endpoint` until `stop` is called; use as a context manager.

    Raises:
        ConfigError: If the address cannot be bound.
        MissingExtraError: If the extra `serve` is not installed.
    """

    def __init__(
        self, served: Served, settings: ServerSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._zmq: Any = require("zmq")
        require("msgpack")
        self._served, self._settings, self._clock = served, settings, clock
        self._fingerprint = served.schema.fingerprint
        self._instance = uuid.uuid4().hex
        self._max_message = served.schema.max_message
        per_client, wait_s = settings.max_per_client, settings.max_wait_ms / 1e3
        self._queue = Batcher(settings.max_queue, per_client, settings.max_batch, wait_s)
        self.metrics = Metrics()
        self._stopping = False
        self._listener: _Listener | None = None
        self._context = self._zmq.Context()
        keys = settings.keys
        self._authenticator = None if keys is None else start_authenticator(self._context, keys)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.endpoint = f"tcp://{host}:{settings.port or '*'}"
        try:
            self._socket = self._bind()
        except ConfigError:
            self._close()
            raise
        self.endpoint = self._socket.getsockopt_string(self._zmq.LAST_ENDPOINT)
        self._warm_up()
        self._memory = resident_mb()
        own = _open_descriptors()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = sys.maxsize if soft == resource.RLIM_INFINITY else soft
        self._most_in_use = max(own + 1, min(own + settings.max_connections, limit - _SPARE))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=1000)
        self._close()

    def stop(self) -> None:
        """Make `run` answer the queue, refuse new requests and return; safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until `stop` is called."""
        while not (self._stopping and not len(self._queue)):
            self.step()
        self.step()  # refuses messages received meanwhile

    def step(self, timeout_ms: int = _POLL_MS) -> None:
        """Read pending messages, and compute one batch if due."""
        due = self._queue.due_in(self._clock())
        wait = timeout_ms if due is None else min(timeout_ms, math.ceil(due * 1e3))
        stopping = self._stopping
        if self._socket.poll(0 if stopping else wait):
            self._read(_DRAIN, stopping)
        due = self._queue.due_in(self._clock())
        if due is not None and (due == 0 or self._stopping):
            self._decide()
        self.metrics.waiting = len(self._queue)
        self._guard_connections()
        self._guard_memory()

    def _read(self, most: int, stopping: bool) -> None:
        for _ in range(most):
            try:
                client, *frames = self._socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            self.metrics.counts["messages"] += 1
            number: Any = None
            try:
                message = self._parse(frames)
                number = message.get("id") if type(message.get("id")) is int else None
                self._handle(client, message, number, stopping)
            except ServingError as error:
                self._refuse(client, number, error.reason, str(error))

    def _parse(self, frames: Sequence[bytes]) -> dict[str, Any]:
        if len(frames) != 1:
            raise ServingError("malformed", f"a message must have one frame; got {len(frames)}.")
        if len(frames[0]) > self._max_message:
            limit = f"a message may have {self._max_message} bytes here"
            raise ServingError("oversize", f"{limit}; got {len(frames[0])}.")
        return unpack(frames[0])

    def _handle(self, client: bytes, message: dict[str, Any], number: int | None, stopping: bool) -> None:
        """Answer or queue a message."""
        if message.get("v") != VERSION:
            found = str(message.get("v"))[:20]
            raise ServingError("version", f"this server uses version {VERSION}; got {found}.")
        if number is None:
            raise ServingError("malformed", "a message must have a whole number 'id'.")
        match message["type"]:
            case "hello":
                answer = {
                    "schema": self._served.schema.to_wire(),
                    "fingerprint": self._fingerprint,
                    "instance": self._instance,
                    "max_message": self._max_message,
                }
                self._answer(client, {"type": "welcome", "id": number, **answer})
            case "metrics":
                self._answer(client, {"type": "metrics", "id": number, "metrics": self.metrics.summary()})
            case "act":
                self._enqueue(client, number, message, stopping)
            case other:
                raise ServingError("malformed", f"type must be hello, act or metrics; got '{other[:20]}'.")

    def _enqueue(self, client: bytes, number: int, message: dict[str, Any], stopping: bool) -> None:
        """Validate and queue a request."""
        if stopping:
            raise ServingError("stopping", "the server is shutting down. Ask again when it is back.")
        if full := self._queue.refusal(client):
            raise ServingError("busy", full)
        if message.get("schema") != self._fingerprint:
            served = f"another policy is served here ({self._fingerprint})"
            raise ServingError("schema", f"{served}. Send hello, and use its schema.")
        inputs = read_observation(message.get("obs"), self._served.schema, self._settings.max_abs)
        now = self._clock()
        deadline = now + _milliseconds(message.get("deadline_ms"), self._settings.deadline_ms) / 1e3
        self._queue.add(Request(client, number, inputs, _key(message.get("key")), now, deadline))

    def _decide(self) -> None:
        now = self._clock()
        batch, late = self._queue.take(now)
        for request in late:
            reason = (
                f"it waited {1e3 * (now - request.arrived):.0f} ms, past its deadline. Raise the deadline."
            )
            self._refuse(request.client, request.id, "late", reason)
        if not batch:
            return
        actions = self._actions(batch)
        took = self._clock() - now
        self.metrics.decided([now - request.arrived for request in batch], took)
        for request, action in zip(batch, actions, strict=True):
            if action is None:
                reason = "the policy gave no finite actions for this observation; see the server's log."
                self._refuse(request.client, request.id, "failed", reason)
                continue
            times = {"queue_ms": 1e3 * (now - request.arrived), "decide_ms": 1e3 * took, "batch": len(batch)}
            answer = {"type": "actions", "id": request.id, "actions": to_wire(action), **times}
            self._answer(request.client, answer)

    def _actions(self, batch: Sequence[Request]) -> list[Array | None]:
        """Return the actions (Ta, Da) of every request; None where the policy failed on that row alone."""
        inputs = {name: np.stack([one.inputs[name] for one in batch]) for name in self._served.schema.inputs}
        noise = np.stack([self._noise(request) for request in batch])
        try:
            actions = np.asarray(self._served.decide(inputs, noise), dtype=np.float32)
        except Exception:  # one failing row must not affect other clients
            _log.exception("the policy failed on a batch of %d", len(batch))
            return [None] if len(batch) == 1 else [self._actions([request])[0] for request in batch]
        return [row if np.isfinite(row).all() else None for row in actions]

    def _warm_up(self) -> None:
        """Compute once, so that the policy's memory is allocated before monitoring."""
        inputs = {k: np.zeros(f.shape, f.dtype) for k, f in self._served.schema.inputs.items()}
        for size in {1, self._settings.max_batch}:
            self._actions([Request(b"", 0, inputs, None, 0.0, math.inf)] * size)

    def _noise(self, request: Request) -> Array:
        shape = self._served.noise_shape
        return np.zeros(shape, np.float32) if request.key is None else draw_noise(request.key, shape)

    def _refuse(self, client: bytes, number: int | None, reason: str, message: str) -> None:
        self.metrics.rejected[reason] += 1
        self._answer(client, {"type": "error", "id": number, "reason": reason, "message": message})

    def _answer(self, client: bytes, message: dict[str, Any]) -> None:
        """Send without blocking; disconnected or slow clients lose the answer."""
        try:
            self._socket.send_multipart([client, pack(message)], self._zmq.NOBLOCK)
        except self._zmq.Again:
            self.metrics.counts["slow"] += 1
        except self._zmq.ZMQError as error:
            if error.errno != self._zmq.EHOSTUNREACH:
                raise
            self.metrics.counts["gone"] += 1

    def _bind(self) -> Any:
        zmq = self._zmq
        try:
            router = self._context.socket(zmq.ROUTER)
        except zmq.ZMQError as error:
            raise _cannot_listen(self.endpoint, error) from None
        options = {
            zmq.MAXMSGSIZE: _HARD * self._max_message,
            zmq.RCVHWM: self._settings.max_per_client + 4,
            zmq.SNDHWM: 2 * self._settings.max_per_client + 8,
            zmq.ROUTER_MANDATORY: 1,
            zmq.HANDSHAKE_IVL: 5000,
            zmq.HEARTBEAT_IVL: 5000,
            zmq.HEARTBEAT_TIMEOUT: 15000,
            zmq.IPV6: int(":" in self._settings.host),
        }
        for option, value in options.items():
            router.setsockopt(option, value)
        if self._settings.keys is not None:
            public, secret = server_keys(self._settings.keys)
            router.curve_publickey, router.curve_secretkey, router.curve_server = public, secret, True
        try:
            self._listener = _Listener.at(self.endpoint)
            if self._listener is not None:
                router.setsockopt(zmq.USE_FD, self._listener.descriptor())
                self.endpoint = self._listener.endpoint
            router.bind(self.endpoint)
        except OSError as error:  # includes ZMQError
            router.close(linger=0)
            raise _cannot_listen(self.endpoint, error) from None
        return router

    def _guard_connections(self) -> None:
        """Accept new connections only below the limit; existing ones stay."""
        if self._listener is None:
            return
        if self._listener.is_open and _next_descriptor() >= self._most_in_use:
            self._listener.shut()
            self.metrics.counts["crowded"] += 1
            _log.warning("all connections are taken; others are accepted when one closes")
        elif not self._listener.is_open and _open_descriptors() < self._most_in_use:
            self._listener.open()

    def _guard_memory(self) -> None:
        """Drop all connections above the memory limit; clients reconnect automatically."""
        grown = resident_mb() - self._memory
        if grown < self._settings.max_backlog_mb:
            return
        _log.warning("memory grew by %.0f MB: all connections are dropped and accepted again", grown)
        self.metrics.counts["reopened"] += 1
        self._socket.close(linger=0)
        if self._listener is not None:
            self._listener.close()
        deadline = time.monotonic() + _REOPEN_S
        while True:  # the port is free once the context has closed the socket
            try:
                self._socket = self._bind()
                break
            except ConfigError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        _trim_memory()
        self._memory = resident_mb()

    def _close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._listener is not None:
            self._listener.close()
        self._context.term()


def _milliseconds(value: Any, default: float) -> float:
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 < value < 1e9:
        raise ServingError("malformed", f"deadline_ms must be a positive number; got {str(value)[:20]}.")
    return float(value)


def _key(value: Any) -> tuple[int, ...] | None:
    """Parse a noise key; None requests zero noise."""
    if value is None:
        return None
    if not isinstance(value, list) or not 1 <= len(value) <= 8:
        raise ServingError("malformed", "key must be a list of one to eight whole numbers, or nil.")
    if not all(type(one) is int and 0 <= one < 2**63 for one in value):
        raise ServingError("malformed", "key must hold whole numbers, not negative.")
    return tuple(value)


class _Listener:
    """Listening socket that can hold back new connections.

    A kernel filter drops packets at the listening socket, where connections begin; clients retry
    automatically. Established connections have their own sockets.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._socket, self.is_open = listener, True
        host, port = listener.getsockname()[:2]
        self.endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    @classmethod
    def at(cls, endpoint: str) -> _Listener | None:
        """Listen at a ZeroMQ endpoint; None without filter support, or if it is no address."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        if not sys.platform.startswith("linux"):
            return None
        try:
            number = None if port == "*" else int(port)
            found = socket.getaddrinfo(host.strip("[]"), number, type=socket.SOCK_STREAM)
        except socket.gaierror:  # a ZeroMQ name, such as that of a network interface
            return None
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return cls(listener)

    def descriptor(self) -> int:
        """Return a descriptor of the socket, to be closed by the caller."""
        return os.dup(self._socket.fileno())

    def shut(self) -> None:
        """Hold back new connections."""
        drop = ctypes.create_string_buffer(struct.pack("HBBI", *_DROP))
        program = struct.pack("HP", 1, ctypes.addressof(drop))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        self.is_open = False

    def open(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        self.is_open = True

    def close(self) -> None:
        self._socket.close()


def _cannot_listen(endpoint: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen at {endpoint}: {error.strerror}. Choose another host or port.")


def _next_descriptor() -> int:
    """Return the next free descriptor, a lower bound on those in use; a large number if none is free."""
    try:
        handle = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return sys.maxsize
    os.close(handle)
    return handle


def _open_descriptors() -> int:
    """Return the number of open descriptors; slower than `_next_descriptor`."""
    try:
        return len(os.listdir("/dev/fd")) - 1
    except OSError:
        return sys.maxsize


def _trim_memory() -> None:
    """Return freed memory to the system, if the C library supports it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
