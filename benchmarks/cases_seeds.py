"""Gradient steps of several seeds that one learner takes, per seed; see `benchmarks.cases_offline`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from algos.base import Setup
from algos.constrained_td3 import Td3Learner
from algos.offline_run import OfflineRun
from algos.prdc import PrdcConfig
from algos.td3_bc import Td3BcConfig
from benchmarks.cases_offline import (
    BATCH,
    BLOCK,
    POOL,
    arrays_of,
    dataset_of,
    learner_of,
    list_search_of,
    near_the_data,
    ours_of,
    same_weights,
    stand_still,
    theirs_of,
    timed,
)
from benchmarks.peers_offline import PlainPrdc
from benchmarks.sides import require_close
from benchmarks.timing import Figure

SEEDS = 4
TREE = {"a fresh actor": 4.0, "near the data": 1.1}
"""Floors of PRDC against a tree per step, a million rows; on a file a tree costs less."""


def block_of(runs: Sequence[OfflineRun], learner: Td3Learner, pool: Tensor) -> Callable[[], None]:
    """Return a block of steps of all runs."""
    generator = torch.Generator().manual_seed(4)

    def block() -> None:
        for _ in range(BLOCK):
            row = pool[torch.randint(len(pool), (len(runs), BATCH), generator=generator)]
            drawn = [run.learner.draw(BATCH, generator) for run in runs]
            draws = {name: torch.stack([each[name] for each in drawn]) for name in drawn[0]}
            learner.step(runs[0].table.gather(row), draws)
            for run in runs:
                run.learner.steps = learner.steps

    return block


def require_equal_steps(config: Any, setup: Setup) -> None:
    """Take two steps of every seed together and alone, and compare actors and critics."""
    runs = config.build_seeds(setup, range(SEEDS))
    group = config.together(runs)
    group.advance()
    for seed, run in enumerate(runs):
        alone = config.build(Setup(dataset=setup.dataset, seed=seed))
        alone.advance()
        for ours, theirs in (
            (one, other) for part in ("policy", "critic") for one, other in _pairs(run, alone, part)
        ):
            require_close("two steps", ours.detach(), theirs.detach(), 2e-5)


def _pairs(run: OfflineRun, other: OfflineRun, part: str) -> Iterator[tuple[Tensor, Tensor]]:
    first, second = (getattr(one.learner, part).parameters() for one in (run, other))
    return zip(first, second, strict=True)


def seeds(options: argparse.Namespace) -> Iterator[Figure]:
    """Four seeds at once: TD3+BC against single runs, PRDC also against a tree per step."""
    setup = Setup(dataset=dataset_of(options), seed=0)
    require_equal_steps(Td3BcConfig(steps=2, block_steps=2), setup)
    pool = torch.arange(len(Td3BcConfig().build(setup).table))
    for kind, floor in ((None, 0.9), ("bfloat16", 1.1)):
        config = Td3BcConfig(steps=10**9, autocast=kind)
        runs, alone = config.build_seeds(setup, range(SEEDS)), config.build(setup)
        whole = Td3Learner.together([learner_of(run) for run in runs])
        times = timed(options, {"ours": block_of(runs, whole, pool), "single": ours_of(alone, pool)})
        name = f"TD3+BC step, {SEEDS} seeds{'' if kind is None else f', {kind}'}"
        yield Figure(name, "together", "single runs", times["ours"] / SEEDS, times["single"], floor)
    yield from _prdc(options, setup)


def _prdc(options: argparse.Namespace, setup: Setup) -> Iterator[Figure]:
    """PRDC in bfloat16 with its lists made, the plain program in float32."""
    config = PrdcConfig(steps=10**9, autocast="bfloat16", search="lists")
    runs, alone = config.build_seeds(setup, range(SEEDS)), config.build(setup)
    peer = PlainPrdc(arrays_of(alone))
    pool = torch.randperm(len(alone.table), generator=torch.Generator().manual_seed(5))[:POOL]
    for run in (runs[0], alone):
        list_search_of(run).make_lists(pool)
    for place, floor in TREE.items():
        if place == "near the data":
            for run in (*runs, alone):
                near_the_data(run)
        same_weights(alone, peer)
        whole = Td3Learner.together([learner_of(run) for run in runs])
        for learner in (whole, learner_of(alone)):
            stand_still(learner, peer)
        blocks = {
            "ours": block_of(runs, whole, pool),
            "single": ours_of(alone, pool),
            "tree": theirs_of(peer, pool),
        }
        times = timed(options, blocks)
        ours, name = times["ours"] / SEEDS, f"PRDC step, {SEEDS} seeds, bfloat16, {place}"
        yield Figure(name, "together", "single runs", ours, times["single"], 1.05)
        yield Figure(name, "together", "a tree per step", ours, times["tree"], floor)
        print(
            f"PRDC step of a single run, bfloat16, {place}: {times['tree'] / times['single']:.2f} times a tree's"
        )
