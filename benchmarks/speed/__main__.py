"""Hot paths against their peers, on two cores, DPPO's Hopper sizes.

    OMP_NUM_THREADS=1 python -m benchmarks.speed [case ...] [--rounds 9] [--json FILE] [--gate]

Every case first checks that ours and the peer compute the same thing, then times them in turns and prints
the ratio of medians with its floor. `--gate` exits with 1 if a ratio misses its floor. Times of one run are
comparable with each other only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gymnasium
import mujoco
import torch

from algos.training.memory import keep_freed_memory
from algos.training.provenance import processor_name
from benchmarks.speed.cases_acting import exported, rollout, sampling, transformer, unet
from benchmarks.speed.cases_critics import critics
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
        released,
    )
}
PEERS = ("ppo", "dsrl_sac", "lerobot", "released")
"""Cases whose peer is another program, to be installed or cloned beside ours."""


def machine() -> dict[str, object]:
    """Describe where the figures come from."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processor": processor_name(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "mujoco": mujoco.__version__,
        "gymnasium": gymnasium.__version__,
    }


def main() -> int:
    """Run the chosen cases and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="gradient threads of both sides")
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="of the data of offline learning, and of a replay"
    )
    parser.add_argument("--seeds", type=int, default=4, help="that are trained together, of `seeds`")
    parser.add_argument(
        "--dataset",
        type=Path,
        help="a file in place of synthetic data of offline learning; cloned before `evaluate`",
    )
    parser.add_argument("--peers", action="store_true", help=f"with {', '.join(PEERS)}")
    parser.add_argument(
        "--programs", type=Path, help="folder with clones of CORL, PRDC, A2PR, for `released`"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gate", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does; peers profit too
    print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
    print(f"{'case':<36}{'ours':>12}{'peer':>12}{'ratio':>8}{'floor':>7}  against", flush=True)
    figures: list[Figure] = []
    print(processor_name(), flush=True)
    for name in options.cases or [case for case in CASES if options.peers or case not in PEERS]:
        for figure in CASES[name](options):
            figures.append(figure)
            verdict = "" if figure.ok else "  MISSED"
            print(
                f"{figure.case:<36}{1e3 * figure.ours_s:>9.3f} ms{1e3 * figure.peer_s:>9.3f} ms"
                f"{figure.ratio:>8.2f}{figure.floor:>7.1f}  {figure.peer}{verdict}",
                flush=True,
            )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(), "figures": [figure.row() for figure in figures]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(options.gate and not all(figure.ok for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
