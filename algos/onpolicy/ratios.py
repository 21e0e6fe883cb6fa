"""Likelihood-ratio estimators between new and old policy.

An estimator acts, records its intermediate quantities, and later returns the log ratio of recorded rows under
the current weights. `ChainRatio` treats every recorded denoising step as an action; a Gaussian policy is a
chain of one step. Others: `algos.onpolicy.reinflow_ratio`, `algos.onpolicy.fpo_ratio`,
`algos.onpolicy.policyflow_ratio`.

Legend: M environment steps, B rows of a minibatch (pairs of environment step and inner step), S inner steps
per environment step, U distinct environment steps among rows, Th horizon, Da action width.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from algos.onpolicy.advantages import Experience
from policies.denoising import DenoisingPolicy
from policies.networks.distributions import gaussian_entropy
from policies.policy import Policy
from policies.protocols import Chain, Cond

REDUCTIONS = ("mean", "per_step", "joint")


@dataclass(frozen=True)
class Rows:
    """Rows of a minibatch, sorted by environment step where several may share one.

    Shapes:
        index: (B,) environment step * S + inner step. step: (B,) inner step. state: (U,) distinct environment
        steps. state_row: (B,) index into `state`; None: every row has its own. count: (U,) rows per
        distinct environment step; None: one.
    """

    index: Tensor
    step: Tensor
    state: Tensor
    state_row: Tensor | None = None
    count: Tensor | None = None

    @classmethod
    def sorted_from(cls, index: Tensor, inner_steps: int) -> Rows:
        """Split flat indices (B,), sorted unless S = 1.

        Steps that share their environment step share its condition on a CPU. Elsewhere each row has its own:
        finding them would wait for the device.
        """
        if inner_steps == 1:
            return cls(index, torch.zeros_like(index), index)
        if not index.is_cpu:
            return cls(index, index % inner_steps, index // inner_steps)
        state, state_row, count = torch.unique_consecutive(
            index // inner_steps, return_inverse=True, return_counts=True
        )
        return cls(index, index % inner_steps, state, state_row, count)

    @property
    def state_of_row(self) -> Tensor:
        """The environment step of every row, (B,)."""
        return self.state if self.state_row is None else self.state.index_select(0, self.state_row)


@dataclass(frozen=True)
class Score:
    """Per row (B,): log ratio, entropy, and fraction of its terms without gradient, due to clamps.

    `penalty` is added to the loss. `drift` replaces the log ratio in the KL estimate. `divergence` is the KL
    divergence from the old policy where it has a closed form and the experience a reference.
    """

    log_ratio: Tensor
    entropy: Tensor
    saturated: Tensor
    penalty: Tensor | None = None
    drift: Tensor | None = None
    divergence: Tensor | None = None


class RatioEstimator(ABC):
    """Acts, and computes likelihood ratios. Picklable: every worker acts with its own copy.

    `policy` is the policy in training, with exploration.
    """

    policy: Any

    @property
    @abstractmethod
    def inner_steps(self) -> int:
        """S, rows per environment step."""

    @property
    @abstractmethod
    def factors(self) -> float | None:
        """Number of density factors whose geometric mean is the ratio of a row; 1: the full product.

        A ratio clip range c limits the log-density to about `factors` c. None: no clipping.
        """

    @property
    def evaluations(self) -> int:
        return 1

    @abstractmethod
    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Return physical actions (N, Ta, Da) and a record, each (N, ...)."""

    @abstractmethod
    def score(self, experience: Experience, rows: Rows, advantage: Tensor | None = None) -> Score:
        """Return the differentiable score of recorded rows under the current weights.

        `advantage` (B,) is for estimators with sign-dependent bounds.
        """

    def reference(self, experience: Experience, rows: Rows) -> Tensor | None:
        """Return means and entropies (2, B, Th, Da) of recorded normal transitions; None: no closed form."""
        return None

    def set_progress(self, progress: float) -> None:  # noqa: B027
        """Update schedules for the completed fraction of the run (0 to 1)."""

    def on_cpu(self) -> Self:
        """Return the estimator on the CPU, for workers."""
        actor = copy.copy(self)
        actor.policy = self.policy.on_cpu()
        return actor

    def state_dict(self) -> dict[str, Any]:
        """Return the training state beside the policy."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        ...


class FlowRatio(RatioEstimator):
    """A ratio estimator of a denoising policy."""

    policy: DenoisingPolicy

    @property
    def trainable(self) -> nn.Module:
        return self.policy.field


class NoisyFlowRatio(FlowRatio):
    """A ratio estimator with learned exploration noise, saved beside the policy."""

    noise: nn.Module

    def on_cpu(self) -> Self:
        actor = super().on_cpu()
        actor.noise = copy.deepcopy(self.noise).cpu()
        return actor

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.noise.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise.load_state_dict(state)


def reduce_log_prob(log_prob: Tensor, how: str) -> Tensor:
    """Reduce (..., Ta, Da) to (...).

    `mean`: over executed steps and dims, the geometric mean of the ratios of all elements (DPPO; its clip
    ranges are sized for it). `per_step`: sum over dims, mean over steps. `joint`: sum over both.
    """
    match how:
        case "mean":
            return log_prob.mean(dim=(-2, -1))
        case "per_step":
            return log_prob.sum(dim=-1).mean(dim=-1)
    return log_prob.sum(dim=(-2, -1))


def normal_divergence(entropy: Tensor, new_entropy: Tensor, at_mean: Tensor) -> Tensor:
    """Return KL(old || new) of normal distributions, element by element, from their entropies H.

    1/2 exp(2 (H - H_new)) - H - log p_new(mean), with `at_mean` the log-density of the new one at the mean of
    the old one: exp(2 (H - H_new)) is the ratio of variances.
    """
    return 0.5 * torch.exp(2.0 * (entropy - new_entropy)) - entropy - at_mean


class ChainRatio(RatioEstimator):
    """Ratio of single denoising transitions: elementwise clamped, over executed rows, reduced.

    Args:
        policy: A chain policy with its exploration sampler.
        log_prob_range: Clamp of elementwise log-densities; no gradient beyond; None: off.
        reduction: See `reduce_log_prob`.

    Source: DPPO (arXiv 2409.00588), section 4; clamp and mean as in the reference implementation.
    """

    def __init__(self, policy: Any, *, log_prob_range: tuple[float, float] | None, reduction: str) -> None:
        self.policy, self.log_prob_range, self.reduction = policy, log_prob_range, reduction

    @property
    def inner_steps(self) -> int:
        return self.policy.tuned_steps

    @property
    def factors(self) -> float:
        chunk = self.policy.chunk
        sizes = {"mean": chunk.width, "per_step": chunk.act_steps}
        return float(sizes.get(self.reduction, 1))

    @torch.no_grad()
    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Explore; the record holds the chain (N, S+1, Th, Da) and its reduced log-densities (N, S).

        The sampler computes the densities while acting, which saves a second pass over the data.
        """
        policy: Policy = self.policy
        cond = policy.encode(policy.observation(obs))
        chain = self.sample(cond, generator)
        record = {"chain": chain.x, "log_prob": self.reduce(chain.log_prob)[0]}
        return policy.executed(chain.action), record

    def sample(self, cond: Cond, generator: torch.Generator) -> Chain:
        return self.policy.sample_chain(cond, generator=generator)

    def reduce(self, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Clamp and reduce (..., Th, Da); return (reduced, fraction clamped), each (...)."""
        executed = log_prob[..., self.policy.chunk.executed, :]
        if self.log_prob_range is None:
            zeros = torch.zeros(executed.shape[:-2], device=executed.device)
            return reduce_log_prob(executed, self.reduction), zeros
        clamped = executed.clamp(*self.log_prob_range)
        with torch.no_grad():
            saturated = (clamped != executed).to(executed.dtype).mean(dim=(-2, -1))
        return reduce_log_prob(clamped, self.reduction), saturated

    def reduction_weights(self) -> Tensor:
        """Return the derivative of reduced log-densities by each of (Th, Da), where none is clamped."""
        rows, (th, da) = self.policy.chunk.executed, self.policy.chunk.shape
        executed = torch.zeros(th, da).index_fill_(0, torch.arange(th)[rows], 1.0)
        return executed / {"mean": executed.sum(), "per_step": executed.sum() / da}.get(self.reduction, 1.0)

    def score(self, experience: Experience, rows: Rows, advantage: Tensor | None = None) -> Score:
        x, x_next = self.transitions(experience, rows)
        old = experience.record["log_prob"].flatten().index_select(0, rows.index)
        cond, at, divergence = experience.cond.rows(rows.state), (rows.step, rows.state_row), None
        if experience.reference is None:
            log_prob, entropy = self.policy.transition_log_prob(cond, x, x_next, *at)
        else:  # two points, one evaluation of the network
            old_mean, old_entropy = experience.reference.index_select(1, rows.index)
            points = torch.stack([x_next, old_mean])
            (log_prob, at_mean), entropy = self.policy.transition_log_prob(cond, x, points, *at)
            divergence = self.reduce_executed(normal_divergence(old_entropy, entropy, at_mean))
        new, saturated = self.reduce(log_prob)
        return Score(new - old, self.reduce_executed(entropy), saturated, divergence=divergence)

    def transitions(self, experience: Experience, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the states before and after recorded transitions, (B, Th, Da) each."""
        before = rows.index + rows.state_of_row  # a chain of S transitions has S + 1 states
        states = experience.record["chain"].flatten(0, 1)  # (M (S+1), Th, Da)
        return states.index_select(0, before), states.index_select(0, before + 1)

    def reduce_executed(self, values: Tensor) -> Tensor:
        """Reduce entropies or divergences (B, Th, Da) of executed rows to (B,), as log-densities are."""
        return reduce_log_prob(values[..., self.policy.chunk.executed, :], self.reduction)

    def reference(self, experience: Experience, rows: Rows) -> Tensor | None:
        """Return means and entropies under the current weights: mean = x + variance d log p(x) / dx."""
        if not getattr(self.policy, "has_entropy", True) or self.policy.noise_correlation:
            return None
        x, x_next = self.transitions(experience, rows)
        cond = experience.cond.rows(rows.state)
        with torch.enable_grad():
            point = x_next.requires_grad_()
            log_prob, entropy = self.policy.transition_log_prob(cond, x, point, rows.step, rows.state_row)
            (slope,) = torch.autograd.grad(log_prob.sum(), point)
        variance = torch.exp(2.0 * (entropy - gaussian_entropy(torch.ones_like(entropy))))
        return torch.stack([x_next + variance * slope, entropy]).detach()


class BcTerm(Protocol):
    """Behaviour-cloning term towards another policy."""

    @property
    def noise_shape(self) -> tuple[int, ...]: ...

    @property
    def frozen(self) -> Policy: ...

    def losses(self, cond: Cond, noise: Tensor, frozen_cond: Cond | None = None) -> Tensor:
        """Return the loss of each row (B,); noise is (B, *noise_shape).

        `frozen_cond` is the condition of the other policy, if its encoder is another; None: `cond`.
        """
        ...


class CloningTerm:
    """Behaviour-cloning term: minus the clamped mean log-density of the frozen policy's chains.

    Source: DPPO reference implementation (use_bc_loss).
    """

    def __init__(self, frozen: Any, ratio: ChainRatio) -> None:
        self.frozen, self.ratio = frozen, ratio

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """(K+1, Th, Da): start noise, then one draw per denoising step."""
        shape = self.frozen.noise_shape
        return shape if len(shape) == 3 else (2, *shape)

    def losses(self, cond: Cond, noise: Tensor, frozen_cond: Cond | None = None) -> Tensor:
        with torch.no_grad():
            chain = self.frozen.sample_chain(frozen_cond or cond, noise=noise).x
        log_prob, _ = self.ratio.policy.chain_log_prob(cond, chain)
        if self.ratio.log_prob_range is not None:
            log_prob = log_prob.clamp(*self.ratio.log_prob_range)
        return -log_prob.mean(dim=(1, 2, 3))
