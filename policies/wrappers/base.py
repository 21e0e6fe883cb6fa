"""Wrapped policies: a registered part (group `wrapper`) modifies the decisions of an inner policy."""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from policies.errors import CapabilityError
from policies.policy import Policy
from policies.protocols import Cond


class WrapperConfig(Protocol):
    """Registered configuration of a wrapper."""

    def wrap(self, base: Policy) -> WrappedPolicy:
        """Return the wrapped policy, with fresh weights of the wrapper."""
        ...


def _of_base(name: str) -> Any:
    return property(lambda wrapped: getattr(wrapped.base, name))


class WrappedPolicy(Policy):
    """Base of wrapped policies: all but `decode` is delegated to the inner policy."""

    def __init__(self, base: Policy, wrapper: Any) -> None:
        nn.Module.__init__(self)
        self.base = base
        self.wrapper = wrapper

    config: Any = _of_base("config")
    chunk: Any = _of_base("chunk")
    encoder: Any = _of_base("encoder")
    normalizer: Any = _of_base("normalizer")
    noise_sensitive: Any = _of_base("noise_sensitive")
    noise_shape: Any = _of_base("noise_shape")
    goal_dim: Any = _of_base("goal_dim")
    chooses: Any = _of_base("chooses")

    @property
    def process(self) -> Any:
        return self.config.process

    @property
    def sampler(self) -> Any:
        return getattr(self.base, "sampler", self.config.sampler)

    @property
    def is_deterministic(self) -> bool:
        return bool(getattr(self.base, "is_deterministic", False))

    def encode(self, obs: Any, *, generator: torch.Generator | None = None) -> Cond:
        return self.base.encode(obs, generator=generator)

    def condition(self, vec: Tensor) -> Cond:
        return self.base.condition(vec)

    def with_sampler(self, sampler: Any, **options: Any) -> Self:
        base: Any = self.base
        view = self._view()
        view.base = base.with_sampler(sampler, **options)
        return view

    def with_act_steps(self, act_steps: int) -> Self:
        view = self._view()
        view.base = self.base.with_act_steps(act_steps)
        return view

    def with_own_act_steps(self, act_steps: int, own: str) -> Self:
        """Return this policy, whose `own` networks are of its number of executed steps; refuse others."""
        if act_steps == self.chunk.act_steps:
            return self
        raise CapabilityError(
            f"{own} chunks of {self.chunk.act_steps} executed steps; got act_steps={act_steps}. Leave it out."
        )

    def executed_part(self, plans: Tensor) -> Tensor:
        """Return the executed rows of chunks (..., Th, Da), flat (..., A)."""
        return plans[..., self.chunk.executed, :].flatten(-2)

    def with_executed(self, plans: Tensor, actions: Tensor) -> Tensor:
        """Return chunks (..., Th, Da) with other executed rows (..., A)."""
        rows, start = self.chunk.act_steps, self.chunk.action_start
        before, after = plans[..., :start, :], plans[..., start + rows :, :]
        return torch.cat([before, actions.unflatten(-1, (rows, -1)), after], dim=-2)
