"""PolicyFlow ratio: likelihood ratio from the velocity shift at one point between start noise and end.

Legend: N environments, n draws per action, P pairs of an environment step and one of its draws, Th horizon,
Da action width; z start noise, e the end of the flow from z, s the deviation of the noise u on it::

    action = e + s u,    x = (1 - t) z + t e,    shift = v(x, t) - v_old(x, t)
    log ratio = log N(s_old u; shift, s^2) - log N(s_old u; 0, s_old^2)
    Brownian term = mean ((1 - t) v(x, t) - (x - t v_old(x, t)))^2

A small velocity change shifts the end of the flow by about as much: under the new policy, the old action is a
noisy sample around a shifted end. One network evaluation per draw; the path is not integrated again. The
Brownian term pulls the velocity towards minus the score, which keeps ends spread; its value corresponds
to an entropy, which has no closed form here.

Source: PolicyFlow, arXiv 2602.01156; the first velocity of the Brownian term is the learned one, as in its
algorithm (in the text's equation it is the old one, which has no gradient).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from algos.onpolicy.advantages import Experience
from algos.onpolicy.ratios import NoisyFlowRatio, Rows, Score, reduce_log_prob
from policies.bounds import Checked, bounded
from policies.denoising import DenoisingPolicy
from policies.networks.distributions import gaussian_entropy, gaussian_log_prob
from policies.protocols import Cond


@dataclass(frozen=True)
class EndNoiseConfig(Checked):
    """Learned noise on finished chunks."""

    key: ClassVar[str] = "algo.noise"

    min_std: float = bounded(0.05, gt=0)  # smallest std, normalised action units
    max_std: float = bounded(0.3, gt=0)  # largest std; without a bound it diverges
    initial_std: float = bounded(0.15, gt=0)  # initial std

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.min_std, self.max_std
        rule = f"between min_std={low:g} and max_std={high:g}"
        self.require("initial_std", low < self.initial_std < high, rule)


class EndNoise(nn.Module):
    """One std per action dimension: log s = log min + (log max - log min) sigmoid(w)."""

    def __init__(self, config: EndNoiseConfig, action_dim: int) -> None:
        super().__init__()
        self.low, self.span = math.log(config.min_std), math.log(config.max_std / config.min_std)
        share = (math.log(config.initial_std) - self.low) / self.span
        self.weight = nn.Parameter(torch.full((action_dim,), math.log(share / (1 - share))))

    def forward(self) -> Tensor:
        """Return the standard deviations (Da,)."""
        return torch.exp(self.low + self.span * self.weight.sigmoid())


class PolicyflowRatio(NoisyFlowRatio):
    """Acts with the flow plus end noise, scores its velocity shift; see the module docstring.

    Args:
        policy: A rectified flow with a deterministic sampler without chunk clipping.
        noise: Std of the noise on finished chunks.
        num_draws: n, sampler times drawn per action; each is a row with its own ratio.
        reduction: Over executed entries: `joint` (published), `per_step` or `mean`; see `reduce_log_prob`.
        brownian_coef: Weight of the Brownian term.
    """

    noise: EndNoise

    def __init__(
        self,
        policy: DenoisingPolicy,
        noise: EndNoise,
        *,
        num_draws: int,
        reduction: str,
        brownian_coef: float,
    ) -> None:
        self.policy, self.noise, self.num_draws = policy, noise, num_draws
        self.reduction, self.brownian_coef = reduction, brownian_coef

    @property
    def inner_steps(self) -> int:
        return self.num_draws

    @property
    def trainable(self) -> nn.Module:
        return nn.ModuleList([self.policy.field, self.noise])

    @property
    def factors(self) -> float:
        rows, dims = self.policy.chunk.act_steps, self.policy.chunk.shape[1]
        return float({"mean": rows * dims, "per_step": rows}.get(self.reduction, 1))

    @torch.no_grad()
    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Return physical actions (N, Ta, Da), and the record for scoring.

        It holds `start` and `end` of the flow and the scaled `noise` on it (N, Th, Da), `step` (N, n) of the
        drawn times, `velocity` (N, n, Th, Da) there, and the density `log_prob` (N,).
        """
        policy, draws = self.policy, self.num_draws
        cond = policy.encode(policy.observation(obs))
        batch, std = len(cond), self.noise()
        start = policy.sample_noise(batch, generator=generator)
        end = policy.decode(cond, start)
        noise = std * policy.sample_noise(batch, generator=generator)
        count, shape = policy.table.num_steps, (batch, draws)
        step = torch.randint(count, shape, generator=generator, device=generator.device).to(start.device)
        row = torch.arange(batch, device=start.device).repeat_interleave(draws)
        _, velocity = self.velocities(cond, start[row], end[row], row, step.flatten())
        record = {
            "start": start,
            "end": end,
            "noise": noise,
            "step": step,
            "velocity": velocity.unflatten(0, (batch, draws)),
            "log_prob": self.reduce(gaussian_log_prob(noise, torch.zeros_like(noise), std)),
        }
        return policy.executed(end + noise), record

    def velocities(
        self, cond: Cond, start: Tensor, end: Tensor, row: Tensor | None, step: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return points (P, Th, Da) on the lines at drawn times, and their velocities.

        Shapes:
            start, end: (P, Th, Da). row: (P,) index into cond, None: one each. step: (P,) of the sampler.
        """
        x = self.policy.process.corrupt(end, start, self.times(start).index_select(0, step))
        times = self.policy.table.to_device("net_time", start)
        return x, self.policy.field(x, times, cond, cond_row=row, time_row=step)

    def times(self, like: Tensor) -> Tensor:
        """Return the sampling times (K,) of the sampler's steps."""
        return like.new_tensor(self.policy.table.times[:-1])

    def reduce(self, values: Tensor) -> Tensor:
        """Reduce values (B, Th, Da) of executed rows to (B,)."""
        return reduce_log_prob(values[:, self.policy.chunk.executed], self.reduction)

    def score(self, experience: Experience, rows: Rows, advantage: Tensor | None = None) -> Score:
        record = experience.record
        step, old = (record[name].flatten(0, 1).index_select(0, rows.index) for name in ("step", "velocity"))
        names = ("start", "end", "noise", "log_prob")
        start, end, noise, log_prob = (record[name].index_select(0, rows.state_of_row) for name in names)
        cond = experience.cond.rows(rows.state)
        x, velocity = self.velocities(cond, start, end, rows.state_row, step)
        std = self.noise()
        ratio = self.reduce(gaussian_log_prob(noise, velocity - old, std)) - log_prob
        entropy = self.reduce(gaussian_entropy(std).expand_as(noise))
        penalty = self.brownian_coef * self.brownian(x, step, velocity, old) if self.brownian_coef else None
        return Score(ratio, entropy, torch.zeros_like(ratio), penalty)

    def brownian(self, x: Tensor, step: Tensor, velocity: Tensor, old: Tensor) -> Tensor:
        """Return the Brownian term (P,) at points (P, Th, Da) of drawn steps (P,), over all entries."""
        t = self.times(x).index_select(0, step)[:, None, None]
        return ((1 - t) * velocity - (x - t * old)).square().mean(dim=(1, 2))
