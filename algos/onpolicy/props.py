"""Proximal on-policy sampling: a second policy collects, so that the rows of an iteration look on-policy.

A finite draw never has the distribution that it is drawn from. Within an iteration, after every
`props_every` chunk steps, the collecting policy b is copied from the policy p in training and moved by::

    loss = mean max(r, clip(r, 1 - c, 1 + c)),   r = b / p,   over the rows of the iteration so far

which makes actions that were taken too often less likely. The update of p reads densities of p alone.

Legend: T chunk steps, N environments, S inner steps, B = T N S rows.

Source: PROPS, arXiv 2311.08290, with the released settings for continuous actions. Deviations: rows of the
running iteration only, none of former ones; b's Adam begins anew with each copy, at the actor's rate; the
term that pulls b to p, whose released weight is 0, is left out: `props_kl` ends the steps. Densities are
those of whole chunks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from algos.onpolicy.advantages import Experience
from algos.onpolicy.losses import approx_kl
from algos.onpolicy.ppo_update import GeneratorDraws
from algos.onpolicy.ratios import ChainRatio, Rows
from algos.training.observations import encode, mapped
from algos.training.ranks import current
from envs.rollouts.rollout import Rollout, RolloutPool, concatenated
from policies.policy import Policy

PIECE = 2048  # rows per forward pass


def move_away(
    log_ratio: Callable[[Tensor], Tensor],
    weights: Sequence[Tensor],
    rows: int,
    draws: GeneratorDraws,
    *,
    bound: float | None,
    lr: float,
    clip: float = 0.3,
    epochs: int = 16,
    minibatches: int = 16,
    max_grad_norm: float = 0.5,
) -> int:
    """Make the taken actions less likely, until a minibatch's KL divergence from p exceeded `bound`.

    `log_ratio` returns log r of row indices (B,), with gradients to `weights`. Returns the steps taken.
    """
    optimizer = torch.optim.Adam(weights, lr=lr, eps=1e-5)
    steps = 0
    for _ in range(epochs):
        for index in draws.permutation(rows).split(-(-rows // minibatches)):
            log_ratios = log_ratio(index)
            ratio = log_ratios.exp()
            loss = torch.maximum(ratio, ratio.clamp(1.0 - clip, 1.0 + clip)).mean()
            grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            for weight, grad in zip(weights, grads, strict=True):  # a trained encoder's are 0: it is not read
                weight.grad = grad
            torch.nn.utils.clip_grad_norm_(weights, max_grad_norm)
            optimizer.step()
            steps += 1
            if bound is not None and float(approx_kl(log_ratios.detach()).mean()) > bound:
                return steps
    return steps


class AdaptiveSampling:
    """Collects an iteration in parts; see the module docstring."""

    def __init__(self, ratio: ChainRatio, every: int, bound: float, lr: float) -> None:
        self.ratio, self.every, self.bound, self.lr = ratio, every, bound, lr
        self._joint = copy.copy(ratio)
        self._joint.reduction, self._joint.log_prob_range = "joint", None

    def collect(
        self,
        pool: RolloutPool,
        steps: int,
        draws: GeneratorDraws,
        *,
        reset: bool,
        on_progress: Callable[[int], None],
    ) -> Rollout:
        """Return a rollout of `steps` chunk steps; its record has densities of the policy in training.

        `reset` begins new episodes; `on_progress` is told the number of chunks so far.
        """
        collecting: ChainRatio = self.ratio
        before = 0

        def count(chunks: int) -> None:
            on_progress(before + chunks)

        parts: list[Rollout] = []
        experiences: list[Experience] = []
        for begin in range(0, steps, self.every):
            actor, size = pool.acting(collecting), min(self.every, steps - begin)
            part = pool.collect(actor, size, reset=reset and not parts, on_progress=count)
            before += part.length.numel() // current().world  # as `on_progress`, of this process
            parts.append(part)
            experiences.append(self.scored(part, self._joint))
            if begin + self.every < steps:
                collecting = self.corrected(experiences, draws)
        for part in parts:
            part.record["log_prob"] = self.scored(part, self.ratio).record["log_prob"].to(part.rewards.device)
        return concatenated(parts)

    @torch.no_grad()
    def scored(self, rollout: Rollout, ratio: ChainRatio) -> Experience:
        """Return the rows of a rollout with their log-densities under the weights of `ratio`."""
        policy: Policy = ratio.policy
        obs = mapped(rollout.obs, lambda part: part.flatten(0, 1))
        record = {name: value.flatten(0, 1).to(policy.device) for name, value in rollout.record.items()}
        record["log_prob"] = torch.zeros_like(record["log_prob"])
        zeros = torch.zeros(len(record["log_prob"]), device=policy.device)
        experience = Experience(encode(policy, obs), record, zeros, zeros, zeros)
        pieces = torch.arange(zeros.numel() * ratio.inner_steps, device=policy.device).split(PIECE)
        log_probs = [
            ratio.score(experience, Rows.sorted_from(piece, ratio.inner_steps)).log_ratio for piece in pieces
        ]
        shape = (*rollout.length.shape, ratio.inner_steps)
        return replace(experience, record=record | {"log_prob": torch.cat(log_probs).view(shape)})

    def corrected(self, experiences: Sequence[Experience], draws: GeneratorDraws) -> ChainRatio:
        """Return a copy of the policy in training that has moved away from the rows seen."""
        moved = copy.deepcopy(self._joint)
        weights = [weight for weight in moved.policy.parameters() if weight.requires_grad]
        sizes = [part.record["log_prob"].numel() for part in experiences]
        ends = torch.tensor(sizes).cumsum(0)

        def log_ratio(index: Tensor) -> Tensor:
            log_ratios = []
            for k, part in enumerate(experiences):
                inside = index[(index < ends[k]) & (index >= ends[k] - sizes[k])] - (ends[k] - sizes[k])
                for piece in inside.sort().values.to(moved.policy.device).split(PIECE):
                    rows = Rows.sorted_from(piece, moved.inner_steps)
                    log_ratios.append(moved.score(part, rows).log_ratio)
            return torch.cat(log_ratios)

        move_away(log_ratio, weights, sum(sizes), draws, bound=self.bound, lr=self.lr)
        return moved


def sampling(config: Any, ratio: ChainRatio) -> AdaptiveSampling | None:
    """Return what collects for `algo.props_every`; None: the policy itself does."""
    if not config.props_every:
        return None
    return AdaptiveSampling(ratio, config.props_every, config.props_kl, config.actor_lr)
