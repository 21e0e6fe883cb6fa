"""A step of Q-chunking, the best of 32 chunks of a flow in targets and cloning: a plain program, and DSRL."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from algos.critics.qc import QcConfig, QcLearner
from algos.dsrl import DsrlConfig, NoiseAliasedUpdate
from algos.offpolicy.replay_buffer import ChunkBatch
from algos.transitions import Batch
from benchmarks.speed import peers
from benchmarks.speed.sides import (
    CHUNK,
    OBS,
    copy_critics,
    copy_trunk,
    plain_nets,
    require_close,
    unit_statistics,
)
from benchmarks.speed.timing import Figure, compare
from policies.build import build_policy
from policies.policy import PolicyConfig
from policies.processes.flow import RectifiedFlow
from policies.samplers.ode import Euler
from policies.wrappers.noise_policy import Steering

ROWS, CANDIDATES, STEPS, WIDTHS, RATE, TAU = 32, 32, 10, (256, 256, 256), 3e-4, 0.005
SIZE = CHUNK[0] * CHUNK[1]


class PlainQc:
    """Q-chunking, one module per network.

    Args:
        net: The flow that is cloned and sampled.
    """

    def __init__(self, net: peers.PlainMlp) -> None:
        self.net = copy.deepcopy(net)
        self.critics = nn.ModuleList(plain_critic(OBS + SIZE) for _ in range(2))

    def remake(self) -> None:
        """Copy the targets and forget the moments of the optimisers."""
        self.targets = copy.deepcopy(self.critics)
        self.optimizers = [torch.optim.Adam(part.parameters(), lr=RATE) for part in (self.critics, self.net)]

    def values(self, critics: nn.ModuleList, state: Tensor, action: Tensor) -> Tensor:
        """Return the values (B, E) of every critic."""
        joint = torch.cat([state, action], 1)
        return torch.cat([critic(joint) for critic in critics], 1)

    def best(self, state: Tensor, noise: Tensor) -> Tensor:
        """Return the best of N chunks (B, A) for noise (B, N, Th, Da)."""
        many = state.repeat_interleave(CANDIDATES, 0)
        chunks = peers.euler(self.net, many, noise.flatten(0, 1), STEPS, 1.0).flatten(1)
        worth = self.values(self.critics, many, chunks).mean(1).view(-1, CANDIDATES)
        return chunks.view(-1, CANDIDATES, SIZE)[torch.arange(len(state)), worth.argmax(1)]

    def step(self, batch: Batch, draws: dict[str, Tensor]) -> dict[str, float]:
        """Take a step of the critics and one of the flow."""
        with torch.no_grad():
            following = self.values(self.targets, batch.next_cond, self.best(batch.next_cond, draws["next"]))
            target = batch.reward + batch.discount * following.mean(1)
        for late, new in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
            late.data.mul_(1 - TAU).add_(TAU * new.data)
        found = self.values(self.critics, batch.cond, batch.action)
        critic_loss = ((found - target[:, None]) ** 2).mean()
        chunk, eps, t = batch.plan.view(-1, *CHUNK), draws["te/eps"], draws["te/t"]
        mixed = (1 - t)[:, None, None] * eps + t[:, None, None] * chunk
        loss = ((self.net(mixed, t, batch.cond) - (chunk - eps)) ** 2).mean()
        for optimizer, each in zip(self.optimizers, (critic_loss, loss), strict=True):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
        return {"critic/loss": critic_loss.item(), "policy/loss": loss.item()}


def plain_critic(inputs: int) -> nn.Sequential:
    """Return linear layers with GELU and then layer normalisation, and one output."""
    layers: list[nn.Module] = []
    for width in WIDTHS:
        layers += [nn.Linear(inputs, width), nn.GELU(approximate="tanh"), nn.LayerNorm(width, eps=1e-6)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 1))


def sides() -> tuple[QcLearner, PlainQc]:
    """Return our learner and its peer with the same weights."""
    torch.manual_seed(0)
    peer = PlainQc(plain_nets()[0])
    config = PolicyConfig(process=RectifiedFlow(time_scale=1.0), sampler=Euler(steps=STEPS))
    base = build_policy(config, obs_dim=OBS, action_dim=CHUNK[1], statistics=unit_statistics())
    copy_trunk(peer.net, base.field)  # type: ignore[arg-type]
    settings = QcConfig(critic_dims=WIDTHS, num_candidates=CANDIDATES, critic_lr=RATE, actor_lr=RATE, tau=TAU)
    learner = QcLearner(base, settings)
    copy_critics(learner.critic, peer.critics)
    peer.remake()
    return learner, peer


def batch_of(generator: torch.Generator, rows: int = ROWS) -> Batch:
    """Return random transitions."""
    normal = torch.randn(rows, 2 * OBS + SIZE + 1, generator=generator)
    cond, next_cond, action, reward = normal.split([OBS, OBS, SIZE, 1], dim=1)
    action = action.clamp(-1, 1)
    none = torch.zeros(rows)
    return Batch(
        cond=cond, action=action, reward=reward[:, 0], next_cond=next_cond, discount=none + 0.96,
        next_action=torch.zeros_like(action), has_next=none, plan=action,
        real=torch.ones(rows, CHUNK[0]), row=torch.arange(rows),
    )  # fmt: skip


def critics(options: argparse.Namespace) -> Iterator[Figure]:
    """Steps of Q-chunking: targets by the best of 32 chunks, critics, cloning; and beside DSRL."""
    learner, peer = sides()
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        batch, draws = batch_of(generator), learner.draw(ROWS, generator)
        found, expected = learner.step(batch, draws), peer.step(batch, draws)
        for name, value in expected.items():
            require_close(f"Q-chunking, {name}", found[name], value, 1e-4 * max(1.0, abs(value)))

    def step(side: Any) -> None:
        side.step(batch_of(generator), learner.draw(ROWS, generator))

    both = ("learner", partial(step, learner)), ("plain program", partial(step, peer))
    case = "Q-chunking, a step with 32 candidates"
    yield compare(case, *both, 1.5, rounds=options.rounds, clock=time.process_time)
    for rows in (ROWS, 256):
        yield beside_dsrl(learner, rows, generator, options)


def beside_dsrl(
    learner: QcLearner, rows: int, generator: torch.Generator, options: argparse.Namespace
) -> Figure:
    """Two steps beside those of DSRL with the same flow, rows and sizes of critics, and its distillation."""
    config = DsrlConfig(critics=learner.critic.members, critic_dims=WIDTHS)
    dsrl = config.learner_of(Steering().wrap(learner.base.clone().eval()))
    assert isinstance(dsrl, NoiseAliasedUpdate)

    def transitions() -> ChunkBatch:
        one, latent = batch_of(generator, rows), dsrl.draw_latents(rows, generator)
        return ChunkBatch(one.cond, latent, one.action, one.reward, one.discount, one.next_cond)

    def two_steps() -> None:
        for _ in range(2):
            learner.step(batch_of(generator, rows), learner.draw(rows, generator))

    def two_of_dsrl() -> None:
        for _ in range(2):
            dsrl.step(transitions(), dsrl.draw(rows, generator))
        dsrl.distill(transitions(), {"latent": dsrl.draw_latents(rows, generator)})

    case, both = f"Q-chunking, 2 steps, {rows} rows", (("learner", two_steps), ("our DSRL", two_of_dsrl))
    return compare(case, *both, 0.0, rounds=options.rounds, clock=time.process_time)  # 0: see docs/speed.md
