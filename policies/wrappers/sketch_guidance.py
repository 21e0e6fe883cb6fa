"""Inference-time policy steering (ITPS): a policy follows a sketch without training for it.

Legend: B batch, N candidates, Th horizon, Da action width; x noisy plan, x0 predicted clean plan, eps
predicted noise, g guide, all (B, Th, Da), normalised, or (B, Th, D) of planners, where some entries of a row
are guided (`policies.wrappers.planned_sketch`); alpha, sigma amplitudes; i row of a plan.

    xi(x)     = mean_i |x_i - g_i|                          distance of a plan from the guide, guided entries
    ranking   softmax_n 20 (1 - xi_n / max_n xi_n)          of N finished plans
    start     x = g + 0.5 noise, at a later step            biased initialisation
    guidance  eps <- eps + scale grad xi(x),  x0 <- x0 - sigma / alpha scale grad xi(x)
    resampling  the same, four times at every level: x <- alpha x0 + sigma noise thrice, then the step

The gradient is a closed form, grad xi = (x_i - g_i) / (Th |x_i - g_i|): the network is not differentiated.

Source: arXiv 2411.16627. Deviations: guided x0 stay within `limit` (the published sampler clips at 1); the
gradient is taken at x0 by default; every decision uses the part of the sketch that lies ahead; output
perturbation begins a plan with rows of the guide, where the published one puts the agent on the sketch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from policies.errors import CapabilityError, ConfigError
from policies.policy_config import ChunkSpec
from policies.protocols import Cond, Hook, Hooks, Observation, PlanDecoder, Start, Step
from policies.samplers.step_table import StepTable, resampled
from policies.wrappers.best_of_n import BestOfN, Selection
from policies.wrappers.planned_sketch import guide_of, guided_entries
from policies.wrappers.planner import PlannerPolicy
from policies.wrappers.sketch_settings import SketchSettings
from policies.wrappers.sketches import ActionSketch, AnySketch, Sketch, read_sketch

AnyPolicy = TypeVar("AnyPolicy")

RANKING_SCALE = 20.0
SMALLEST_DISTANCE = 1e-12  # below it a row counts as on the guide and has zero gradient
SMALLEST_ALPHA = 1e-9  # replaces a zero signal amplitude in sigma / alpha


def guide_distance(plan: Tensor, guide: Tensor, entries: Tensor | None = None) -> Tensor:
    """Return xi (...) of plans (..., Th, Da): the mean distance of their rows from the guide's."""
    return _offset(plan, guide, entries).norm(dim=-1).mean(dim=-1)


def _offset(plan: Tensor, guide: Tensor, entries: Tensor | None) -> Tensor:
    """Return plans minus guide, 0 in entries (D,) that are not guided."""
    return plan - guide if entries is None else (plan - guide) * entries.to(plan)


def guide_gradient(plan: Tensor, guide: Tensor, entries: Tensor | None = None) -> Tensor:
    """Return the gradient of xi (..., Th, Da); zero in rows that lie on the guide."""
    offset = _offset(plan, guide, entries)
    length = offset.norm(dim=-1, keepdim=True)
    return torch.where(length > SMALLEST_DISTANCE, offset / length, 0.0) / plan.shape[-2]


def ranking_scores(distance: Tensor) -> Tensor:
    """Return 20 (1 - d / max d) for distances (B, N); their softmax is the published weight of a plan."""
    largest = distance.amax(dim=1, keepdim=True).clamp(min=SMALLEST_DISTANCE)
    return RANKING_SCALE * (1 - distance / largest)


@dataclass(frozen=True, eq=False)
class GuideHook(Hook):
    """Move predictions towards a guide, at every noise level but the last."""

    guide: Tensor  # (B, Th, Da or D), normalised
    scale: float  # weight of the gradient in eps
    gradient: str = "x0"  # where it is taken: at `x` as published, or at `x0`, then at most onto the guide
    limit: float | None = 1.0  # bound on the magnitude of moved clean plans; None: unbounded
    resample_steps: int = 1  # evaluations per level
    entries: Tensor | None = None  # (D,) of 0 and 1: what of a row is guided; None: all

    def on_prediction(self, step: Step, x: Tensor, x0: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        if step.num_steps - step.k <= self.resample_steps:
            return x0, eps
        reach = self.scale * step.sigma / max(step.alpha, SMALLEST_ALPHA)
        if self.gradient == "x":
            moved = self._bounded(x0 - reach * guide_gradient(x, self.guide, self.entries))
        else:
            moved = self._pulled(self._bounded(x0), reach / x0.shape[-2])
        return moved, eps + (step.alpha / step.sigma) * (x0 - moved)

    def _bounded(self, x0: Tensor) -> Tensor:
        return x0 if self.limit is None else x0.clamp(-self.limit, self.limit)

    def _pulled(self, x0: Tensor, length: float) -> Tensor:
        """Return clean plans with rows moved by this length towards the guide, at most onto it."""
        offset = _offset(x0, self.guide, self.entries)
        share = (length / offset.norm(dim=-1, keepdim=True).clamp(min=SMALLEST_DISTANCE)).clamp(max=1.0)
        return x0 - share * offset


@dataclass(frozen=True)
class Resampling:
    """Wrapped sampler with several evaluations per level (`step_table.resampled`)."""

    sampler: Any
    steps: int
    noise: float = 1.0

    @property
    def min_std(self) -> float:
        return float(self.sampler.min_std)

    @property
    def final_std(self) -> Any:
        return self.sampler.final_std

    def table(self, process: Any) -> StepTable:
        table = self.sampler.table(process)
        return resampled(table, process, self.sampler, steps=self.steps, noise=self.noise)


class SketchedPolicy(BestOfN):
    """Denoising policy that follows a sketch; of a planner the sketch chooses plans, not the value.

    Raises:
        CapabilityError: If the policy does not denoise, or the sketch lies in nothing that it plans.
        ConfigError: If numbers of the sketch do not fit.
    """

    policy: Any  # a PlanDecoder

    def __init__(self, policy: Any, sketch: Sketch, steering: SketchSettings) -> None:
        if not isinstance(policy, PlanDecoder):
            kind = type(policy).__name__
            raise CapabilityError(f"steer needs a policy that denoises its plan; {kind} does not.")
        recipe = steering.recipe
        if isinstance(policy, PlannerPolicy):
            policy = policy.with_fields(plans=1)
        if recipe.resample_steps > 1:
            noise = steering.resample_noise
            policy = policy.with_sampler(Resampling(policy.sampler, recipe.resample_steps, noise))
        super().__init__(policy, None, Selection(recipe.candidates))
        self.sketch, self.steering, self.recipe = sketch, steering, recipe
        self.entries = guided_entries(policy, sketch)
        self._first = policy.table.step_at(steering.start) if recipe.starts_at_guide else 0
        self._guide_rows = _guide_rows(policy.chunk, steering) if recipe.begins_with_guide else 0
        in_states = isinstance(policy, PlannerPolicy) and not isinstance(sketch, ActionSketch)
        if self._guide_rows and in_states and policy.inverse is None:
            raise CapabilityError(
                f"steer.strategy={steering.strategy} executes rows of the sketch, which is a path of states; "
                "this planner executes the actions beside them. Use post_hoc_ranking or guided_diffusion."
            )

    @property
    def calls(self) -> int:
        """Sequential network evaluations per plan."""
        return int(self.policy.table.num_steps) - self._first

    def guide(self, obs: Observation) -> Tensor:
        """Return the guide (B, Th, Da or D), normalised."""
        return guide_of(self.policy, self.sketch, obs)

    def plan(self, obs: Observation, noise: Tensor, *, hooks: Hooks = (), **_: Any) -> Tensor:
        """Return the chosen plan (B, Th, Da), normalised; `hooks` follow those of the guide."""
        guide = self.guide(obs)
        beside = guide.repeat_interleave(self.recipe.candidates, dim=0)
        start = self._start(beside, noise) if self.recipe.starts_at_guide else None
        plans = self.candidates(obs, noise, start=start, hooks=[*self._hooks(beside), *hooks])
        scores = ranking_scores(guide_distance(plans, guide[:, None], self.entries))
        plan = self.chosen(plans, scores, noise)
        if self._guide_rows:
            rows = slice(self.chunk.action_start, self.chunk.action_start + self._guide_rows)
            free = 0 if self.entries is None else 1 - self.entries.to(plan)
            plan[:, rows] = guide[:, rows] + free * (plan[:, rows] - guide[:, rows])
        chunk: Tensor = self.policy.chunk_of(plan)
        return chunk

    def sample(self, cond: Cond, noise: Tensor, *, start: Start = None, hooks: Hooks = ()) -> Tensor:
        plans: Tensor = self.policy.trajectory(cond, noise, start=start, hooks=hooks)
        return plans

    def _start(self, guide: Tensor, noise: Tensor) -> tuple[Tensor, float]:
        """Return the guide under its share of the start noise, and the time of the first step."""
        policy = self.policy
        first = policy.start_noise(noise.flatten(0, 1))
        return guide + self.steering.noise_share * first, policy.table.times[self._first]

    def _hooks(self, guide: Tensor) -> list[Hook]:
        if not self.recipe.scale:
            return []
        steering, recipe = self.steering, self.recipe
        bounds = (steering.gradient, steering.limit, recipe.resample_steps)
        return [GuideHook(guide, recipe.scale, *bounds, self.entries)]


def steered(policy: AnyPolicy, steering: SketchSettings) -> AnyPolicy | SketchedPolicy:
    """Return the policy with the configured sketch guidance; unchanged if none is configured."""
    return SketchedPolicy(policy, _sketch_of(steering), steering) if steering.is_on else policy


def describe_steering(steering: SketchSettings) -> dict[str, Any] | None:
    """Return the settings with the sketch's content instead of its file; None if steering is off."""
    return {**asdict(steering), "sketch": asdict(_sketch_of(steering))} if steering.is_on else None


def _sketch_of(steering: SketchSettings) -> AnySketch:
    if steering.sketch is None:
        raise ConfigError(f"steer.strategy={steering.strategy} needs steer.sketch=<JSON or NPZ file>.")
    return read_sketch(steering.sketch)


def _guide_rows(chunk: ChunkSpec, steering: SketchSettings) -> int:
    rows = (chunk.act_steps + 1) // 2 if steering.guide_rows is None else steering.guide_rows
    if rows > chunk.act_steps:
        raise ConfigError(f"steer.guide_rows must be at most act_steps={chunk.act_steps}; got {rows}.")
    return rows
