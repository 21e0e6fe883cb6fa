"""Fine-tuning of the last denoising steps: earlier ones keep a frozen copy of the network."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

from policies.backbones.switched import SwitchedField
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError


def tunable_copy(init: DenoisingPolicy, sampler: Any, tuned_steps: int) -> DenoisingPolicy:
    """Return a copy of `init` with a trainable network for the last `tuned_steps` of the sampler.

    Everything else is frozen; if all steps are tuned, the frozen network is dropped. Network times fall for
    diffusion and rise for flows.

    Raises:
        ConfigError: If there are fewer denoising steps than tuned ones, or the policy was tuned with
            another division of its steps.
    """
    times = sampler.table(init.process).net_time
    first = len(times) - tuned_steps
    if first < 0:
        takes_more = "steps" in {one.name for one in fields(sampler)}
        more = ", or raise algo.denoising_steps" if takes_more else ""
        raise ConfigError(
            f"algo.tuned_steps must not exceed the {len(times)} denoising steps; got {tuned_steps}. "
            f"Use algo.tuned_steps={len(times)}{more}."
        )
    policy = init.clone().requires_grad_(False)
    field = policy.field
    if isinstance(field, SwitchedField):
        if not first or field.is_tuned(times).tolist() != [k >= first for k in range(len(times))]:
            raise ConfigError(
                f"the initial policy was tuned before, with a switch at {field.switch_time:g}; "
                f"algo.tuned_steps={tuned_steps} divides it elsewhere. Use the value it was tuned with."
            )
        field.tuned.requires_grad_(True)
        return policy
    tuned = copy.deepcopy(field).requires_grad_(True)
    if not first:
        policy.field = tuned
        return policy
    before, after = float(times[first - 1]), float(times[first])
    policy.field = SwitchedField(field, tuned, (before + after) / 2, tuned_above=after > before)
    return policy
