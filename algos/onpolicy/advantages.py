"""Data of an on-policy iteration: encoded states, actor records, advantages.

Legend: T chunk steps, N environments, M = T N environment steps (time-major), C condition width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from algos.onpolicy.losses import RewardScaler, gae, successor_values
from algos.onpolicy.polychromic import Sets
from algos.training.observations import IMAGE_ROWS, EncodedWhenRead, Record, encode, mapped
from envs.rollouts.rollout import Rollout
from policies.policy import Policy
from policies.protocols import Cond, Observation

Critic = Callable[[Any], Tensor]  # rows of what it reads -> values (B,)
CRITIC_INPUTS = ("policy", "own", "simulator")
VALUE_ROWS = 4096  # rows per critic forward pass outside of training, so that activations fit the cache


class Readable(Protocol):
    """M rows that a network reads some of."""

    def __len__(self) -> int: ...

    def rows(self, index: Tensor) -> Any: ...


@dataclass(frozen=True)
class Experience:
    """Data of one iteration, one row per environment step.

    Shapes:
        cond: (M) conditions of the observations. record: recorded by the actor, each (M, ...).
        advantage, target, value: (M,); target is the regression target of the critic.

    Attributes:
        seen: What the critic reads; None: the conditions.
        initial_cond: Conditions of the behaviour-cloning term's policy; None: `cond`.
        shift: (2, M S) log ratio and drift that shifted images alone cause; None: images are not shifted.
        reference: (2, M S, Th, Da) means and entropies of the acting policy's transitions, from which
            divergences are measured; None: they are estimated from ratios.
    """

    cond: Readable
    record: Mapping[str, Tensor]
    advantage: Tensor
    target: Tensor
    value: Tensor
    seen: Readable | None = None
    initial_cond: Cond | None = None
    shift: Tensor | None = None
    reference: Tensor | None = None

    def __len__(self) -> int:
        return len(self.advantage)


@torch.no_grad()
def evaluate_rows(critic: Critic, seen: Readable) -> Tensor:
    """Return the critic's values (M,) float64, computed in cache-sized batches."""
    if not len(seen):
        return torch.zeros(0, dtype=torch.float64)
    if isinstance(seen, Cond):
        return torch.cat([critic(rows) for rows in seen.vec.split(VALUE_ROWS)]).double()
    pieces = torch.arange(len(seen)).split(IMAGE_ROWS)
    return torch.cat([critic(seen.rows(piece)) for piece in pieces]).double()


@dataclass(frozen=True)
class SimulatorState:
    """Simulator states (M, Ds) that a critic reads, as the task scales them."""

    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, index: Tensor) -> Tensor:
        return self.values.index_select(0, index.to(self.values.device))


@dataclass(frozen=True)
class AdvantageEstimator:
    """Reward scaling and advantage estimation (names as in the configuration).

    With `trains_encoder`, conditions are encoded whenever they are read; `sets` replaces advantages.
    """

    gamma: float
    gae_lambda: float
    reward_scale_const: float
    paper_compat: bool
    critic_input: str = "policy"
    trains_encoder: bool = False
    sets: Sets | None = None

    def __call__(
        self, rollout: Rollout, policy: Policy, critic: Critic, scaler: RewardScaler | None
    ) -> Experience:
        """Scale the rewards, evaluate the critic once per observation, estimate advantages.

        The reward of a chunk is the sum over its executed steps; discounts apply per chunk.
        """
        shape = rollout.terminated.shape
        obs = mapped(rollout.obs, lambda part: part.flatten(0, 1))
        seen = self.seen(policy, obs)
        value = evaluate_rows(critic, seen).view(shape).cpu()
        reward = rollout.rewards.double().sum(dim=-1)
        if scaler is not None:
            reward = scaler(reward, rollout.first)
        reward = self.reward_scale_const * reward
        advantage, target = gae(
            reward,
            value,
            self.successors(rollout, policy, critic, value),
            rollout.terminated,
            rollout.truncated,
            gamma=self.gamma,
            lam=self.gae_lambda,
            paper_compat=self.paper_compat,
        )
        if self.sets is not None:
            advantage = self.sets(advantage, reward, rollout)
        record = {name: item.flatten(0, 1).to(policy.device) for name, item in rollout.record.items()}
        advantage, target, value = (
            x.flatten().to(policy.device, policy.dtype) for x in (advantage, target, value)
        )
        if self.trains_encoder:
            cond: Readable = EncodedWhenRead(policy, Record(policy.observation(obs)))
        else:
            cond = seen if isinstance(seen, Cond) else encode(policy, obs)
        return Experience(cond, record, advantage, target, value, seen=seen)

    def seen(self, policy: Policy, obs: Observation) -> Readable:
        """Return what the critic reads of physical observations, M rows."""
        if self.critic_input == "policy":
            return encode(policy, obs)
        on_device = policy.observation(obs)
        return Record(on_device) if self.critic_input == "own" else SimulatorState(on_device["simulator"])

    def successors(self, rollout: Rollout, policy: Policy, critic: Critic, value: Tensor) -> Tensor:
        """Return the values (T, N) of the true successors; those of final observations cost an evaluation."""
        last = evaluate_rows(critic, self.seen(policy, rollout.next_obs_last)).cpu()
        if self.paper_compat or not len(rollout.final_index):
            return successor_values(value, last)
        final = evaluate_rows(critic, self.seen(policy, rollout.final_obs)).cpu()
        return successor_values(value, last, final, rollout.final_index)
