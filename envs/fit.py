"""Compatibility checks of policies, datasets and tasks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from envs.datasets.goals import with_goals_in_states
from envs.datasets.recorded_task import recorded_spec, recorded_task
from envs.spec import EnvSpec
from policies.errors import ConfigError

if TYPE_CHECKING:
    from envs.datasets.episodes import EpisodeDataset
    from envs.spec import EnvConfig

_MEANINGS = {
    "obs_names": "what observations are",
    "action_names": "what actions are",
    "control_hz": "the control rate in Hz",
}
"""What an option of a task may change without a change of widths."""

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
        _require_goals(spec, dataset)
        _log.info("%s: goals end the states, as in env=%s.", dataset.source, spec.name)
        dataset = with_goals_in_states(dataset)
    if hasattr(env, "check_recording") and dataset.obs_dim == spec.obs_dim:
        env.check_recording(dataset)
    return dataset


def _require_goals(spec: EnvSpec, dataset: EpisodeDataset) -> None:
    goals = dataset.extras.get("goal")
    if goals is None or goals.shape[1:] != (spec.state_goal_dim,):
        found = "no goals" if goals is None else f"goals of shape {tuple(goals.shape[1:])}"
        raise ConfigError(
            f"the states of env={spec.name} are {spec.obs_dim} wide and end with a goal of width "
            f"{spec.state_goal_dim}; {dataset.source} has states of width {dataset.obs_dim} and {found}. Use "
            f"data with goals (in D4RL files infos/goal, unless reader.infos=false), or another env.goal."
        )


def require_fit(name: str, thing: Any, other_name: str, other: Any, *, advice: str) -> None:
    """Refuse two objects whose observation, action or goal widths differ.

    Each object is a task's specification, a policy or a dataset; names and advice appear in messages. Widths
    that one of them lacks (e.g. goals of a dataset) are not compared. A dataset of the same widths recorded
    in another task gives a warning.

    Raises:
        ConfigError: If widths or images differ; names both objects and widths.
    """
    for what in ("observation", "action", "goal"):
        width, other_width = _width(thing, what), _width(other, what)
        if None not in (width, other_width) and width != other_width:
            raise ConfigError(
                f"{name} has {what} width {width}, but {other_name} has {what} width {other_width}. {advice}"
            )
    _require_images(name, thing, other_name, other, advice)
    if isinstance(thing, EnvSpec) and hasattr(other, "meta"):
        _warn_of_another_task(name, thing, other_name, other.meta)


def _warn_of_another_task(name: str, spec: EnvSpec, dataset_name: str, meta: Any) -> None:
    """Warn if a dataset's metadata name another task, or entries of other meaning."""
    found = recorded_task(meta)
    if found is None:
        return
    recorded, options = found
    if recorded != spec.name:
        _log.warning(
            "%s was recorded in env=%s, not in %s; widths alone agree.", dataset_name, recorded, name
        )
        return
    then = None if options is None else recorded_spec(recorded, options)
    for key, meaning in {} if then is None else _MEANINGS.items():
        mine, other = getattr(spec, key), getattr(then, key)
        if mine != other and (key == "control_hz" or len(mine) == len(other)):
            mine, other = (mine, other) if key == "control_hz" else _first_unlike(mine, other)
            _log.warning(
                "%s was recorded in env=%s with other options: %s differs, %s there and %s here. Give the "
                "options of the recording (see burnish data inspect).",
                *(dataset_name, recorded, meaning, other, mine),
            )


def _first_unlike(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, str]:
    pair = next(pair for pair in zip(one, other, strict=True) if pair[0] != pair[1])
    return f"'{pair[0]}'", f"'{pair[1]}'"


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


def _width(thing: Any, what: str) -> int | None:
    """Return a width, or None; a policy's action width is in its chunk."""
    if what == "action":
        thing = getattr(thing, "chunk", thing)
    width: int | None = getattr(thing, {"observation": "obs_dim"}.get(what, f"{what}_dim"), None)
    return width
