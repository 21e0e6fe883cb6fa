"""What a process is, and the arithmetic shared by every Gaussian path `x = alpha x0 + sigma eps`.

Legend: x noisy chunk, x0 clean chunk, eps noise, all (B, Th, Da); t sampling time (B,), 0 noise and 1 data;
dots are derivatives with respect to t.

Equations: a prediction of any kind and the state x determine the pair (x0, eps) linearly::

    eps       x0 = (x - sigma eps) / alpha
    x0        eps = (x - alpha x0) / sigma
    score     eps = -sigma score
    v         v = alpha eps - sigma x0,            determinant alpha^2 + sigma^2
    velocity  u = alpha' x0 + sigma' eps,          determinant alpha sigma' - sigma alpha'

Source: arXiv 2011.13456 (score), 2202.00512 (v), 2303.08797 (velocity of an interpolant).
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from policies.errors import ConfigError
from policies.protocols import Kind

KINDS = ("eps", "x0", "v", "velocity", "score")


@runtime_checkable
class Process(Protocol):
    """What the backbone's output means and how it is trained; pure functions only."""

    @property
    def kind(self) -> Kind:
        """What the network predicts."""
        ...

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return signal and noise amplitudes at times t, shaped like t."""
        ...

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives of `alpha_sigma` with respect to t."""
        ...

    def corrupt(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return the noisy chunk at times t (B,)."""
        ...

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return what the network should output at times t (B,)."""
        ...

    def convert(self, x: Tensor, t: Tensor, pred: Tensor, src: Kind, dst: Kind) -> Tensor:
        """Translate a prediction at (x, t) from one kind to another."""
        ...

    def net_time(self, t: Tensor) -> Tensor:
        """Return the time that the backbone receives."""
        ...

    def levels(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor | None:
        """Return the times (K,) that training draws from, or None where they are continuous."""
        ...

    def sample_time(
        self,
        n: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Draw n training times (n,)."""
        ...

    def default_sampler(self) -> Any:
        """Return the sampler of a policy that names none."""
        ...

    def policy_class(self) -> type:
        """Return the class of policies that run this process."""
        ...


def over_rows(value: Tensor, x: Tensor) -> Tensor:
    """View per-row values (B,) so that they multiply x (B, ...); the type becomes that of x."""
    return value.to(x.dtype).reshape(value.shape + (1,) * (x.dim() - value.dim()))


def corrupt_with(process: Process, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """Return alpha x0 + sigma eps of a process."""
    alpha, sigma = process.alpha_sigma(t)
    return over_rows(alpha, x0) * x0 + over_rows(sigma, x0) * eps


def express(process: Process, x0: Tensor, eps: Tensor, t: Tensor, kind: Kind) -> Tensor:
    """Express the pair (x0, eps) as one kind.

    Raises:
        ConfigError: If the kind is unknown.
    """
    if kind == "x0":
        return x0
    if kind == "eps":
        return eps
    alpha, sigma = (over_rows(value, x0) for value in process.alpha_sigma(t))
    if kind == "v":
        return alpha * eps - sigma * x0
    if kind == "score":
        return -eps / sigma
    if kind == "velocity":
        alpha_rate, sigma_rate = (over_rows(value, x0) for value in process.rates(t))
        return alpha_rate * x0 + sigma_rate * eps
    raise ConfigError(f"prediction kind must be one of {', '.join(KINDS)}; got '{kind}'.")


def resolve(process: Process, x: Tensor, t: Tensor, pred: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Solve a prediction for the pair (x0, eps).

    Where the path has no signal (alpha = 0) `eps` and `score` leave x0 undetermined, and where it has no
    noise (sigma = 0) `x0` leaves eps undetermined: the result is not finite there.

    Raises:
        ConfigError: If the kind is unknown.
    """
    alpha, sigma = (over_rows(value, x) for value in process.alpha_sigma(t))
    if kind == "x0":
        return pred, (x - alpha * pred) / sigma
    if kind in ("eps", "score"):
        eps = pred if kind == "eps" else -sigma * pred
        return (x - sigma * eps) / alpha, eps
    if kind == "v":
        norm = alpha * alpha + sigma * sigma
        return (alpha * x - sigma * pred) / norm, (sigma * x + alpha * pred) / norm
    if kind == "velocity":
        alpha_rate, sigma_rate = (over_rows(value, x) for value in process.rates(t))
        det = alpha * sigma_rate - sigma * alpha_rate
        return (sigma_rate * x - sigma * pred) / det, (alpha * pred - alpha_rate * x) / det
    raise ConfigError(f"prediction kind must be one of {', '.join(KINDS)}; got '{kind}'.")


def convert_with(process: Process, x: Tensor, t: Tensor, pred: Tensor, src: Kind, dst: Kind) -> Tensor:
    """Translate a prediction between kinds through the pair (x0, eps)."""
    if src == dst:
        return pred
    x0, eps = resolve(process, x, t, pred, src)
    return express(process, x0, eps, t, dst)
