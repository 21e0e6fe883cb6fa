"""Networks beside the denoiser on the shared trunk: value function, Gaussian and mixture actor."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.bounds import bounded
from policies.networks.activations import ACTIVATIONS
from policies.networks.mlp_blocks import TrunkConfig
from policies.protocols import Cond


@dataclass(frozen=True)
class CriticConfig(TrunkConfig):
    """State-value network V(s)."""

    width: int = bounded(256, ge=1)
    activation: str = bounded("mish", choices=tuple(ACTIVATIONS))

    def build(self, obs_dim: int) -> Critic:
        return Critic(self, obs_dim)

    def official_keys(self) -> dict[str, str]:
        """Map the parameter names of DPPO's released `CriticObs` to ours."""
        return self.official_trunk_keys("Q1.", "trunk.")


class Critic(nn.Module):
    """Value of an observation: `CriticObs` of DPPO (arXiv 2409.00588), equal up to rounding."""

    def __init__(self, config: CriticConfig, obs_dim: int) -> None:
        super().__init__()
        self.config = config
        self.trunk = config.build_trunk(obs_dim, 1)

    def forward(self, obs: Tensor | Cond) -> Tensor:
        """Return the value (B,) of encoded or normalised observations (B, ...), flattened to (B, obs_dim)."""
        features = obs.vec if isinstance(obs, Cond) else obs
        return self.trunk(features.flatten(1)).squeeze(1)


@dataclass(frozen=True)
class DensityHeadConfig(TrunkConfig):
    """Common settings of densities over action chunks: std per action dimension, learned or fixed."""

    key: ClassVar[str] = "process"  # which has the settings of deviations and modes

    width: int = bounded(256, ge=1)
    activation: str = bounded("mish", choices=tuple(ACTIVATIONS))
    init_std: float = 0.1  # initial standard deviation, normalised action units
    min_std: float = bounded(0.01, gt=0)  # lower limit of the standard deviation
    max_std: float = 0.2  # upper limit of the standard deviation
    learn_std: bool = True  # false keeps `init_std` fixed

    def __post_init__(self) -> None:
        super().__post_init__()
        within = f"between min_std={self.min_std} and max_std={self.max_std}"
        self.require("init_std", self.min_std <= self.init_std <= self.max_std, within)

    @classmethod
    def from_parts(cls, trunk: TrunkConfig, deviation: Any) -> Self:
        """Combine a backbone's trunk settings with the fields of the same names in `deviation`."""
        known = {item.name for item in fields(TrunkConfig)}
        sources = {item.name: trunk if item.name in known else deviation for item in fields(cls)}
        return cls(**{name: getattr(source, name) for name, source in sources.items()})

    def attach_log_var(self, head: nn.Module, shape: tuple[int, ...]) -> None:
        """Register the log-variances `log_var`: a parameter, or a buffer where they stay fixed."""
        log_var = torch.full(shape, 2 * math.log(self.init_std))
        if self.learn_std:
            head.register_parameter("log_var", nn.Parameter(log_var))
        else:
            head.register_buffer("log_var", log_var)

    @property
    def log_var_range(self) -> tuple[float, float]:
        return 2 * math.log(self.min_std), 2 * math.log(self.max_std)

    def std_of(self, log_var: Tensor) -> Tensor:
        return torch.exp(0.5 * log_var.clamp(*self.log_var_range))

    def is_free(self, log_var: Tensor) -> Tensor:
        """Return where log-variances are within their limits, so that a gradient reaches them."""
        low, high = self.log_var_range
        return (log_var >= low) & (log_var <= high)


@dataclass(frozen=True)
class GaussianHeadConfig(DensityHeadConfig):
    """Gaussian distribution over action chunks."""

    squash: bool = True  # mean within [-1, 1] by tanh; false: the network's output

    def build(self, chunk_shape: tuple[int, int], cond_dim: int) -> GaussianHead:
        return GaussianHead(self, chunk_shape, cond_dim)

    def official_keys(self) -> dict[str, str]:
        """Map the parameter names of DPPO's released `Gaussian_MLP` to ours."""
        deviation = {"logvar": "log_var"} if self.learn_std else {}
        return deviation | self.official_trunk_keys("mlp_mean.", "trunk.")


class GaussianHead(nn.Module):
    """Mean from the condition, within [-1, 1] unless told; a standard deviation per action dimension.

    The parameter is the log-variance, as in the released code, so that published learning rates keep their
    meaning. Outside the limits it receives no gradient.

    Source: DPPO (arXiv 2409.00588), `Gaussian_MLP` of the released code with a learned fixed deviation.
    """

    log_var: Tensor

    def __init__(self, config: GaussianHeadConfig, chunk_shape: tuple[int, int], cond_dim: int) -> None:
        super().__init__()
        self.config = config
        self.chunk_shape = tuple(chunk_shape)
        self.trunk = config.build_trunk(cond_dim, chunk_shape[0] * chunk_shape[1])
        config.attach_log_var(self, chunk_shape[1:])

    def forward(self, vec: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation, each (B, Th, Da), for conditions (B, C)."""
        out = self.trunk(vec)
        mean = (torch.tanh(out) if self.config.squash else out).view(-1, *self.chunk_shape)
        return mean, self.config.std_of(self.log_var).expand_as(mean)


@dataclass(frozen=True)
class MixtureHeadConfig(DensityHeadConfig):
    """Mixture of Gaussian distributions over action chunks."""

    num_modes: int = bounded(5, ge=1)  # M, Gaussians
    state_std: bool = False  # deviations from the condition, softplus of the network + min_std

    def build(self, chunk_shape: tuple[int, int], cond_dim: int) -> MixtureHead:
        return MixtureHead(self, chunk_shape, cond_dim)


class Mixture(NamedTuple):
    """M diagonal Gaussians: log weights (B, M), means (B, M, Th, Da), deviations (M, 1, Da) or like means."""

    log_weight: Tensor
    mean: Tensor
    std: Tensor


class MixtureHead(nn.Module):
    """Weights and means of all modes from the condition by one trunk, a deviation per mode and dimension.

    With `state_std` the trunk also outputs the deviations, as in robomimic (arXiv 2108.03298).

    Source: DPPO (arXiv 2409.00588), mixture baseline: five modes, means within [-1, 1], learned fixed
    deviations. Deviation: weights and means have one trunk, not two, so released weights do not load.
    """

    log_var: Tensor

    def __init__(self, config: MixtureHeadConfig, chunk_shape: tuple[int, int], cond_dim: int) -> None:
        super().__init__()
        self.config = config
        self.chunk_shape = tuple(chunk_shape)
        per_mode = 1 + chunk_shape[0] * chunk_shape[1] * (2 if config.state_std else 1)
        self.trunk = config.build_trunk(cond_dim, config.num_modes * per_mode)
        if not config.state_std:
            config.attach_log_var(self, (config.num_modes, 1, chunk_shape[1]))

    def forward(self, vec: Tensor) -> Mixture:
        modes = self.config.num_modes
        weight, mean = self.trunk(vec).tensor_split([modes], dim=1)
        if self.config.state_std:
            mean, raw = mean.chunk(2, dim=1)
            std = (F.softplus(raw) + self.config.min_std).view(-1, modes, *self.chunk_shape)
        else:
            std = self.config.std_of(self.log_var)
        mean = torch.tanh(mean).view(-1, modes, *self.chunk_shape)
        return Mixture(weight.log_softmax(dim=1), mean, std)
