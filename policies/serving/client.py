"""Client of a policy server, for use on a robot.

    robot = RemotePolicy("tcp://127.0.0.1:5750")
    while True:
        action = robot.act({"observation": state})     # (Do,) -> (Da,), once per control step

Requires NumPy, pyzmq and msgpack, not PyTorch. History and chunk are kept on the client, so the server may be
restarted: requests without an answer in time are sent again over a new connection, with the same noise.

Legend: To observation history, Ta executed steps, Da action width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from policies.errors import ConfigError, ServingError
from policies.execution.history import Array, Arrays, ChunkActor
from policies.serving.encryption import read_keys, read_public_key
from policies.serving.messages import PORT, VERSION, Schema, from_wire, pack, require, to_wire, unpack
from policies.storage.features import short

LOCAL = f"tcp://127.0.0.1:{PORT}"


class Client:
    """A connection to a policy server; use as a context manager, in one thread.

    Args:
        endpoint: Address of the server.
        timeout_s: Timeout of one attempt [s]; also sent as the request's deadline.
        retries: Attempts after the first one.
        secret_key: File with the client's CURVE keys; None: no encryption.
        server_key: File with the server's public key.

    Raises:
        MissingExtraError: If pyzmq or msgpack is not installed.
        ConfigError: If one key is given without the other, or they cannot be read. Messages: if the endpoint
            is no address.
    """

    def __init__(
        self,
        endpoint: str = LOCAL,
        *,
        timeout_s: float = 1.0,
        retries: int = 2,
        secret_key: str | Path | None = None,
        server_key: str | Path | None = None,
    ) -> None:
        if (secret_key is None) != (server_key is None):
            given = "server_key" if secret_key is None else "secret_key"
            raise ConfigError(f"give both secret_key and server_key, or neither; got {given} alone.")
        self._zmq: Any = require("zmq")
        require("msgpack")
        self.endpoint, self._timeout_s, self._retries = endpoint, timeout_s, retries
        self._keys = None if secret_key is None else read_keys(secret_key)
        self._server_key = None if server_key is None else read_public_key(server_key)
        self._context = self._zmq.Context()
        self._socket: Any = None
        self._id = 0
        self._schema: Schema | None = None
        self._fingerprint = ""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._drop()
        self._context.term()

    @property
    def schema(self) -> Schema:
        """Inputs and outputs of the policy, as last received from the server."""
        if self._schema is None:
            self._greet()
        assert self._schema is not None
        return self._schema

    def decide(self, obs: Arrays, key: tuple[int, ...] | None) -> Array:
        """Return the actions (Ta, Da) for observations (To, ...), physical.

        Args:
            obs: Arrays by the names of the schema.
            key: Noise key, see `policies.runner.draw_noise`; None: zero noise (deterministic).

        Raises:
            ServingError: `timeout`, a reason of `policies.serving.messages.REASONS`, or `schema` if the
                server now serves a policy with other observation or action shapes.
        """
        schema = self.schema
        arrays = {name: to_wire(_typed(name, value, schema)) for name, value in obs.items()}
        noise = None if key is None else list(key)
        body = {"type": "act", "obs": arrays, "key": noise, "deadline_ms": 1e3 * self._timeout_s}
        try:
            answer = self.request({**body, "schema": self._fingerprint})
        except ServingError as error:
            if error.reason != "schema":
                raise
            self._greet()  # the server was restarted with other weights
            answer = self.request({**body, "schema": self._fingerprint})
        actions = from_wire("actions", answer.get("actions"))
        if actions.shape != schema.action.shape or not np.isfinite(actions).all():
            raise ServingError("malformed", f"the server gave actions {actions.shape}, or not finite ones.")
        return actions

    def metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = self.request({"type": "metrics"})["metrics"]
        return metrics

    def request(
        self, body: Mapping[str, Any], *, goes_on: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Send a message and return its answer; resends after a timeout.

        `goes_on` is asked at every timeout while the connection stands: whether to wait once more instead.
        """
        self._id += 1
        frame = pack({**body, "id": self._id})
        for _ in range(self._retries + 1):
            answer = self._attempt(frame, goes_on)
            if answer is None:
                self._drop()  # also drops queued messages
            elif answer["type"] == "error":
                raise ServingError(str(answer.get("reason")), f"{self.endpoint}: {answer.get('message')}")
            else:
                return answer
        raise ServingError(
            "timeout",
            f"{self.endpoint} did not answer {self._retries + 1} times within {self._timeout_s:g} s. "
            "Is the server running there, do keys fit, is timeout_s long enough?",
        )

    def _greet(self) -> None:
        """Request the schema; a compatible one replaces the first."""
        answer = self.request({"type": "hello"})
        schema = Schema.from_wire(answer.get("schema"))
        if self._schema is not None and _shapes(schema) != _shapes(self._schema):
            found = f"observations {schema.inputs} and actions {schema.action}"
            raise ServingError(
                "schema", f"{self.endpoint} now serves another policy, with {found}. Reconnect."
            )
        self._schema, self._fingerprint = schema, str(answer.get("fingerprint"))

    def _attempt(self, frame: bytes, goes_on: Callable[[], bool]) -> dict[str, Any] | None:
        """Send once and wait; None after a timeout."""
        end = time.monotonic() + self._timeout_s
        socket = self._connected()
        while True:
            if not socket.poll(_left_ms(end), self._zmq.POLLOUT):
                return None
            try:
                socket.send(frame, self._zmq.NOBLOCK)
                break
            except self._zmq.Again:  # the server went away after the poll
                continue
        while True:
            if not socket.poll(_left_ms(end)):
                if not (socket.poll(0, self._zmq.POLLOUT) and goes_on()):
                    return None
                end = time.monotonic() + self._timeout_s
                continue
            answer = unpack(socket.recv())
            if answer.get("v") != VERSION:
                raise ServingError(
                    "version",
                    f"{self.endpoint} must use version {VERSION} of the protocol, as this client; it uses "
                    f"{short(answer.get('v'))}. Install the same release of burnish on both sides.",
                )
            if answer.get("id") in (self._id, None):
                return answer  # others are late answers to earlier requests

    def _connected(self) -> Any:
        if self._socket is None:
            # Kept before it connects: `close` waits for sockets, also for one whose address is refused.
            socket = self._socket = self._context.socket(self._zmq.DEALER)
            socket.setsockopt(self._zmq.LINGER, 0)
            socket.setsockopt(self._zmq.IMMEDIATE, 1)  # no queueing without a connected server
            socket.setsockopt(self._zmq.RECONNECT_IVL, 50)
            socket.setsockopt(self._zmq.IPV6, int("[" in self.endpoint))
            if self._keys is not None and self._server_key is not None:
                socket.curve_publickey, socket.curve_secretkey = self._keys
                socket.curve_serverkey = self._server_key
            try:
                socket.connect(self.endpoint)
            except self._zmq.ZMQError as error:
                self._drop()
                raise ConfigError(
                    f"{self.endpoint} is no address of a server ({error.strerror}); give tcp://<host>:<port>."
                ) from None
        return self._socket

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None


class RemotePolicy(ChunkActor):
    """Act step by step by a served policy: one observation in, one action out.

    Args:
        client: A connection, or the address of the server.
        act_steps: Executed actions per chunk; None: all.
        seed: Seed of the noise.
        is_clipped: Whether to clip actions to the task's bounds, if the server reports them.
        max_jump: Largest change between consecutive actions, in action units; None: unlimited.

    Raises:
        ServingError: If the server cannot be reached.
    """

    def __init__(
        self,
        client: Client | str = LOCAL,
        *,
        act_steps: int | None = None,
        seed: int = 0,
        is_clipped: bool = True,
        max_jump: float | None = None,
    ) -> None:
        self.client = Client(client) if isinstance(client, str) else client
        self._is_clipped = is_clipped
        options: dict[str, Any] = {"act_steps": act_steps, "seed": seed, "max_jump": max_jump}
        super().__init__(self._chunk, self.schema.obs_steps, **options)

    @property
    def schema(self) -> Schema:
        """Inputs and outputs of the policy, see `Client.schema`."""
        return self.client.schema

    def _chunk(self, obs: Arrays, key: tuple[int, ...]) -> Array:
        """Decide; the limits are those of the policy that the server has by now."""
        chunk = self.client.decide(obs, key)
        if self._is_clipped:
            self._bound(self.schema.action_low, self.schema.action_high)
        return chunk

    def act(self, obs: Any) -> Array:
        """Return the action (Da,) for an observation: mapping by name, or array (Do,)."""
        return super().act(obs if isinstance(obs, Mapping) else {"observation": obs})


def _typed(name: str, value: Any, schema: Schema) -> Array:
    """Convert an input to its dtype; numbers only, images of other numbers than bytes are refused."""
    array = np.asarray(value)
    wanted = schema.inputs[name].dtype if name in schema.inputs else array.dtype.name
    if wanted == "uint8" and not (array.dtype.kind in "iu" and np.array_equal(array, array.astype(wanted))):
        raise ServingError("dtype", f"'{name}' must be uint8, 0 to 255; got {array.dtype}. Nothing was sent.")
    if array.dtype.kind not in "fiu":
        return array
    return array.astype(wanted)


def _shapes(schema: Schema) -> Schema:
    return replace(schema, task=None, control_hz=None, action_low=None, action_high=None, policy="")


def _left_ms(end: float) -> int:
    return max(0, int(1e3 * (end - time.monotonic())))
