"""Selection: decide by the best of several plans, whatever a plan is judged by.

Legend: B batch, N candidates, K denoising steps, To observation history, Th horizon, Ta executed steps, Da
action width; s_n score of a candidate, more is better.

    best      n = argmax s_n
    softmax   n with probability softmax(s / temperature)_n

All that is drawn comes from the noise, so a choice is deterministic given its noise.

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
from policies.policy import Policy
from policies.protocols import Hooks, Observation, Start

Scorer = Callable[[Tensor, Observation], Tensor]
"""(physical plans (B, N, Th, Da), observation) -> scores (B, N), more is better."""


@dataclass(frozen=True)
class Selection(Checked):
    """How many plans there are to choose from, and how one is chosen."""

    candidates: int = bounded(16, ge=1)  # N, plans sampled for every observation
    temperature: float | None = bounded(None, gt=0)  # draw by softmax(score / temperature); null: the best

    @property
    def rows(self) -> int:
        """Rows of noise of one decision: one per candidate, and one to draw by."""
        return self.candidates + (self.temperature is not None)

    def choose(self, scores: Tensor, draw: Tensor | None = None) -> Tensor:
        """Return the chosen candidates (B,) by scores (B, N), more is better.

        `draw` (B,), standard normal, is needed with a temperature.
        """
        if self.temperature is None:
            return scores.argmax(dim=1)
        assert draw is not None
        share = (scores / self.temperature).softmax(dim=1).cumsum(dim=1)
        below = share < torch.special.ndtr(draw)[:, None]
        return below.sum(dim=1).clamp(max=self.candidates - 1)


class LowEnergy(nn.Module):
    """Scores plans by their energy, the lower the better.

    Args:
        policy: An energy policy; it may be another one than samples the plans.
        t: Sampling time whose energy is compared, the last one that was trained.
    """

    def __init__(self, policy: Any, t: float) -> None:
        super().__init__()
        self.policy, self.t = policy, t

    def forward(self, plans: Tensor, obs: Observation) -> Tensor:
        """Return minus the energies (B, N) of physical plans (B, N, Th, Da)."""
        x = self.policy.normalize_action(rearrange(plans, "B N Th Da -> (B N) Th Da"))
        cond = self.policy.encode(obs).repeat(plans.shape[1])
        energy: Tensor = self.policy.energy(x, x.new_full((len(x),), self.t), cond)
        return -rearrange(energy, "(B N) -> B N", N=plans.shape[1])


class BestOfN(nn.Module):
    """A policy that samples N plans for every observation and executes one of them.

    Args:
        policy: Samples the plans.
        scorer: Judges them.
        selection: How many, and how one is chosen.
    """

    def __init__(self, policy: Policy, scorer: Scorer, selection: Selection) -> None:
        super().__init__()
        self.policy = policy
        self.chunk = policy.chunk
        self.scorer = scorer
        self.selection = selection

    obs_dim = property(lambda self: self.policy.obs_dim)
    goal_dim = property(lambda self: self.policy.goal_dim)
    images = property(lambda self: self.policy.images)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """(N, *noise of one plan); with a temperature there is one row more, whose first number draws."""
        return (self.selection.rows, *self.policy.noise_shape)

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        noise = self.policy.sample_noise(n * self.selection.rows, generator=generator)
        return rearrange(noise, "(n rows) ... -> n rows ...", n=n)

    def candidates(
        self, obs: Observation, noise: Tensor, *, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        """Return the normalised plans (B, N, Th, Da) of observations with B rows.

        Args:
            obs: Physical observations.
            noise: (B, N or more, *noise of one plan).
            start: (x (B, Th, Da) or (B N, Th, Da), t): see `NoiseDecoder.decode`.
            hooks: Changes to the loop; they see B N rows, the candidates of an observation side by side.
        """
        count = self.selection.candidates
        cond = self.policy.encode(obs).repeat(count)
        if start is not None and len(start[0]) != len(cond):
            start = (start[0].repeat_interleave(count, dim=0), start[1])
        flat = rearrange(noise[:, :count], "B N ... -> (B N) ...")
        plans = self.policy.decode(cond, flat, start=start, hooks=hooks)
        return rearrange(plans, "(B N) Th Da -> B N Th Da", N=count)

    def plan(self, obs: Observation, noise: Tensor, *, start: Start = None, hooks: Hooks = ()) -> Tensor:
        """Return the chosen plan (B, Th, Da), normalised; arguments as `candidates`."""
        plans = self.candidates(obs, noise, start=start, hooks=hooks)
        scores = self.scorer(self.policy.physical(plans), obs)
        draw = None if self.selection.temperature is None else noise[:, -1].flatten(1)[:, 0]
        return plans[torch.arange(len(plans), device=plans.device), self.selection.choose(scores, draw)]

    @torch.no_grad()
    def act(
        self, obs: Any, *, noise: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Choose actions (B, Ta, Da); see `Policy.act`."""
        items = self.policy.observation(obs)
        if noise is None:
            noise = self.sample_noise(len(next(iter(items.values()))), generator=generator)
        return self.policy.executed(self.plan(items, noise))

    def on_cpu(self) -> Self:
        return self if self.policy.device.type == "cpu" else copy.deepcopy(self).cpu()
