"""ReinFlow ratio: a deterministic sampler plus learned noise is a chain of known density.

Legend: B rows, K denoising steps, S tuned last steps (usually all), T and C' widths of embedded times and
conditions, Th horizon, Da action width; x_0 start noise of deviation std_0 (0: the sampler starts from zero),
x_K the chunk::

    x_{k+1} = step(x_k),                                     k = 0 … K-S-1, by the frozen initial network
    x_{k+1} = step(x_k) + std_k(condition) clip(noise_k),    k = K-S … K-1
    log p   = sum over these k and entries of log N(x_{k+1}; step(x_k), std_k^2) [+ log N(x_0; 0, std_0^2)]
    log std^2 = lo + (hi - lo) (tanh(net(time, condition)) + 1) / 2,    lo = log min^2,  hi = log max^2

One ratio per chain, on the sampler's time grid: acting and scoring share their functions. The last step
counts its executed rows only (the others have no effect), earlier steps count all rows, which later steps
use. The upper bound of the std may decay over a run. The noise network's inputs are the time and condition
embeddings of the policy's network; gradients to the time embedding are stopped. The noise is used in training
only and is not exported.

Source: ReinFlow, arXiv 2505.22094, section 4. Deviations from the released code: acting and scoring share the
sampler's time grid (the released grids differ, and ratios are not 1 on fresh data); means are clamped only
with the sampler's `clip_state`; log-densities are not clamped by default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from algos.onpolicy.advantages import Experience
from algos.onpolicy.ratios import NoisyFlowRatio, Rows, Score
from policies.bounds import Checked, bounded
from policies.denoising import DenoisingPolicy
from policies.networks.distributions import gaussian_entropy, gaussian_log_prob
from policies.protocols import Cond
from policies.samplers.step_table import transition

REDUCTIONS = ("mean", "per_step", "per_dim", "joint")
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "mish": nn.Mish, "elu": nn.ELU, "silu": nn.SiLU}


@dataclass(frozen=True)
class NoiseConfig(Checked):
    """Exploration noise of a flow policy."""

    key: ClassVar[str] = "algo.noise"
    dropped: ClassVar[tuple[str, ...]] = ("own_time_dim",)  # obsolete keys of saved runs, ignored

    level: str = bounded("learned", choices=("learned", "constant"))  # learned, or constant: always max_std
    input: str = bounded("state_time", choices=("state_time", "state"))  # inputs of the noise network
    min_std: float = bounded(0.10, gt=0)  # smallest std, normalised action units
    max_std: float = bounded(0.24, gt=0)  # largest std, normalised action units
    hold: float = bounded(0.35, ge=0, le=1)  # fraction of the run before max_std decays; 1: no decay
    final_share: float = bounded(0.7, ge=0, le=1)  # ends at final_share max_std + (1 - final_share) min_std
    hidden_dims: tuple[int, ...] = bounded((64, 64), ge=1)  # hidden widths
    activation: str = bounded("tanh", choices=tuple(ACTIVATIONS))  # hidden activation

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("max_std", self.min_std <= self.max_std, f"at least algo.noise.min_std={self.min_std:g}")

    def unused(self) -> dict[str, str]:
        names = ("input", "hidden_dims", "activation")
        learned = {} if self.level == "learned" else dict.fromkeys(names, "without algo.noise.level=learned")
        return learned | ({"final_share": "with algo.noise.hold=1"} if self.hold >= 1 else {})

    def build(self, chunk_shape: tuple[int, int], time_dim: int, cond_dim: int) -> NoiseNet:
        return NoiseNet(self, chunk_shape, time_dim, cond_dim)

    def max_std_at(self, progress: float) -> float:
        """Return the largest std at a fraction of the run (0 to 1): constant, then cosine decay."""
        if self.hold >= 1:
            return self.max_std
        share = min(1.0, max(0.0, (progress - self.hold) / (1 - self.hold)))
        last = self.final_share * self.max_std + (1 - self.final_share) * self.min_std
        return last + (self.max_std - last) * (1 + math.cos(math.pi * share)) / 2


class NoiseNet(nn.Module):
    """Exploration noise std; see the module docstring.

    `max_std` is the present upper bound; derived from the progress of the run, it is not saved.
    """

    def __init__(
        self, config: NoiseConfig, chunk_shape: tuple[int, int], time_dim: int, cond_dim: int
    ) -> None:
        super().__init__()
        self.config, self.chunk_shape = config, tuple(chunk_shape)
        time_dim = time_dim if config.input == "state_time" else 0
        sizes = (time_dim + cond_dim, *config.hidden_dims, math.prod(chunk_shape))
        activation, self.max_std = ACTIVATIONS[config.activation], config.max_std
        self.layers: nn.Sequential | None = None
        if config.level == "learned":
            hidden = (layer for i, o in pairwise(sizes[:-1]) for layer in (nn.Linear(i, o), activation()))
            self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-2], sizes[-1]))

    def set_progress(self, progress: float) -> None:
        self.max_std = self.config.max_std_at(progress)

    def forward(self, time_features: Tensor, cond_features: Tensor) -> Tensor:
        """Return standard deviations (B, K, Th, Da).

        Shapes:
            time_features: (K, T). cond_features: (B, C').
        """
        batch, steps = len(cond_features), len(time_features)
        if self.layers is None:
            return cond_features.new_full((batch, steps, *self.chunk_shape), self.max_std)
        parts = [cond_features.unsqueeze(1).expand(-1, steps, -1)]
        if self.config.input == "state_time":
            parts.insert(0, time_features.detach().unsqueeze(0).expand(batch, -1, -1))
        raw = self.layers(torch.cat(parts, dim=-1))
        low, span = math.log(self.config.min_std), math.log(self.max_std / self.config.min_std)
        return torch.exp(low + span * (raw.tanh() + 1) / 2).view(batch, steps, *self.chunk_shape)


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
        noise_clip: float | None,
        reduction: str,
        count_start: bool,
        log_prob_range: tuple[float, float] | None,
    ) -> None:
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
        """The first tuned step, K - S."""
        return self.policy.table.num_steps - self.policy.tuned_steps

    @property
    def counts_start(self) -> bool:
        """Whether the start counts: a start at zero has no density."""
        return self.count_start and self.policy.table.start_std > 0

    @property
    def trainable(self) -> nn.Module:
        return nn.ModuleList([self.policy.scored_net, self.noise])

    @property
    def factors(self) -> float:
        """Number of log-densities averaged per row; 1 for sums."""
        steps, (rows, dims) = self.policy.tuned_steps, self.policy.chunk.shape
        start = float(self.counts_start)
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

    @torch.no_grad()
    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Explore; the record holds the chain (N, K+1, Th, Da) and its reduced log-density (N,)."""
        policy = self.policy
        cond = policy.encode(policy.observation(obs))
        shape = (len(cond), policy.tuned_steps + 1, *policy.chunk.shape)
        chain, mean, std = self.walk(cond, policy._randn(shape, generator))
        log_prob = gaussian_log_prob(chain[:, self.first + 1 :], mean, std)
        record = {"chain": chain, "log_prob": self.reduce(log_prob, chain)}
        return policy.executed(chain[:, -1]), record

    def walk(self, cond: Cond, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample chains from standard-normal draws (B, S+1, Th, Da); the first draw is the start.

        Returns:
            The chain (B, K+1, Th, Da), and mean and std of its tuned transitions (B, S, Th, Da).
        """
        table, step = self.policy.table, self._step(cond)
        std, noise = self.std(cond), draws[:, 1:]
        if self.noise_clip is not None:
            noise = noise.clamp(-self.noise_clip, self.noise_clip)
        noises = (noise * std).unbind(1)
        states, means = [table.start_std * draws[:, 0]], []
        for k in range(self.first):
            states.append(step(k, states[-1]))
        for k, scaled in enumerate(noises, start=self.first):
            means.append(step(k, states[-1]))
            states.append(means[-1] + scaled)
        if table.clip_action is not None:
            states[-1] = states[-1].clamp(-table.clip_action, table.clip_action)
        return torch.stack(states, dim=1), torch.stack(means, dim=1), std

    def std(self, cond: Cond) -> Tensor:
        """Return the std of every tuned step, (B, S, Th, Da)."""
        return self.noise(*self.policy.scored_net.features(cond, *self._times(cond)))

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

    def score(self, experience: Experience, rows: Rows, advantage: Tensor | None = None) -> Score:
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
        if self.counts_start:
            std = torch.full_like(values[:, 0], self.policy.table.start_std)
            start = gaussian_entropy(std) if chain is None else gaussian_log_prob(chain[:, 0], 0 * std, std)
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

    Source: ReinFlow (arXiv 2505.22094), the W2 term. Deviations from the released code: starts are drawn, as
    in the paper, instead of zero, and both policies share them.
    """

    def __init__(self, frozen: DenoisingPolicy, policy: DenoisingPolicy) -> None:
        self.frozen, self.policy = frozen, policy

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self.policy.noise_shape

    def losses(self, cond: Cond, noise: Tensor, frozen_cond: Cond | None = None) -> Tensor:
        with torch.no_grad():
            target = self.frozen.decode(frozen_cond or cond, noise)
        return (self.policy.decode(cond, noise, grad=True) - target).square().mean(dim=(1, 2))
