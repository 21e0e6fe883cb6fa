"""Noise schedulers by the names of diffusers, as process and sampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.errors import CapabilityError
from policies.processes.diffusion import VPDiffusion
from policies.samplers.ddpm import DDIM, DDPM

_SCHEDULES = {"squaredcos_cap_v2": "cosine", "linear": "linear", "scaled_linear": "scaled_linear"}
_PREDICTIONS = {"epsilon": "eps", "sample": "x0", "v_prediction": "v"}
_FIXED = {"set_alpha_to_one": True, "steps_offset": 0, "thresholding": False, "trained_betas": None,
          "rescale_betas_zero_snr": False}  # fmt: skip

_VARIANCES = ("fixed_small", "fixed_small_log")  # one number, computed in two ways


def process_of(settings: Mapping[str, Any]) -> VPDiffusion:
    """Return the process of a scheduler's settings; those that are left out are diffusers' defaults."""
    schedule, prediction = (
        settings.get(name, default)
        for name, default in (("beta_schedule", "linear"), ("prediction_type", "epsilon"))
    )
    if schedule not in _SCHEDULES or prediction not in _PREDICTIONS:
        raise CapabilityError(
            f"beta_schedule={schedule} with prediction_type={prediction} cannot be imported; "
            f"{', '.join(_SCHEDULES)} and {', '.join(_PREDICTIONS)} can."
        )
    return VPDiffusion(
        num_levels=settings.get("num_train_timesteps", 1000),
        prediction=_PREDICTIONS[prediction],
        schedule=_SCHEDULES[schedule],
        beta_start=settings.get("beta_start", 1e-4),
        beta_end=settings.get("beta_end", 0.02),
    )


def sampler_of(kind: str, settings: Mapping[str, Any], steps: int | None) -> DDPM | DDIM:
    """Return the sampler `DDPM` or `DDIM` of a scheduler's settings; no `steps`: one per level.

    Raises:
        CapabilityError: If the scheduler is another one, or has settings that ours lack.
    """
    for name, value in _FIXED.items():
        if settings.get(name, value) != value:
            raise CapabilityError(f"only {name}={value} can be imported; the scheduler has {settings[name]}.")
    spacing = settings.get("timestep_spacing", "leading")
    clip = settings.get("clip_sample_range", 1.0) if settings.get("clip_sample", True) else None
    if kind == "DDIM":
        levels = settings.get("num_train_timesteps", 1000)
        return DDIM(
            steps=steps or levels, spacing=spacing, clip_x0=clip, recompute_eps=False, noise_clip=None
        )
    if kind != "DDPM" or settings.get("variance_type", "fixed_small") not in _VARIANCES:
        raise CapabilityError(
            f"noise_scheduler_type={kind} cannot be imported; DDIM can, and DDPM with variance_type="
            f"{' or '.join(_VARIANCES)}."
        )
    return DDPM(steps=steps, spacing=spacing, clip_x0=clip, noise_clip=None, min_std=0.0, final_std=None)
