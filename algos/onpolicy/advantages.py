"""Data of an on-policy iteration: encoded states, actor records, advantages.

Legend: T chunk steps, N environments, M = T N environment steps (time-major), C condition width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from algos.onpolicy.functional import RewardScaler, gae, successor_values
from algos.training.observations import encode, mapped
from envs.rollouts.rollout import Rollout
from policies.policy import Policy
from policies.protocols import Cond

Critic = Callable[[Tensor], Tensor]  # normalised observations (B, C) -> values (B,)
VALUE_ROWS = 4096  # rows per critic forward pass outside of training, so that activations fit the cache


@dataclass(frozen=True)
class Experience:
    """Data of one iteration, one row per environment step.

    Shapes:
        cond.vec: (M, C) encoded observations. record: recorded by the actor, each (M, ...).
        advantage, target, value: (M,); target is the regression target of the critic.
    """

    cond: Cond
    record: Mapping[str, Tensor]
    advantage: Tensor
    target: Tensor
    value: Tensor

    def __len__(self) -> int:
        return len(self.advantage)


@torch.no_grad()
def evaluate_rows(critic: Critic, cond: Cond) -> Tensor:
    """Return the critic's values (M,) float64, computed in cache-sized batches."""
    if not len(cond):
        return cond.vec.new_zeros(0, dtype=torch.float64)
    return torch.cat([critic(rows) for rows in cond.vec.split(VALUE_ROWS)]).double()


@dataclass(frozen=True)
class AdvantageEstimator:
    """Reward scaling and advantage estimation (names as in the configuration)."""

    gamma: float
    gae_lambda: float
    reward_scale_const: float
    paper_compat: bool

    def __call__(
        self, rollout: Rollout, policy: Policy, critic: Critic, scaler: RewardScaler | None
    ) -> Experience:
        """Scale the rewards, evaluate the critic once per observation, estimate advantages.

        The reward of a chunk is the sum over its executed steps; discounts apply per chunk.
        """
        shape = rollout.terminated.shape
        cond = encode(policy, mapped(rollout.obs, lambda part: part.flatten(0, 1)))
        value = evaluate_rows(critic, cond).view(shape).cpu()
        reward = rollout.rewards.double().sum(dim=-1)
        if scaler is not None:
            reward = scaler(reward, rollout.first)
        advantage, target = gae(
            self.reward_scale_const * reward,
            value,
            self.successors(rollout, policy, critic, value),
            rollout.terminated,
            rollout.truncated,
            gamma=self.gamma,
            lam=self.gae_lambda,
            paper_compat=self.paper_compat,
        )
        record = {name: item.flatten(0, 1).to(policy.device) for name, item in rollout.record.items()}
        columns = (x.flatten().to(policy.device, policy.dtype) for x in (advantage, target, value))
        return Experience(cond, record, *columns)

    def successors(self, rollout: Rollout, policy: Policy, critic: Critic, value: Tensor) -> Tensor:
        last = evaluate_rows(critic, encode(policy, rollout.next_obs_last)).cpu()
        if self.paper_compat or not len(rollout.final_index):
            return successor_values(value, last)
        final = evaluate_rows(critic, encode(policy, rollout.final_obs)).cpu()
        return successor_values(value, last, final, rollout.final_index)
