"""Interleaved timing: variants take turns, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Figure:
    """One ratio against a peer. Times are medians over rounds, in seconds per call."""

    case: str
    ours: str
    peer: str
    ours_s: float
    peer_s: float
    floor: float

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.peer_s / self.ours_s

    @property
    def ok(self) -> bool:
        """Whether the ratio reaches its floor."""
        return self.ratio >= self.floor

    def row(self) -> dict[str, object]:
        """Return the figure as JSON types."""
        content = asdict(self)
        return {"figure": content.pop("case"), **content, "ratio": self.ratio}


def compare(
    case: str,
    ours: tuple[str, Callable[[], object]],
    peer: tuple[str, Callable[[], object]],
    floor: float,
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    steps: int = 1,
) -> Figure:
    """Time ours and the peer in turns.

    Args:
        case: What the table calls the comparison.
        ours: What the table calls our side, and a function to time.
        peer: The same of the other side.
        floor: Least ratio that is asked for; 0: none.
        rounds: Turns of each.
        clock: See `interleave`.
        steps: Of a call; the table has the time of one.
    """
    names, variants = (ours[0], peer[0]), {"ours": ours[1], "peer": peer[1]}
    times = interleave(variants, rounds=rounds, slot_s=0.1, clock=clock)
    return Figure(case, *names, times["ours"] / steps, times["peer"] / steps, floor)


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 9,
    slot_s: float = 0.05,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median time per call of each variant, in seconds.

    Args:
        variants: Functions to time.
        rounds: Turns each variant gets.
        slot_s: Least time of one turn; short calls are repeated to fill it.
        clock: Wall time; or `time.process_time`, which other programs disturb less, where one thread works.
    """
    calls = {name: _calls_per_slot(run, slot_s) for name, run in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            start = clock()
            for _ in range(calls[name]):
                run()
            times[name].append((clock() - start) / calls[name])
    return {name: statistics.median(values) for name, values in times.items()}


def _calls_per_slot(run: Callable[[], object], slot_s: float) -> int:
    run()
    start = time.perf_counter()
    run()
    return max(1, int(slot_s / max(time.perf_counter() - start, 1e-7)))
