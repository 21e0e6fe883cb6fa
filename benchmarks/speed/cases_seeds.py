"""Gradient steps of several seeds that one learner takes, per seed; see `benchmarks.speed.cases_offline`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from algos.a2pr import A2prConfig
from algos.base import Setup
from algos.iql import IqlConfig
from algos.offline.batched_seeds import SeedBatch, batched, build_seeds, step_together
from algos.offline.loop import OfflineRun
from algos.prdc import PrdcConfig
from algos.rebrac import RebracConfig
from algos.td3_bc import Td3BcConfig
from benchmarks.speed.cases_offline import (
    BLOCK,
    POOL,
    arrays_of,
    dataset_of,
    learner_of,
    list_search_of,
    near_the_data,
    same_weights,
    stand_still,
    theirs_of,
    timed,
)
from benchmarks.speed.peers_offline import PlainPrdc
from benchmarks.speed.sides import require_close
from benchmarks.speed.timing import Figure

SEEDS, HALF = range(4), "bfloat16"
CASES: tuple[tuple[str, type[Any], str | None, float], ...] = (
    ("TD3+BC", Td3BcConfig, None, 0.9),
    ("TD3+BC", Td3BcConfig, HALF, 1.25),
    ("IQL", IqlConfig, HALF, 1.2),
    ("A2PR", A2prConfig, HALF, 1.0),
    ("ReBRAC", RebracConfig, HALF, 0.8),
)
"""Algorithms, number types and floors against single runs; large products gain nothing from company."""

PLACES = ("a fresh actor", "near the data")
TREE = (8.0, 2.5)
TREE_ON_FILE = (3.0, 2.5)
"""Floors of PRDC against a tree per step, for a million rows and for a file of a tenth."""


def seeds(options: argparse.Namespace) -> Iterator[Figure]:
    """Several seeds at once against single runs; PRDC, its lists made, also against a tree per step."""
    setup = Setup(dataset=dataset_of(options), seed=0)
    require_equal_seeds(Td3BcConfig(steps=2, log_every=2), setup)
    for name, kind, autocast, floor in CASES:
        config = kind(steps=10**9, autocast=autocast)
        runs, alone = build_seeds(config, setup, SEEDS), config.build(setup)
        pool = torch.arange(len(alone.table))
        times = timed(options, blocks_of(combined(runs), runs, alone, pool))
        title = f"{name} step, {len(SEEDS)} seeds, {autocast or 'float32'}"
        yield Figure(title, "together", "single runs", times["ours"] / len(SEEDS), times["single"], floor)
    yield from _prdc(options, setup)


def require_equal_seeds(config: Td3BcConfig, setup: Setup) -> None:
    """Take two steps of every seed together and alone, and compare actors and critics."""
    runs = build_seeds(config, setup, SEEDS)
    SeedBatch(runs).advance()
    for seed, run in enumerate(runs):
        alone = config.build(Setup(dataset=setup.dataset, seed=seed))
        alone.advance()
        for ours, theirs in zip(_weights(run), _weights(alone), strict=True):
            require_close("two steps", ours, theirs, 2e-5)


def _weights(run: OfflineRun) -> list[Tensor]:
    learner = learner_of(run)
    return [p.detach() for part in (learner.policy, learner.critic) for p in part.parameters()]


def combined(runs: Sequence[OfflineRun]) -> Any:
    """Return the learner that takes the steps of all runs."""
    return batched([run.learner for run in runs])


def blocks_of(
    whole: Any, runs: Sequence[OfflineRun], alone: OfflineRun, pool: Tensor
) -> dict[str, Callable[[], None]]:
    """Return blocks of steps on rows of a pool: of all runs at once, and of one that is alone."""
    return {"ours": _block(whole, runs, pool), "single": _block(alone.learner, [alone], pool)}


def _block(learner: Any, runs: Sequence[OfflineRun], pool: Tensor) -> Callable[[], None]:
    generator, is_alone = torch.Generator().manual_seed(4), learner is runs[0].learner
    shape = (len(runs), runs[0].config.batch_size)

    def block() -> None:
        for _ in range(BLOCK):
            row = pool[torch.randint(len(pool), shape, generator=generator)]
            if is_alone:
                learner.step(runs[0].table.gather(row[0]), runs[0].draw()[1])
            else:
                step_together(learner, runs, row)

    return block


def _prdc(options: argparse.Namespace, setup: Setup) -> Iterator[Figure]:
    """PRDC in bfloat16, the plain program in float32."""
    config = PrdcConfig(steps=10**9, autocast=HALF, search="lists")
    runs, alone = build_seeds(config, setup, SEEDS), config.build(setup)
    peer = PlainPrdc(arrays_of(alone))
    pool = torch.randperm(len(alone.table), generator=torch.Generator().manual_seed(5))[:POOL]
    for run in (runs[0], alone):
        list_search_of(run).make_lists(pool)
    floors = TREE if options.dataset is None else TREE_ON_FILE
    for place, floor in zip(PLACES, floors, strict=True):
        if place == "near the data":
            for run in (*runs, alone):
                near_the_data(run)
        same_weights(alone, peer)
        whole = combined(runs)
        for learner in (whole, learner_of(alone)):
            stand_still(learner, peer)
        blocks = blocks_of(whole, runs, alone, pool)
        times = timed(options, blocks | {"tree": theirs_of(peer, pool)})
        ours, title = times["ours"] / len(SEEDS), f"PRDC step, {len(SEEDS)} seeds, {HALF}, {place}"
        yield Figure(title, "together", "single runs", ours, times["single"], 1.2)
        yield Figure(title, "together", "a tree per step", ours, times["tree"], floor)
        alone_ratio = times["tree"] / times["single"]
        print(f"a single PRDC run in {HALF}, {place}: {alone_ratio:.2f} times the steps of a tree per step")
