"""Workers as Ray actors, anywhere in a cluster; the interface is `envs.engine.workers.Workers`.

A call to a worker is a ticket: the worker, a number, method and arguments, and the state to begin from. Its
answer is a function of the ticket and comes with the state after it, so a ticket whose actor was killed, or
has given no sign of life for a while, is issued again to a new actor, with the same result.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from envs.engine.workers import Factory, OnMessage, Pickler
from policies.errors import BurnishError, WorkerError
from policies.extras import require
from policies.threads import torch_threads

_log = logging.getLogger(__name__)
_ATTEMPTS = 5  # of a ticket
_OWN_CLUSTER = {  # environment variables, read when Ray is imported
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too: listen on the loopback interface only
    "RAY_worker_niceness": "0",  # 15 by default, so that other programs would keep actors from starting
}


class Remote:
    """Holds one object in an actor; the first ticket builds it, in the thread that serves all of them."""

    def __init__(self, made: bytes) -> None:
        self._made = made
        self._object: Any = None

    def run(self, number: int, method: str, arguments: bytes, state: bytes | None) -> bytes:
        """Return (number, kind, answer, messages, state) of a ticket, pickled; `state` is restored first."""
        messages: list[Any] = []
        try:
            with torch_threads(1):
                if self._object is None:
                    factory, given = pickle.loads(self._made)
                    self._object = factory(*given)
                worker: Any = self._object
                worker.notify = messages.append
                if state is not None:
                    worker.load(pickle.loads(state))
                answer: Any = getattr(worker, method)(*pickle.loads(arguments))
                after = dumps(worker.state()) if hasattr(worker, "state") else None
            return dumps((number, "ok", answer, messages, after))
        except BurnishError as error:
            return dumps((number, "refusal", error, [], None))
        except Exception:
            return dumps((number, "error", traceback.format_exc(), [], None))

    def ping(self) -> None:
        """Give a sign of life; served beside a ticket."""


@dataclass(frozen=True)
class Ticket:
    """A call: of worker `index`, with arguments in the object store."""

    index: int
    number: int
    method: str
    arguments: Any
    attempt: int = 1


class RayWorkers:
    """One actor per object.

    Args:
        factory: Builds an object.
        arguments: Of each object.
        address: Of a running cluster, or `auto`; None: one is started on this machine, and ends with the
            program. It listens on the loopback interface only, if the program did not import Ray before.
        timeout_s: Time without a sign of life after which an actor is replaced [s].

    Raises:
        MissingExtraError: If Ray is not installed.
        WorkerError: If there is no cluster at the address.
    """

    def __init__(
        self,
        factory: Factory,
        arguments: Sequence[tuple[Any, ...]],
        *,
        address: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._ray = _connected(address)
        self._timeout_s, self._number = timeout_s, 0
        self._made = [dumps((factory, given)) for given in arguments]
        self._states: list[bytes | None] = [None] * len(self._made)
        self._pending: dict[Any, Ticket] = {}
        self._actors = [self._start(index) for index in range(len(self._made))]

    def __len__(self) -> int:
        return len(self._actors)

    # -- lockstep -------------------------------------------------------------------------------------

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, on_message: OnMessage | None = None
    ) -> list[Any]:
        """Call a method of every object; messages arrive with the answers.

        Raises:
            BurnishError: Raised by a worker; forwarded unchanged.
            WorkerError: If a call raises anything else, or a ticket loses every actor.
        """
        if method == "state" and None not in self._states:
            return [pickle.loads(state) for state in self._states if state is not None]
        stored: dict[int, Any] = {}
        for index, given in enumerate(arguments):
            if id(given) not in stored:  # the weights of a policy travel once
                stored[id(given)] = self._ray.put(dumps(given))
            self.submit(index, method, stored[id(given)])
        found: dict[int, Any] = {}
        while len(found) < len(self):
            index, answer = self.next(on_message)
            found[index] = answer
        return [found[index] for index in range(len(self))]

    # -- one by one -----------------------------------------------------------------------------------

    @property
    def idle(self) -> list[int]:
        """Workers without a ticket."""
        busy = {ticket.index for ticket in self._pending.values()}
        return [index for index in range(len(self)) if index not in busy]

    def store(self, arguments: tuple[Any, ...]) -> Any:
        """Return arguments in the object store, for `submit`."""
        return self._ray.put(dumps(arguments))

    def submit(self, index: int, method: str, arguments: Any) -> None:
        """Issue a ticket with stored arguments to an idle worker."""
        self._number += 1
        self._issue(Ticket(index, self._number, method, arguments))

    def next(self, on_message: OnMessage | None = None) -> tuple[int, Any]:
        """Wait for an answer; return the worker and the answer. Errors as `call`."""
        while True:
            done, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=self._timeout_s)
            if not done:
                self._replace_silent()
                continue
            ticket = self._pending.pop(done[0])
            try:
                shard = self._ray.get(done[0])
            except self._ray.exceptions.RayError as error:
                self._issue_again(ticket, error)
                continue
            return ticket.index, self._read(ticket, shard, on_message)

    def ready(self) -> tuple[int, Any] | None:
        """Return as `next` an answer that is there; None without any."""
        done, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=0)
        return self.next() if done else None

    def close(self) -> None:
        """End all actors; safe to call twice."""
        for actor in self._actors:
            with suppress(Exception):  # whatever Ray raises over an actor that is gone
                self._ray.kill(actor)
        self._actors, self._pending = [], {}

    # -- tickets --------------------------------------------------------------------------------------

    def _start(self, index: int) -> Any:
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "concurrency_groups": {"health": 1}}
        return self._ray.remote(**options)(Remote).remote(self._made[index])

    def _issue(self, ticket: Ticket, state: bytes | None = None) -> None:
        run = self._actors[ticket.index].run
        self._pending[run.remote(ticket.number, ticket.method, ticket.arguments, state)] = ticket

    def _issue_again(self, ticket: Ticket, why: object) -> None:
        if ticket.attempt == _ATTEMPTS:
            self.close()
            raise WorkerError(
                f"worker {ticket.index} of {len(self._made)} was lost {_ATTEMPTS} times in one call; the "
                f"last time: {_first_line(why)}. Out of memory? Try fewer workers, or a larger "
                "fleet.timeout_s."
            )
        _log.warning("worker %d is lost and its work is issued again: %s", ticket.index, _first_line(why))
        with suppress(Exception):  # as in `close`
            self._ray.kill(self._actors[ticket.index])
        self._actors[ticket.index] = self._start(ticket.index)
        self._issue(replace(ticket, attempt=ticket.attempt + 1), self._states[ticket.index])

    def _replace_silent(self) -> None:
        """Issue the tickets of actors that do not answer a ping again."""
        pings = {
            self._actors[ticket.index].ping.options(concurrency_group="health").remote(): ref
            for ref, ticket in self._pending.items()
        }
        _, silent = self._ray.wait(list(pings), num_returns=len(pings), timeout=self._timeout_s)
        done, _ = self._ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        for ping in silent:
            if pings[ping] not in done:
                ticket = self._pending.pop(pings[ping])
                self._issue_again(ticket, f"no sign of life for {self._timeout_s:g} s")

    def _read(self, ticket: Ticket, shard: bytes, on_message: OnMessage | None) -> Any:
        number, kind, answer, messages, state = pickle.loads(shard)
        if number != ticket.number:
            raise WorkerError(f"worker {ticket.index} answered ticket {number} instead of {ticket.number}.")
        if kind != "ok":
            self.close()
            refused = isinstance(answer, BurnishError)
            raise answer if refused else WorkerError(f"worker {ticket.index} failed:\n{answer}")
        self._states[ticket.index] = state
        if on_message is not None:
            for message in messages:
                on_message(message)
        return answer


def dumps(value: Any) -> bytes:
    """Return a pickle in one piece; arrays are writable after `pickle.loads`."""
    head = io.BytesIO()
    Pickler(head, protocol=5).dump(value)
    return head.getvalue()


def _connected(address: str | None) -> Any:
    """Return Ray, connected to a cluster; an own one is started once per program."""
    given = {"RAY_USAGE_STATS_ENABLED": "0", **({} if address else _OWN_CLUSTER)}
    os.environ.update({name: value for name, value in given.items() if name not in os.environ})
    ray = require("ray", extra="cluster", what="fleet=ray")
    if ray.is_initialized():
        return ray
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    in_main_thread = threading.current_thread() is threading.main_thread()
    before, path = signal.getsignal(signal.SIGTERM), os.environ.get("PYTHONPATH")
    if address is None:  # actors import what this program can
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        ray.init(address=address or "local", include_dashboard=None if address else False, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise WorkerError(
            f"fleet.address={address}: {_first_line(error)} Start a cluster there with ray start --head, or "
            "leave fleet.address out."
        ) from error
    except OSError as error:  # the names of its sockets are too long, or the folder cannot be written
        raise WorkerError(
            f"Ray cannot begin: {_first_line(error)} Give it another folder for temporary files, with a "
            "short path: RAY_TMPDIR=/tmp."
        ) from error
    finally:
        if in_main_thread:  # Ray takes the signal that stops a run
            signal.signal(signal.SIGTERM, before)
        os.environ.pop("PYTHONPATH", None)
        os.environ.update({} if path is None else {"PYTHONPATH": path})
    return ray


def _first_line(value: object) -> str:
    return next(iter(str(value).strip().splitlines()), type(value).__name__)
