"""Time that a run took, by the clock and of the processor, over all attempts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from envs.engine.fork_server import workers_cpu_s


def cpu_s() -> float:
    """Return the processor time [s] so far, user and system: all threads, workers and finished children.

    Workers that live are counted where the system lists processes in `/proc` (Linux); elsewhere they count
    once the program has ended them all.
    """
    return time.process_time() + sum(os.times()[2:4]) + workers_cpu_s()


class RunTime:
    """Time and processor time [s] of one run, with evaluations and workers, over all attempts.

    Processor time is that of the whole process, also if several runs are trained in it; of several processes
    (`algos.training.ranks`), of the first.

    Args:
        clock: Time [s].
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before = {"elapsed_s": 0.0, "cpu_s": 0.0}  # of earlier attempts
        self._began = self._now()

    def _now(self) -> dict[str, float]:
        return {"elapsed_s": self._clock(), "cpu_s": cpu_s()}

    def state_dict(self) -> dict[str, float]:
        """Return the seconds so far by name."""
        return {name: self._before[name] + now - self._began[name] for name, now in self._now().items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Count on from a saved state; those of earlier versions lack processor time."""
        self._before = {"elapsed_s": state["elapsed_s"], "cpu_s": state.get("cpu_s", 0.0)}

    @property
    def metrics(self) -> dict[str, float]:
        """The seconds so far by the names of metrics."""
        return {f"time/{name}": seconds for name, seconds in self.state_dict().items()}

    def adopt(self, row: Mapping[str, float | None]) -> None:
        """Include the time until a row of metrics that was written after the saved state."""
        for name, seconds in self._before.items():
            self._before[name] = max(seconds, row.get(f"time/{name}") or 0.0)
