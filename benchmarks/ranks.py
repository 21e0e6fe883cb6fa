"""What a second rank brings on this machine: one step of three runs, in one process and in two.

    python -m benchmarks.ranks [--rounds 9]

writes docs/results/scale/ranks.json and the table in docs/scale.md. The variants take turns: one process with
one thread, the same with two, and two ranks with a thread each. Beside the time on the wall stands the
processor time of one process, which other programs on the machine lengthen less.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from algos.base import Setup
from algos.bc import BcConfig
from algos.training import ranks
from benchmarks.options import parser
from benchmarks.pages import keep, record, replace_block, table
from benchmarks.speed.cases_learning import synthetic_experience
from benchmarks.speed.sides import dppo_run, episodes
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.images import Images
from envs.engine.workers import ProcessWorkers
from policies.backbones.unet1d import Unet1dConfig
from policies.encoders.resnet import ResNetEncoderConfig
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.threads import torch_threads

PAGE = "docs/scale.md"
PORT = 29_641
Step = Callable[[int], None]  # one step with a number of threads


def random_episodes(frames: int, images: bool) -> EpisodeDataset:
    """Return random episodes of 50 frames."""
    generator = torch.Generator().manual_seed(0)
    states, actions = (torch.rand(frames, width, generator=generator) for width in (11, 3))
    found = episodes(states, actions * 2 - 1, 50)
    if not images:
        return found
    seen = torch.randint(256, (frames, 96, 96, 3), generator=generator, dtype=torch.uint8)
    return replace(found, images={"front": Images.of(seen)})


def cloning(policy: PolicyConfig, batch: int, images: bool = False) -> Step:
    """Return a step of cloning."""
    settings: dict[str, Any] = {"validation_fraction": 0.0, "validation_every": 0, "warmup_steps": 1}
    config = BcConfig(steps=10**9, batch_size=batch, log_every=1, **settings)
    run = config.build(Setup(policy=policy, dataset=random_episodes(1000, images)))

    def step(threads: int) -> None:
        run._num_threads = threads
        run.advance()

    return step


def update() -> Step:
    """Return an update of actor and critic with one minibatch."""
    runs = {threads: dppo_run(0, threads, 1) for threads in (1, 2)}
    experience = synthetic_experience(runs[1], 20_000)
    index = torch.randperm(200_000, generator=torch.Generator().manual_seed(4))[:50_000]

    def step(threads: int) -> None:
        run = runs[threads]
        run.learner.step(experience, index, draws=run.draws, train_actor=True)

    return step


PROCESS = VPDiffusion(num_levels=20)
UNET = Unet1dConfig(widths=(64, 128, 256))


def unet() -> PolicyConfig:
    """Return a policy of 4.1 M weights."""
    return PolicyConfig(process=PROCESS, horizon=16, backbone=UNET)


CASES: dict[str, Callable[[], Step]] = {
    "DPPO update, 50,000 rows": update,
    "BC step, MLP, batch 256": lambda: cloning(PolicyConfig(process=PROCESS, horizon=4), 256),
    "BC step, U-Net, batch 256": lambda: cloning(unet(), 256),
    "BC step, U-Net, batch 512": lambda: cloning(unet(), 512),
    "BC step, images 96 × 96, batch 64": lambda: cloning(
        PolicyConfig(process=PROCESS, horizon=16, encoder=ResNetEncoderConfig(width=32)), 64, images=True
    ),
}


class Side:
    """One of two processes; see `envs.engine.workers`."""

    def __init__(self, rank: int) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
        os.environ.update(place, RANK=str(rank), WORLD_SIZE="2")
        self._ranks = ranks.join()

    def prepare(self, case: str) -> None:
        self._step = self._as(self._ranks, CASES[case])
        self.time("ranks"), self.rank() or (self.time("one"), self.time("two"))

    def rank(self) -> int:
        return self._ranks.rank

    def time(self, variant: str) -> tuple[float, float]:
        """Return seconds on the wall and of the processor of one step."""
        who = self._ranks if variant == "ranks" else ranks.ALONE
        start, used = time.perf_counter(), time.process_time()
        with torch_threads(1):
            self._as(who, lambda: self._step(2 if variant == "two" else 1))
        return time.perf_counter() - start, time.process_time() - used

    def _as(self, who: ranks.Ranks, call: Callable[[], Any]) -> Any:
        token = ranks._current.set(who)
        try:
            return call()
        finally:
            ranks._current.reset(token)

    def close(self) -> None:
        """There is nothing to close."""


def measure(rounds: int) -> dict[str, Any]:
    """Return medians of seconds by case and variant."""
    with ThreadPoolExecutor(2) as pool:
        sides = list(pool.map(lambda rank: ProcessWorkers(Side, [(rank,)]), range(2)))

        def both(method: str, argument: str) -> list[Any]:
            return list(pool.map(lambda side: side.call(method, [(argument,)])[0], sides))

        found: dict[str, Any] = {}
        for case in CASES:
            both("prepare", case)
            times: dict[str, list[tuple[float, float]]] = {"one": [], "two": [], "ranks": []}
            for _ in range(rounds):
                for variant, taken in times.items():
                    called = both if variant == "ranks" else lambda *a: sides[0].call(a[0], [(a[1],)])
                    taken.append(called("time", variant)[0])
            found[case] = {
                variant: {"wall_s": statistics.median(w), "processor_s": statistics.median(c)}
                for variant, taken in times.items()
                for w, c in [zip(*taken, strict=True)]
            }
        for side in sides:
            side.close()
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """Return the lines of the page."""
    rows = []
    for case, sides in found["cases"].items():
        wall, processor = (sides["one"][kind] / sides["ranks"][kind] for kind in ("wall_s", "processor_s"))
        cells = [
            f"{1000 * sides[name]['wall_s']:.4g} ({1000 * sides[name]['processor_s']:.4g})"
            for name in ("one", "two", "ranks")
        ]
        rows.append([case, *cells, f"**{wall:.2f}**", f"{processor:.2f}"])
    columns = ("step", "one process", "with 2 threads", "2 ranks", "one process by 2 ranks")
    return [
        f"`python -m benchmarks.ranks --rounds {found['rounds']}`, medians of interleaved steps in ms "
        f"on the wall, in brackets of one process's processor time; {os.cpu_count()} cores, load "
        f"{found['load']:.1f}:",
        "",
        *table((*columns, "of the processor"), rows),
    ]


def main() -> None:
    """Measure, keep, write."""
    asked = parser(__doc__)
    asked.add_argument("--rounds", type=int, default=9)
    rounds = asked.parse_args().rounds
    load = os.getloadavg()[0]
    keep("scale", "ranks", {"rounds": rounds, "load": load, "cases": measure(rounds)}, indent=1)
    replace_block(PAGE, "ranks", lines(record("scale", "ranks")))


if __name__ == "__main__":
    from benchmarks import ranks as importable  # processes get its classes by this name

    importable.main()
