"""Policies that act by one network evaluation.

Gaussian and mixture (baselines of DPPO, arXiv 2409.00588), tanh-Gaussian (SAC, arXiv 1812.05905) and
deterministic (TD3+BC, arXiv 2106.06860).
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
    """Act by one evaluation of the network; `sampler` is replaced with `with_sampler`, never mutated."""

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
        return True

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        if hooks or start is not None:
            raise CapabilityError(
                f"process={name_of('process', self.process)} acts in one step, without hooks or start state. "
                "Leave them out, or use process=diffusion or process=flow."
            )
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            return self._chunk(cond, noise)

    @abstractmethod
    def _chunk(self, cond: Cond, noise: Tensor) -> Tensor: ...

    def sample_te(self, n: int, *, generator: Rng = None) -> TE:
        """Return empty draws: regression and likelihood use none."""
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
