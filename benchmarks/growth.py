"""How cost grows with a size: processor time by batch, environments, rows, seeds, denoising steps and width.

    python -m benchmarks.growth [--rounds 5] [CASE ...]

writes docs/results/speed/growth.json, docs/pictures/growth.svg and the table in docs/speed.md. One thread;
the sizes of a case take turns. `memory` and `memory of PRDC` measure the most memory of a run, in a process
of its own for each size, on a file of so many rows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from algos.base import Setup
from algos.dppo import DppoConfig
from algos.prdc import PrdcConfig
from algos.td3_bc import Td3BcConfig
from benchmarks.device import MLP, cloning, decision, policy, td3_bc
from benchmarks.options import parser
from benchmarks.pages import keep, processor, record, replace_block, table
from benchmarks.speed.cases_offline import synthetic_dataset
from benchmarks.speed.timing import interleave
from envs.datasets import read_dataset
from envs.datasets.writers import write_dataset
from envs.make import env as make_env
from policies.backbones.mlp import MlpConfig
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.samplers.ddpm import DDIM

PAGE, PICTURE = "docs/speed.md", "docs/pictures/growth.svg"
CPU = torch.device("cpu")
HUNDRED = PolicyConfig(process=VPDiffusion(num_levels=100), horizon=4)
Call = Callable[[], object]


def by_batch(rows: int) -> tuple[Call, int]:
    """Return a decision for this many observations."""
    return decision(MLP, rows, CPU, 1, False), rows


def by_environments(envs: int) -> tuple[Call, int]:
    """Return a collection of DPPO on Hopper in this process, eight chunks of four steps each."""
    given = Setup(env=make_env("hopper"), init=policy(MLP, CPU), num_workers=0, num_threads=1)
    run = DppoConfig(tuned_steps=10, num_envs=envs, steps_per_iteration=8).build(given)
    return run.collect, envs * 8 * 4


def by_steps(steps: int) -> tuple[Call, int]:
    """Return a decision for 40 observations by this many DDIM steps."""
    acting, obs = policy(HUNDRED, CPU).with_sampler(DDIM(steps=steps)), torch.zeros(40, 1, 11)
    return torch.no_grad()(lambda: acting.act(obs)), steps


def by_width(width: int) -> tuple[Call, int]:
    """Return a gradient step of cloning by a network of this width."""
    return cloning(replace(MLP, backbone=MlpConfig(width=width)), 256, 1, CPU, 1, False), 1


def by_seeds(seeds: int) -> tuple[Call, int]:
    """Return twenty gradient steps of TD3+BC of this many seeds at once."""
    return td3_bc(seeds, CPU, 1, False), 20 * seeds


def by_rows(rows: int) -> tuple[Call, int]:
    """Return ten gradient steps of TD3+BC on this many rows of data."""
    run = Td3BcConfig(steps=10**9, log_every=10).build(Setup(dataset=synthetic_dataset(rows), num_threads=1))
    return run.advance, 10


CASES: dict[str, tuple[Callable[[int], tuple[Call, int]], Sequence[int], str]] = {
    "batch": (by_batch, (1, 4, 16, 64, 256, 1024, 4096), "decision, MLP of 10 DDIM steps, per row"),
    "environments": (by_environments, (1, 8, 40, 128, 512), "collection of DPPO on Hopper, per control step"),
    "denoising steps": (by_steps, (2, 5, 10, 20, 50, 100), "decision of 40 rows, per step"),
    "width": (by_width, (64, 128, 256, 512, 1024, 2048), "step of cloning, batch 256"),
    "seeds": (by_seeds, (1, 2, 4, 8), "TD3+BC at once, per seed and step"),
    "rows": (by_rows, (100_000, 1_000_000, 10_000_000), "step of TD3+BC, batch 256"),
}
"""Case -> what builds a call and counts its units, sizes, what is measured."""


MEMORY: dict[str, tuple[Callable[[int], Any], Sequence[int]]] = {
    "memory": (lambda steps: Td3BcConfig(steps=steps, log_every=10), CASES["rows"][1]),
    "memory of PRDC": (lambda steps: PrdcConfig(steps=steps, log_every=10), (100_000, 1_000_000)),
}
"""Name in the file -> what is built for so many steps, rows of data."""


def memory(name: str, rows: int) -> tuple[float, float]:
    """Return the size of transitions, and the memory of a run on a file of them beyond one on few, in MB."""
    used = []
    with tempfile.TemporaryDirectory() as folder:
        for number in (1000, rows):
            file = Path(folder, f"{number}.hdf5")
            write_dataset(file, synthetic_dataset(number), format="d4rl")
            command = [sys.executable, "-m", "benchmarks.growth", "--memory", name, str(file)]
            used.append(float(subprocess.check_output(command)))
        return rows * 4 * (2 * 11 + 3 + 1) / 1e6, used[1] - used[0]


def peak(name: str, file: str) -> None:
    """Print the peak memory [MB] of a process that reads data, builds a run and takes ten steps."""
    MEMORY[name][0](10**6).build(Setup(dataset=read_dataset(file), num_threads=1)).advance()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    sys.stdout.write(f"{float(status['VmHWM'].split()[0]) / 1e3}\n")


def measure(names: Sequence[str], rounds: int) -> None:
    """Measure cases and keep them beside those that were measured before."""
    content = record("speed", "growth")
    found = content.setdefault("cases", {})
    for name in names:
        if name in MEMORY:
            found[name] = {str(size): memory(name, size) for size in MEMORY[name][1]}
        else:
            found[name] = times_of(name, rounds)
            content |= {"rounds": rounds, "load": os.getloadavg()[0]}
        sys.stdout.write(f"{name}: {found[name]}\n")
        own = {name: content[name] for name in ("rounds", "load") if name in content}
        keep("speed", "growth", own | {"cases": found}, indent=1)


def times_of(name: str, rounds: int) -> dict[str, float]:
    """Return the seconds of processor time of a unit, by size."""
    build, sizes, _ = CASES[name]
    calls, units = {}, {}
    for size in sizes:
        calls[str(size)], units[str(size)] = build(size)
    times = interleave(calls, rounds=rounds, slot_s=0.1, clock=time.process_time)
    return {size: seconds / units[size] for size, seconds in times.items()}


def picture(found: dict[str, Any]) -> None:
    """Draw every case: time by size, both logarithmic."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(11, 6), layout="constrained")
    for axes, (name, (_, _, what)) in zip(figure.subplots(2, 3).flat, CASES.items(), strict=True):
        ticks, times = [*map(int, found[name])], [1e6 * seconds for seconds in found[name].values()]
        axes.loglog(ticks, times, marker="o")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(min(min(times) / 2, max(times) / 20), 2 * max(times))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel=name, ylabel="µs of processor time")
        axes.set_title(what, fontsize=9)
        axes.grid(alpha=0.3)
    figure.savefig(PICTURE, metadata={"Date": None})


def lines(content: dict[str, Any]) -> list[str]:
    """Return the lines of the page."""
    found, machine = content["cases"], content["environment"]
    rows = [
        [name, what, ", ".join(f"{int(n):,}: {1e6 * s:,.0f}" for n, s in found[name].items())]
        for name, (_, _, what) in CASES.items()
    ]
    used = {
        kind: ", ".join(
            f"{int(n):,}: {full:,.0f} MB, {full / data:.1f} times the data"
            for n, (data, full) in found[kind].items()
        )
        for kind in MEMORY
    }
    command = f"OMP_NUM_THREADS=1 python -m benchmarks.growth --rounds {content['rounds']}"
    return [
        f"`{command}`, {processor(machine)}, load {content['load']:.1f}:",
        "",
        *table(["grows", "measured", "size: µs of processor time"], rows),
        "",
        f"Most memory of a run of TD3+BC, its data included, by transitions of 26 numbers: {used['memory']}.",
        "",
        f"Of PRDC, with its tables and all lists: {used['memory of PRDC']}.",
    ]


def main() -> None:
    """Measure, keep, draw, write."""
    asked = parser(__doc__)
    asked.add_argument("cases", nargs="*", choices=[*CASES, *MEMORY, []], help="default: all")
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--memory", nargs=2, metavar=("WHAT", "FILE"), help="only print the peak on a file")
    options = asked.parse_args()
    if options.memory:
        peak(*options.memory)
        return
    measure(options.cases or [*CASES, *MEMORY], options.rounds)
    content = record("speed", "growth")
    picture(content["cases"])
    replace_block(PAGE, "growth", lines(content))


if __name__ == "__main__":
    main()
