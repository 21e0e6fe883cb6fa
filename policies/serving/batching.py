"""Request queue of a policy server: bounded, fair across clients, emptied in batches.

It uses no sockets and no clock: times are arguments.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from policies.execution.history import Array


@dataclass(frozen=True)
class Request:
    """One queued observation."""

    client: bytes  # client identity
    id: int  # the client's request id
    inputs: dict[str, Array] = field(repr=False)  # one row, checked
    key: tuple[int, ...] | None  # noise key; None: zero noise
    arrived: float  # time [s]
    deadline: float  # time [s] after which the answer is dropped


class Batcher:
    """Queue requests until a batch is due: it is full, or its oldest request waited `max_wait_s`."""

    def __init__(self, max_queue: int, max_per_client: int, max_batch: int, max_wait_s: float) -> None:
        self._limits = (max_queue, max_per_client)
        self._max_batch, self._max_wait_s = max_batch, max_wait_s
        self._waiting: deque[Request] = deque()
        self._clients: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def refusal(self, client: bytes) -> str:
        """Return the reason to refuse a client's next request; empty if accepted."""
        most, own = self._limits
        if len(self._waiting) >= most:
            return f"{most} requests are waiting already. Ask again later, or raise max_queue."
        if self._clients[client] >= own:
            return f"{own} requests of this client are waiting already. Wait for their answers first."
        return ""

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        self._clients[request.client] += 1

    def due_in(self, now: float) -> float | None:
        """Return the time until a batch is due [s], 0 if one is; None for an empty queue."""
        if not self._waiting:
            return None
        if len(self._waiting) >= self._max_batch:
            return 0.0
        return max(0.0, self._waiting[0].arrived + self._max_wait_s - now)

    def take(self, now: float) -> tuple[list[Request], list[Request]]:
        """Remove the oldest requests: a batch, and those past their deadline."""
        batch: list[Request] = []
        late: list[Request] = []
        while self._waiting and len(batch) < self._max_batch:
            request = self._waiting.popleft()
            self._clients[request.client] -= 1
            if not self._clients[request.client]:
                del self._clients[request.client]
            (late if request.deadline < now else batch).append(request)
        return batch, late
