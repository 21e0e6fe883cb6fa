"""ReinFlow ratio: a deterministic sampler plus learned noise is a chain of known density.

Legend: B rows, K denoising steps, S tuned last steps (usually all), Th horizon, Da action width; x_0 start
noise, x_K the chunk::

    x_{k+1} = step(x_k),                                     k = 0 … K-S-1, by the frozen initial network
    x_{k+1} = step(x_k) + std_k(condition) clip(noise_k),    k = K-S … K-1
    log p   = sum over these k and entries of log N(x_{k+1}; step(x_k), std_k^2)   [+ log N(x_0; 0, 1)]

One ratio per chain, on the sampler's time grid: acting and scoring share their functions. The last step
counts its executed rows only (the others have no effect), earlier steps count all rows, which later steps
use.

Source: ReinFlow, arXiv 2505.22094. Deviations from the released code: acting and scoring share the sampler's
time grid (the released grids differ, and ratios are not 1 on fresh data); means are clamped only with the
sampler's `clip_state`; log-densities are not clamped by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from algos.onpolicy.advantages import Experience
from algos.onpolicy.exploration_noise import NoiseNet
from algos.onpolicy.ratios import NoisyFlowRatio, Rows, Score
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.networks.distributions import gaussian_entropy, gaussian_log_prob
from policies.protocols import Cond
from policies.samplers.step_table import transition

REDUCTIONS = ("mean", "per_step", "per_dim", "joint")


class ReinflowRatio(NoisyFlowRatio):
    """Acts with a noisy chain and scores whole chains; see `algos.onpolicy.ratios.RatioEstimator`.

    Args:
        policy: A denoising policy with a deterministic sampler of one evaluation per step.
        noise: Std of the exploration noise.
        noise_clip: Clip of standard-normal draws; None: off.
        reduction: `mean` over all factors (steps, rows, dims) of the chain; `per_step`: sum over rows and
            dims, mean over steps; `per_dim`: sum over steps, mean over rows and dims; or `joint`: log-density
            of the chain.
        count_start: Whether the start noise counts as a factor: it cancels in the ratio, but enters the
            divisor of the reductions and the clamp.
        log_prob_range: Clamp of the reduced log-densities; no gradient beyond; None: off.
    """

    noise: NoiseNet

    def __init__(
        self,
        policy: DenoisingPolicy,
        noise: NoiseNet,
        *,
        noise_clip: float | None = 3.0,
        reduction: str = "mean",
        count_start: bool = True,
        log_prob_range: tuple[float, float] | None = None,
    ) -> None:
        if reduction not in REDUCTIONS:
            raise ConfigError(
                f"log_prob_reduction must be one of {', '.join(REDUCTIONS)}; got '{reduction}'."
            )
        self.policy, self.noise, self.noise_clip = policy, noise, noise_clip
        self.reduction, self.count_start, self.log_prob_range = reduction, count_start, log_prob_range

    @property
    def inner_steps(self) -> int:
        return 1

    @property
    def evaluations(self) -> int:
        return self.policy.tuned_steps

    @property
    def first(self) -> int:
        return self.policy.table.num_steps - self.policy.tuned_steps

    @property
    def trainable(self) -> nn.Module:
        """Trainable part: the network of the tuned steps and the noise."""
        return nn.ModuleList([self.policy.scored_net, self.noise])

    @property
    def factors(self) -> float:
        """Number of log-densities averaged per row; 1 for sums."""
        steps, (rows, dims) = self.policy.tuned_steps, self.policy.chunk.shape
        start = float(self.count_start)
        match self.reduction:
            case "mean":
                executed = self.policy.chunk.act_steps
                return ((steps - 1 + start) * rows + executed) * dims
            case "per_step":
                return steps + start
            case "per_dim":
                return float(rows * dims)
        return 1.0

    def set_progress(self, progress: float) -> None:
        self.noise.set_progress(progress)

    # -- acting ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Explore; the record holds the chain (N, K+1, Th, Da) and its reduced log-density (N,)."""
        policy = self.policy
        cond = policy.encode(policy.observation(obs))
        shape = (len(cond), policy.tuned_steps + 1, *policy.chunk.shape)
        draws = torch.randn(shape, generator=generator, device=generator.device, dtype=policy.dtype)
        chain, mean, std = self.walk(cond, draws.to(policy.device))
        log_prob = gaussian_log_prob(chain[:, self.first + 1 :], mean, std)
        record = {"chain": chain, "log_prob": self.reduce(log_prob, chain)}
        return policy.executed(chain[:, -1]), record

    def walk(self, cond: Cond, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample chains from standard-normal draws (B, S+1, Th, Da); the first draw is the start.

        Returns:
            The chain (B, K+1, Th, Da), and mean and std of its tuned transitions (B, S, Th, Da).
        """
        table, step = self.policy.table, self._step(cond)
        std, steps = self.std(cond), draws[:, 1:]
        if self.noise_clip is not None:
            steps = steps.clamp(-self.noise_clip, self.noise_clip)
        shifts = (steps * std).unbind(1)
        states, means = [table.start_std * draws[:, 0]], []
        for k in range(self.first):
            states.append(step(k, states[-1]))
        for k, shift in enumerate(shifts, start=self.first):
            means.append(step(k, states[-1]))
            states.append(means[-1] + shift)
        if table.clip_action is not None:
            states[-1] = states[-1].clamp(-table.clip_action, table.clip_action)
        return torch.stack(states, dim=1), torch.stack(means, dim=1), std

    def std(self, cond: Cond) -> Tensor:
        """Return the std of every tuned step, (B, S, Th, Da)."""
        times, second = self._times(cond)
        return self.noise(times, *self.policy.scored_net.features(cond, times, second))

    def _step(self, cond: Cond) -> Any:
        """Return a function (k, x) -> mean of the state after step k."""
        table, bound = self.policy.table, self.policy.bind(cond)

        def step(k: int, x: Tensor) -> Tensor:
            return self._bounded(transition(table, k, x, bound(k, x)))

        return step

    def _bounded(self, x: Tensor) -> Tensor:
        limit = self.policy.table.clip_state
        return x if limit is None else x.clamp(-limit, limit)

    def _times(self, cond: Cond) -> tuple[Tensor, Tensor | None]:
        """Return the network times of the tuned steps, (S,) each."""
        table, first = self.policy.table, self.first
        second = None if table.second_time is None else table.to_device("second_time", cond.vec)[first:]
        return table.to_device("net_time", cond.vec)[first:], second

    # -- scoring ---------------------------------------------------------------------------------------

    def score(self, experience: Experience, rows: Rows, advantage: Tensor | None = None) -> Score:
        """Score recorded chains under the current weights; see `algos.onpolicy.ratios.RatioEstimator`."""
        chain = experience.record["chain"].index_select(0, rows.state)
        old = experience.record["log_prob"].index_select(0, rows.state)
        log_prob, entropy = self.log_prob(experience.cond.rows(rows.state), chain)
        new, saturated = self._clamped(self.reduce(log_prob, chain))
        entropies = self.reduce(entropy, None)
        return Score(new - self._clamped(old)[0], entropies, saturated)

    def log_prob(self, cond: Cond, chain: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-densities and entropies of all entries of chains (B, K+1, Th, Da), (B, S, Th, Da)."""
        mean, std = self.means(cond, chain), self.std(cond)
        return gaussian_log_prob(chain[:, self.first + 1 :], mean, std), gaussian_entropy(std)

    def means(self, cond: Cond, chain: Tensor) -> Tensor:
        """Return the tuned steps' means (B, S, Th, Da) for chains (B, K+1, Th, Da), in one evaluation."""
        table, (times, second) = self.policy.table, self._times(cond)
        batch, steps, entered = len(chain), self.policy.tuned_steps, chain[:, self.first : -1]
        row = torch.arange(batch, device=chain.device).repeat_interleave(steps)
        step = torch.arange(steps, device=chain.device).repeat(batch)
        x = entered.flatten(0, 1)
        pred = self.policy.scored_net(x, times, cond, cond_row=row, time_row=step, second_time=second)
        return self._bounded(transition(table, step + self.first, x, pred)).view_as(entered)

    def reduce(self, values: Tensor, chain: Tensor | None) -> Tensor:
        """Reduce log-densities (B, S, Th, Da) of a chain, or entropies (without a chain), to (B,)."""
        last = values[:, -1, self.policy.chunk.executed]
        total = values[:, :-1].sum(dim=(1, 2, 3)) + last.sum(dim=(1, 2))
        if self.count_start:
            one = torch.ones_like(values[:, 0])
            start = gaussian_entropy(one) if chain is None else gaussian_log_prob(chain[:, 0], 0 * one, one)
            total = total + start.sum(dim=(1, 2))
        return total / self.factors

    def _clamped(self, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Return clamped values and whether each was clamped, (B,)."""
        if self.log_prob_range is None:
            return log_prob, torch.zeros_like(log_prob)
        clamped = log_prob.clamp(*self.log_prob_range)
        return clamped, (clamped != log_prob).to(log_prob.dtype)


class PathTerm:
    """Penalty towards a frozen policy: mean squared difference of noise-free chunks from the same start.

    Args:
        frozen: Reference policy, with the exploration sampler.
        policy: Policy in training.

    Source:
        ReinFlow (arXiv 2505.22094), the W2 term. Deviations from the released code: starts are drawn, as in
        the paper, instead of zero, and both policies share them.
    """

    def __init__(self, frozen: DenoisingPolicy, policy: DenoisingPolicy) -> None:
        self.frozen, self.policy = frozen, policy

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """(Th, Da): start noise."""
        return self.policy.noise_shape

    def losses(self, cond: Cond, noise: Tensor) -> Tensor:
        """Return the loss of each row (B,); noise is (B, Th, Da)."""
        with torch.no_grad():
            wanted = self.frozen.decode(cond, noise)
        return (self.policy.decode(cond, noise, grad=True) - wanted).square().mean(dim=(1, 2))
