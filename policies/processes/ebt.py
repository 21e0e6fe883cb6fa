"""Energy descent: gradient descent of a chunk on an energy, without noise levels.

Legend: x chunk, v velocity, both (B, Th, Da) and without physical meaning; n = Th Da; E (B,) energy, the mean
of the network's output over the chunk; i = 0 … N-1 step, u uniform in 0 … 1, xi standard normal. One step::

    y = x / rms(x)                            rms over the chunk
    y <- y + sigma_i xi                       in training
    g = grad E(y + momentum v)
    s = step_size n exp(E(y + momentum v)),   exp(E) at most max_growth
    v <- momentum v - r s g                   r = 1; in training 1/spread + u (spread - 1/spread)
    x <- y + v

    sigma_i = noise_min + (noise_max - noise_min) (1 + cos(pi i / N)) / 2

The loss compares the end of the descent with the clean chunk: |x_N - action|^2, through the last step alone
(`truncate`), or the mean of |x_i - action|^2, each through its own step. Starts are independent of the chunk,
so the loss is minimal where every descent ends at the conditional mean: the policy averages multimodal
demonstrations. `process=energy` keeps modes.

Source: EBT-Policy, arXiv 2510.27545, and its released code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.processes.base import over_rows
from policies.protocols import TE, Rng
from policies.registry import register

if TYPE_CHECKING:
    from policies.networks.energy import BoundEnergy

_EPS = 1.19e-7  # added to the mean square of a chunk: the spacing of float32 at one


@register("process", "ebt")
@dataclass(frozen=True)
class EnergyDescent(Checked):
    """Gradient descent on an energy, trained by unrolling.

    Args:
        step_size: Step size on the network's summed output at E = 0; times n it is EBT-Policy's alpha / tau.
        step_spread: In training, each step of each row is scaled by a random factor up to this, up or down.
        max_growth: Bound on exp(E). At 1 it can only shorten steps. Above 1, training may increase E instead
            of its slope: with the MLP this happened after a thousand steps, without recovery.
        batch_coupled: Normalise and stop by the whole batch, as the released code does; actions then depend
            on the other rows.

    Source: arXiv 2510.27545. Deviations: rows are normalised and stop independently, and exp(E) is bounded.
    """

    policy_class: ClassVar[str] = "descent"

    num_steps: int = bounded(6, ge=1)  # minimum number of training steps
    extra_steps: int = bounded(4, ge=0)  # maximum number of additional steps, drawn per row
    step_size: float = bounded(1.0, gt=0)
    step_spread: float = bounded(1.5, ge=1)
    momentum: float = bounded(0.9, ge=0, lt=1)  # momentum coefficient of the velocity
    noise_max: float = 0.2  # Langevin noise of the first training step; chunks have unit root mean square
    noise_min: float = bounded(0.002, ge=0)  # final Langevin noise
    truncate: bool = True  # loss at the last step only; else at every step
    max_growth: float = bounded(1.0, ge=1, le=math.inf)
    batch_coupled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("noise_max", self.noise_min <= self.noise_max, f"at least noise_min={self.noise_min}")

    @property
    def max_steps(self) -> int:
        return self.num_steps + self.extra_steps

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "descent"}

    def step(
        self, energy: BoundEnergy, x: Tensor, v: Tensor, *, ratio: Any = 1.0, noise: Any = 0.0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take one step; see the top of the file.

        Shapes:
            x, v: (B, Th, Da). ratio: r, or (B, 1, 1). noise: sigma_i xi (B, Th, Da), or 0.

        Returns:
            x and v after the step, and energy (B,) and gradient (B, Th, Da) where it was taken.
        """
        y = x / self._rms(x) + noise
        value, gradient = energy(0, y + self.momentum * v)
        growth = over_rows(value.clamp(max=math.log(self.max_growth)).exp(), x)
        size = self.step_size * x.shape[-2] * x.shape[-1] * growth
        v = self.momentum * v - ratio * size * gradient
        return y + v, v, value, gradient

    def slope(self, gradient: Tensor) -> Tensor:
        """Return the norm (B,) of a gradient (B, Th, Da), the stopping criterion."""
        if self.batch_coupled:
            return torch.linalg.vector_norm(gradient).expand(gradient.shape[0])
        return torch.linalg.vector_norm(gradient, dim=(-2, -1))

    def _rms(self, x: Tensor) -> Tensor:
        square = x.square()
        mean = square.mean() if self.batch_coupled else square.mean(dim=(-2, -1), keepdim=True)
        return (mean + _EPS).sqrt()

    def more_draws(self, te: TE, *, generator: Rng = None) -> dict[str, Tensor]:
        """Draw step counts `num_steps` (B,), `ratio` u (B, S) and `langevin` xi (B, S, Th, Da)."""
        batch, most = len(te.eps), self.max_steps
        device = te.eps.device if generator is None else generator.device
        kind: dict[str, Any] = {"device": device, "dtype": te.eps.dtype}
        shape = (batch, most, *te.eps.shape[1:])
        low = self.num_steps
        draws = {
            "num_steps": torch.randint(low, most + 1, (batch,), generator=generator, device=device),
            "ratio": torch.rand(batch, most, generator=generator, **kind),
            "langevin": torch.randn(shape, generator=generator, **kind),
        }
        return {name: draw.to(te.eps.device) for name, draw in draws.items()}

    def noise_std(self, i: Tensor, num_steps: Tensor) -> Tensor:
        """Return sigma_i for N = num_steps; shaped like the arguments."""
        share = (1 + torch.cos(math.pi * i / num_steps)) / 2
        return self.noise_min + (self.noise_max - self.noise_min) * share

    def losses(self, energy: BoundEnergy, action: Tensor, te: TE) -> Tensor:
        losses = self._truncated_losses if self.truncate else self._stepwise_losses
        return losses(energy, action, te)

    def _truncated_losses(self, energy: BoundEnergy, action: Tensor, te: TE) -> Tensor:
        count, x, v = te.more["num_steps"], te.eps, torch.zeros_like(te.eps)
        with torch.no_grad():
            for i in range(self.max_steps - 1):
                x, v = where_on(i < count - 1, self._training_step(energy, x, v, i, te), (x, v))
        return (self._training_step(energy, x, v, count - 1, te)[0] - action).square()

    def _stepwise_losses(self, energy: BoundEnergy, action: Tensor, te: TE) -> Tensor:
        count, x, v = te.more["num_steps"], te.eps, torch.zeros_like(te.eps)
        total = torch.zeros_like(action)
        for i in range(self.max_steps):
            new = self._training_step(energy, x.detach(), v.detach(), i, te)
            total = total + over_rows(i < count, x) * (new[0] - action).square()
            x, v = where_on(i < count, new, (x, v))
        return total / over_rows(count, x)

    def _training_step(
        self, energy: BoundEnergy, x: Tensor, v: Tensor, i: int | Tensor, te: TE
    ) -> tuple[Tensor, Tensor]:
        count = te.more["num_steps"]
        step = torch.as_tensor(i, device=x.device).expand(len(x))
        row = torch.arange(len(x), device=x.device)
        std = over_rows(self.noise_std(step.to(x.dtype), count.to(x.dtype)), x)
        least = 1 / self.step_spread
        ratio = over_rows(least + te.more["ratio"][row, step] * (self.step_spread - least), x)
        return self.step(energy, x, v, ratio=ratio, noise=std * te.more["langevin"][row, step])[:2]


def where_on(is_on: Tensor, new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return new states (B, Th, Da) for rows selected by `is_on` (B,), old ones for the rest."""
    return tuple(torch.where(is_on[:, None, None], a, b) for a, b in zip(new, old, strict=True))
