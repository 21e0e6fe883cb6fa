"""Cases of learning: batches of data, gradient steps, and a whole iteration of fine-tuning."""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from algos.base import Setup
from algos.bc import BcConfig
from algos.onpolicy.advantages import Experience
from benchmarks.speed import peers
from benchmarks.speed.sides import (
    CHUNK,
    ENVS,
    FT,
    LEVELS,
    OBS,
    THREADS,
    copy_trunk,
    dppo_run,
    episodes,
    plain_nets,
    reference,
    require_close,
)
from benchmarks.speed.timing import Figure, compare
from envs.datasets.windows import Windows
from policies.policy import PolicyConfig
from policies.policy_config import ChunkSpec
from policies.processes.diffusion import VPDiffusion

BLOCK = 25  # gradient steps per report of behaviour cloning
LENGTH = 1000  # of an episode


def synthetic_experience(run: Any, rows: int) -> Any:
    """Record chains on random observations; advantages and targets are random."""
    generator = torch.Generator().manual_seed(3)
    state = (0.5 * torch.randn(rows, 1, OBS, generator=generator)).to(run.policy.device)
    with torch.no_grad():
        _, record = run.ratio.act({"state": state}, generator)
    cond = run.policy.encode({"state": state})
    columns = (torch.randn(rows, generator=generator).to(run.policy.device) for _ in range(3))
    return Experience(cond, record, *columns)


def peer_batch(experience: Any, index: Tensor, old: Tensor) -> tuple[Tensor, ...]:
    """Lay the same minibatch out for the peer."""
    state, step = index // FT, index % FT
    chain = experience.record["chain"]
    return (
        experience.cond.vec[state], chain[state, step], chain[state, step + 1], step, old[state, step],
        experience.advantage[state], experience.target[state],
    )  # fmt: skip


def update(options: argparse.Namespace) -> Iterator[Figure]:
    """One DPPO minibatch of 50,000 (environment step, denoising step) rows."""
    run = dppo_run(0, THREADS, 1)
    experience = synthetic_experience(run, 20_000)
    peer = reference()
    index = torch.randperm(20_000 * FT, generator=torch.Generator().manual_seed(4))[:50_000]
    old = peer.chain_log_prob(experience.cond.vec, experience.record["chain"])
    batch = peer_batch(experience, index, old)
    grads, _ = run.learner.actor_gradient(experience, index, draws=run.draws)
    critic_grads, _ = run.learner.critic_gradient(experience, index)
    peer.loss(*batch).backward()
    check_gradients(run, peer, grads, critic_grads, len(index))
    peer.actor_optimizer.zero_grad(), peer.critic_optimizer.zero_grad()
    torch.set_num_threads(THREADS)
    yield compare(
        "DPPO update, 50,000 rows",
        (
            f"{THREADS} threads",
            lambda: run.learner.step(experience, index, draws=run.draws, train_actor=True),
        ),
        ("reference style", lambda: peer.update(*batch)),
        3.0,
        rounds=max(3, options.rounds // 2),
    )
    torch.set_num_threads(1)
    run.close()


def sum_rounding(terms: int) -> float:
    """Return how far two programs' float32 gradients may differ, relative to their norm.

    The terms have either sign: their sum is sqrt(n) times smaller than the sum of their sizes, so that an
    error of eps in every term is one of eps sqrt(n) in the sum. A term passes four layers, and each rounds.
    """
    return 4 * torch.finfo(torch.float32).eps * math.sqrt(terms)


def check_gradients(
    run: Any, peer: peers.ReferenceStyle, actor: list[Tensor], critic: list[Tensor], rows: int
) -> None:
    """Compare our gradient with the peer's: norm of the difference relative to the norm, per network."""
    for source, target, grads in (
        (peer.tuned, run.policy.scored_net, actor),
        (peer.critic, run.learner.critic, critic),
    ):
        shadow = type(source)(CHUNK, OBS) if isinstance(source, peers.PlainMlp) else type(source)(OBS)
        for p, q in zip(shadow.parameters(), source.parameters(), strict=True):
            p.data = q.grad
        expected = {name: torch.zeros_like(p) for name, p in target.named_parameters()}
        holder = _Holder(expected)
        copy_trunk(shadow, holder)  # type: ignore[arg-type]
        theirs = torch.cat([holder.state[name].flatten() for name in expected])
        ours = torch.cat([grad.flatten() for grad in grads])
        difference = (ours - theirs).norm() / theirs.norm()
        require_close(f"gradient of {type(source).__name__}", difference, 0.0, sum_rounding(rows))


class _Holder:
    """Receives what `copy_trunk` would load."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.state.update({k: v.detach() for k, v in state.items()})


def cloning(options: argparse.Namespace) -> Iterator[Figure]:
    """One behaviour-cloning step at batch 256: gather, loss, optimiser, average of the weights."""
    rows, batch = 100_000, 256
    generator = torch.Generator().manual_seed(5)
    states = torch.rand(rows, OBS, generator=generator) * 2 - 1
    actions = torch.rand(rows, CHUNK[1], generator=generator) * 2 - 1
    ours, peer = _our_cloning(states, actions, batch), _peer_cloning(states, actions, batch)
    sides = ("Bc.advance", ours), ("DataLoader + diffusers", lambda: [peer() for _ in range(BLOCK)])
    yield compare("BC step, batch 256", *sides, 1.7, rounds=options.rounds, steps=BLOCK)


def _our_cloning(states: Tensor, actions: Tensor, batch: int) -> Callable[[], object]:
    config = BcConfig(
        steps=10**9, batch_size=batch, log_every=BLOCK, validation_fraction=0.0, validation_every=0
    )
    policy = PolicyConfig(process=VPDiffusion(num_levels=LEVELS, prediction="eps"))
    run = config.build(Setup(policy=policy, dataset=episodes(states, actions, LENGTH)))
    copy_trunk(plain_nets()[0], run.policy.field)
    return run.advance  # type: ignore[no-any-return]


def _peer_cloning(states: Tensor, actions: Tensor, batch: int) -> Callable[[], None]:
    net, schedule = copy.deepcopy(plain_nets()[0]), peers.scheduler(LEVELS)
    average = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-6)
    stream = _endless(states, actions, batch)

    def step() -> None:
        state, chunk = next(stream)
        noise, tau = torch.randn_like(chunk), torch.randint(0, LEVELS, (len(chunk),))
        loss = nn.functional.mse_loss(net(schedule.add_noise(chunk, noise, tau), tau, state), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), net.parameters(), strict=True):
                slow.mul_(0.995).add_(0.005 * fast)

    return step


def gather(options: argparse.Namespace) -> Iterator[Figure]:
    """A batch of 256 windows against a per-item DataLoader."""
    rows, batch = 100_000, 256
    states, actions = torch.randn(rows, OBS), torch.randn(rows, CHUNK[1])
    chunk = ChunkSpec(CHUNK[1], horizon=CHUNK[0], act_steps=CHUNK[0])
    windows = Windows(episodes(states, actions, LENGTH), chunk, pad_end=False)
    items = peers.ChunkDataset(states, actions, _usable(rows), CHUNK[0])
    picked = windows.gather(torch.arange(0, windows.num, 997))
    same = [items[i] for i in range(0, windows.num, 997)]
    require_close("gather", picked.action, torch.stack([a for _, a in same]), 0.0)
    require_close("gather", picked.obs[:, 0], torch.stack([s for s, _ in same]), 0.0)
    stream, generator = _endless(states, actions, batch), torch.Generator().manual_seed(6)
    ours = partial(windows.sample, batch, generator=generator)
    sides = ("Windows.sample", ours), ("DataLoader", lambda: next(stream))
    yield compare("gather 256 windows", *sides, 30.0, rounds=options.rounds)


def _usable(rows: int) -> list[int]:
    """Return the rows from which a whole chunk is left in their episode."""
    return [i for i in range(rows) if i % LENGTH <= LENGTH - CHUNK[0]]


def _endless(states: Tensor, actions: Tensor, batch: int) -> Iterator[Any]:
    while True:
        yield from peers.chunk_loader(states, actions, _usable(len(states)), CHUNK[0], batch)


def iteration(options: argparse.Namespace) -> Iterator[Figure]:
    """One whole DPPO iteration: 125 chunk steps of 40 environments, 5 epochs of one 50,000-row minibatch."""
    steps = 125
    run, program = dppo_run(2, THREADS, steps), reference()
    naive = peers.NaiveRollout(program, gymnasium.vector.SyncVectorEnv, "Hopper-v5", ENVS)

    def peer() -> None:
        data = naive.collect(steps)
        torch.set_num_threads(THREADS)
        state, chain = data["state"].flatten(0, 1), data["chain"].flatten(0, 1)
        with torch.no_grad():
            value = program.critic(state)
        old = program.chain_log_prob(state, chain)
        returns = data["reward"].flatten().float() + 0.99 * value
        for _ in range(5):
            index = torch.randperm(len(state) * FT)[:50_000]
            row, step = index // FT, index % FT
            program.update(
                state[row], chain[row, step], chain[row, step + 1], step, old[row, step],
                (returns - value)[row], returns[row],
            )  # fmt: skip
        torch.set_num_threads(1)

    sides = (f"2 processes, {THREADS} threads", run.advance), ("reference style", peer)
    yield compare("whole DPPO iteration", *sides, 3.5, rounds=3)
    naive.envs.close()
    run.close()
