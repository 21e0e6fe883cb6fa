"""Policies around a policy: the inner one decides, a small part before or after it changes the decision.

A wrapper is a registered part (group `wrapper`), so a wrapped policy is saved, loaded, evaluated, composed
and exported as any other; the directory of one is that of the inner policy with the wrapper named on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from policies.encoders import Encoder
from policies.errors import CapabilityError
from policies.normalizer import Normalizer
from policies.policy import Policy, PolicyConfig
from policies.policy_config import ChunkSpec
from policies.protocols import Cond, SampleHook


class WrapperConfig(Protocol):
    """A registered description of a wrapper."""

    def wrap(self, base: Policy) -> WrappedPolicy:
        """Return the wrapped policy, with fresh weights of what the wrapper adds."""
        ...


class WrappedPolicy(Policy):
    """What all wrappers share: everything but `decode` is the inner policy's.

    Args:
        base: The inner policy.
        wrapper: The description that this was made from.
    """

    def __init__(self, base: Policy, wrapper: Any) -> None:
        nn.Module.__init__(self)
        self.base = base
        self.wrapper = wrapper

    @property
    def config(self) -> PolicyConfig:  # type: ignore[override]
        """What the inner policy is made of."""
        return self.base.config

    @property
    def chunk(self) -> ChunkSpec:  # type: ignore[override]
        """The inner policy's horizons."""
        return self.base.chunk

    @property
    def encoder(self) -> Encoder:  # type: ignore[override]
        """The inner policy's encoder."""
        return self.base.encoder

    @property
    def normalizer(self) -> Normalizer:  # type: ignore[override]
        """The inner policy's normaliser."""
        return self.base.normalizer

    @property
    def process(self) -> Any:
        """The inner policy's process."""
        return self.config.process

    @property
    def sampler(self) -> Any:
        """The inner policy's sampler."""
        return getattr(self.base, "sampler", self.config.sampler)

    @property
    def is_deterministic(self) -> bool:
        """Whether noise at the start alone decides the action."""
        return bool(getattr(self.base, "is_deterministic", False))

    @property
    def noise_sensitive(self) -> bool:  # type: ignore[override]
        """Whether noise has an influence."""
        return self.base.noise_sensitive

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of one row of noise."""
        return self.base.noise_shape

    def encode(self, obs: Any, *, generator: torch.Generator | None = None) -> Cond:
        """Encode as the inner policy does."""
        return self.base.encode(obs, generator=generator)

    def with_sampler(self, sampler: Any, **options: Any) -> Self:
        """Return a view whose inner policy has another sampler."""
        base: Any = self.base
        view = self._view()
        view.base = base.with_sampler(sampler, **options)
        return view

    def with_act_steps(self, act_steps: int) -> Self:
        """Return a view whose inner policy executes another number of rows."""
        view = self._view()
        view.base = self.base.with_act_steps(act_steps)
        return view

    def refuse_hooks(self, start: tuple[Tensor, float] | None, hooks: Sequence[SampleHook]) -> None:
        """Refuse what changes the loop of a policy that has none of its own.

        Raises:
            CapabilityError: If a start or hooks are given.
        """
        if start is not None or hooks:
            raise CapabilityError(
                f"{type(self).__name__} takes no hooks and no start state. Give them to the inner policy."
            )
