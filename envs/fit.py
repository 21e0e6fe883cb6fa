"""Compatibility of policies, datasets and tasks: widths, images, and the task itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.datasets.goals import with_goals_in_states
from envs.datasets.recorded_task import option_text, recorded_env, recorded_task
from envs.engine.pixels import CAMERA_OPTIONS
from envs.spec import options_of, task_name
from policies.errors import CheckpointError, ConfigError
from policies.importing.robomimic_facts import CHANGES
from policies.paths import with_paths
from policies.storage.checksums import sha256

if TYPE_CHECKING:
    from envs.datasets.episodes import EpisodeDataset
    from envs.spec import EnvConfig

CONDITIONS = frozenset(
    (
        *("expert", "engine", "goal", "max_episode_steps", "terminate_on_success", "continuing"),
        *("reward", "healthy_reward", "forward_reward_weight", "ctrl_cost_weight", "contact_cost_weight"),
        *("starts", "start_cell", "reset_noise_scale", "robot_noise_ratio", "object_noise_ratio"),
        *CAMERA_OPTIONS,
    )
)
"""Options under which one task is recorded, rewarded, started or limited. All others select the task.

Ways to observe a goal differ in widths, which are compared anyway. The property `conditions` of a task names
further options.
"""
ALLOW = "allow_other_task=true"
"""Override that permits a difference."""

_log = logging.getLogger(__name__)


def with_task_observations(env: EnvConfig, dataset: EpisodeDataset) -> EpisodeDataset:
    """Return a dataset with the task's observations: goals are appended to states if the task does so.

    Tasks with `check_recording` then check the data further.

    Raises:
        ConfigError: If the states lack only goals, and the dataset has none in `extras["goal"]`.
        DatasetError: If there is no memory or disk space for wider states.
    """
    spec, lacking = env.spec, env.spec.obs_dim - dataset.obs_dim
    if lacking and lacking == spec.state_goal_dim:
        _require_goals(env, dataset)
        _log.info("%s: goals end the states, as in env=%s.", dataset.source, task_name(env))
        dataset = with_goals_in_states(dataset)
    if hasattr(env, "check_recording") and dataset.obs_dim == spec.obs_dim:
        env.check_recording(dataset)
    return dataset


def _require_goals(env: EnvConfig, dataset: EpisodeDataset) -> None:
    goals, spec = dataset.extras.get("goal"), env.spec
    if goals is None or goals.shape[1:] != (spec.state_goal_dim,):
        found = "no goals" if goals is None else f"goals of shape {tuple(goals.shape[1:])}"
        raise ConfigError(
            f"the states of env={task_name(env)} are {spec.obs_dim} wide and end with a goal of width "
            f"{spec.state_goal_dim}; {dataset.source} has states of width {dataset.obs_dim} and {found}. Use "
            f"data with goals (in D4RL files infos/goal, unless reader.infos=false), or another env.goal."
        )


def require_fit(name: str, thing: Any, other_name: str, other: Any, *, advice: str) -> None:
    """Refuse two objects whose observation, action or goal widths differ, or whose kinds of actions do.

    Each object is a task's specification, a policy or a dataset; names and advice appear in messages. Widths
    that one of them lacks (e.g. goals of a dataset) are not compared.

    Raises:
        ConfigError: If widths, kinds of actions or images differ; names both objects and what differs.
    """
    for what in ("observation", "action", "goal"):
        width, other_width = _width(thing, what), _width(other, what)
        if None not in (width, other_width) and width != other_width:
            raise ConfigError(
                f"{name} has {what} width {width}, but {other_name} has {what} width {other_width}. {advice}"
            )
    kind, other_kind = _action_kind(thing), _action_kind(other)
    if None not in (kind, other_kind) and kind != other_kind:
        raise ConfigError(
            f"the actions of {name} are {kind}, but those of {other_name} are {other_kind}. {advice}"
        )
    _require_images(name, thing, other_name, other, advice)


def require_dataset_of(env: EnvConfig, dataset: EpisodeDataset, *, allow_other_task: bool = False) -> None:
    """Refuse a dataset of other widths, or one whose metadata name another task.

    Raises:
        ConfigError: If there is a difference; names both.
    """
    found = recorded_task(dataset.meta)
    recorded = None if found is None else recorded_env(*found)
    advice = "Use a dataset of the same task."
    differ: list[str] = []
    if recorded is not None and task_name(env) == task_name(recorded):
        differ = differing_options(env, recorded)
    if recorded is not None and differ:
        one, two = task_text(recorded, differ), task_text(env, differ)
        advice = f"It was recorded with {one}, not {two}. {advice}"
    require_fit(f"env={task_name(env)}", env.spec, dataset.source, dataset, advice=advice)
    if found is None:
        return
    if recorded is not None and found[1] is not None:
        require_same_task("this run", env, dataset.source, recorded, allow_other_task=allow_other_task)
    elif found[0] != task_name(env):
        what = f"this run is for env={task_name(env)}, {dataset.source} for env={found[0]}"
        _refuse(what, allow_other_task)


def require_same_task(
    name: str, env: EnvConfig, other_name: str, other: EnvConfig, *, allow_other_task: bool = False
) -> list[str]:
    """Refuse two different tasks, whatever their widths; returns the `CONDITIONS` that differ.

    A learned world counts as the task that it imagines; if its model is gone, it is not compared.

    Args:
        name: What is made for the first task.
        env: The first task.
        other_name: What is made for the second one.
        other: The second task.
        allow_other_task: Warn instead.

    Raises:
        ConfigError: If names or options that select the task differ; names both.
    """
    try:
        env, other = (getattr(task, "imagined", task) for task in (env, other))
    except CheckpointError as error:
        _log.warning("the tasks of %s and %s are not compared: %s", name, other_name, error)
        return []
    if task_name(env) != task_name(other):
        what = f"{name} is for {task_text(env)}, {other_name} for {task_text(other)}"
        _refuse(what, allow_other_task)
        return []
    differ = differing_options(env, other)
    free = CONDITIONS | {*getattr(env, "conditions", ()), *getattr(other, "conditions", ())}
    if chosen := [key for key in differ if key not in free]:
        one, two = (task_text(task, chosen) for task in (env, other))
        _refuse(f"{name} is for {one}, {other_name} for {two}", allow_other_task)
    return [key for key in differ if key in free]


def differing_options(env: EnvConfig, other: EnvConfig) -> list[str]:
    """Return the options in which two configurations of a task differ; files are compared by content."""
    tasks = (task.compared() if hasattr(task, "compared") else task for task in (env, other))
    one, two = (_plain(options_of(with_paths(task, _content))) for task in tasks)
    return [key for key in one if key in two and one[key] != two[key]]


def task_text(env: EnvConfig, shown: Iterable[str] = ()) -> str:
    """Return a task as command-line text with the options that select it, e.g. `env=metaworld env.task=push`.

    Args:
        env: The task.
        shown: Options to include although they have their defaults.
    """
    hidden, always = CONDITIONS | {*getattr(env, "conditions", ())}, set(shown)
    texts = [f"env={task_name(env)}"]
    options: tuple[Field[Any], ...] = fields(env) if is_dataclass(env) else ()
    for one in options:
        value = getattr(env, one.name)
        is_chosen = one.name not in hidden and value != one.default
        if one.name in always or (is_chosen and value not in ({}, [])):
            texts.append(f"env.{one.name}={option_text(value)}")
    return " ".join(texts)


def _refuse(what: str, allow_other_task: bool) -> None:
    if allow_other_task:
        _log.warning("%s (%s).", what, ALLOW)
        return
    raise ConfigError(f"{what}. Give the same task to both; to use another one on purpose, {ALLOW}.")


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in JSON types, so that a list equals a tuple."""
    plain: dict[str, Any] = json.loads(json.dumps(options, default=str))
    return plain


def _content(path: str) -> str:
    """Return the checksum of a file; its path if it is missing."""
    place = Path(path).expanduser()
    return f"sha256:{sha256(place)}" if place.is_file() else path


def _require_images(name: str, policy: Any, dataset_name: str, dataset: Any, advice: str) -> None:
    shown: dict[str, Any] | None = getattr(dataset, "image_shapes", None)
    if shown is None:
        return
    for camera, shape in getattr(policy, "images", {}).items():
        if tuple(shape) != shown.get(camera):
            raise ConfigError(
                f"{name} needs images {tuple(shape)} of camera '{camera}', but {dataset_name} has "
                f"{shown.get(camera, 'none')}. {advice}"
            )


def _action_kind(thing: Any) -> str | None:
    """Return what the actions of a specification, a dataset or an imported policy are, where it is known."""
    if getattr(thing, "family", None) == "robosuite":
        return CHANGES
    facts = getattr(thing, "meta", None) or getattr(thing, "provenance", None) or {}
    interface = facts.get("interface")
    return interface.get("actions") if isinstance(interface, Mapping) else None


def _width(thing: Any, what: str) -> int | None:
    """Return a width, or None; a policy's action width is in its chunk."""
    if what == "action":
        thing = getattr(thing, "chunk", thing)
    width: int | None = getattr(thing, {"observation": "obs_dim"}.get(what, f"{what}_dim"), None)
    return width
