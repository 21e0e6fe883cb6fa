"""Plan execution under inference latency: receding horizon, one command per control step.

A decision uses the observation of step s; its plan arrives at step s + d, while earlier plans are executed.
`policies.runner.Track` maps rows to control steps, and `policies.runner.Limits` clips each command.

Legend: B lanes (robots, episodes), To observation history, Th predicted horizon, R rows of a plan from the
newest observation on, Da action width, n control steps between decisions, d of latency. Rows are counted from
the newest observation:

    mask_i = 1                              i < d             committed: executed before the plan arrives
    mask_i = c (e^c - 1) / (e - 1)          d <= i < R - n    c = (R - n - i) / (R - n - d + 1)
    mask_i = 0                              otherwise         not covered by the previous plan

Source: Real-Time Chunking (arXiv 2506.07339), eq. 5 for the mask. Deviation: the previous plan replaces the
clean estimate (`policies.samplers.hooks.Inpaint`) where RTC guides towards it by a gradient of the network;
this works for every denoising policy with any sampler.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.errors import CapabilityError, ConfigError
from policies.execution.replanning import Replanner, shifted
from policies.execution.warm_start import WarmStart
from policies.policy import Policy
from policies.policy_config import ChunkSpec
from policies.protocols import PlanDecoder
from policies.runner import Limits, Track
from policies.samplers.hooks import Inpaint

_log = logging.getLogger(__name__)


@dataclass
class Execution(Checked):
    """Execution of plans during inference of the next ones.

    Attributes:
        act_steps: n, control steps between decisions; null: the policy's own, or what latency leaves.
        ensemble: Average the plans of a step with weights exp(-ensemble age rank); null: the newest plan.
        max_jump: Largest change between consecutive commands, physical units; null: unlimited.
    """

    act_steps: int | None = bounded(None, ge=1)
    latency: int = bounded(0, ge=0)  # d, simulated latency from observation to plan [control steps]
    compensate: bool = True  # skip rows that are past when a plan arrives
    ensemble: float | None = bounded(None, ge=0)
    inpaint: bool = False  # condition on the previous plan: fixed committed rows, soft remaining rows
    max_jump: float | None = bounded(None, gt=0)
    warm_start: WarmStart = field(default_factory=WarmStart)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inpaint and self.warm_start.is_on:
            raise ConfigError("inpaint and warm_start both use the previous plan; leave one of them out.")
        if self.inpaint and not self.compensate:
            raise ConfigError("inpaint needs compensate=true; got false.")


@dataclass
class _Lane:
    """State of one robot."""

    track: Track  # plans that have arrived
    plan: Tensor | None = None  # newest plan, normalised (Th, Da or D); None: no decision yet
    is_sound: bool = True  # whether that plan is finite and may condition the next one
    begun: int = 0  # step of the plan's observation
    arrives: int = 0  # arrival step of the plan


class Executor:
    """Act in parallel lanes, one command per control step.

    Args:
        policy: The policy.
        execution: Execution settings.
        low: Lower action bounds (Da,), physical; None: no bounds.
        high: Upper action bounds (Da,).

    Raises:
        CapabilityError: If the execution conditions on previous plans and the policy cannot.
        ConfigError: If the execution does not fit the policy's horizon.
    """

    def __init__(self, policy: Policy, execution: Execution, *, low: Any = None, high: Any = None) -> None:
        self.calls: list[int] = []  # network evaluations at the last step per lane
        self._policy, self._execution = policy, execution
        warm = execution.warm_start
        self._replanner = Replanner(policy, warm) if warm.is_on else None
        if execution.inpaint and not isinstance(policy, PlanDecoder):
            kind = type(policy).__name__
            raise CapabilityError(f"inpaint needs a policy that denoises its plan; {kind} does not.")
        self._start, self._rows = policy.chunk.action_start, policy.chunk.horizon - policy.chunk.action_start
        self._act_steps = _decision_interval(policy.chunk, execution)
        low, high = (None if side is None else np.asarray(side, np.float32) for side in (low, high))
        self._limits = Limits(low, high, execution.max_jump)
        self._lanes: dict[int, _Lane] = {}

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (self._replanner or self._policy).noise_shape

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        return (self._replanner or self._policy).sample_noise(n, generator=generator)

    def track(self, lane: int) -> Track:
        return self._lane(lane).track

    def reset(self, lanes: Iterable[int] | None = None) -> None:
        """Reset lanes at the start of episodes; None: all."""
        for lane in list(self._lanes) if lanes is None else lanes:
            self._lanes.pop(lane, None)

    @torch.no_grad()
    def act(
        self,
        obs: Any,
        *,
        lanes: Sequence[int] | None = None,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the commands of one control step: observations (B, To, Do) -> (B, Da), physical units.

        The first plan of a lane is available immediately; later ones arrive after the latency.

        Args:
            obs: As `Policy.act`.
            lanes: Distinct lane of each row; None: 0 to B - 1.
            noise: (B, *noise_shape), used by the rows that decide.
            generator: Source of the noise when none is given.
        """
        items = self._policy.observation(obs)
        count = len(next(iter(items.values())))
        chosen = [self._lane(lane) for lane in (range(count) if lanes is None else lanes)]
        if noise is None:
            noise = self.sample_noise(count, generator=generator)
        self.calls = [0] * count
        for lane in chosen:
            self._deliver(lane)
        due = [i for i, lane in enumerate(chosen) if lane.track.is_due]
        for rows in _groups(due, chosen):
            self._decide({name: value[rows] for name, value in items.items()}, noise[rows], rows, chosen)
        for lane in chosen:
            self._deliver(lane)
        return torch.from_numpy(np.stack([lane.track.next() for lane in chosen]))

    def _lane(self, lane: int) -> _Lane:
        if lane not in self._lanes:
            compensate, ensemble = self._execution.compensate, self._execution.ensemble
            track = Track(self._act_steps, compensate=compensate, ensemble=ensemble, limits=self._limits)
            self._lanes[lane] = _Lane(track)
        return self._lanes[lane]

    def _decide(self, obs: Any, noise: Tensor, rows: Sequence[int], chosen: Sequence[_Lane]) -> None:
        """Plan for the lanes of one group."""
        lanes = [chosen[i] for i in rows]
        is_first = lanes[0].plan is None
        known = [lane.plan for lane in lanes if lane.plan is not None and lane.is_sound]
        previous = torch.stack(known) if known else None
        elapsed = lanes[0].track.step - lanes[0].begun
        plans, calls = self._plan(obs, noise, previous, elapsed)
        for i, lane, plan in zip(rows, lanes, plans, strict=True):
            lane.track.begin()
            lane.plan, lane.begun = plan, lane.track.step
            lane.arrives = lane.begun + (0 if is_first else self._execution.latency)
            self.calls[i] = calls

    def _plan(self, obs: Any, noise: Tensor, previous: Tensor | None, elapsed: int) -> tuple[Tensor, int]:
        """Return normalised plans (B, Th, Da or D) and the network evaluations per plan."""
        if self._replanner is not None:
            decision = self._replanner.decide(obs, noise=noise, previous=previous, elapsed=elapsed)
            return decision.plan, decision.calls
        policy: Any = self._policy
        hooks = []
        if self._execution.inpaint and previous is not None:
            mask = committed(self._rows, elapsed, self._execution.latency, start=self._start)
            known = shifted(previous, elapsed)
            known = known.repeat_interleave(len(policy.start_noise(noise)) // len(known), dim=0)  # its plans
            hooks.append(Inpaint(known, mask.to(previous)[:, None]))
        cond = policy.encode(policy.observation(obs))
        if isinstance(policy, PlanDecoder):
            return policy.trajectory(cond, noise, hooks=hooks), policy.table.num_steps
        return policy.decode(cond, noise), 1

    def _deliver(self, lane: _Lane) -> None:
        if lane.track.is_pending and lane.plan is not None and lane.track.step >= lane.arrives:
            source: Any = self._replanner or self._policy
            decodes = isinstance(source, PlanDecoder | Replanner)
            chunk = source.chunk_of(lane.plan[None]) if decodes else lane.plan[None]
            plan = source.physical(chunk[:, self._start :])[0].float().cpu().numpy()
            lane.is_sound = bool(np.isfinite(plan).all())
            lane.track.deliver(plan)


def _decision_interval(chunk: ChunkSpec, execution: Execution) -> int:
    """Return n, the control steps between decisions.

    The next plan arrives n + d steps after the previous observation, and the previous rows must last until
    then. The policy's own n is lowered accordingly; `execution.act_steps` is not, and may be refused.
    """
    rows, latency = chunk.horizon - chunk.action_start, execution.latency
    wanted = execution.act_steps or chunk.act_steps
    steps = wanted
    if execution.act_steps is None and rows - latency >= max(1, latency):
        steps = min(wanted, rows - latency)
    if max(steps, latency) + latency > rows:
        raise ConfigError(
            f"a plan of {rows} rows must last for act_steps={wanted} steps and latency={latency} more; lower "
            f"one of them, or train with a longer horizon."
        )
    if steps < wanted:
        _log.warning(
            "plans of %d rows cannot last for act_steps=%d with latency=%d; using act_steps=%d. To decide "
            "less often, train with a longer horizon.",
            *(rows, wanted, latency, steps),
        )
    return steps


def committed(rows: int, elapsed: int, latency: int, *, start: int = 0) -> Tensor:
    """Return the mask (start + rows,) of the module docstring for n = elapsed and d = latency."""
    left = rows - elapsed
    weights = [1.0] * (start + latency)
    for i in range(latency, rows):
        c = max(0.0, left - i) / max(1, left - latency + 1)
        weights.append(c * math.expm1(c) / math.expm1(1.0))
    return torch.tensor(weights)


def _groups(due: Sequence[int], lanes: Sequence[_Lane]) -> list[list[int]]:
    """Group the deciding rows by age and soundness of their lanes' previous plans."""
    groups: dict[tuple[int | None, bool], list[int]] = {}
    for i in due:
        lane = lanes[i]
        age = None if lane.plan is None else lane.track.step - lane.begun
        groups.setdefault((age, lane.is_sound), []).append(i)
    return list(groups.values())
