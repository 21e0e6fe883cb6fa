"""Base of processes: arithmetic of Gaussian paths `x = alpha x0 + sigma eps`.

Legend: x noisy chunk, x0 clean chunk, eps noise, all (B, Th, Da); t sampling time (B,), 0 noise and 1 data;
dots are derivatives with respect to t; lambda = ln(alpha / sigma), half the log signal-to-noise ratio.

Equations: a prediction of any kind and the state x determine the pair (x0, eps) linearly::

    eps       x0 = (x - sigma eps) / alpha
    x0        eps = (x - alpha x0) / sigma
    score     eps = -sigma score
    v         v = alpha eps - sigma x0,            determinant alpha^2 + sigma^2
    velocity  u = alpha' x0 + sigma' eps,          determinant alpha sigma' - sigma alpha'

Two paths agree on (x0, eps) where their lambda agree; the states there differ by the factor alpha2 / alpha1.

Source: arXiv 2011.13456 (score), 2202.00512 (v), 2303.08797 (velocity of an interpolant).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from policies.errors import ConfigError
from policies.protocols import TE, Device, Evaluate, Kind, Rng
from policies.registry import name_of

if TYPE_CHECKING:
    from policies.backbones import Backbone

KINDS = ("eps", "x0", "v", "velocity", "score")
_HALVINGS = 60  # bisection steps: far below the spacing of float64 times


class GaussianPath(ABC):
    """Meaning and training of a backbone's output on a Gaussian path; pure functions only.

    Path samplers require `is_integrable`: the network predicts the slope at every time.
    """

    has_second_time: ClassVar[bool] = False
    is_integrable: ClassVar[bool] = True
    policy_class: ClassVar[str] = "denoising"  # registered name of the policy class that runs this process

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """Prediction kind of the network."""

    @abstractmethod
    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return signal and noise amplitudes at times t, shaped like t."""

    @abstractmethod
    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives of `alpha_sigma` with respect to t."""

    @abstractmethod
    def net_time(self, t: Tensor) -> Tensor:
        """Return the time input of the backbone."""

    @abstractmethod
    def sample_time(
        self, n: int, *, generator: Rng = None, device: Device = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Draw n training times (n,)."""

    @abstractmethod
    def default_sampler(self) -> dict[str, Any]:
        """Return the default sampler: its registered `name` and field values."""

    def corrupt(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return the noisy chunk at times t (B,)."""
        alpha, sigma = self.alpha_sigma(t)
        return over_rows(alpha, x0) * x0 + over_rows(sigma, x0) * eps

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return the regression target at times t (B,)."""
        return self.express(x0, eps, t, self.kind)

    def convert(self, x: Tensor, t: Tensor, pred: Tensor, src: Kind, dst: Kind) -> Tensor:
        """Convert a prediction at (x, t) between kinds."""
        if src == dst:
            return pred
        x0, eps = self.resolve(x, t, pred, src)
        return self.express(x0, eps, t, dst)

    def express(self, x0: Tensor, eps: Tensor, t: Tensor, kind: Kind) -> Tensor:
        """Convert the pair (x0, eps) to one kind."""
        if kind == "x0":
            return x0
        if kind == "eps":
            return eps
        alpha, sigma = (over_rows(value, x0) for value in self.alpha_sigma(t))
        if kind == "v":
            return alpha * eps - sigma * x0
        if kind == "score":
            return -eps / sigma
        if kind == "velocity":
            alpha_rate, sigma_rate = (over_rows(value, x0) for value in self.rates(t))
            return alpha_rate * x0 + sigma_rate * eps
        raise unknown_kind(kind)

    def resolve(self, x: Tensor, t: Tensor, pred: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
        """Solve a prediction for (x0, eps); not finite where alpha or sigma = 0 leaves one undetermined."""
        alpha, sigma = (over_rows(value, x) for value in self.alpha_sigma(t))
        if kind == "x0":
            return pred, (x - alpha * pred) / sigma
        if kind in ("eps", "score"):
            eps = pred if kind == "eps" else -sigma * pred
            return (x - sigma * eps) / alpha, eps
        if kind == "v":
            norm = alpha * alpha + sigma * sigma
            return (alpha * x - sigma * pred) / norm, (sigma * x + alpha * pred) / norm
        if kind == "velocity":
            alpha_rate, sigma_rate = (over_rows(value, x) for value in self.rates(t))
            det = alpha * sigma_rate - sigma * alpha_rate
            return (sigma_rate * x - sigma * pred) / det, (alpha * pred - alpha_rate * x) / det
        raise unknown_kind(kind)

    def second_net_time(self, t: Tensor, t_next: Tensor) -> Tensor | None:
        """Return the second time input of a step from t to t_next; None if the network takes one time."""
        return None

    def time_of_lambda(self, log_ratio: Tensor) -> Tensor:
        """Solve ln(alpha / sigma) = log_ratio (any shape, float64) by bisection."""
        low, high = torch.zeros_like(log_ratio), torch.ones_like(log_ratio)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            alpha, sigma = self.alpha_sigma(middle)
            is_noisier = alpha.log() - sigma.log() < log_ratio
            low, high = torch.where(is_noisier, middle, low), torch.where(is_noisier, high, middle)
        return (low + high) / 2

    def grid(self, steps: int) -> list[float]:
        """Return the steps + 1 times of the process's own grid, from noise to data."""
        return [k / steps for k in range(steps + 1)]

    def check_steps(self, times: Sequence[float]) -> None:
        """Refuse steps between these times if the network was not trained for them."""
        return None

    def start_std(self, t: float) -> float:
        """Return the standard deviation of the initial state at start time t."""
        return float(self.alpha_sigma(torch.tensor(t, dtype=torch.float64))[1])

    def levels(self, *, device: Device = None, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Return the training times (K,), or None for continuous times."""
        return None

    def more_draws(self, te: TE, *, generator: Rng = None) -> dict[str, Tensor]:
        """Draw the loss's extra inputs; every tensor has one row per row of `te`."""
        return {}

    def losses(self, net: Evaluate, action: Tensor, te: TE) -> Tensor:
        """Return the unreduced loss (B, Th, Da) of clean chunks."""
        x = self.corrupt(action, te.eps, te.t)
        return (net(x, te.t, level=te.level) - self.target(action, te.eps, te.t)).square()

    def field_of(self, backbone: Backbone) -> Backbone:
        """Return the module evaluated by the policy: the backbone or a wrapper of it."""
        return backbone


def over_rows(value: Tensor, x: Tensor) -> Tensor:
    """Reshape per-row values (B,) to broadcast with x (B, ...), in the dtype of x."""
    return value.to(x.dtype).reshape(value.shape + (1,) * (x.dim() - value.dim()))


def unknown_kind(kind: str) -> ConfigError:
    """Return the error for a prediction kind that a path lacks."""
    return ConfigError(f"prediction kind must be one of {', '.join(KINDS)}; got '{kind}'.")


def incompatible(sampler: Any, process: Any, *, needs: str) -> ConfigError:
    """Return the error for a sampler that cannot run a process."""
    instead = process.default_sampler()["name"]
    return ConfigError(
        f"sampler={name_of('sampler', sampler)} needs process={needs}; got "
        f"process={name_of('process', process)}. Use sampler={instead}, or train with process={needs}."
    )
