"""Cases of learning from a fixed dataset: a TD3+BC step, a PRDC step with its neighbours, a gather.

Data are synthetic: states near a manifold of five dimensions, actions a smooth function of them with noise;
or those of a file (`--dataset`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algos.base import Setup
from algos.offline.loop import OfflineRun
from algos.offline.neighbors import ListSearch
from algos.offline.td3_update import Td3Learner
from algos.prdc import NearestRow, PrdcConfig
from algos.td3_bc import Td3BcConfig
from benchmarks.speed.peers_offline import PlainPrdc, PlainTd3Bc
from benchmarks.speed.sides import copy_critics, episodes, require_close
from benchmarks.speed.timing import Figure, compare, interleave
from envs.datasets import read_dataset
from envs.datasets.episodes import EpisodeDataset

STATE, ACTION, BATCH, BLOCK = 11, 3, 256, 10
NEAREST = {"a fresh actor": 4.0, "near the data": 2.0, "data actions with noise": 20.0}
"""Floors of searches among a million rows."""
LATE_ON_FILE = 4.0  # what a tree costs depends on how many rows it has
POOL = 2048  # rows whose lists are made before PRDC is timed; batches are drawn from them


def synthetic_dataset(rows: int, seed: int = 0) -> EpisodeDataset:
    """Return episodes of 1000 steps, 11 + 3 wide."""
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(rows, 5, generator=generator)
    mix, rule = (torch.randn(shape, generator=generator) for shape in ((5, STATE), (STATE, ACTION)))
    states = torch.tanh(0.5 * latent @ mix) + 0.05 * torch.randn(rows, STATE, generator=generator)
    actions = torch.tanh(0.7 * states @ rule) + 0.1 * torch.randn(rows, ACTION, generator=generator)
    rewards = 1 + states @ torch.randn(STATE, generator=generator) / STATE**0.5  # alive, and some progress
    return episodes(states, actions.clamp(-1, 1), 1000, rewards)


def dataset_of(options: argparse.Namespace) -> EpisodeDataset:
    """Return the file that is asked for, or synthetic data."""
    return synthetic_dataset(options.rows) if options.dataset is None else read_dataset(options.dataset)


def arrays_of(run: OfflineRun) -> dict[str, np.ndarray]:
    """Return the transitions of a run as the peer keeps them."""
    all_rows = run.table.gather(torch.arange(len(run.table)))
    parts = {
        "state": all_rows.cond, "action": all_rows.action, "reward": all_rows.reward[:, None],
        "next_state": all_rows.next_cond, "discount": all_rows.discount[:, None],
    }  # fmt: skip
    return {name: np.ascontiguousarray(part.numpy()) for name, part in parts.items()}


def learner_of(run: OfflineRun) -> Td3Learner:
    """Return the learner of a run on the TD3 core."""
    assert isinstance(run.learner, Td3Learner)
    return run.learner


def list_search_of(run: OfflineRun) -> ListSearch:
    """Return the search of a PRDC run by lists."""
    regulariser = learner_of(run).regulariser
    assert isinstance(regulariser, NearestRow) and isinstance(regulariser.search, ListSearch)
    return regulariser.search


def same_weights(run: OfflineRun, peer: PlainTd3Bc) -> None:
    """Give the peer our weights."""
    learner = learner_of(run)
    with torch.no_grad():
        for ours, theirs in zip(learner.policy.parameters(), peer.actor.parameters(), strict=True):
            theirs.copy_(ours)
    copy_critics(learner.critic, peer.critics)
    peer.remake()


def require_equal_steps(run: OfflineRun, peer: PlainTd3Bc, pool: Tensor) -> None:
    """Take two steps on both sides with the same rows and noise, and compare actors and critics."""
    learner, generator = learner_of(run), torch.Generator().manual_seed(2)
    for _ in range(2):
        row = pool[torch.randint(len(pool), (BATCH,), generator=generator)]
        draws = learner.draw(BATCH, generator)
        learner.step(run.table.gather(row), draws)
        peer.step(row.numpy(), draws["target"])
    pairs = list(zip(learner.policy.parameters(), peer.actor.parameters(), strict=True))
    for member, net in enumerate(peer.critics):
        layers = [p for layer in learner.critic.layers_of(member) for p in layer.values()]
        pairs += zip(layers, net.parameters(), strict=True)
    for ours, theirs in pairs:
        require_close("two steps", ours.detach(), theirs.detach(), 2e-5)


def near_the_data(run: OfflineRun, steps: int = 300) -> None:
    """Clone the actor, so that it is where training spends most of its time."""
    actor, generator = learner_of(run).actor, torch.Generator().manual_seed(3)
    optimizer = torch.optim.Adam(actor.policy.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = run.table.gather(torch.randint(len(run.table), (BATCH,), generator=generator))
        loss = (actor(batch.cond, actor.draw(BATCH, generator)) - batch.action).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def ours_of(run: OfflineRun, pool: Tensor | None = None) -> Callable[[], None]:
    """Return a block of our steps, on rows of a pool, or as the run draws them."""
    learner: Any = run.learner
    generator = torch.Generator().manual_seed(4)

    def block() -> None:
        for _ in range(BLOCK):
            if pool is None:
                row, draws = run.draw()
            else:
                row = pool[torch.randint(len(pool), (BATCH,), generator=generator)]
                draws = learner.draw(BATCH, generator)
            learner.step(run.table.gather(row), draws)

    return block


def theirs_of(peer: PlainTd3Bc, pool: Tensor) -> Callable[[], None]:
    """Return a block of the peer's steps."""
    rows, generator = pool.numpy(), np.random.default_rng(4)

    def block() -> None:
        for _ in range(BLOCK):
            peer.step(rows[generator.integers(len(rows), size=BATCH)])

    return block


def timed(options: argparse.Namespace, blocks: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return CPU seconds per step; all of this is the work of one thread."""
    found = interleave(blocks, rounds=options.rounds, slot_s=0.2, clock=time.process_time)
    return {name: seconds / BLOCK for name, seconds in found.items()}


def offline(options: argparse.Namespace) -> Iterator[Figure]:
    """A gradient step of TD3+BC at batch 256, in float32 and bfloat16; a gather."""
    setup = Setup(dataset=dataset_of(options), seed=0)
    run, half = (Td3BcConfig(steps=10**9, autocast=kind).build(setup) for kind in (None, "bfloat16"))
    arrays = arrays_of(run)
    peer, pool = PlainTd3Bc(arrays), torch.arange(len(run.table))
    same_weights(run, peer)
    require_equal_steps(run, peer, pool)
    blocks = {"ours": ours_of(run, pool), "half": ours_of(half, pool), "peer": theirs_of(peer, pool)}
    times = timed(options, blocks)
    yield Figure("TD3+BC step", "float32", "plain program", times["ours"], times["peer"], 1.1)
    yield Figure("TD3+BC step, bfloat16", "autocast", "plain program", times["half"], times["peer"], 1.4)
    row = pool[torch.randint(len(pool), (BATCH,))]
    mine, theirs = run.table.gather(row), peer.batch(row.numpy())
    require_close("gather", mine.cond, theirs["state"], 0.0)
    require_close("gather", mine.reward, theirs["reward"][:, 0], 0.0)
    numbers = row.numpy()
    sides = ("one matrix", lambda: run.table.gather(row)), ("five arrays", lambda: peer.batch(numbers))
    yield compare("gather 256 transitions", *sides, 1.5, rounds=options.rounds, clock=time.process_time)


def neighbours(options: argparse.Namespace) -> Iterator[Figure]:
    """PRDC with its lists made: searches and steps of a fresh actor and of one near the data."""
    setup = Setup(dataset=dataset_of(options), seed=0)
    run, plain = PrdcConfig(steps=10**9).build(setup), Td3BcConfig(steps=10**9).build(setup)
    learner, peer = learner_of(run), PlainPrdc(arrays_of(run))
    search = list_search_of(run)
    pool = torch.randperm(len(run.table), generator=torch.Generator().manual_seed(5))[:POOL]
    for way in (search.listing.by_boxes, search.listing.by_product):
        start = time.perf_counter()
        way(pool[:BATCH])
        took = (time.perf_counter() - start) / BATCH
        print(f"lists {way.__name__.replace('_', ' ')}: {1e3 * took:.3f} ms per row")
    start = time.perf_counter()
    search.make_lists(pool)
    per_row = (time.perf_counter() - start) / len(pool)
    print(f"lists of 64 neighbours among {len(run.table):,} rows: {1e3 * per_row:.3f} ms per row, once")
    same_weights(run, peer)
    require_equal_steps(run, peer, pool)
    nearest = NEAREST if options.dataset is None else NEAREST | {"data actions with noise": LATE_ON_FILE}
    far = 4.0 if options.dataset is None else 1.1
    for place, floor in (("a fresh actor", far), ("near the data", 1.1)):
        if place == "near the data":
            near_the_data(run)
            same_weights(run, peer)
        stand_still(learner, peer)
        yield search_alone(options, run, peer, pool, place, actions_of(run, pool), nearest[place])
        blocks = {"ours": ours_of(run, pool), "tree": theirs_of(peer, pool), "td3_bc": ours_of(plain, pool)}
        times = timed(options, blocks)
        print(f"{place}: a search that costs nothing would gain {times['tree'] / times['td3_bc']:.2f}")
        yield Figure(f"PRDC step, {place}", "lists", "a tree per step", times["ours"], times["tree"], floor)
    yield Figure(f"PRDC step, {place}", "lists", "our TD3+BC step", times["ours"], times["td3_bc"], 0.67)
    place, data = "data actions with noise", run.table.gather(pool[:BATCH]).action
    noise = 0.2 * torch.randn(data.shape, generator=torch.Generator().manual_seed(7))
    yield search_alone(options, run, peer, pool, place, (data + noise).clamp(-1, 1), nearest[place])


def actions_of(run: OfflineRun, pool: Tensor) -> Tensor:
    """Return what the actor does on the first rows of a pool."""
    batch, actor = run.table.gather(pool[:BATCH]), learner_of(run).actor
    return actor(batch.cond, actor.draw(BATCH, torch.Generator().manual_seed(6)), grad=False).detach()


def stand_still(*learners: Any) -> None:
    """Let steps cost what they cost and change nothing, so that actors stay where they are timed."""
    for learner in learners:
        for optimizer in (learner.actor_optimizer, learner.critic_optimizer):
            for group in optimizer.param_groups:
                group["lr"] = 0.0


def search_alone(
    options: argparse.Namespace,
    run: OfflineRun,
    peer: PlainPrdc,
    pool: Tensor,
    place: str,
    action: Tensor,
    floor: float,
) -> Figure:
    """Time the search for actions (BATCH, A)."""
    search, batch = list_search_of(run), run.table.gather(pool[:BATCH])
    key = {"state": batch.cond}
    found = search.nearest(batch.row, batch.cond, action)
    require_close("nearest actions", run.table.action[found.row], peer.aim(key, action), 1e-6)
    share, own = found.certified.float().mean(), (found.row == batch.row).float().mean()
    print(f"{place}: {share:.0%} certified by their lists, {own:.0%} are nearest to their own row")
    return compare(
        f"nearest rows of 256, {place}",
        ("lists", lambda: search.nearest(batch.row, batch.cond, action)),
        ("scipy's tree", lambda: peer.aim(key, action)),
        floor,
        rounds=options.rounds,
        clock=time.process_time,
    )
