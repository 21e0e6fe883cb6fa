"""Noise steering: a small network selects the start noise of a frozen policy.

Legend: B batch, Th predicted horizon, Da action width, R rows of a latent, b the bound, M (Th, R) the
adapter, mu and sigma the actor over encoded conditions, eps standard normals (B, R, Da)::

    u = tanh(mu(s) + sigma(s) eps)      latent, within [-1, 1]; density "gaussian": (mu + sigma eps) / b
    w = M b u                           noise of the inner policy, (B, Th, Da)
    a = inner(s, w)                     chunk

The rows of M have length 1, so standard normals b u give standard normals w. With `full` M is the identity,
`row_repeat` repeats one row of noise, `low_rank` interpolates between R equally spaced rows.

With `zero_init` and density `gaussian` an untrained actor gives standard normals w, and with the adapter
`full` the inner policy itself. With `tanh` w has the deviation 0.63 b and no tails.

Source: DSRL, arXiv 2506.15799. Deviation: the bound is always applied; the released program for noise-aliased
DSRL reads and ignores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.errors import CapabilityError, ConfigError
from policies.networks.activations import ACTIVATIONS
from policies.networks.distributions import TanhGaussianConfig
from policies.policy import Policy
from policies.protocols import Cond, Hooks, Start
from policies.registry import register
from policies.wrappers.base import WrappedPolicy

ADAPTERS = ("full", "row_repeat", "low_rank")
DENSITIES = ("tanh", "gaussian")


@register("wrapper", "steering")
@dataclass(frozen=True)
class Steering(Checked):
    """The actor, and the mapping of its output to noise."""

    key: ClassVar[str] = "steering"

    bound: float = bounded(1.5, gt=0)  # b, bound on the noise in standard deviations
    adapter: str = bounded("full", choices=ADAPTERS)  # mapping from a latent to a chunk's noise
    rank: int = bounded(2, ge=1)  # R of low_rank, at most the predicted horizon
    density: str = bounded("tanh", choices=DENSITIES)  # gaussian is unbounded
    stochastic: bool = True  # sample the actor's distribution; false: use its mean
    hidden_dims: tuple[int, ...] = bounded((256, 256, 256), ge=1, some=True)  # hidden widths of the actor
    activation: str = bounded("tanh", choices=tuple(ACTIVATIONS))  # activation of the actor
    layer_norm: bool = True  # normalise before each activation
    zero_init: bool = False  # initialise to mean 0 and deviation 1

    def wrap(self, base: Policy) -> SteeredPolicy:
        return SteeredPolicy(base, self)

    def rows(self, horizon: int) -> int:
        return {"full": horizon, "row_repeat": 1, "low_rank": self.rank}[self.adapter]


def _deterministic(process: Any) -> str:
    """Return the keys of a process's deterministic sampler."""
    if not hasattr(process, "deterministic_sampler"):
        return "a deterministic sampler"
    spec = process.deterministic_sampler()
    return " with ".join([f"sampler={spec.pop('name')}", *(f"sampler.{k}={v}" for k, v in spec.items())])


def require_steerable(policy: Policy) -> None:
    """Refuse a policy whose chunk is no function of its start noise."""
    process, sampler = type(policy.config.process).__name__, type(getattr(policy, "sampler", None)).__name__
    if not policy.noise_sensitive:
        raise CapabilityError(
            f"steering needs a policy whose noise matters; got process '{process}', sampler '{sampler}'. Use "
            f"process=flow."
        )
    if not getattr(policy, "is_deterministic", False) or policy.noise_shape != policy.chunk.shape:
        raise CapabilityError(
            f"steering needs a deterministic sampler; got process '{process}', sampler '{sampler}'. "
            f"Set algo.denoising_steps=<steps>, or clone with {_deterministic(policy.config.process)}."
        )


def interpolation(horizon: int, rows: int) -> Tensor:
    """Return the matrix (Th, R) that interpolates R equally spaced rows, with rows of unit length."""
    if rows == 1:
        return torch.ones(horizon, 1)
    place = torch.arange(horizon).double() * ((rows - 1) / max(1, horizon - 1))
    weight = (1 - (place[:, None] - torch.arange(rows).double()).abs()).clamp(min=0)
    return (weight / weight.norm(dim=1, keepdim=True)).float()


class SteeredPolicy(WrappedPolicy):
    """A frozen policy with an actor for its noise.

    Attributes:
        actor: Conditions (B, C) to means and logarithms of deviations, (B, R Da) each.
    """

    adapter: Tensor

    def __init__(self, base: Policy, wrapper: Steering) -> None:
        require_steerable(base)
        super().__init__(base, wrapper)
        self.wrapper: Steering = wrapper
        horizon, width = base.chunk.shape
        self._rows = wrapper.rows(horizon)
        if self._rows > horizon:
            raise ConfigError(f"steering.rank must be at most horizon={horizon}; got {wrapper.rank}.")
        base.requires_grad_(False)
        options = (wrapper.activation, wrapper.layer_norm, wrapper.zero_init)
        head = TanhGaussianConfig(wrapper.hidden_dims, *options)
        self.actor = head.build(base.encoder.cond_dim, self._rows * width).to(base.dtype)
        self.register_buffer("adapter", interpolation(horizon, self._rows).to(base.dtype), persistent=False)

    @property
    def is_deterministic(self) -> bool:
        return True

    @property
    def noise_sensitive(self) -> bool:  # type: ignore[override]
        return self.wrapper.stochastic

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """(R, Da), standard normals of the actor."""
        return (self._rows, self.chunk.action_dim)

    @property
    def latent_dim(self) -> int:
        return self._rows * self.chunk.action_dim

    def with_sampler(self, sampler: Any, **options: Any) -> Self:
        view = super().with_sampler(sampler, **options)
        require_steerable(view.base)
        return view

    def latent(self, vec: Tensor, eps: Tensor) -> Tensor:
        """Return latents u (B, L) for conditions (B, C) and standard normals (B, L)."""
        mean, log_std = self.actor(vec)
        g = mean + log_std.exp() * eps if self.wrapper.stochastic else mean
        return torch.tanh(g) if self.wrapper.density == "tanh" else g / self.wrapper.bound

    def noise_of(self, latent: Tensor) -> Tensor:
        """Return the inner policy's noise (B, Th, Da) of latents u (B, L)."""
        noise = (self.wrapper.bound * latent).view(-1, *self.noise_shape)
        return noise if self.wrapper.adapter == "full" else self.adapter @ noise

    @torch.no_grad()
    def chunk_of(self, vec: Tensor, latent: Tensor) -> Tensor:
        """Return normalised chunks (B, Th, Da) of latents u (B, L) at conditions (B, C)."""
        return self.base.decode(self.base.condition(vec), self.noise_of(latent))

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        if start is not None:
            raise CapabilityError("a steered policy takes no start state; give it to its `base`.")
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            latent = self.latent(cond.vec, noise.flatten(1))
            return self.base.decode(cond, self.noise_of(latent), grad=grad, hooks=hooks)
