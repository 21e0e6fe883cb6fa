"""Hot paths against their peers, on two cores, DPPO's Hopper sizes.

    OMP_NUM_THREADS=1 python -m benchmarks.speed [case ...] [--rounds 9] [--keep] [--gate]

Every case first checks that ours and the peer compute the same thing, then times them in turns and prints
the ratio of medians with its floor. `--keep` adds the figures to those of this processor in
docs/results/speed, and writes the tables of docs/speed.md. `--gate` exits with 1 if a ratio misses its
floor. Times of one run are comparable with each other only.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch

from algos.training.memory import keep_freed_memory
from algos.training.provenance import describe_environment
from benchmarks.options import parser
from benchmarks.pages import processor
from benchmarks.speed import page
from benchmarks.speed.cases_acting import exported, rollout, sampling, transformer, unet
from benchmarks.speed.cases_critics import critics
from benchmarks.speed.cases_d3rlpy import d3rlpy
from benchmarks.speed.cases_dsrl import dsrl_sac
from benchmarks.speed.cases_evaluating import evaluate
from benchmarks.speed.cases_flows import flow, reinflow
from benchmarks.speed.cases_learning import cloning, gather, iteration, update
from benchmarks.speed.cases_lerobot import lerobot
from benchmarks.speed.cases_offline import neighbours, offline
from benchmarks.speed.cases_offpolicy import dsrl, ensembles, replay, steered
from benchmarks.speed.cases_peers import ppo
from benchmarks.speed.cases_released import released
from benchmarks.speed.cases_seeds import seeds
from benchmarks.speed.timing import Figure

CASES: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    case.__name__: case
    for case in (
        sampling,
        flow,
        unet,
        transformer,
        exported,
        update,
        reinflow,
        cloning,
        gather,
        rollout,
        evaluate,
        iteration,
        offline,
        neighbours,
        seeds,
        replay,
        steered,
        ensembles,
        dsrl,
        critics,
        ppo,
        dsrl_sac,
        lerobot,
        d3rlpy,
        released,
    )
}
PEERS = ("ppo", "dsrl_sac", "lerobot", "d3rlpy", "released")
"""Cases whose peer is another program, to be installed or cloned beside ours."""


ON_A_FILE = ("offline", "neighbours", "seeds", "d3rlpy", "released", "evaluate")
"""Cases that read `--dataset`."""
ON_ROWS = ("offline", "neighbours", "seeds", "d3rlpy", "released", "replay", "dsrl")
"""Cases whose synthetic data have `--rows`."""
ROWS = 1_000_000


def about(case: str, options: argparse.Namespace) -> dict[str, object]:
    """Return what a kept figure says of its run: data, rounds, commit, load and day."""
    dataset = None
    if options.dataset is not None and case in ON_A_FILE:
        dataset = options.dataset.name
    elif options.rows != ROWS and case in ON_ROWS:
        dataset = f"{options.rows:,} rows"
    commit, *changes = str(describe_environment()["commit"] or "unknown").split("-")
    return {
        "case": case,
        "dataset": dataset,
        "rounds": options.rounds,
        "commit": "-".join((commit[:7], *changes)),
        "load": round(os.getloadavg()[0], 2),
        "date": date.today().isoformat(),
    }


def main() -> int:
    """Run the chosen cases and print a table."""
    asked = parser(__doc__)
    asked.add_argument("cases", nargs="*", choices=[*CASES, []], help=f"of {', '.join(CASES)}; default: all")
    asked.add_argument("--rounds", type=int, default=9)
    asked.add_argument("--rows", type=int, default=ROWS, help="of synthetic data")
    asked.add_argument("--dataset", type=Path, help=f"a file in place of them, for {', '.join(ON_A_FILE)}")
    asked.add_argument("--peers", action="store_true", help=f"with {', '.join(PEERS)}")
    asked.add_argument("--programs", type=Path, help="folder with clones of CORL, PRDC, A2PR, for `released`")
    asked.add_argument("--keep", action="store_true", help="the figures, in docs/results/speed")
    asked.add_argument("--gate", action="store_true", help="exit with 1 if a ratio misses its floor")
    options = asked.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does; peers profit too
    print(f"{processor(describe_environment())}, load average {os.getloadavg()[0]:.1f}", flush=True)
    print(f"{'case':<36}{'ours':>12}{'peer':>12}{'ratio':>8}{'floor':>7}  against", flush=True)
    figures: list[Figure] = []
    for name in options.cases or [case for case in CASES if options.peers or case not in PEERS]:
        run, found = about(name, options), []
        for figure in CASES[name](options):
            found.append(figure)
            verdict = "" if figure.ok else "  MISSED"
            print(
                f"{figure.case:<36}{1e3 * figure.ours_s:>9.3f} ms{1e3 * figure.peer_s:>9.3f} ms"
                f"{figure.ratio:>8.2f}{figure.floor:>7.1f}  {figure.peer}{verdict}",
                flush=True,
            )
        figures += found
        if options.keep:
            page.add(run | figure.row() for figure in found)
            page.write()
    return int(options.gate and not all(figure.ok for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
