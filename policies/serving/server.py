"""Policy server: one loop that reads requests, batches them, computes actions and answers.

The server keeps no client state but queued requests; the noise follows from the key in the request. An answer
does not depend on the other requests of its batch (up to rounding).

What clients control is bounded, see `policies.serving.endpoint`, and so are queued messages, in total and per
client.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from policies.bounds import bounded
from policies.errors import ServingError
from policies.execution.history import Array
from policies.runner import draw_noise
from policies.serving.batching import Batcher, Request
from policies.serving.endpoint import Endpoint, EndpointSettings
from policies.serving.messages import Schema, read_observation, to_wire

_log = logging.getLogger(__name__)

_POLL_MS = 50  # poll interval [ms], maximum delay of a stop


class Served(Protocol):
    """Object that can be served."""

    schema: Schema
    noise_shape: tuple[int, ...]

    def decide(self, inputs: dict[str, Array], noise: Array) -> Array:
        """Map inputs (B, ...) and noise (B, *noise_shape) to actions (B, Ta, Da), physical."""
        ...


@dataclass
class ServerSettings(EndpointSettings):
    """Settings of a policy server.

    Attributes:
        max_wait_ms: Maximum wait of a request for others; 0: only while the server is busy.
    """

    max_batch: int = bounded(16, ge=1)  # maximum requests per batch
    max_wait_ms: float = bounded(0.0, ge=0)
    max_queue: int = bounded(64, ge=1)  # maximum queued requests; further ones are refused
    deadline_ms: float = bounded(1000.0, gt=0)  # default deadline of a request [ms]
    max_abs: float = bounded(1e6, gt=0)  # larger magnitudes in observations are refused


class Server(Endpoint):
    """Serve a policy at `endpoint` until `stop` is called; use as a context manager.

    Raises:
        Exception: What the policy raises for an observation of zeros.
        ConfigError: If the address cannot be bound.
        MissingExtraError: If the extra `serve` is not installed.
    """

    def __init__(
        self, served: Served, settings: ServerSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._served, self._settings, self._clock = served, settings, clock
        self._fingerprint = served.schema.fingerprint
        self._instance = uuid.uuid4().hex
        per_client, wait_s = settings.max_per_client, settings.max_wait_ms / 1e3
        self._queue = Batcher(settings.max_queue, per_client, settings.max_batch, wait_s)
        self._stopping = False
        self._warm_up()
        super().__init__(settings, served.schema.max_message)

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
        self.receive(0 if self._stopping else wait)
        due = self._queue.due_in(self._clock())
        if due is not None and (due == 0 or self._stopping):
            self._decide()
        self.metrics.waiting = len(self._queue)
        self.guard()

    def handle(self, client: bytes, message: dict[str, Any], number: int) -> None:
        match message["type"]:
            case "hello":
                answer = {
                    "schema": self._served.schema.to_wire(),
                    "fingerprint": self._fingerprint,
                    "instance": self._instance,
                    "max_message": self._max_message,
                }
                self.answer(client, {"type": "welcome", "id": number, **answer})
            case "metrics":
                self.answer(client, {"type": "metrics", "id": number, "metrics": self.metrics.summary()})
            case "act":
                self._enqueue(client, number, message)
            case other:
                raise ServingError("malformed", f"type must be hello, act or metrics; got '{other[:20]}'.")

    def _enqueue(self, client: bytes, number: int, message: dict[str, Any]) -> None:
        """Validate and queue a request."""
        if self._stopping:
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
            self.refuse(request.client, request.id, "late", reason)
        if not batch:
            return
        actions = self._actions(batch)
        took = self._clock() - now
        answered = [one for one, action in zip(batch, actions, strict=True) if action is not None]
        self.metrics.decided([now - request.arrived for request in answered], took)
        for request, action in zip(batch, actions, strict=True):
            if action is None:
                reason = "the policy gave no finite actions for this observation; see the server's log."
                self.refuse(request.client, request.id, "failed", reason)
                continue
            times = {"queue_ms": 1e3 * (now - request.arrived), "decide_ms": 1e3 * took, "batch": len(batch)}
            answer = {"type": "actions", "id": request.id, "actions": to_wire(action), **times}
            self.answer(request.client, answer)

    def _actions(self, batch: Sequence[Request]) -> list[Array | None]:
        """Return the actions (Ta, Da) of every request; None where the policy failed on that row alone."""
        try:
            actions = self._computed(batch)
        except Exception:  # one failing row must not affect other clients
            _log.exception("the policy failed on a batch of %d", len(batch))
            return [None] if len(batch) == 1 else [self._actions([request])[0] for request in batch]
        rows = [row if np.isfinite(row).all() else None for row in actions]
        if failed := sum(row is None for row in rows):
            _log.error("the policy gave NaN or inf for %d of %d observations", failed, len(rows))
        return rows

    def _computed(self, batch: Sequence[Request]) -> Array:
        """Return the actions (B, Ta, Da) of requests; raises what the policy raises."""
        inputs = {name: np.stack([one.inputs[name] for one in batch]) for name in self._served.schema.inputs}
        noise = np.stack([self._noise(request) for request in batch])
        return np.asarray(self._served.decide(inputs, noise), dtype=np.float32)

    def _warm_up(self) -> None:
        """Compute once, so that a policy that fails is found, and memory is allocated before monitoring."""
        inputs = {k: np.zeros(f.shape, f.dtype) for k, f in self._served.schema.inputs.items()}
        request = Request(b"", 0, inputs, None, 0.0, math.inf)
        self._computed([request])
        self._actions([request] * self._settings.max_batch)

    def _noise(self, request: Request) -> Array:
        shape = self._served.noise_shape
        return np.zeros(shape, np.float32) if request.key is None else draw_noise(request.key, shape)


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
