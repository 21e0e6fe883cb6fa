"""Data and protocols shared by policies, processes and algorithms.

Legend: B batch, K denoising steps, S recorded steps, To observation history, Th predicted horizon,
Ta executed steps, Do and Da observation and action widths, C condition width.

Sampling time `t` runs from noise (t = 0) to action (t = 1); denoising step `k = 0 … K-1` counts in
execution order. All quantities are normalised unless named `physical`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Kind = Literal["eps", "x0", "v", "velocity", "score", "edm", "consistency"]
"""What a network output means: noise, clean action, VP velocity (alpha eps - sigma x0), dx/dt in package
time, the score of the noisy density, or what EDM or a consistency model mixes with the state (their own
processes only)."""

Reduction = Literal["none", "step", "sample", "mean"]
"""(B, Th, Da) | (B, Th) | (B,) | scalar."""

Observation = Mapping[str, Tensor]
"""`state` (B, To, Do), physical; of some policies `goal` (B, Dg) and images (B, To, H, W, 3) by camera."""

Rng = torch.Generator | None
Device = torch.device | str | None

BoundField = Callable[[int, Tensor], Tensor]
"""`bound(k, x)` evaluates a backbone at its k-th bound time for its bound condition; (B, Th, Da)."""

Features = tuple[Tensor, Tensor]
"""Embedded times (K, T) and conditions (B, C') of a backbone."""


@dataclass(frozen=True)
class Cond:
    """Encoded observation, the condition of the backbone.

    Shapes:
        vec: (B, C), features of the whole observation.
        tokens: (B, N, Ct), features of its parts, for attention backbones; None: no tokens.

    Attributes:
        free: The same observation with the goal dropped, for classifier-free guidance; None: no guidance.
    """

    vec: Tensor
    tokens: Tensor | None = None
    free: Cond | None = None

    def __len__(self) -> int:
        return self.vec.shape[0]

    def repeat(self, n: int) -> Cond:
        """Repeat every row n times, row-major: (B, ...) -> (B n, ...)."""
        return self._map(lambda part: part.repeat_interleave(n, dim=0))

    def rows(self, index: Tensor) -> Cond:
        """Select rows by an index tensor (M,)."""
        return self._map(lambda part: part.index_select(0, index))

    def joined(self, other: Cond) -> Cond:
        """Append the rows of another condition, without the goal-free versions of both."""
        return Cond.concatenated([replace(self, free=None), replace(other, free=None)])

    @classmethod
    def concatenated(cls, conds: Sequence[Cond]) -> Cond:
        """Return the rows of conditions of one policy, one after the other."""
        tokens = None
        if conds[0].tokens is not None:
            tokens = torch.cat([cond.tokens for cond in conds if cond.tokens is not None])
        free = [cond.free for cond in conds if cond.free is not None]
        joined = cls.concatenated(free) if free else None
        return Cond(torch.cat([cond.vec for cond in conds]), tokens, joined)

    def freed(self, rows: Tensor) -> Cond:
        """Replace rows selected by a mask (B,) by their goal-free version."""
        assert self.free is not None
        vec = torch.where(rows[:, None], self.free.vec, self.vec)
        if self.tokens is None or self.free.tokens is None:
            return Cond(vec)
        return Cond(vec, torch.where(rows[:, None, None], self.free.tokens, self.tokens))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Cond:
        tokens = None if self.tokens is None else change(self.tokens)
        return Cond(change(self.vec), tokens, None if self.free is None else self.free._map(change))


@dataclass(frozen=True)
class TE:
    """Draws of a matching loss.

    Shapes:
        t: (B,), sampling times. eps: (B, Th, Da), noise.
        level: (B,) int64, index of each time in `GaussianPath.levels`; None for continuous times. Networks
            then embed each level once instead of each row.
        more: Extra draws of the process's loss (`GaussianPath.more_draws`), B rows each.
    """

    t: Tensor
    eps: Tensor
    level: Tensor | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)

    def rows(self, index: slice | Tensor) -> TE:
        level = None if self.level is None else self.level[index]
        more = {name: draws[index] for name, draws in self.more.items()}
        return TE(self.t[index], self.eps[index], level, more)


class Evaluate(Protocol):
    """A network bound to one batch of conditions, evaluated at sampling times; used by losses."""

    def __call__(
        self, x: Tensor, t: Tensor, until: Tensor | None = None, *, level: Tensor | None = None
    ) -> Tensor:
        """Return the raw output at x (B, Th, Da) and sampling times t (B,).

        Args:
            x: States.
            t: Sampling times.
            until: End times of the step (B,), for processes whose network takes two times; None: t.
            level: Index of each t in `GaussianPath.levels` (B,), if known; each level is embedded once.
        """


@dataclass(frozen=True)
class Chain:
    """A recorded denoising trajectory.

    Shapes:
        x: (B, S+1, Th, Da); x[:, s] is the input of recorded step s, x[:, -1] the action chunk.
        log_prob: (B, S, Th, Da) log-density of each element of x[:, s+1], unreduced and unclamped.
    """

    x: Tensor
    log_prob: Tensor

    @property
    def action(self) -> Tensor:
        return self.x[:, -1]


@dataclass(frozen=True)
class Step:
    """Denoising step passed to hooks; x = alpha x0 + sigma eps at t, and the step adds noise of `std`."""

    k: int
    num_steps: int
    t: float
    t_next: float
    cond: Cond
    alpha: float
    sigma: float
    std: float = 0.0


class Hook:
    """Hook of the denoising loop, e.g. guidance or inpainting; subclasses override methods."""

    def before_prediction(self, step: Step, x: Tensor) -> Tensor:
        """Return the state (B, Th, Da) that the network reads and from which the step is taken."""
        return x

    def on_prediction(self, step: Step, x: Tensor, x0: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (x0, eps) that replace the network's prediction; both (B, Th, Da)."""
        return x0, eps

    def on_state(self, step: Step, x: Tensor) -> Tensor:
        """Return the state (B, Th, Da) from which the loop continues."""
        return x


Hooks = Sequence[Hook]
Start = tuple[Tensor, float] | None
"""(x, t): begin at a state x (B, Th, Da) at sampling time t instead of at the noise (warm start)."""


@runtime_checkable
class NoiseDecoder(Protocol):
    """Map noise to action chunks, deterministically given the noise."""

    noise_sensitive: bool

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """(Th, Da) for a deterministic sampler, (K+1, Th, Da) for a stochastic one (start, then steps)."""

    def encode(self, obs: Observation) -> Cond:
        """Encode physical observations; called once per action."""

    def sample_noise(self, n: int, *, generator: Rng = None) -> Tensor:
        """Draw noise (n, *noise_shape)."""

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        """Return the normalised chunk (B, Th, Da); `grad` keeps the graph."""


@runtime_checkable
class PlanDecoder(Protocol):
    """Denoise a plan that can begin at another one, be edited on its way, and be carried on.

    A plan is the chunk itself, or what a chunk is read from: for planners rows (B, H, D) with states.
    """

    @property
    def table(self) -> Any:
        """Steps of the sampler."""

    @property
    def sampler(self) -> Any: ...

    @property
    def chunk(self) -> Any: ...

    @property
    def is_deterministic(self) -> bool: ...

    def trajectory(self, cond: Cond, noise: Tensor, *, start: Start = None, hooks: Hooks = ()) -> Tensor:
        """Return the plan, normalised; `start` and `hooks` are of its shape."""

    def chunk_of(self, plan: Tensor) -> Tensor:
        """Return the chunk (B, Th, Da) of a plan, normalised."""

    def start_noise(self, noise: Tensor) -> Tensor:
        """Return the part of noise (B, *noise_shape) from which denoising starts, a row per plan."""


@runtime_checkable
class MatchingLoss(Protocol):
    """Policies trained by regression on corrupted actions."""

    def sample_te(self, n: int, *, generator: Rng = None) -> TE:
        """Draw times and noise for n rows."""

    def matching_loss(self, cond: Cond, action: Tensor, te: TE, *, reduce: Reduction = "sample") -> Tensor:
        """Return the loss of normalised actions (B, Th, Da), reduced by `reduce`."""


@runtime_checkable
class ChainPolicy(Protocol):
    """Policies with a stochastic denoising chain whose transitions have densities."""

    def sample_chain(self, cond: Cond, *, noise: Tensor | None = None, generator: Rng = None) -> Chain:
        """Sample chunks and record the fine-tuned transitions; noise is (B, K+1, Th, Da)."""

    def chain_log_prob(self, cond: Cond, x: Tensor, *, steps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Score all recorded steps, or the columns `steps` (L,), of a chain x (B, S+1, Th, Da).

        Returns unreduced (log_prob, entropy), each (B, S or L, Th, Da).
        """

    def transition_log_prob(
        self, cond: Cond, x: Tensor, x_next: Tensor, step: Tensor, cond_row: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Score single transitions: x, x_next (M, Th, Da), step (M,) recorded-step index.

        `cond_row` (M,) maps transitions to rows of `cond`; a shared observation is encoded and projected
        once. Returns unreduced (log_prob, entropy), (M, Th, Da).
        """


class DensityPolicy(ChainPolicy, Protocol):
    """Policies with a density of the executed chunk in closed form: chains of one step.

    Attributes:
        head: The network of the density.
        has_entropy: Whether the entropy is known; else `chain_log_prob` returns 0 for it.
    """

    head: Any
    has_entropy: bool


class StepwisePolicy(ChainPolicy, Protocol):
    """Policies that evaluate a network once per row of a step table; see `policies.samplers.step_table`.

    Attributes:
        process: Meaning of the network's output.
        sampler: Settings of the table; replaced with `with_sampler`.
        table: The steps of the sampler.
        field: The network.
    """

    process: Any
    sampler: Any
    table: Any
    field: Any

    def with_sampler(
        self, sampler: Any, *, tuned_steps: int | None = None, log_prob_min_std: float | None = None
    ) -> Any:
        """Return a view with another sampler."""
        ...


@runtime_checkable
class Field(Protocol):
    """Denoiser at arbitrary state and time, in any parametrisation."""

    def predict(self, x: Tensor, t: Tensor, cond: Cond, *, kind: Kind) -> Tensor:
        """Return the prediction at x (B, Th, Da), sampling time t (B,), as `kind`."""


def _has_members(policy: Any, protocol: type) -> bool:
    """Whether a policy has what a protocol declares; since Python 3.12 `isinstance` overlooks submodules."""
    declared = {*vars(protocol), *vars(protocol)["__annotations__"]}
    return all(hasattr(policy, name) for name in declared if not name.startswith("_"))


def has_steps(policy: Any) -> bool:
    """Whether a network is evaluated step by step: with noise after the steps its chain has densities."""
    return isinstance(policy, ChainPolicy) and _has_members(policy, StepwisePolicy)


def has_density(policy: Any) -> bool:
    """Whether the density of chunks is known in closed form."""
    return isinstance(policy, ChainPolicy) and _has_members(policy, DensityPolicy)


def has_field(policy: Any) -> bool:
    """Whether the policy acts with the denoiser that its matching loss trains, at every noise level."""
    return has_steps(policy) and policy.process.is_integrable and not policy.process.has_second_time
