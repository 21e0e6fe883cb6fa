"""Evaluation protocol: fixed settings, their serialisation, and their effect on a policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from envs.engine.engines import HasEngines, exactly
from envs.engine.pixels import CAMERA_OPTIONS, HasCameras, match_cameras
from envs.engine.rendering import require_renderer
from envs.evaluation.settings import EvaluationSettings
from envs.fit import require_fit
from envs.rollouts.blocks import BLOCK_ROWS
from envs.rollouts.player import EvaluatedPolicy
from envs.spec import EnvConfig, options_of
from policies.encoders import ImageShape
from policies.errors import CapabilityError, ConfigError
from policies.execution.replanning import Replanner, with_act_steps
from policies.extras import installed_version
from policies.paths import with_paths
from policies.storage.checksums import sha256
from policies.storage.policy_folder import WEIGHTS, policy_in
from policies.wrappers.candidates import CandidatePolicy
from policies.wrappers.sketch_guidance import describe_steering, steered

_VERSIONS = ("mujoco", "gymnasium", "burnish")


def describe_protocol(env: EnvConfig, settings: EvaluationSettings, task: EnvConfig) -> dict[str, Any]:
    """Return the protocol, everything but the policy that determines the numbers, as JSON values."""
    images = _describe_images(task)
    packages = (*_VERSIONS, *env.spec.packages, *_drawn_by(images))
    numbers = json.loads(json.dumps({**asdict(settings), "steer": describe_steering(settings.steer)}))
    del numbers["num_envs"]  # no effect on the numbers
    if settings.guidance is None:  # protocols of earlier versions lack it
        del numbers["guidance"]
    if not settings.warm_start.executed:  # as above
        del numbers["warm_start"]["executed"]
    return {
        "env": describe_task(env),
        **numbers,
        **images,
        "block_rows": BLOCK_ROWS,
        "engine": "exact",
        "versions": {name: installed_version(name) or "not installed" for name in packages},
    }


def describe_task(env: EnvConfig) -> dict[str, Any]:
    """Return a task as JSON values for protocols."""
    spec = env.spec
    options = options_of(with_paths(env, _digest))
    unused = ("expert", *CAMERA_OPTIONS, *(("engine",) if isinstance(env, HasEngines) else ()))
    for name in unused:  # not part of the evaluated task
        options.pop(name, None)
    task = {
        "name": spec.name,
        "options": options,
        "max_episode_steps": spec.max_episode_steps,
        "success_rule": spec.success_rule,
        "reference_scores": spec.reference_scores,
    }
    description: dict[str, Any] = json.loads(json.dumps(task))
    return description


def _digest(path: str) -> str:
    """Return the checksum of a file, or of the weights of a policy directory or run."""
    place = Path(path).expanduser()
    return f"sha256:{sha256(policy_in(place) / WEIGHTS if place.is_dir() else place)}"


def _describe_images(task: Any) -> dict[str, Any]:
    """Return the policy's image settings, if any; cameras belong to the policy, not the task."""
    if not getattr(task, "cameras", ()):
        return {}
    shapes = {camera: list(shape) for camera, shape in task.images.items()}
    if not isinstance(task, HasCameras):  # frames that a world imagines
        return {"images": {"cameras": shapes}}
    samples = {} if task.image_samples is None else {"samples": task.image_samples}
    renderer = {} if task.image_renderer == "opengl" else {"renderer": task.image_renderer}
    return {"images": {"cameras": shapes, "shadows": task.image_shadows, **samples, **renderer}}


def _drawn_by(images: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the packages whose versions affect the images."""
    return ("mujoco-warp", "warp-lang") if "renderer" in images.get("images", {}) else ()


def prepare_eval(env: EnvConfig, policy: Any) -> EnvConfig:
    """Return the task with the cameras of a policy, simulated by MuJoCo itself.

    Raises:
        ConfigError: If observations, actions, goals or images of the two differ.
        CapabilityError: If the task's scene cannot be rendered.
        MissingExtraError: If rendering is unavailable.
    """
    spec, advice = env.spec, "Evaluate it on the task it was made for."
    require_fit(f"env={spec.name}", spec, "the policy", policy, advice=advice)
    images: Mapping[str, ImageShape] = getattr(policy, "images", {})
    task: Any = match_cameras(exactly(env), images)
    if isinstance(task, HasCameras) and images:
        require_renderer(task.image_renderer)
    return task


def require_playable(policy: Any, env: EnvConfig, settings: EvaluationSettings) -> None:
    """Refuse a policy that does not fit a task or settings, without an episode.

    Raises:
        BurnishError: See `prepare_eval` and `with_settings`.
    """
    prepare_eval(env, policy)
    with_settings(policy, settings)


def with_settings(policy: EvaluatedPolicy, settings: EvaluationSettings) -> EvaluatedPolicy:
    """Return the policy with the settings' steps, guidance, warm start and sketch guidance.

    Raises:
        ConfigError: If a number of steps, a weight, a short run or a sketch does not fit the policy, or it
            chooses between candidates that would have the same noise.
        CapabilityError: If the policy lacks such an option.
    """
    noises = (settings.start_noise, settings.sampling_noise)
    makes_alike = noises[0] == "zero" if isinstance(policy, CandidatePolicy) else "zero" in noises
    if makes_alike and getattr(policy, "chooses", False):
        raise ConfigError(
            f"start_noise and sampling_noise must be random where a policy chooses between candidates, which "
            f"differ by their noise; got {noises[0]} and {noises[1]}."
        )
    guided = with_guidance(with_steps(policy, settings.steps), settings.guidance)
    view = with_act_steps(guided, settings.act_steps)
    if settings.warm_start.is_on:
        Replanner(view, settings.warm_start)
    return steered(view, settings.steer)


def with_steps(policy: EvaluatedPolicy, steps: int | None) -> EvaluatedPolicy:
    """Return the policy with another number of denoising steps; None keeps it unchanged.

    Raises:
        CapabilityError: If its sampler has no number of steps.
    """
    if steps is None:
        return policy
    sampler = getattr(policy, "sampler", None)
    has_steps = is_dataclass(sampler) and any(f.name == "steps" for f in fields(sampler))
    if not has_steps or not hasattr(policy, "with_sampler"):
        raise CapabilityError(
            f"steps={steps} needs a policy whose sampler has a number of steps; {type(policy).__name__} has "
            f"none. Leave steps out."
        )
    view: EvaluatedPolicy = policy.with_sampler(replace(sampler, steps=steps))  # type: ignore[type-var]
    return view


def with_guidance(policy: EvaluatedPolicy, weight: float | None) -> EvaluatedPolicy:
    """Return the policy with another guidance weight of its goal or label; None keeps it unchanged.

    Raises:
        ConfigError: If the policy was not trained with dropped goals.
        CapabilityError: If it has no guidance.
    """
    if weight is None:
        return policy
    if not hasattr(policy, "with_guidance"):
        raise CapabilityError(
            f"guidance={weight:g} needs a policy guided by a goal or label; {type(policy).__name__} is not. "
            f"Leave guidance out."
        )
    view: EvaluatedPolicy = policy.with_guidance(weight)
    return view
