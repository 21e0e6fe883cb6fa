"""A bounded ZeroMQ socket that answers messages of many clients, for the programs that listen.

All client-controlled quantities are bounded: message bytes, unfetched answers, and connections. ZeroMQ
accepts connections until descriptors run out, so the kernel holds new ones back while there are
`max_connections` (Linux only). ZeroMQ buffers multi-frame messages before they can be read; if these exceed
`max_backlog_mb`, beside the answers that are on their way, all connections are dropped and accepted again.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from policies.bounds import Checked, bounded
from policies.errors import ConfigError, ServingError
from policies.paths import path_field
from policies.serving.encryption import server_keys, start_authenticator
from policies.serving.messages import PORT, VERSION, pack, require, unpack
from policies.serving.metrics import Metrics, resident_mb

_log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DRAIN = 256  # messages read in one call
_REOPEN_S = 60.0  # timeout for the old socket to free the port [s]
_BACKLOG = 16  # connections pending in the kernel for ZeroMQ to accept
_SPARE = 8 + _BACKLOG  # descriptors reserved from connections
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # Linux socket options
_DROP = (0x06, 0, 0, 0)  # BPF instruction "return 0": drops the packet
_HARD = 4  # larger frames, in multiples of a valid request's bytes, are not read


@dataclass
class EndpointSettings(Checked):
    """Settings of a socket that listens.

    Attributes:
        max_backlog_mb: Memory growth above which all connections are dropped once.
    """

    host: str = "127.0.0.1"  # network interface; other than loopback requires allow_remote=true
    port: int = bounded(PORT, ge=0, lt=65536)  # request port; 0: any free port
    allow_remote: bool = False  # accept connections from other machines
    keys: str | None = path_field()  # folder with CURVE keys; null: no encryption or authentication
    max_per_client: int = bounded(4, ge=1)  # maximum queued requests per client
    max_connections: int = bounded(256, ge=1)  # simultaneous, limited by descriptors; others wait
    max_backlog_mb: float = bounded(256.0, gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host not in LOOPBACK and not self.allow_remote:
            raise ConfigError(
                f"host={self.host} lets other machines connect and needs allow_remote=true (and "
                f"keys=<folder>); got allow_remote=false. Or keep host=127.0.0.1."
            )

    def warn_if_open(self, what: str) -> None:
        """Log a warning if everybody who reaches the interface can do `what`."""
        if self.host not in LOOPBACK and self.keys is None:
            _log.warning("host=%s without keys: everybody who reaches it can %s", self.host, what)


class Endpoint(ABC):
    """Listen at `endpoint`; use as a context manager.

    Args:
        settings: Where to listen, and for whom.
        max_message: Upper bound on the bytes of a valid message.

    Raises:
        ConfigError: If the address cannot be bound.
        MissingExtraError: If the extra `serve` is not installed.
    """

    def __init__(self, settings: EndpointSettings, max_message: int) -> None:
        self._zmq: Any = require("zmq")
        require("msgpack")
        self._bounds, self._max_message = settings, max_message
        self.metrics = Metrics()
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
        self._memory = resident_mb()
        own = self._own_descriptors = _open_descriptors()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = sys.maxsize if soft == resource.RLIM_INFINITY else soft
        self._most_in_use = max(own + 1, min(own + settings.max_connections, limit - _SPARE))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=1000)
        self._close()

    @abstractmethod
    def handle(self, client: bytes, message: dict[str, Any], number: int) -> None:
        """Answer a message of this version with its id, or raise a ServingError."""

    @property
    def connections(self) -> int:
        """Number of open connections, at most."""
        return max(0, _open_descriptors() - self._own_descriptors)

    def answers_mb(self) -> float:
        """Return the memory that answers may take until all clients have fetched theirs [MB]."""
        return 0.0

    def receive(self, timeout_ms: int) -> None:
        """Wait for messages and handle those that are there."""
        if self._socket.poll(timeout_ms):
            self._read(_DRAIN)

    def guard(self) -> None:
        """Keep connections and memory within their bounds."""
        self._guard_connections()
        self._guard_memory()

    def _read(self, most: int) -> None:
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
                self.handle(client, message, self._checked(message, number))
            except ServingError as error:
                self.refuse(client, number, error.reason, str(error))

    def _parse(self, frames: Sequence[bytes]) -> dict[str, Any]:
        if len(frames) != 1:
            raise ServingError("malformed", f"a message must have one frame; got {len(frames)}.")
        if len(frames[0]) > self._max_message:
            limit = f"a message may have {self._max_message} bytes here"
            raise ServingError("oversize", f"{limit}; got {len(frames[0])}.")
        return unpack(frames[0])

    def _checked(self, message: dict[str, Any], number: int | None) -> int:
        if message.get("v") != VERSION:
            found = str(message.get("v"))[:20]
            raise ServingError("version", f"this server uses version {VERSION}; got {found}.")
        if number is None:
            raise ServingError("malformed", "a message must have a whole number 'id'.")
        return number

    def refuse(self, client: bytes, number: int | None, reason: str, message: str) -> None:
        self.metrics.rejected[reason] += 1
        self.answer(client, {"type": "error", "id": number, "reason": reason, "message": message})

    def answer(self, client: bytes, message: dict[str, Any]) -> None:
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
            zmq.RCVHWM: self._bounds.max_per_client + 4,
            zmq.SNDHWM: 2 * self._bounds.max_per_client + 8,
            zmq.ROUTER_MANDATORY: 1,
            zmq.HANDSHAKE_IVL: 5000,
            zmq.HEARTBEAT_IVL: 5000,
            zmq.HEARTBEAT_TIMEOUT: 15000,
            zmq.IPV6: int(":" in self._bounds.host),
        }
        for option, value in options.items():
            router.setsockopt(option, value)
        if self._bounds.keys is not None:
            public, secret = server_keys(self._bounds.keys)
            router.curve_publickey, router.curve_secretkey, router.curve_server = public, secret, True
        try:
            self._listener = _Listener.at(self.endpoint)
            if self._listener is not None:
                router.setsockopt(zmq.USE_FD, self._listener.descriptor())
                self.endpoint = self._listener.endpoint
            router.bind(self.endpoint)
        except (OSError, zmq.ZMQError) as error:  # the latter of a host that is none
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
        most = self._bounds.max_backlog_mb
        if grown < most or grown < most + self.answers_mb():
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
        except (socket.gaierror, UnicodeError):  # a ZeroMQ name, such as that of a network interface
            return None
        # Clients resolve a name to IPv4.
        family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
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


def _cannot_listen(endpoint: str, error: Any) -> ConfigError:
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
