"""Deterministic policy: tanh of a network, trained by offline actor-critic methods or by regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from policies.policy import PolicyConfig, reduce_elements
from policies.processes.one_step import OneStepPolicy, trunk_of
from policies.protocols import TE, Cond, Reduction
from policies.registry import register


@register("process", "deterministic")
@dataclass(frozen=True)
class DeterministicProcess:
    """One chunk per observation: tanh of a network, without noise.

    Source: the actors of TD3+BC (arXiv 2106.06860), PRDC and A2PR.
    """

    policy_class: ClassVar[str] = "deterministic"

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "mean"}


@register("policy_class", "deterministic")
class DeterministicPolicy(OneStepPolicy):
    """Act by tanh(trunk(observation)), in normalised units within [-1, 1]."""

    process: DeterministicProcess

    def __init__(self, config: PolicyConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        rows, dims = self.chunk.shape
        self.trunk = trunk_of(config).build_trunk(self.encoder.cond_dim, rows * dims)

    def _chunk(self, cond: Cond, noise: Tensor) -> Tensor:
        return torch.tanh(self.trunk(cond.vec)).view(-1, *self.chunk.shape)

    def matching_loss(self, cond: Cond, action: Tensor, te: TE, *, reduce: Reduction = "sample") -> Tensor:
        return reduce_elements((self._chunk(cond, te.eps) - action).square(), reduce)
