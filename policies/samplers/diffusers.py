"""Schedulers of diffusers as samplers, for schedulers tuned elsewhere or missing in this package."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.errors import CapabilityError, ConfigError
from policies.processes.base import incompatible
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.processes.schedules import time_of_level
from policies.protocols import BoundField
from policies.registry import name_of, register
from policies.samplers.step_table import StepRules, StepTable, build_step_table

DIFFUSION_SCHEDULERS = (
    "DDIMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "UniPCMultistepScheduler",
)
FLOW_SCHEDULERS = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
FLOW_TIMESTEPS = 1000
_PREDICTIONS = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
_BETAS = {"cosine": "squaredcos_cap_v2", "linear": "linear", "scaled_linear": "scaled_linear"}
_CLIPS = ("DDIMScheduler",)  # the other schedulers have no x0 bound that keeps their arithmetic


@register("sampler", "diffusers")
@dataclass(frozen=True, kw_only=True)
class Diffusers(Checked):
    """A deterministic scheduler of diffusers, configured from the process.

    The package's own samplers are faster and support recorded chains, hooks, warm starts and export.

    Args:
        clip_x0: Bound on the predicted clean chunk (DDIM only); None: no bound.
        scheduler: Class name; stochastic schedulers are refused because they draw their own noise.
    """

    clip_x0: float | None = bounded(None, gt=0)
    clip_action: float | None = bounded(1.0, gt=0)  # bound on the final chunk; None: no bound
    scheduler: str = bounded("DPMSolverMultistepScheduler", choices=(*DIFFUSION_SCHEDULERS, *FLOW_SCHEDULERS))
    steps: int = bounded(10, ge=1)  # sampling steps; some schedulers evaluate the network twice per step
    options: dict[str, Any] = field(default_factory=dict)  # further scheduler arguments by name
    min_std: ClassVar[float] = 0.0
    final_std: ClassVar[float | None] = None

    def table(self, process: Any) -> StepTable:
        if type(process) not in (VPDiffusion, RectifiedFlow):
            raise incompatible(self, process, needs="diffusion or flow")
        is_flow = isinstance(process, RectifiedFlow)
        if (self.scheduler in FLOW_SCHEDULERS) != is_flow:
            choices = ", ".join(FLOW_SCHEDULERS if is_flow else DIFFUSION_SCHEDULERS)
            raise ConfigError(
                f"sampler=diffusers with sampler.scheduler={self.scheduler} does not run "
                f"process={name_of('process', process)}. Use one of {choices}."
            )
        loop = SchedulerLoop(self, _settings_of(process) | self.options, is_flow)
        taus = torch.as_tensor(loop.scheduler().timesteps, dtype=torch.float64)
        times = 1 - taus / FLOW_TIMESTEPS if is_flow else time_of_level(taus, process.num_levels)
        zeros = torch.zeros(len(times), 1, dtype=torch.float64)
        rules = StepRules(clip_x0=None)
        table = build_step_table(process, rules, [*times.tolist(), 1.0], zeros, zeros, zeros)
        return replace(table, loop=loop)


def _settings_of(process: VPDiffusion | RectifiedFlow) -> dict[str, Any]:
    if isinstance(process, RectifiedFlow):
        return {"num_train_timesteps": FLOW_TIMESTEPS}
    return {
        "num_train_timesteps": process.num_levels,
        "beta_schedule": _BETAS[process.schedule],
        "beta_start": process.beta_start,
        "beta_end": process.beta_end,
        "prediction_type": _PREDICTIONS[process.prediction],
    }


@dataclass(frozen=True)
class SchedulerLoop:
    """Run a scheduler; holds settings only, so it can be copied and pickled."""

    sampler: Diffusers
    settings: dict[str, Any]
    is_flow: bool

    def scheduler(self) -> Any:
        import diffusers

        settings = dict(self.settings)
        clip = self.sampler.clip_x0
        if self.sampler.scheduler in _CLIPS:
            settings |= {"clip_sample": clip is not None, "clip_sample_range": 1.0 if clip is None else clip}
        kind = getattr(diffusers, self.sampler.scheduler)
        known = set(inspect.signature(kind.__init__).parameters)
        algorithm = str(settings.get("algorithm_type", ""))
        if algorithm.startswith("sde") or settings.get("stochastic_sampling"):
            raise ConfigError(
                f"sampler.options of {self.sampler.scheduler} make it draw noise of its own, without our "
                "seed. Use a deterministic setting, or sampler=ddpm, or ddim with sampler.eta."
            )
        if unknown := sorted(set(self.sampler.options) - known):
            raise ConfigError(f"sampler.options {unknown} are no settings of {self.sampler.scheduler}.")
        if clip is not None and self.sampler.scheduler not in _CLIPS:
            raise ConfigError(f"sampler.clip_x0 must be null with {self.sampler.scheduler}; got {clip}.")
        scheduler = kind(**settings)
        scheduler.set_timesteps(self.sampler.steps)
        return scheduler

    def __call__(self, bound: BoundField, noise: Tensor) -> Tensor:
        """Denoise start noise (B, Th, Da) to a chunk (B, Th, Da)."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            raise CapabilityError(
                "sampler=diffusers cannot be compiled or exported. Use one of the package's own samplers."
            )
        scheduler = self.scheduler()
        x = noise * getattr(scheduler, "init_noise_sigma", 1.0)
        for k, tau in enumerate(scheduler.timesteps):
            scaled = x if self.is_flow else scheduler.scale_model_input(x, tau)
            pred = bound(k, scaled.to(noise.dtype))
            pred = -pred if self.is_flow else pred  # their velocity points from data to noise
            x = scheduler.step(pred, tau, x).prev_sample.to(noise.dtype)
        clip = self.sampler.clip_action
        return x if clip is None else x.clamp(-clip, clip)
