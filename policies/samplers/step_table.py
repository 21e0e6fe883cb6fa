"""Step table: coefficients, means and densities of denoising steps.

Legend: B batch, K denoising steps, k step in the order of execution, M scored transitions, Th horizon,
Da action width, D = 1 or Da; alpha, sigma signal and noise amplitudes.

Every sampler that evaluates the network once per step is a table of coefficients::

    (x0, eps) = linear in (x, pred)              what the prediction means
    x0   <- clip(x0, clip_x0), eps <- eps + alpha / sigma (unclipped - clipped x0)   where recomputed
    eps  <- clip(eps, eps_clip)
    mean = to_x0 x0 + to_eps eps
    x'   = mean + std clip(noise, noise_clip)

Methods with several evaluations per step (Heun, midpoint) or past ones (multistep) are rows of the same
table, one per evaluation, with a memory m initialised to the first row's x0::

    mean = to_x0 x0 + to_eps eps + to_memory m,      m <- keep_x0 x0 + keep_eps eps

Tables are computed in float64; the loop uses Python floats. One function computes the mean for sampling
and for scoring stored transitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.processes.base import GaussianPath
from policies.protocols import BoundField
from policies.registry import name_of


class Coefficients(NamedTuple):
    """Coefficients of one step (floats), or tensors that broadcast against chunks.

    The first seven define the step (module docstring). The rest are the same arithmetic with fewer passes
    over the chunk. y is proportional to the clipped x0: `clip(x + ratio pred, limit)`, or `clip(pred, limit)`
    where the network predicts x0. `mean = mean_y y + mean_x x + mean_pred pred`. Without a bound, mean_y is 0
    and y is not computed.
    """

    x0_x: Any
    x0_pred: Any
    eps_x: Any
    eps_pred: Any
    slope: Any  # alpha / sigma where eps follows a clipped x0, else 0
    to_x0: Any
    to_eps: Any
    ratio: Any
    limit: Any
    mean_y: Any
    mean_x: Any
    mean_pred: Any


class Memory(NamedTuple):
    """Coefficients of the memory m, K numbers each: of m in the mean, of x0 and eps in the next m."""

    to_memory: tuple[float, ...]
    keep_x0: tuple[float, ...]
    keep_eps: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class StepTable:
    """A sampler's steps for one process: K network evaluations, one row of coefficients each.

    Shapes:
        net_time: (K,) float32, time input of the backbone.
        second_time: (K,) float32, second time input; None: the backbone takes one time.
        std: (K, D) float64, standard deviation of the injected noise.
        schedule_std: (K, D) float64, `std` before floors.
        coefficients: (12, K, D) float64, in the order of `Coefficients`.

    Attributes:
        memory: Coefficients of methods with memory; None: rows are independent steps.
        loop: External loop (bound network, noise) -> chunk that replaces the rows.
    """

    times: tuple[float, ...]  # K+1 sampling times; step k starts at `times[k]`
    net_time: Tensor
    std: Tensor
    schedule_std: Tensor
    coefficients: Tensor
    alpha: tuple[float, ...]  # K signal amplitudes at `times`
    sigma: tuple[float, ...]  # K noise amplitudes at `times`
    predicts_x0: bool  # whether the network predicts x0
    uses_pred: bool  # whether the mean uses the prediction beside the clipped x0
    clip_x0: float | None
    eps_clip: float | None
    noise_clip: float | None
    clip_action: float | None
    second_time: Tensor | None = None
    start_std: float = 1.0  # standard deviation of the start state; scales the start noise
    memory: Memory | None = None
    entries: tuple[bool, ...] = ()  # whether sampling may start at a row; False for a corrector's row
    recompute: bool = True  # whether eps is recomputed from a clipped x0
    clip_state: float | None = None  # bound on the state after every step; None: no bound
    loop: Callable[[BoundField, Tensor], Tensor] | None = None
    rows: tuple[Coefficients, ...] = field(init=False, repr=False)
    noisy: tuple[bool, ...] = field(init=False, repr=False)
    spread: tuple[float, ...] = field(init=False, repr=False)  # largest deviation of every step before floors
    _copies: dict[Any, Tensor] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        columns = self.coefficients[:, :, 0].T.tolist() if self.coefficients.shape[-1] == 1 else []
        object.__setattr__(self, "rows", tuple(Coefficients(*column) for column in columns))
        object.__setattr__(self, "noisy", tuple((self.std > 0).any(dim=-1).tolist()))
        object.__setattr__(self, "spread", tuple(self.schedule_std.amax(dim=-1).tolist()))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copies": {}}  # their devices may not exist where it is unpickled

    def __deepcopy__(self, memo: dict[int, Any]) -> StepTable:
        return self  # nothing changes a table

    @property
    def num_steps(self) -> int:
        return len(self.times) - 1

    @property
    def is_deterministic(self) -> bool:
        return not any(self.noisy)

    def at(self, k: int | Tensor, x: Tensor) -> Coefficients:
        """Return the coefficients of step k for chunks x (M, Th, Da): floats, or gathered rows (M, 1, D)."""
        if isinstance(k, int) and self.rows:
            return self.rows[k]
        picked = self.to_device("coefficients", x)[:, k]
        return Coefficients(*(picked if isinstance(k, int) else picked.unsqueeze(2)).unbind(0))

    @cached_property
    def native_steps(self) -> Tensor | None:
        """The steps for the loop in C, (K, 6) float32; None: they are more than a bounded y and products.

        Columns: ratio, limit, factors of state, y and prediction, deviation.
        """
        if not self.rows or any(part is not None for part in (self.memory, self.loop, self.eps_clip)):
            return None
        c = Coefficients(*self.coefficients[:, :, 0])
        columns = (c.ratio, c.limit, c.mean_x, c.mean_y, c.mean_pred, self.std[:, 0])
        with torch.inference_mode(False):
            return torch.stack(columns, dim=1).to(torch.float32)

    def step_at(self, t: float) -> int:
        """Return the first step whose sampling time is at least t."""
        for k in range(self.num_steps):
            if self.times[k] >= t - 1e-6 and (not self.entries or self.entries[k]):
                return k
        raise ConfigError(
            f"a start time must be at most {self.times[-2]:.4g}, the last of {self.num_steps} denoising "
            f"steps; got {t:.4g}. Start earlier or use more steps."
        )

    def to_device(self, name: str, like: Tensor) -> Tensor:
        """Return a tensor of the table with the device and dtype of `like`; the copy is cached."""
        is_plain = type(like) is Tensor and torch._C._functorch.peek_interpreter_stack() is None
        if torch.compiler.is_compiling() or not is_plain:  # such tensors must not enter the cache
            return getattr(self, name).to(device=like.device, dtype=like.dtype)
        key = (name, like.device, like.dtype)
        if key not in self._copies:
            with torch.inference_mode(False):
                self._copies[key] = getattr(self, name).to(device=like.device, dtype=like.dtype)
        return self._copies[key]


def table_of(sampler: Any, process: Any) -> StepTable:
    """Return a sampler's table for a process; equal ones share it, as nothing changes a table."""
    try:
        hash((sampler, process))
        is_kept = not torch.compiler.is_compiling()
    except TypeError:  # options of another program
        is_kept = False
    table: StepTable = _kept_table(sampler, process) if is_kept else sampler.table(process)
    return table


@lru_cache(maxsize=256)
def _kept_table(sampler: Any, process: Any) -> StepTable:
    with torch.inference_mode(False):  # made while sampling, it is also used in training
        table: StepTable = sampler.table(process)
    return table


@dataclass(frozen=True, kw_only=True)
class StepRules(Checked):
    """Bounds common to all samplers, in normalised units."""

    key: ClassVar[str] = "sampler"

    clip_x0: float | None = bounded(1.0, gt=0)  # bound on the clean chunk of every step; null: no bound
    clip_action: float | None = bounded(None, gt=0)  # bound on the final chunk; null: no bound
    noise_clip: float | None = bounded(3.0, gt=0)  # bound on standard-normal draws; null: no bound
    min_std: float = bounded(0.0, ge=0)  # floor on the noise std of every step
    final_std: float | None = bounded(None, ge=0)  # noise of the last step; null: schedule and floor


def build_step_table(
    process: GaussianPath,
    rules: StepRules,
    times: Sequence[float],
    to_x0: Tensor,
    to_eps: Tensor,
    schedule_std: Tensor,
    *,
    recompute: bool = True,
    eps_clip: float | None = None,
    memory: Memory | None = None,
    entries: Sequence[bool] = (),
    clip_state: float | None = None,
) -> StepTable:
    """Build the table of steps `mean = to_x0 x0 + to_eps eps`; options as in `StepTable`.

    Shapes:
        times: K+1 sampling times. to_x0, to_eps, schedule_std (noise before floors): (K, D) float64.
    """
    process.check_steps(times)
    t = torch.tensor(times[:-1], dtype=torch.float64)
    zero, one = torch.zeros_like(t), torch.ones_like(t)
    alpha, sigma = process.alpha_sigma(t)
    x0_x, eps_x = (process.convert(one, t, zero, process.kind, kind)[:, None] for kind in ("x0", "eps"))
    x0_pred, eps_pred = (process.convert(zero, t, one, process.kind, kind)[:, None] for kind in ("x0", "eps"))
    _require_finite(process, t, torch.cat([x0_x, x0_pred, eps_x, eps_pred], dim=1))
    slope = (alpha / sigma)[:, None] if recompute else zero[:, None]
    predicts_x0 = process.kind == "x0"
    scale = x0_pred if predicts_x0 else x0_x  # x0 = scale y
    if rules.clip_x0 is None:
        mean_y, mean_x = zero[:, None], to_x0 * x0_x + to_eps * eps_x
        mean_pred = to_x0 * x0_pred + to_eps * eps_pred
    elif recompute:  # eps = (x - alpha clipped x0) / sigma
        mean_y, mean_x, mean_pred = scale * (to_x0 - to_eps * slope), to_eps / sigma[:, None], zero[:, None]
    else:
        mean_y, mean_x, mean_pred = scale * to_x0, to_eps * eps_x, to_eps * eps_pred
    bound = math.inf if rules.clip_x0 is None else rules.clip_x0
    definition = (x0_x, x0_pred, eps_x, eps_pred, slope, to_x0, to_eps)
    coefficients = (*definition, x0_pred / scale, bound / scale, mean_y, mean_x, mean_pred)
    std = schedule_std.clamp(min=rules.min_std)
    if rules.final_std is not None:
        std[-1] = rules.final_std
    second = process.second_net_time(t, torch.tensor(times[1:], dtype=torch.float64))
    return StepTable(
        times=tuple(times),
        net_time=process.net_time(t).to(torch.float32),
        std=std,
        schedule_std=schedule_std,
        coefficients=torch.stack([part.expand_as(std) for part in coefficients]),
        alpha=tuple(alpha.tolist()),
        sigma=tuple(sigma.tolist()),
        predicts_x0=predicts_x0,
        uses_pred=bool((mean_pred != 0).any()),
        clip_x0=rules.clip_x0,
        eps_clip=eps_clip,
        noise_clip=rules.noise_clip,
        clip_action=rules.clip_action,
        second_time=None if second is None else second.to(torch.float32),
        start_std=process.start_std(times[0]),
        memory=memory,
        entries=tuple(entries),
        recompute=recompute,
        clip_state=clip_state,
    )


def _require_finite(process: GaussianPath, t: Tensor, parts: Tensor) -> None:
    """Refuse times (K,) at which the prediction does not determine x0 and eps, by their coefficients."""
    if len(bad := t[~parts.isfinite().all(dim=1)]):
        raise ConfigError(
            f"process={name_of('process', process)}: x0 and eps do not follow from a prediction of "
            f"'{process.kind}' at t = {float(bad[0]):.4g}. Predict another kind, e.g. 'velocity', or "
            f"override `grid` so that sampling visits other times."
        )


def resampled(
    table: StepTable, process: GaussianPath, rules: StepRules, *, steps: int, noise: float = 1.0
) -> StepTable:
    """Evaluate the network `steps` times per level; the last evaluation takes the table's own step.

    The others stay at their level and redraw the fraction `noise` of the noise around the predicted x0::

        x <- alpha x0 + sigma (sqrt(1 - noise^2) eps + noise draw)

    With `noise` = 1 only x0 remains of the state, whose spread is below that of clean chunks. Small values
    are Langevin steps, x + (noise sigma)^2 / 2 score + noise sigma draw, which keep the level's distribution.
    The table, of `process` and the sampler `rules`, has one evaluation per row.

    Source: inference-time policy steering, arXiv 2411.16627 (`noise` = 1); RePaint, arXiv 2201.09865.
    """
    if steps < 1 or not 0 <= noise <= 1:
        raise ConfigError(f"resampling needs steps of at least 1, noise in [0, 1]; got {steps}, {noise}.")
    if table.memory is not None or table.loop is not None:
        raise ConfigError(
            "resampling needs a sampler of one evaluation per step: ddpm, ddim, ancestral or euler, not "
            "heun, midpoint, dpmpp_2m or diffusers."
        )
    single = Coefficients(*table.coefficients)
    alpha, sigma = (torch.tensor(a, dtype=torch.float64)[:, None] for a in (table.alpha, table.sigma))
    kept_noise = math.sqrt(1 - noise * noise) * sigma

    def repeated(staying: Tensor, leaving: Tensor) -> Tensor:
        """Return one coefficient of all rows: that of staying at a level, last that of leaving it."""
        rows = [staying.expand_as(leaving)] * (steps - 1)
        return rearrange([*rows, leaving], "steps K D -> (K steps) D")

    repeats = build_step_table(
        process,
        rules,
        [t for t in table.times[:-1] for _ in range(steps)] + [table.times[-1]],
        repeated(alpha, single.to_x0),
        repeated(kept_noise, single.to_eps),
        repeated(noise * sigma, table.schedule_std),
        recompute=table.recompute,
        eps_clip=table.eps_clip,
        clip_state=table.clip_state,
    )
    return replace(repeats, net_time=table.net_time.repeat_interleave(steps), start_std=table.start_std)


def transition(
    table: StepTable, k: int | Tensor, x: Tensor, pred: Tensor, *, plus: Tensor | None = None
) -> Tensor:
    """Return the mean of the next state, plus an optional term (scaled noise).

    Shapes:
        k: one step, or (M,) one step per transition. x: (M, Th, Da) state. pred: (M, Th, Da) network output.
    """
    if table.eps_clip is not None:
        mean = merge_prediction(table, k, *split_prediction(table, k, x, pred))
        return mean if plus is None else plus + mean
    c = table.at(k, x)
    if table.clip_x0 is None:
        mean = c.mean_x * x if plus is None else _axpy(plus, x, c.mean_x)
        return _axpy(mean, pred, c.mean_pred)
    if table.predicts_x0:
        y = pred.clamp(-c.limit, c.limit)
    else:
        y = _axpy(x, pred, c.ratio).clamp_(-c.limit, c.limit)
    mean = c.mean_y * y if plus is None else _axpy(plus, y, c.mean_y)
    mean = _axpy(mean, x, c.mean_x)
    return _axpy(mean, pred, c.mean_pred) if table.uses_pred else mean


def _axpy(base: Tensor, x: Tensor, factor: float | Tensor) -> Tensor:
    return torch.add(base, x, alpha=factor) if isinstance(factor, float) else torch.addcmul(base, x, factor)


def split_prediction(table: StepTable, k: int | Tensor, x: Tensor, pred: Tensor) -> tuple[Tensor, Tensor]:
    """Return the network's (x0, eps)."""
    c = table.at(k, x)
    return c.x0_x * x + c.x0_pred * pred, c.eps_x * x + c.eps_pred * pred


def merge_prediction(table: StepTable, k: int | Tensor, x0: Tensor, eps: Tensor) -> Tensor:
    """Clip (x0, eps) and return the mean of the next state."""
    c = table.at(k, x0)
    x0, eps = clip_prediction(table, k, x0, eps)
    return c.to_x0 * x0 + c.to_eps * eps


def recall_prediction(
    table: StepTable, k: int, x0: Tensor, eps: Tensor, memory: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Clip (x0, eps) and return the mean of the next state and the new memory (None: x0)."""
    assert table.memory is not None
    c, m = table.at(k, x0), table.memory
    x0, eps = clip_prediction(table, k, x0, eps)
    mean = c.to_x0 * x0 + c.to_eps * eps
    if m.to_memory[k]:
        mean = mean + m.to_memory[k] * (x0 if memory is None else memory)
    return mean, m.keep_x0[k] * x0 + m.keep_eps[k] * eps


def clip_prediction(table: StepTable, k: int | Tensor, x0: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the table's bounds to (x0, eps)."""
    c = table.at(k, x0)
    if table.clip_x0 is not None:
        clipped = x0.clamp(-table.clip_x0, table.clip_x0)
        x0, eps = clipped, eps + c.slope * (x0 - clipped)
    if table.eps_clip is not None:
        eps = eps.clamp(-table.eps_clip, table.eps_clip)
    return x0, eps
