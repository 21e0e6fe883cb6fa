"""Best of N: sample several plans and execute the one selected by a scorer.

Legend: B batch, N candidates, K denoising steps, To observation history, Th horizon, Ta executed steps, Da
action width; s_n score of a candidate, more is better.

    best      n = argmax s_n
    softmax   n with probability softmax(s / temperature)_n

All randomness comes from the noise, so the selection is deterministic given the noise.

Source: best-of-N sampling as IDQL (arXiv 2304.10573) and ITPS (arXiv 2411.16627, post-hoc ranking) use it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from einops import rearrange
from torch import Tensor, nn

from policies.bounds import Checked, bounded
from policies.policy import Policy, require_finite
from policies.protocols import Cond, Hooks, Observation, Start

Scorer = Callable[[Tensor, Observation], Tensor]
"""(physical plans (B, N, Th, Da), observation) -> scores (B, N), more is better."""


@dataclass(frozen=True)
class Selection(Checked):
    """Number of candidates, and selection rule."""

    candidates: int = bounded(16, ge=1)  # N, sampled plans per observation
    temperature: float | None = bounded(None, gt=0)  # sample softmax(score / temperature); null: the best

    @property
    def num_draws(self) -> int:
        """Noise draws per decision: one per candidate, and one for the selection."""
        return self.candidates + (self.temperature is not None)

    def choose(self, scores: Tensor, draw: Tensor | None = None) -> Tensor:
        """Return the chosen candidates (B,) for scores (B, N) and, with a temperature, normals (B,)."""
        if self.temperature is None:
            return scores.argmax(dim=1)
        assert draw is not None
        share = (scores / self.temperature).softmax(dim=1).cumsum(dim=1)
        below = share < torch.special.ndtr(draw)[:, None]
        return below.sum(dim=1).clamp(max=self.candidates - 1)


def _of_policy(name: str) -> Any:
    return property(lambda best: getattr(best.policy, name))


class BestOfN(nn.Module):
    """Policy that samples N plans per observation and executes one of them.

    Args:
        policy: The policy whose plans these are.
        scorer: What ranks them; None: a subclass ranks in its own `plan`.
        selection: How many, and which one.
    """

    def __init__(self, policy: Policy, scorer: Scorer | None, selection: Selection) -> None:
        super().__init__()
        self.policy = policy
        self.chunk = policy.chunk
        self.scorer = scorer
        self.selection = selection

    obs_dim: Any = _of_policy("obs_dim")
    goal_dim: Any = _of_policy("goal_dim")
    images: Any = _of_policy("images")
    normalizer: Any = _of_policy("normalizer")
    physical: Any = _of_policy("physical")
    provenance: Any = _of_policy("provenance")
    device: Any = _of_policy("device")
    dtype: Any = _of_policy("dtype")
    noise_sensitive = chooses = True

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """(N, *noise of one plan); with a temperature one more, whose first number selects."""
        return (self.selection.num_draws, *self.policy.noise_shape)

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        noise = self.policy.sample_noise(n * self.selection.num_draws, generator=generator)
        return rearrange(noise, "(n draws) ... -> n draws ...", n=n)

    def candidates(
        self, obs: Observation, noise: Tensor, *, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        """Return normalised plans (B, N, Th, Da) for physical observations and noise (B, N or more, *noise).

        `start` has B or B N rows and `hooks` see B N rows, the candidates of an observation contiguous.
        """
        count = self.selection.candidates
        cond = self.policy.encode(obs).repeat(count)
        if start is not None and len(start[0]) != len(cond):
            start = (start[0].repeat_interleave(count, dim=0), start[1])
        flat = noise[:, :count].flatten(0, 1)
        plans = self.sample(cond, flat, start=start, hooks=hooks)
        return plans.unflatten(0, (-1, count))  # -1, so that a graph fits any batch

    def sample(self, cond: Cond, noise: Tensor, *, start: Start = None, hooks: Hooks = ()) -> Tensor:
        """Return one plan per row."""
        return self.policy.decode(cond, noise, start=start, hooks=hooks)

    def plan(self, obs: Observation, noise: Tensor, *, start: Start = None, hooks: Hooks = ()) -> Tensor:
        """Return the chosen plan (B, Th, Da), normalised; arguments as `candidates`."""
        assert self.scorer is not None
        plans = self.candidates(obs, noise, start=start, hooks=hooks)
        return self.chosen(plans, self.scorer(self.policy.physical(plans), obs), noise)

    def chosen(self, plans: Tensor, scores: Tensor, noise: Tensor) -> Tensor:
        """Return the plans (B, Th, Da) that scores (B, N) select among plans (B, N, Th, Da)."""
        draw = None if self.selection.temperature is None else noise[:, -1].flatten(1)[:, 0]
        chosen = self.selection.choose(scores, draw)
        index = chosen.view(-1, 1, 1, 1).expand(-1, 1, *plans.shape[2:])
        return plans.gather(1, index).squeeze(1)

    @torch.no_grad()
    def act(
        self, obs: Any, *, noise: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Choose actions (B, Ta, Da); see `Policy.act`."""
        items = self.policy.observation(obs)
        require_finite(items)
        if noise is None:
            noise = self.sample_noise(len(next(iter(items.values()))), generator=generator)
        return self.policy.executed(self.plan(items, noise.to(self.policy.device, self.policy.dtype)))

    def clone(self) -> Self:
        return copy.deepcopy(self)

    def on_cpu(self) -> Self:
        return self if self.device.type == "cpu" else self.clone().cpu()
