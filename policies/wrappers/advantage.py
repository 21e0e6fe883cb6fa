"""Advantage label: a policy conditioned on whether its data were better than usual, asked for the better.

Legend: s observation, l label, 1 better than usual, -1 not, 0 unknown; w guidance weight, v prediction of the
denoiser::

    v(s, w) = v(s, l = 0) + w (v(s, l = 1) - v(s, l = 0))

The label stands where goals stand: it is the goal of width 1 of the inner policy, and an unknown label is a
dropped goal. Weights 0 and 1 evaluate one condition. Weights above 1 leave the data.

Source: RECAP, advantage-conditioned policies of pi*0.6, arXiv 2511.14759.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self, cast

from torch import Tensor

from policies.bounds import Checked, bounded
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.policy import Policy
from policies.protocols import Cond, Hooks, Observation, Rng, Start
from policies.registry import register
from policies.wrappers.base import WrappedPolicy


@register("wrapper", "advantage")
@dataclass(frozen=True)
class Advantage(Checked):
    """Weight of the label when acting."""

    guidance: float = bounded(1.0, ge=0)  # w; 0: without label, 1: as trained, > 1: amplified

    def wrap(self, base: Policy) -> AdvantagePolicy:
        """Return the policy that acts with the label 1."""
        return AdvantagePolicy(base, self)


class AdvantagePolicy(WrappedPolicy):
    """Acts as the better part of its data; observations are those without label.

    Raises:
        ConfigError: If the inner policy has no label, a goal of width 1 that is dropped in training.
    """

    def __init__(self, base: Policy, wrapper: Advantage) -> None:
        if not (isinstance(base, DenoisingPolicy) and base.goal_dim == 1 and base.config.goal_dropout):
            raise ConfigError(
                "wrapper 'advantage' needs a denoising policy with a dropped goal of width 1; got "
                f"{type(base).__name__} with a goal of width {base.goal_dim}."
            )
        super().__init__(base.with_guidance(wrapper.guidance or 1.0), wrapper)
        self.wrapper: Advantage = wrapper

    @property
    def goal_dim(self) -> int:
        """0: the label is no part of an observation."""
        return 0

    def encode(self, obs: Observation, *, generator: Rng = None) -> Cond:
        label = obs["state"].new_full((obs["state"].shape[0], 1), float(self.wrapper.guidance > 0))
        return self.base.encode({**obs, "goal": label}, generator=generator)

    def with_guidance(self, guidance: float) -> Self:
        """Return a view with another guidance weight."""
        view = self._view()
        view.wrapper = replace(self.wrapper, guidance=guidance)
        view.base = cast(Any, self.base).with_guidance(guidance or 1.0)
        return view

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        return self.base.decode(cond, noise, grad=grad, start=start, hooks=hooks)
