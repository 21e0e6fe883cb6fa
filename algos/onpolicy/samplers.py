"""Samplers that explore: the policy's own settings, with and without noise."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.registry import from_json, lookup, name_of
from policies.samplers.ode import Euler

NOISE_FREE = {"eta": 0.0, "eta_per_dim": (), "min_std": 0.0, "final_std": None}
"""Settings without which a sampler adds no noise of its own, if it has them."""

GRID = ("grid", "rho", "noise_min", "noise_max")


def replaced(sampler: Any, **values: Any) -> Any:
    """Return the sampler with those of the values for which it has a field."""
    known = {field.name for field in fields(sampler)}
    return replace(sampler, **{name: value for name, value in values.items() if name in known})


def kept(sampler: Any, *names: str) -> dict[str, Any]:
    """Return the settings of these names that a sampler has."""
    return {name: getattr(sampler, name) for name in names if hasattr(sampler, name)}


def on_even_times(sampler: Any) -> Any:
    """Return the sampler with network times at the starts of its steps instead of the released times.

    Ratios use these times, so flows are explored, fine-tuned and exported with them.
    """
    return replace(sampler, released_times=False) if isinstance(sampler, Euler) else sampler


def with_steps(sampler: Any, policy: DenoisingPolicy, steps: int | None) -> Any:
    """Return the sampler with a number of steps.

    Raises:
        ConfigError: If the process prescribes another number.
    """
    if "steps" in {field.name for field in fields(sampler)}:
        return replace(sampler, steps=steps)
    prescribed = sampler.table(policy.process).num_steps
    if steps not in (None, prescribed):
        raise ConfigError(
            f"algo.denoising_steps must be {prescribed}, or null, with process="
            f"{name_of('process', policy.process)}, whose times of evaluation are fixed; got {steps}."
        )
    return sampler


def stochastic(policy: DenoisingPolicy, name: str) -> Any:
    """Return the policy's sampler if it is of this name, else a new one with as many evaluations.

    `auto` stands for the stochastic sampler of the process.

    Raises:
        ConfigError: If the process has no steps of this sampler.
    """
    own, process = policy.sampler, policy.process
    usual = process.stochastic_sampler()["name"]
    on_path = process.is_integrable and not process.has_second_time
    if name != "auto" and not (on_path if name == "ancestral" else process.levels() is not None):
        needs = "a denoiser at every noise level" if name == "ancestral" else "discrete noise levels"
        raise ConfigError(
            f"algo.sampler={name} needs {needs}, which process={name_of('process', process)} lacks. Use "
            f"algo.sampler=auto, here {usual}."
        )
    name = usual if name == "auto" else name
    if isinstance(own, lookup("sampler", name)):
        return own
    new = from_json("sampler", {"name": name})
    steps = {} if name == "ddpm" else {"steps": policy.table.num_steps}
    return replaced(new, **kept(own, "clip_x0", *GRID), **steps)


def deterministic(policy: DenoisingPolicy, steps: int | None, default: int) -> Any:
    """Return a sampler of one evaluation per step without noise: the policy's own, or the process's.

    Args:
        policy: Policy with steps.
        steps: Number of steps; None: as the process prescribes, else `default`.
        default: Number of steps of a process that takes any.

    Raises:
        ConfigError: If the process cannot take so many steps without noise.
    """
    process, own = policy.process, policy.sampler
    spec = process.deterministic_sampler()
    sampler = replaced(on_even_times(own), **NOISE_FREE)
    table = sampler.table(process)
    if not table.is_deterministic or table.memory is not None or table.loop is not None:
        sampler = from_json("sampler", spec)
        clips = ("clip_action",) if isinstance(sampler, Euler) else ("clip_action", "clip_x0")
        sampler = replaced(sampler, **kept(own, *clips))
    takes_default = steps is None and "steps" in {field.name for field in fields(sampler)}
    sampler = with_steps(sampler, policy, spec.get("steps", default) if takes_default else steps)
    if not sampler.table(process).is_deterministic:
        raise ConfigError(
            f"algo.denoising_steps must be {spec['steps']}, or null, with process="
            f"{name_of('process', process)}, whose further steps draw noise; got {steps}. For more steps use "
            f"algo=dppo."
        )
    return sampler
