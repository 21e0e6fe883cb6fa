"""Policies that act by one network evaluation.

Gaussian (the baseline of DPPO, arXiv 2409.00588), mixture, tanh-Gaussian (SAC, arXiv 1812.05905)
and deterministic (TD3+BC, arXiv 2106.06860).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor

from policies.errors import CapabilityError, ConfigError
from policies.networks.mlp_blocks import TrunkConfig
from policies.policy import Policy, PolicyConfig
from policies.processes.base import incompatible
from policies.protocols import TE, Cond, Hooks, Rng, Start
from policies.registry import lookup, name_of


class OneStepSampler:
    """Base of one-step samplers; subclasses name their process."""

    belongs_to: ClassVar[str]

    def table(self, process: Any) -> NoReturn:
        raise incompatible(self, process, needs=self.belongs_to)


class OneStepPolicy(Policy):
    """Act by one evaluation of the network.

    Attributes:
        sampler: Sampler configuration; replaced with `with_sampler`, never mutated.
    """

    noise_sensitive = False
    process: Any
    sampler: Any

    def __init__(self, config: PolicyConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.process = config.process
        self._use_sampler(config.sampler)

    def _use_sampler(self, sampler: Any) -> None:
        require_own_sampler(self.process, sampler)
        self.sampler = sampler

    def with_sampler(self, sampler: Any) -> Self:
        view = self._view()
        view._use_sampler(sampler)
        return view

    @property
    def is_deterministic(self) -> bool:
        """Whether the chunk is a function of the start noise alone, or of no noise."""
        return True

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        """Map noise (B, *noise_shape) to a normalised chunk (B, Th, Da).

        Raises:
            CapabilityError: If a start or hooks are given; one-step policies have no loop.
        """
        require_one_step(self.process, start, hooks)
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            return self._chunk(cond, noise)

    @abstractmethod
    def _chunk(self, cond: Cond, noise: Tensor) -> Tensor: ...

    def sample_te(self, n: int, *, generator: Rng = None) -> TE:
        """Return empty draws; regression and likelihood use none."""
        return TE(torch.zeros(n, device=self.device), torch.zeros(n, *self.chunk.shape, device=self.device))


def trunk_of(config: PolicyConfig) -> TrunkConfig:
    """Return the backbone's settings for a fully connected network from condition to density."""
    process, backbone = name_of("process", config.process), config.backbone
    if not isinstance(backbone, TrunkConfig):
        raise ConfigError(
            f"process={process} needs a fully connected backbone (backbone=mlp); got "
            f"{type(backbone).__name__}."
        )
    if ignored := getattr(backbone, "cond_dims", ()):
        raise ConfigError(
            f"process={process} has no encoder of the condition; got backbone.cond_dims={list(ignored)}. "
            f"Set backbone.cond_dims=[]."
        )
    return backbone


def require_own_sampler(process: Any, sampler: Any) -> None:
    """Refuse a sampler of another class than the process's default."""
    own = process.default_sampler()["name"]
    if not isinstance(sampler, lookup("sampler", own)):
        raise ConfigError(
            f"process={name_of('process', process)} needs sampler={own}, its default; "
            f"got sampler={name_of('sampler', sampler)}. Leave the sampler out, or use a process that takes "
            f"steps (diffusion, flow)."
        )


def require_one_step(process: Any, start: Start, hooks: Hooks) -> None:
    """Refuse a start and hooks."""
    if hooks or start is not None:
        raise CapabilityError(
            f"a policy with process={name_of('process', process)} acts in one step, so it takes no hooks and "
            f"no start state. Leave them out, or use a policy with process=diffusion or process=flow."
        )
