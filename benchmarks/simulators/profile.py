"""Where the processor time of a row of `benchmarks.simulators` goes, on our side and on the other.

    OMP_NUM_THREADS=1 python -m benchmarks.simulators.profile metaworld adroit-pen [--rounds 5]

Microseconds per control step by package or file, largest differences first, as Python's profiler counts them:
calls of Python functions look more expensive than they are, so read shares, not totals.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import Counter
from pathlib import Path

from benchmarks.options import parser
from benchmarks.simulators.__main__ import episode, families
from benchmarks.simulators.case import Case, Side

ROOT = Path(__file__).resolve().parents[2]
LINES = 8


def spent(case: Case, side: Side, rounds: int) -> Counter[str]:
    """Return the microseconds per control step of every place in the code."""
    profiler, executed = cProfile.Profile(time.process_time), 0
    for seed in range(rounds + 1):
        actions = episode(case, seed)
        side.begin(seed, actions)
        if seed:  # the first episode warms up
            profiler.enable()
            executed += side.run(actions)
            profiler.disable()
        else:
            side.run(actions)
    places: Counter[str] = Counter()
    for (file, _, function), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        places[place(file, function)] += 1e6 * own / executed
    return places


def place(file: str, function: str) -> str:
    """Name where a function lives: a file of ours, else a package."""
    path = Path(file)
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    if "site-packages" in path.parts:
        return path.parts[path.parts.index("site-packages") + 1]
    return "mujoco" if "mujoco" in function else "numpy and Python"


def main() -> None:
    """Print a table per row of the chosen tasks."""
    asked = parser(__doc__)
    asked.add_argument("envs", nargs="+")
    asked.add_argument("--rounds", type=int, default=5)
    options = asked.parse_args()
    for case in families():
        if case.env in options.envs:
            sides = case.build()
            ours, theirs = (spent(case, sides[name], options.rounds) for name in ("ours", "peer"))
            print(f"\n{case.env}, {case.num_envs} envs: {case.backend} and {case.peer}, µs per control step")
            print(f"{'all':<40}{ours.total():>9.1f}{theirs.total():>9.1f}")
            names = sorted(ours.keys() | theirs.keys(), key=lambda name: -abs(ours[name] - theirs[name]))
            for name in names[:LINES]:
                print(f"{name:<40}{ours[name]:>9.1f}{theirs[name]:>9.1f}", flush=True)


if __name__ == "__main__":
    main()
