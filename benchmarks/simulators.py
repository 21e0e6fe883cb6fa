"""Control steps per CPU-second of our simulators and of what they are made from.

    OMP_NUM_THREADS=1 python -m benchmarks.simulators [env ...] [--rounds 7] [--json FILE]

Every row first steps both sides through the same episodes, where they must agree to its tolerance. Then the
sides take turns on episodes of one length, resets not counted; medians are compared. `physics` is MuJoCo
alone, with the states and motor commands of our side: what no engine on this model can exceed. Processor
time is counted, not the clock's, so that other work on the machine matters little.

A family adds rows by a module with `CASES`, listed in `families`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from policies.errors import MissingExtraError

Array = np.ndarray


class Side(Protocol):
    """One simulator of a task, or its physics alone."""

    def begin(self, seed: int, actions: Array) -> None:
        """Start the episode in which actions (T, Da) will be executed; this is not timed."""
        ...

    def run(self, actions: Array) -> None:
        """Execute actions (T, Da)."""
        ...

    def state(self) -> Array:
        """Return the present positions, to compare sides by."""
        ...


@dataclass(frozen=True)
class Case:
    """A row of the table: how to build its sides, and how far they may differ."""

    env: str
    backend: str
    peer: str
    build: Callable[[], Mapping[str, Side]]  # of `ours`, `peer` and, where it makes sense, `physics`
    action_dim: int
    tolerance: float | None  # largest difference after an episode; None: the two cannot begin alike
    steps: int = 50  # of an episode


@dataclass(frozen=True)
class Row:
    """A measured row; speeds in control steps per CPU-second."""

    env: str
    backend: str
    peer: str
    ours_per_s: float
    peer_per_s: float
    physics_per_s: float | None
    difference: float | None  # of positions, largest over the checked episodes

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.ours_per_s / self.peer_per_s

    def line(self) -> str:
        """Format the row."""
        physics = f"{self.physics_per_s:>10.0f}" if self.physics_per_s else f"{'-':>10}"
        equal = f"{'-':>11}" if self.difference is None else f"{self.difference:>11.0e}"
        return (
            f"{self.env:<17}{self.backend:<12}{self.peer:<13}{self.ours_per_s:>9.0f}{self.peer_per_s:>9.0f}"
            f"{self.ratio:>7.2f}{physics}{equal}"
        )


HEADER = "{:<17}{:<12}{:<13}{:>9}{:>9}{:>7}{:>10}{:>11}".format(
    *("env", "backend", "peer", "ours/s", "peer/s", "ratio", "physics/s", "equal to")
)


def families() -> Iterator[Case]:
    """Yield the rows of all families."""
    from benchmarks import simulators_locomotion, simulators_robosuite, simulators_worlds

    yield from simulators_locomotion.CASES
    yield from simulators_worlds.CASES
    yield from simulators_robosuite.CASES


def episode(case: Case, seed: int) -> Array:
    """Draw actions (T, Da) that hold for five steps, as a movement does."""
    draws = np.random.default_rng(seed).uniform(-1, 1, (-(-case.steps // 5), case.action_dim))
    return draws.repeat(5, axis=0)[: case.steps]


def disagreement(case: Case, sides: Mapping[str, Side], episodes: int) -> float | None:
    """Return the largest difference between the two sides; None where they cannot begin alike.

    Raises:
        SystemExit: If it exceeds the case's tolerance.
    """
    if case.tolerance is None:
        return None
    worst = 0.0
    for seed in range(episodes):
        for name in ("ours", "peer"):
            sides[name].begin(seed, episode(case, seed))
            sides[name].run(episode(case, seed))
        worst = max(worst, float(np.abs(sides["ours"].state() - sides["peer"].state()).max()))
    if not worst <= case.tolerance:
        raise SystemExit(
            f"{case.env}: {case.backend} and {case.peer} differ by {worst:.1e}; nothing was timed."
        )
    return worst


def measure(case: Case, rounds: int) -> Row:
    """Check that the sides agree, then time them in turns."""
    sides = case.build()
    difference = disagreement(case, sides, episodes=2)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for seed in range(rounds):
        actions = episode(case, seed)
        for name, side in sides.items():
            side.begin(seed, actions)
            start = time.process_time()
            side.run(actions)
            seconds[name].append(time.process_time() - start)
    speed = {name: case.steps / statistics.median(values) for name, values in seconds.items()}
    return Row(
        *(case.env, case.backend, case.peer, speed["ours"], speed["peer"], speed.get("physics"), difference)
    )


def main() -> int:
    """Measure the chosen rows and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("envs", nargs="*", help="names of tasks; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(HEADER, flush=True)
    rows = []
    for case in families():
        if options.envs and case.env not in options.envs:
            continue
        try:
            rows.append(measure(case, options.rounds))
        except MissingExtraError as error:
            print(f"{case.env:<17}left out: {error}", flush=True)
            continue
        print(rows[-1].line(), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = [asdict(row) | {"ratio": row.ratio} for row in rows]
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
