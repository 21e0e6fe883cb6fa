"""Policies that act by one network evaluation.

Gaussian and mixture (baselines of DPPO, arXiv 2409.00588), tanh-Gaussian (SAC, arXiv 1812.05905) and
deterministic (TD3+BC, arXiv 2106.06860).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NoReturn, Protocol, Self

import torch
from torch import Tensor

from policies.errors import CapabilityError, ConfigError
from policies.networks.mlp_blocks import TrunkConfig
from policies.policy import Policy, PolicyConfig
from policies.processes.base import incompatible
from policies.protocols import TE, Chain, Cond, Hooks, Rng, Start
from policies.registry import lookup, name_of


class ChunkDensity(Protocol):
    """A distribution over chunks, for a batch of conditions."""

    def draw(self, noise: Tensor) -> Tensor:
        """Return draws (B, Th, Da) from standard normals (B, 2, Th, Da)."""
        ...

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log-densities of draws (B, Th, Da); their sum over executed entries is the chunk's."""
        ...

    def entropy(self) -> Tensor:
        """Return entropies (B, Th, Da), or 0 where they are unknown."""
        ...

    def rows(self, index: Tensor) -> Self:
        """Select rows by an index tensor (M,)."""
        ...


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


class ClosedFormPolicy(OneStepPolicy):
    """A one-step policy with a density; see `policies.protocols.DensityPolicy`.

    The chain has one transition, from zero to the draw.
    """

    tuned_steps = 1
    has_entropy: ClassVar[bool] = True
    head: Any

    @abstractmethod
    def density(self, cond: Cond) -> ChunkDensity: ...

    def sample_chain(self, cond: Cond, *, noise: Tensor | None = None, generator: Rng = None) -> Chain:
        """Draw chunks; noise is (B, 2, Th, Da)."""
        if noise is None:
            noise = self._randn((len(cond), 2, *self.chunk.shape), generator)
        density = self.density(cond)
        x = density.draw(noise)
        return Chain(torch.stack([torch.zeros_like(x), x], dim=1), density.log_prob(x).unsqueeze(1))

    def chain_log_prob(self, cond: Cond, x: Tensor, *, steps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Score draws x[:, 1] (B, Th, Da)."""
        log_prob, entropy = self.transition_log_prob(cond, x[:, 0], x[:, 1], torch.zeros(0))
        return log_prob.unsqueeze(1), entropy.unsqueeze(1)

    def transition_log_prob(
        self, cond: Cond, x: Tensor, x_next: Tensor, step: Tensor, cond_row: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Score draws x_next (M, Th, Da); there is one step only."""
        density = self.density(cond)
        if cond_row is not None:
            density = density.rows(cond_row)
        return density.log_prob(x_next), density.entropy()


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
