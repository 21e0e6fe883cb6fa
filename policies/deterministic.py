"""The deterministic policy: a network from the observation to the chunk, squashed into the box of actions.

What offline actor-critic methods train. Cloning regresses it, so it is their baseline too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.gaussian import Mean
from policies.likelihood import no_draws, require_one_step, require_own_sampler, trunk_of
from policies.policy import Policy, PolicyConfig, reduce_elements
from policies.protocols import TE, Cond, Reduction, SampleHook
from policies.registry import register


@register("process", "deterministic")
@dataclass(frozen=True)
class DeterministicProcess:
    """One chunk per observation, tanh of a network; no noise anywhere.

    Source: the actors of TD3+BC (arXiv 2106.06860), PRDC and A2PR.
    """

    def policy_class(self) -> type[Policy]:
        """Return the class that runs this process."""
        return DeterministicPolicy

    def default_sampler(self) -> Mean:
        """Return the evaluation sampler."""
        return Mean()


class DeterministicPolicy(Policy):
    """Acts by tanh(trunk(observation)), in normalised units within [-1, 1]."""

    noise_sensitive = False

    def __init__(self, config: PolicyConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.process: DeterministicProcess = config.process
        self.sampler = config.sampler
        require_own_sampler(config.process, config.sampler)
        rows, dims = self.chunk.shape
        self.trunk = trunk_of(config).build_trunk(self.encoder.cond_dim, rows * dims)

    @property
    def is_deterministic(self) -> bool:
        """There is one action per observation."""
        return True

    def decode(
        self,
        cond: Cond,
        noise: Tensor,
        *,
        grad: bool = False,
        start: tuple[Tensor, float] | None = None,
        hooks: Sequence[SampleHook] = (),
    ) -> Tensor:
        """Return the chunk (B, Th, Da); the noise has no influence.

        Raises:
            CapabilityError: If a start or hooks are given: there is no loop for them.
        """
        require_one_step(self.process, start, hooks)
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            return self._chunk(cond)

    def sample_te(self, n: int, *, generator: torch.Generator | None = None) -> TE:
        """Return empty draws: regression needs none."""
        return no_draws(self, n)

    def matching_loss(self, cond: Cond, action: Tensor, te: TE, *, reduce: Reduction = "sample") -> Tensor:
        """Squared error of normalised actions (B, Th, Da)."""
        return reduce_elements((self._chunk(cond) - action).square(), reduce)

    def with_sampler(self, sampler: Any, **_: Any) -> DeterministicPolicy:
        """Return self: there is one way to act.

        Raises:
            ConfigError: If the sampler is another one.
        """
        require_own_sampler(self.process, sampler)
        return self

    def _chunk(self, cond: Cond) -> Tensor:
        return torch.tanh(self.trunk(cond.vec)).view(-1, *self.chunk.shape)
