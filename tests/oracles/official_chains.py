"""ReinFlow's noisy chain with released weights."""

from __future__ import annotations

import math
from typing import Any

from official_flows import official_reflow, official_shortcut
from torch import Tensor

from algos.onpolicy.reinflow_ratio import NoiseConfig, ReinflowRatio
from algos.reinflow import ReinFlowConfig
from policies.denoising import DenoisingPolicy
from policies.samplers.ode import Euler

NOISE = "actor.explore_noise_net.mlp_logvar.moduleList."


def part(arrays: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the arrays below a prefix."""
    return {name[len(prefix) :]: value for name, value in arrays.items() if name.startswith(prefix)}


def policy_of(
    arrays: dict[str, Tensor], prefix: str = "actor.policy.", *, released_times: bool = False
) -> DenoisingPolicy:
    """Build the velocity network of a file, sampled as the released code does."""
    weights, shape = part(arrays, prefix), arrays["chain"].shape[2:]
    sampler = Euler(steps=int(arrays["K"]), clip_state=1.0, released_times=released_times)
    build = official_shortcut if "vel_head.layers.0.weight" in weights else official_reflow
    return build(weights, arrays["obs"], shape, sampler)


def config_of(arrays: dict[str, Tensor], **options: Any) -> ReinFlowConfig:
    """Return the settings of a file."""
    hidden = [len(value) for name, value in part(arrays, NOISE).items() if name.endswith("bias")][:-1]
    noise = NoiseConfig(
        min_std=float(arrays["min_std"]), max_std=float(arrays["max_std"]), hidden_dims=tuple(hidden)
    )
    defaults: dict[str, Any] = {"denoising_steps": int(arrays["K"]), "clip_state": 1.0, "noise": noise}
    return ReinFlowConfig(**(defaults | options))


def noise_keys(arrays: dict[str, Tensor]) -> dict[str, str]:
    """Map the released names of the noise network to ours."""
    names = part(arrays, NOISE)
    return {name: f"layers.{2 * int(name.split('.')[0])}.{name.split('.')[-1]}" for name in names}


def chain_of(
    arrays: dict[str, Tensor], policy: DenoisingPolicy | None = None, **options: Any
) -> ReinflowRatio:
    """Return our estimator with the weights of a file."""
    ratio = config_of(arrays, **options).noisy_chain(policy or policy_of(arrays), seed=0)
    keys = noise_keys(arrays)
    weights = {keys[name]: value for name, value in part(arrays, NOISE).items()}
    ratio.noise.load_state_dict(weights, strict=True)
    return ratio


def bounds_agree(arrays: dict[str, Tensor]) -> bool:
    """Tell whether the file's bounds of the log-variance follow from its deviations."""
    bounds = part(arrays, "actor.explore_noise_net.")
    return all(
        math.isclose(float(bounds[f"logvar_{end}"]), 2 * math.log(float(arrays[f"{end}_std"])), rel_tol=1e-5)
        for end in ("min", "max")
    )


__all__ = ["bounds_agree", "chain_of", "config_of", "noise_keys", "part", "policy_of"]
