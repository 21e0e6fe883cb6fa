"""FPO ratio: likelihood ratio from the difference of matching losses.

Legend: N environments, n draws per action, P pairs of an environment step and one of its draws, Th horizon,
Da action width; t sampling time (0 noise, 1 action)::

    loss(action; t, eps) = reduce (target - prediction)^2 at alpha(t) action + sigma(t) eps
    log ratio            = scale (loss of the old weights - loss of the new ones)

The negative loss is, up to a constant, a lower bound of the log-likelihood for a suitable weighting of times:
raising it raises the likelihood of an action. Draws and their losses under the acting weights are stored with
the action, as they cannot be recomputed later. Per action, the ratio averages over draws before
exponentiation; per draw, every draw is a row with its own ratio.

Source: FPO, arXiv 2507.21053; FPO++, arXiv 2602.02481; AWM, arXiv 2509.25050. Deviations from FPO's released
code: times at which the loss has zero weight are not drawn (a tenth of its draws).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from algos.onpolicy.advantages import Experience
from algos.onpolicy.ratios import FlowRatio, Rows, Score
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.protocols import Cond

PREDICTIONS = ("velocity", "eps", "x0")
TIMES = ("grid", "density")
REDUCTIONS = ("mean", "sqrt", "per_step", "joint")
_MARGIN = 0.005  # distance of `density` times from both ends


@dataclass(frozen=True)
class Matching:
    """Matching loss of an action and its bounds."""

    prediction: str = "eps"  # compared quantity: velocity, eps, x0 or what the network predicts
    reduction: str = "mean"  # or sqrt (sum / sqrt of the number), per_step (mean over dims), joint (sum)
    huber: float | None = None  # Huber threshold, above which errors are linear; None: squared errors
    scale: float = 1.0  # factor of the loss
    max_loss: float | None = None  # clamp of losses before subtraction
    max_loss_negative: float | None = None  # clamp where the advantage is negative and losses increase
    difference_range: tuple[float, float] | None = None  # clamp of differences; no gradient beyond
    max_difference: float | None = None  # upper clamp of the difference's value, gradients kept

    def errors(self, difference: Tensor) -> Tensor:
        """Return the error of every entry: e^2, or 2 delta |e| - delta^2 beyond delta."""
        square = difference.square()
        if self.huber is None:
            return square
        size = difference.abs()
        return torch.where(size <= self.huber, square, 2 * self.huber * size - self.huber**2)

    def reduce(self, errors: Tensor) -> Tensor:
        """Reduce errors (P, Ta, Da) of executed entries to losses (P,)."""
        match self.reduction:
            case "mean":
                return errors.mean(dim=(1, 2))
            case "sqrt":
                return errors.sum(dim=(1, 2)) / (errors.shape[1] * errors.shape[2]) ** 0.5
            case "per_step":
                return errors.mean(dim=2).sum(dim=1)
        return errors.sum(dim=(1, 2))

    def bounded(self, loss: Tensor, advantage: Tensor | None = None) -> Tensor:
        """Clamp losses (P,); with advantages (P,), also apply `max_loss_negative`."""
        if self.max_loss is not None:
            loss = loss.clamp(max=self.max_loss)
        if self.max_loss_negative is not None and advantage is not None:
            loss = torch.where(advantage < 0, loss.clamp(max=self.max_loss_negative), loss)
        return loss

    def difference(self, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Return clamped differences (P,) of old and new losses, and whether the gradient vanishes."""
        raw = self.scale * (old - new)
        clamped = raw if self.difference_range is None else raw.clamp(*self.difference_range)
        stopped = _changed(raw, clamped)
        if self.max_difference is not None:  # straight-through: the value is clamped, the gradient kept
            clamped = clamped + (clamped.detach().clamp(max=self.max_difference) - clamped.detach())
        return clamped, stopped


class Comparison(NamedTuple):
    """For pairs (P,): log ratio, whether a clamp stops its gradient, decrease of the loss."""

    log_ratio: Tensor
    stopped: Tensor
    drift: Tensor


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """Return 1 where a clamp changed the value, else 0."""
    return (after.detach() != before.detach()).to(before.dtype)


def time_of(uniform: Tensor, power: float) -> Tensor:
    """Return times from uniform draws in [0, 1), bounded away from both ends (FPO++)."""
    return 1 - (_MARGIN + (1 - 2 * _MARGIN) * (1 - (1 - uniform) ** (1 / power)))


class FpoRatio(FlowRatio):
    """Acts with the policy's sampler and compares matching losses; see the module docstring.

    Args:
        policy: A denoising policy.
        matching: The matching loss and its bounds.
        num_draws: n.
        per_draw: Every draw is a row with its own ratio; else one ratio per action.
        times: `grid` (the times of the sampler's steps) or `density`.
        time_power: Of `density`: noise amplitudes have the density of 1 - (1 - u)^(1 / power), u uniform; 1
            is uniform.
        action_noise: Std of noise added to finished chunks, normalised units.
    """

    def __init__(
        self,
        policy: DenoisingPolicy,
        matching: Matching,
        *,
        num_draws: int = 8,
        per_draw: bool = False,
        times: str = "grid",
        time_power: float = 1.0,
        action_noise: float = 0.0,
    ) -> None:
        self.policy, self.matching, self.num_draws, self.per_draw = policy, matching, num_draws, per_draw
        self.times, self.time_power, self.action_noise = times, time_power, action_noise
        if times == "grid" and not len(self.grid):
            raise ConfigError(
                "algo.times=grid with algo.prediction=eps needs algo.denoising_steps of 2 or more: the first "
                "step has weight 0. Or use algo.times=density, or algo.prediction=velocity."
            )

    @property
    def inner_steps(self) -> int:
        return self.num_draws if self.per_draw else 1

    @property
    def evaluations(self) -> int:
        return 1 if self.per_draw else self.num_draws

    @property
    def factors(self) -> float | None:
        rows, dims = self.policy.chunk.act_steps, self.policy.chunk.shape[1]
        return {"mean": rows * dims, "sqrt": (rows * dims) ** 0.5, "per_step": dims}.get(
            self.matching.reduction, 1.0
        )

    @torch.no_grad()
    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Act; the record holds `action` (N, Th, Da), `eps` (N, n, Th, Da), `t` (N, n) and `loss` (N, n)."""
        policy = self.policy
        cond = policy.encode(policy.observation(obs))
        action = policy.decode(cond, policy.sample_noise(len(cond), generator=generator))
        if self.action_noise:
            action = action + self.action_noise * policy._randn(action.shape, generator)
        eps = policy._randn((len(cond), self.num_draws, *policy.chunk.shape), generator)
        t = self.draw_times((len(cond), self.num_draws), generator)
        pairs = action.repeat_interleave(self.num_draws, 0), eps.flatten(0, 1), t.flatten()
        loss = self.losses(cond.repeat(self.num_draws), *pairs).view_as(t)
        return policy.executed(action), {"action": action, "eps": eps, "t": t, "loss": loss}

    def draw_times(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw sampling times, those of `times`."""
        uniform = torch.rand(shape, generator=generator, device=generator.device, dtype=self.policy.dtype)
        uniform = uniform.to(self.policy.device)
        if self.times == "grid":
            grid = self.grid.to(uniform)
            return grid[(uniform * len(grid)).long().clamp(max=len(grid) - 1)]
        return self.policy.process.nearest_time(time_of(uniform, self.time_power))

    @property
    def grid(self) -> Tensor:
        """Sampling times of the sampler's steps at which the loss has weight."""
        table = self.policy.table
        times = torch.tensor(table.times[:-1], dtype=torch.float64)
        has_signal = torch.tensor(table.alpha) > 0  # where there is none, eps is the state itself
        return times[has_signal] if self.matching.prediction == "eps" else times

    def losses(self, cond: Cond, action: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return the losses (P,) of chunks (P, Th, Da) with noise (P, Th, Da) at times (P,)."""
        process, kind = self.policy.process, self.matching.prediction
        x = process.corrupt(action, eps, t)
        predicted = process.convert(x, t, self.policy.evaluate(cond)(x, t), process.kind, kind)
        is_own = kind == process.kind  # what the network predicts
        target = process.target(action, eps, t) if is_own else process.express(action, eps, t, kind)
        errors = self.matching.errors(target - predicted)
        return self.matching.reduce(errors[:, self.policy.chunk.executed])

    def score(self, experience: Experience, rows: Rows, advantage: Tensor | None = None) -> Score:
        record, state, draws = experience.record, rows.state, self.num_draws
        if self.per_draw:
            index, pair = rows.state_of_row, rows.index  # (P,) environment steps, and places in (M n)
        else:
            index = state.repeat_interleave(draws)
            pair = (state[:, None] * draws + torch.arange(draws, device=state.device)).flatten()
            advantage = None if advantage is None else advantage.repeat_interleave(draws)
        eps, t, old = (record[name].flatten(0, 1).index_select(0, pair) for name in ("eps", "t", "loss"))
        new = self.losses(experience.cond.rows(index), record["action"].index_select(0, index), eps, t)
        pairs = self.compare(old, new, advantage, t)
        if not self.per_draw:
            pairs = Comparison(*(part.view(-1, draws).mean(1) for part in pairs))
        return Score(pairs.log_ratio, torch.zeros_like(pairs.log_ratio), pairs.stopped, drift=pairs.drift)

    def compare(self, old: Tensor, new: Tensor, advantage: Tensor | None, t: Tensor) -> Comparison:
        """Compare recorded and current losses (P,) of pairs at times (P,)."""
        matching = self.matching
        bounded = matching.bounded(new, advantage)
        difference, stopped = matching.difference(matching.bounded(old), bounded)
        stopped = torch.maximum(stopped, _changed(new, bounded))
        return Comparison(difference, stopped, drift=difference.detach())


class AwmRatio(FpoRatio):
    """Matching losses weighted by advantages: ratios are 1 and carry the gradient only.

    The recorded losses only measure the decrease of the loss, so only `target_kl` limits several passes over
    the same data. Weights by the noise amplitude s of a draw: `one`, `noise` (s), `noise_squared` (s^2), or
    `huber`: s ((loss + 1e-10)^p - 1e-10^p) / p with p = 1/4 replaces the loss.

    Source: AWM, arXiv 2509.25050.
    """

    WEIGHTS = ("one", "noise", "noise_squared", "huber")
    _FLOOR, _POWER = 1e-10, 0.25

    def __init__(
        self, policy: DenoisingPolicy, matching: Matching, *, weight: str = "one", **options: Any
    ) -> None:
        super().__init__(policy, matching, **options)
        self.weight = weight

    @property
    def factors(self) -> None:
        return None

    def compare(self, old: Tensor, new: Tensor, advantage: Tensor | None, t: Tensor) -> Comparison:
        """Return log ratio 0 with the gradient of the weighted loss."""
        bounded = self.matching.bounded(new, advantage)
        weighted = self.matching.scale * self.weighted(bounded, t)
        decrease = self.matching.scale * (old - new.detach())
        return Comparison(weighted.detach() - weighted, _changed(new, bounded), drift=decrease)

    def weighted(self, loss: Tensor, t: Tensor) -> Tensor:
        noise = self.policy.process.alpha_sigma(t)[1]
        match self.weight:
            case "one":
                return loss
            case "noise":
                return noise * loss
            case "noise_squared":
                return noise.square() * loss
        return noise * ((loss + self._FLOOR) ** self._POWER - self._FLOOR**self._POWER) / self._POWER
