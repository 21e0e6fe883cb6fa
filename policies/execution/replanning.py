"""Replanning: initialise the next plan from the previous one.

Legend: B batch, K denoising steps of the policy, R noise draws of a run, Th predicted horizon, Ta executed
steps, Da action width. A plan is a predicted chunk (B, Th, Da), normalised, or the trajectory of a planner
(B, Th, D); alpha, sigma are the amplitudes at the start of the short run.

    guess_i = plan_min(i + n, Th - 1)       plan shifted by n steps, last row repeated
    x = guess                               start of the short run (arXiv 2508.05396, RTI-DP, for Ta = 1)
    x = alpha guess + sigma eps             the same with `renoise` (SDEdit, arXiv 2108.01073)
    x_i = alpha a_i, later sigma eps_i      actions a_i executed before the newest observation (BESO)

Deviations from RTI-DP: Ta may exceed 1, the guess may be noised to the start level of the run, and the run
may consist of Euler steps.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from policies.errors import CapabilityError, ConfigError
from policies.execution.warm_start import WarmStart
from policies.policy import Policy
from policies.policy_config import ChunkSpec
from policies.processes.base import GaussianPath
from policies.protocols import PlanDecoder
from policies.samplers.ddpm import DDPM
from policies.samplers.ode import Euler, even_times
from policies.samplers.step_table import StepRules

AnyPolicy = TypeVar("AnyPolicy")


@dataclass(frozen=True, kw_only=True)
class EulerFrom(Euler):
    """Equal first-order steps from a sampling time on."""

    start: float = 0.0

    def times(self, process: GaussianPath) -> list[float]:
        return even_times(process, self.steps, self.start)


class Decision(NamedTuple):
    """Decisions of B episodes."""

    actions: Tensor  # (B, Ta, Da), physical
    plan: Tensor  # (B, Th, Da or D), normalised, for the next decision
    calls: int  # network evaluations per decision


class Replanner:
    """Plan with full denoising, or with a short run from the previous plan; stateless.

    Raises:
        CapabilityError: If the policy does not denoise.
        ConfigError: If the short run does not fit the policy, or no plan rows remain.

    Source:
        RTI-DP (arXiv 2508.05396): the shifted plan as the start, the list of levels, the gripper by its sign;
        BESO (arXiv 2304.02532), released code: executed actions as the start.
    """

    def __init__(self, policy: Any, warm_start: WarmStart) -> None:
        if not isinstance(policy, PlanDecoder):
            kind = type(policy).__name__
            raise CapabilityError(f"warm_start needs a policy that denoises its plan; {kind} does not.")
        self.chunk: ChunkSpec = policy.chunk
        _check(warm_start, policy)
        self._warm_start = warm_start
        self._full: Any = policy
        self._short = _short(policy, warm_start)
        table: Any = self._short.table
        wanted = warm_start.steps or table.num_steps
        self._first = table.step_at(table.times[table.num_steps - wanted])

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self._noisier.noise_shape

    @property
    def is_deterministic(self) -> bool:
        return bool(self._noisier.is_deterministic)

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        return self._noisier.sample_noise(n, generator=generator)

    @property
    def _noisier(self) -> Any:
        return max((self._full, self._short), key=_num_draws)

    @torch.no_grad()
    def decide(
        self, obs: Any, *, noise: Tensor, previous: Tensor | None = None, elapsed: int | None = None
    ) -> Decision:
        """Plan for observations (B, To, Do); see `Policy.act`.

        Args:
            obs: Physical observations.
            noise: (B, *noise_shape).
            previous: Plans of the previous decisions; None: first decisions.
            elapsed: Control steps since then; None: the executed rows.
        """
        cond = self._full.encode(self._full.observation(obs))
        if previous is None:
            plan = self._full.trajectory(cond, _noise_for(self._full, noise))
            return Decision(self.command(plan), plan, self._full.table.num_steps)
        start = (self._start(previous, noise, elapsed), self._short.table.times[self._first])
        plan = self._short.trajectory(cond, _noise_for(self._short, noise), start=start)
        if self._warm_start.executed:
            plan = self._with_executed(plan, previous, elapsed)
        return Decision(self.command(plan), plan, self._short.table.num_steps - self._first)

    def guess(self, previous: Tensor, elapsed: int | None = None) -> Tensor:
        """Return plans shifted, the last row repeated, grippers open or closed."""
        left = shifted(previous, self.chunk.act_steps if elapsed is None else elapsed)
        return _by_sign(left, self._warm_start.gripper, self._warm_start.gripper_guess)

    def command(self, plan: Tensor) -> Tensor:
        """Return the commands (B, Ta, Da) of plans."""
        return self.physical(self.chunk_of(plan)[:, self.chunk.executed])

    def chunk_of(self, plan: Tensor) -> Tensor:
        """Return the chunks (B, Th, Da) of plans."""
        chunk: Tensor = self._full.chunk_of(plan)
        return chunk

    def physical(self, rows: Tensor) -> Tensor:
        """Return rows of chunks (B, R, Da) as commands; grippers at an end of their range."""
        commands: Tensor = self._full.physical(_by_sign(rows, self._warm_start.gripper, 1.0))
        return commands

    def _start(self, previous: Tensor, noise: Tensor, elapsed: int | None) -> Tensor:
        table, k = self._short.table, self._first
        eps = self._noisier.start_noise(noise)
        if self._warm_start.executed:
            return self._with_executed(table.start_std * eps, table.alpha[k] * previous, elapsed)
        guess = self.guess(previous, elapsed)
        if not self._warm_start.renoise:
            return guess
        return table.alpha[k] * guess.repeat_interleave(len(eps) // len(guess), 0) + table.sigma[k] * eps

    def _with_executed(self, rows: Tensor, previous: Tensor, elapsed: int | None) -> Tensor:
        """Replace the rows before the newest observation by the executed ones; all (B, Th, Da).

        Such rows of a previous plan are executed ones as well, except in the first decision.
        """
        first = self.chunk.action_start
        left = shifted(previous, self.chunk.act_steps if elapsed is None else elapsed)
        return torch.cat([left[:, :first], rows[:, first:]], dim=1)


def shifted(plan: Tensor, rows: int) -> Tensor:
    """Return plans (B, Th, Da) moved on by a number of rows, the last one repeated."""
    horizon = plan.shape[1]
    return plan[:, [min(i + rows, horizon - 1) for i in range(horizon)]]


def with_act_steps(policy: AnyPolicy, act_steps: int | None) -> AnyPolicy:
    """Return the policy with another number of executed rows; None keeps it unchanged."""
    if act_steps is None:
        return policy
    if not isinstance(policy, Policy):
        kind = type(policy).__name__
        raise CapabilityError(
            f"act_steps={act_steps} needs a policy that predicts a horizon; {kind} has none."
        )
    return policy.with_act_steps(act_steps)


def _check(warm_start: WarmStart, policy: PlanDecoder) -> None:
    chunk, steps = policy.chunk, policy.table.num_steps
    if not warm_start.is_on:
        raise ConfigError("warm_start needs a short run; give warm_start.steps or warm_start.levels.")
    if warm_start.executed:
        if not chunk.action_start:
            raise ConfigError(
                "warm_start.executed needs rows before the newest observation; got policy.action_start=0."
            )
        return
    if warm_start.start is None and (warm_start.steps or 0) > steps:
        raise ConfigError(
            f"warm_start.steps must be at most {steps}, the policy's denoising steps; got {warm_start.steps}."
        )
    if chunk.executed.stop >= chunk.horizon:
        raise ConfigError(
            f"warm_start needs planned actions that were not executed; of horizon={chunk.horizon} rows "
            f"{chunk.action_start} are past and act_steps={chunk.act_steps} executed. Lower act_steps, or "
            f"train with a longer horizon."
        )
    if not all(0 <= i < chunk.action_dim for i in warm_start.gripper):
        raise ConfigError(
            f"warm_start.gripper must name action dimensions, 0 to {chunk.action_dim - 1}; got "
            f"{list(warm_start.gripper)}."
        )
    if warm_start.gripper and getattr(policy, "inverse", None) is not None:
        raise ConfigError("warm_start.gripper names actions; the plans of this policy hold states alone.")


def _short(policy: Any, warm_start: WarmStart) -> Any:
    """Return the policy with the sampler of its short run, with its own bounds."""
    own = policy.sampler
    if warm_start.executed or (warm_start.steps is not None and warm_start.start is None):
        return policy
    limits = {f.name: getattr(own, f.name) for f in fields(StepRules) if hasattr(own, f.name)}
    try:
        if warm_start.steps is None:
            variance = getattr(own, "variance", DDPM.variance)
            return policy.with_sampler(DDPM(**limits, variance=variance, levels=warm_start.levels))
        names = ("clip_x0", "clip_action", "clip_state")
        clips = {name: getattr(own, name) for name in names if hasattr(own, name)}
        return policy.with_sampler(EulerFrom(**clips, steps=warm_start.steps, start=warm_start.start or 0.0))
    except ConfigError as error:
        raise ConfigError(f"this policy has no such short run, {warm_start}: {error}") from error


def _num_draws(policy: PlanDecoder) -> int:
    return 1 if policy.is_deterministic else policy.table.num_steps + 1


def _noise_for(policy: Any, noise: Tensor) -> Tensor:
    """Return the part of noise (B, ..., Th, D) or (B, ..., R, Th, D) that a run needs."""
    if policy.is_deterministic:
        return noise if noise.dim() == len(policy.noise_shape) + 1 else noise.select(-3, 0)
    return noise[..., : _num_draws(policy), :, :]


def _by_sign(plan: Tensor, dims: tuple[int, ...], magnitude: float) -> Tensor:
    """Return plans (B, ..., Da) whose given dimensions are ± magnitude, by their sign."""
    if not dims:
        return plan
    out = plan.clone()
    out[..., list(dims)] = torch.where(plan[..., list(dims)] < 0, -magnitude, magnitude).to(plan)
    return out
