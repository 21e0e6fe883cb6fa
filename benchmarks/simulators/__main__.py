"""Control steps per CPU-second of our simulators and of what they are made from.

    OMP_NUM_THREADS=1 python -m benchmarks.simulators [--rounds 7]          everything, and the page of it
    OMP_NUM_THREADS=1 python -m benchmarks.simulators hopper scene          some tasks, printed only
    python -m benchmarks.simulators --report                                the page from what is there

Every row first steps both sides through the same episodes, where they must agree to its tolerance. Then the
sides take turns on episodes of one length, resets not counted; medians are compared. `physics` is MuJoCo
alone, with the states and motor commands of our side: what no engine on this model can exceed. Processor
time is counted, not the clock's, so that other work on the machine matters little.

A family adds rows by a module with `CASES`, listed in `families`. A run of all of them leaves
docs/results/simulators/all.json and docs/results/simulators.md.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.simulators.case import Array, Case, Side
from policies.errors import MissingExtraError

PACKAGES = ("numpy", "mujoco", "gymnasium", "gymnasium-robotics", "ogbench", "robosuite", "metaworld")
EQUAL_EPISODES = 2  # that both sides step through before anything is timed


@dataclass(frozen=True)
class Row:
    """A measured row; speeds in control steps per CPU-second."""

    env: str
    backend: str
    num_envs: int
    peer: str
    ours_per_s: float
    peer_per_s: float
    physics_per_s: float | None
    difference: float | None  # largest over the checked episodes

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.ours_per_s / self.peer_per_s

    def cells(self) -> list[str]:
        """Format the row."""
        physics = "-" if self.physics_per_s is None else f"{self.physics_per_s:.0f}"
        equal = "-" if self.difference is None else f"{self.difference:.0e}" if self.difference else "equal"
        speeds = f"{self.ours_per_s:.0f}", f"{self.peer_per_s:.0f}", f"{self.ratio:.2f}"
        return [self.env, self.backend, str(self.num_envs), self.peer, *speeds, physics, equal]


COLUMNS = ("env", "engine", "envs", "compared with", "ours", "theirs", "ratio", "physics", "difference")
WIDTHS = (23, 12, 5, 14, 8, 8, 7, 8, 11)


def families() -> Iterator[Case]:
    """Yield the rows of all families."""
    from benchmarks.simulators import locomotion, own, robosuite, worlds

    yield from own.CASES
    yield from locomotion.CASES
    yield from worlds.CASES
    yield from robosuite.CASES


# -- measuring ------------------------------------------------------------------------------------------


def episode(case: Case, seed: int) -> Array:
    """Draw actions (T, Da) that hold for five steps, as a movement does."""
    draws = np.random.default_rng(seed).uniform(-1, 1, (-(-case.steps // 5), case.action_dim))
    return draws.repeat(5, axis=0)[: case.steps]


def disagreement(case: Case, sides: Mapping[str, Side]) -> float | None:
    """Return the largest difference between the two sides; None where they cannot begin alike.

    Raises:
        SystemExit: If it exceeds the case's tolerance.
    """
    if case.tolerance is None:
        return None
    differences = []
    for seed in range(EQUAL_EPISODES):
        for name in ("ours", "peer"):
            sides[name].begin(seed, episode(case, seed))
            sides[name].run(episode(case, seed))
        differences.append(np.abs(sides["ours"].state() - sides["peer"].state()).max())
    worst = float(np.max(differences))  # NaN if any of them is
    if not worst <= case.tolerance:
        raise SystemExit(
            f"{case.env}: {case.backend} and {case.peer} differ by {worst:.1e}; nothing was timed."
        )
    return worst


def measure(case: Case, rounds: int) -> Row:
    """Check that the sides agree, then time them in turns."""
    sides = case.build()
    difference = disagreement(case, sides)
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for seed in range(rounds):
        for name, side in sides.items():
            speeds[name].append(_timed(side, seed, episode(case, seed)))
    ours, peer, physics = (
        statistics.median(speeds[name]) if name in speeds else None for name in ("ours", "peer", "physics")
    )
    assert ours is not None and peer is not None
    return Row(case.env, case.backend, case.num_envs, case.peer, ours, peer, physics, difference)


def _timed(side: Side, seed: int, actions: Array) -> float:
    """Return the control steps per CPU-second of an episode."""
    side.begin(seed, actions)
    start = side.clock()
    executed = side.run(actions)
    return executed / (side.clock() - start)


def measured(cases: Sequence[Case], rounds: int) -> tuple[list[Row], list[str]]:
    """Measure and print rows; returns them, and what was left out for lack of a package."""
    rows, left_out = [], []
    print(_line(COLUMNS), flush=True)
    for case in cases:
        try:
            rows.append(measure(case, rounds))
        except MissingExtraError as error:
            left_out.append(case.env)
            print(f"{case.env:<17}left out: {error}", flush=True)
            continue
        print(_line(rows[-1].cells()), flush=True)
    return rows, left_out


def _line(cells: Sequence[str]) -> str:
    return "".join(
        f"{cell:<{width}}" if i in (0, 1, 3) else f"{cell:>{width - 2}}  "
        for i, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    )


# -- report ---------------------------------------------------------------------------------------------


def keep(rows: Sequence[Row], rounds: int) -> Path:
    """Write the numbers of a whole run."""
    packages = {name: metadata.version(name) for name in PACKAGES}
    content = {"rounds": rounds, "rows": [asdict(row) for row in rows], "packages": packages}
    return pages.keep("simulators", "all", content, indent=1)


def report() -> Path:
    """Write docs/results/simulators.md from the numbers that are there."""
    (content,) = pages.kept("simulators", advice="run python -m benchmarks.simulators first")
    rows = [Row(**row).cells() for row in content["rows"]]
    return pages.write("simulators", [INTRODUCTION, *pages.table(COLUMNS, rows), "", _origin(content)])


INTRODUCTION = """# Simulators

`OMP_NUM_THREADS=1 python -m benchmarks.simulators`: control steps per CPU-second of every family and engine,
and of what it is made from, in one run on one machine. CPU-seconds are those of all processes that take part,
so that other work on the machine matters little; ratios are within the run. Both sides first step through the
same episodes.

- *envs*: environments of our vector, which executes chunks of eight steps; the exact engine of the locomotion
  tasks, chunks of four. *compared with*: what ours is made from, without its wrappers, one after the other.
- *physics*: `mj_step` alone from the states of the episode, with the motors as they are: about what no engine
  on the same model can exceed.
- *difference*: between both sides after an episode; for robosuite of positions, else of observations.
- Worker processes get every chunk by a message and answer with its results. The clock would show what they
  gain; processor time shows what the messages cost.
"""


def _origin(content: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in content["packages"].items())
    return (
        f"Medians of {content['rounds']} rounds on {content['environment']['cpu_count']} CPU cores, shared "
        f"with other work; one thread; {packages}; commit {pages.commits([content])}. Numbers are in "
        "`simulators/`."
    )


def main() -> int:
    """Measure the chosen rows and print a table."""
    parser = study_parser(__doc__)
    parser.add_argument("envs", nargs="*", help="names of tasks; default: all, and the page is written")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not options.report:
        cases = tuple(families())
        known = dict.fromkeys(case.env for case in cases)
        if unknown := [name for name in options.envs if name not in known]:
            parser.error(f"unknown env {', '.join(unknown)}; choose among {', '.join(known)}")
        rows, left_out = measured(
            [case for case in cases if case.env in (options.envs or known)], options.rounds
        )
        if options.envs:
            return 0
        if left_out:
            print(f"not written: {', '.join(left_out)} were left out; install their packages.")
            return 1
        print(f"written: {keep(rows, options.rounds)}")
    print(f"written: {report()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
