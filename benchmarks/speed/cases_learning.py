"""Cases of learning: batches of data, gradient steps, and a whole iteration of fine-tuning."""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Iterator
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
    copy_trunk,
    dppo_run,
    plain_nets,
    reference,
    require_close,
)
from benchmarks.speed.timing import Figure, interleave
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.windows import Windows
from policies.policy import PolicyConfig
from policies.policy_config import ChunkSpec
from policies.processes.diffusion import VPDiffusion

BLOCK = 25  # gradient steps per report of behaviour cloning


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
    run = dppo_run(0, options.threads, 1)
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
    torch.set_num_threads(options.threads)
    times = interleave(
        {
            "ours": lambda: run.learner.step(experience, index, draws=run.draws, train_actor=True),
            "peer": lambda: peer.update(*batch),
        },
        rounds=max(3, options.rounds // 2),
        slot_s=0.1,
    )
    torch.set_num_threads(1)
    run.close()
    yield Figure(
        "DPPO update, 50,000 rows",
        f"{options.threads} threads",
        "reference style",
        times["ours"],
        times["peer"],
        3.0,
    )


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
    starts = torch.arange(0, rows + 1, 1000)
    ours, peer = _our_cloning(states, actions, starts, batch), _peer_cloning(states, actions, batch)
    blocks = {"ours": ours, "peer": lambda: [peer() for _ in range(BLOCK)]}
    times = {name: t / BLOCK for name, t in interleave(blocks, rounds=options.rounds, slot_s=0.1).items()}
    yield Figure(
        "BC step, batch 256", "Bc.advance", "DataLoader + diffusers", times["ours"], times["peer"], 1.7
    )


def _our_cloning(states: Tensor, actions: Tensor, starts: Tensor, batch: int) -> Callable[[], None]:
    flags = torch.zeros(len(states), dtype=torch.bool)
    ends = flags.clone()
    ends[starts[1:] - 1] = True
    data = EpisodeDataset(states, actions, torch.zeros(len(states)), flags, ends, starts)
    config = BcConfig(
        steps=10**9, batch_size=batch, log_every=BLOCK, validation_fraction=0.0, validation_every=0
    )
    run = config.build(
        Setup(policy=PolicyConfig(process=VPDiffusion(num_levels=LEVELS, prediction="eps")), dataset=data)
    )
    copy_trunk(plain_nets()[0], run.policy.field)
    return lambda: run.advance()  # type: ignore[return-value]


def _peer_cloning(states: Tensor, actions: Tensor, batch: int) -> Callable[[], None]:
    net, schedule = copy.deepcopy(plain_nets()[0]), peers.scheduler(LEVELS)
    average = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-6)
    usable = [i for i in range(len(states)) if i % 1000 <= 1000 - CHUNK[0]]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from peers.chunk_loader(states, actions, usable, CHUNK[0], batch)

    stream = batches()

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
    flags, starts = torch.zeros(rows, dtype=torch.bool), torch.arange(0, rows + 1, 1000)
    ends = flags.clone()
    ends[starts[1:] - 1] = True
    data = EpisodeDataset(states, actions, torch.zeros(rows), flags, ends, starts)
    windows = Windows(data, ChunkSpec(CHUNK[1], *CHUNK[:1], act_steps=CHUNK[0]), pad_end=False)
    usable = [i for i in range(rows) if i % 1000 <= 1000 - CHUNK[0]]
    items = peers.ChunkDataset(states, actions, usable, CHUNK[0])
    picked = windows.gather(torch.arange(0, windows.num, 997))
    same = [items[i] for i in range(0, windows.num, 997)]
    require_close("gather", picked.action, torch.stack([a for _, a in same]), 0.0)
    require_close("gather", picked.obs[:, 0], torch.stack([s for s, _ in same]), 0.0)
    stream = _endless(states, actions, usable, batch)
    generator = torch.Generator().manual_seed(6)
    times = interleave(
        {"ours": lambda: windows.sample(batch, generator=generator), "peer": lambda: next(stream)},
        rounds=options.rounds,
    )
    yield Figure("gather 256 windows", "Windows.sample", "DataLoader", times["ours"], times["peer"], 30.0)


def _endless(states: Tensor, actions: Tensor, usable: list[int], batch: int) -> Iterator[Any]:
    while True:
        yield from peers.chunk_loader(states, actions, usable, CHUNK[0], batch)


def iteration(options: argparse.Namespace) -> Iterator[Figure]:
    """One whole DPPO iteration: 125 chunk steps of 40 environments, 5 epochs of one 50,000-row minibatch."""
    steps = 125
    run, program = dppo_run(2, options.threads, steps), reference()
    naive = peers.NaiveRollout(program, gymnasium.vector.SyncVectorEnv, "Hopper-v5", ENVS)

    def peer() -> None:
        data = naive.collect(steps)
        torch.set_num_threads(options.threads)
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

    times = interleave({"ours": lambda: run.advance(), "peer": peer}, rounds=3, slot_s=0.1)
    naive.envs.close()
    run.close()
    yield Figure(
        "whole DPPO iteration",
        f"2 processes, {options.threads} threads",
        "reference style",
        times["ours"],
        times["peer"],
        3.5,
    )
