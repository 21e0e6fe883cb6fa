"""The task recorded in a dataset's metadata, for all formats."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from envs.spec import named_options
from policies.bounds import with_present_names
from policies.errors import ConfigError
from policies.registry import lookup

if TYPE_CHECKING:
    from envs.spec import EnvConfig

TASK_KEYS = ("env", "env_args", "env_spec")
"""Keys of a dataset's metadata that name its task."""
_ROBOSUITE = {
    "Lift": "lift",
    "PickPlaceCan": "can",
    "NutAssemblySquare": "square",
    "TwoArmTransport": "transport",
}
"""Names of robosuite's tasks -> ours."""


def recorded_task(meta: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None] | None:
    """Return name and options of the recorded task; None if it is none of ours.

    Args:
        meta: Metadata of the dataset. Own files use `env` or `env_args`, Minari's `env_spec`, robomimic's
            `env_args`, without options of ours: these are None.
    """
    from envs.make import list_envs

    found = _of_ours(meta) or _of_robosuite(meta) or _of_gymnasium(meta.get("env_spec"))
    return found if found is not None and found[0] in list_envs() else None


def meta_to_write(
    meta: Mapping[str, Any], env: EnvConfig | None, left_out: Collection[str]
) -> dict[str, Any]:
    """Return what a writer stores of a dataset's metadata, in JSON types.

    Args:
        meta: Metadata of the dataset.
        env: Task of the episodes, if given; it replaces the recorded one.
        left_out: Keys that belong to the file that was read, or stand elsewhere in the new one.
    """
    kept = {key: value for key, value in meta.items() if key not in left_out}
    kept |= {} if env is None else {"env": named_options(env)}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


def recorded_task_text(meta: Mapping[str, Any], obs_dim: int, action_dim: int) -> str | None:
    """Return the recorded task as `env=pointmaze-umaze env.hold=5`; None if unknown or of other widths."""
    found = recorded_task(meta)
    task = None if found is None else recorded_env(*found)
    if found is None or task is None:
        return None
    is_code = getattr(task, "runs_code", False)  # not run for what a file says
    if not is_code and (task.spec.obs_dim, task.spec.action_dim) != (obs_dim, action_dim):
        return None
    defaults = {one.name: one.default for one in fields(task)}  # type: ignore[arg-type]
    named = [key for key in with_present_names(type(task), found[1] or {}) if key in defaults]
    chosen = {key: value for key in named if (value := getattr(task, key)) != defaults[key]}
    texts = [f"env.{key}={option_text(value)}" for key, value in chosen.items() if not is_dataclass(value)]
    return " ".join([f"env={found[0]}", *texts])


def recorded_env(name: str, options: Mapping[str, Any] | None) -> EnvConfig | None:
    """Return the configuration of a recorded task; None if its options are no longer valid."""
    with contextlib.suppress(ConfigError, TypeError, ValueError):
        return _restored(lookup("env", name), options or {})
    return None


def _restored(kind: type, values: Mapping[str, Any]) -> Any:
    """Build a dataclass from recorded values; unknown ones are skipped, nested parts are built too."""
    present, chosen = with_present_names(kind, values), {}
    for one in fields(kind):
        if one.name in present:
            value, inner = present[one.name], type(one.default)
            is_part = isinstance(value, Mapping) and is_dataclass(inner)
            value = _restored(inner, value) if is_part else value
            chosen[one.name] = tuple(value) if isinstance(value, list) else value
    return kind(**chosen)


def _of_ours(meta: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    own, args = meta.get("env"), meta.get("env_args")
    if isinstance(own, Mapping) and "name" in own:
        return str(own["name"]), {key: value for key, value in own.items() if key != "name"}
    if isinstance(args, Mapping) and isinstance(args.get("env_kwargs"), Mapping):
        name = str(args.get("env_name"))
        return None if name in _ROBOSUITE else (name, dict(args["env_kwargs"]))
    return None


def _of_robosuite(meta: Mapping[str, Any]) -> tuple[str, None] | None:
    args = meta.get("env_args")
    name = _ROBOSUITE.get(str(args.get("env_name"))) if isinstance(args, Mapping) else None
    return None if name is None else (name, None)


def _of_gymnasium(spec: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the task from Minari's metadata: gymnasium's `id`, `kwargs` and `max_episode_steps`."""
    with contextlib.suppress(ValueError):  # no JSON: no task
        spec = json.loads(spec) if isinstance(spec, str) else spec
    if not isinstance(spec, Mapping):
        return None
    kwargs = spec.get("kwargs")
    for pattern, read in _KINDS.items():
        match = re.fullmatch(pattern, str(spec.get("id")))
        if match is not None:
            name, options = read(match, kwargs if isinstance(kwargs, Mapping) else {})
            limit = spec.get("max_episode_steps")
            return name, options | ({} if limit is None else {"max_episode_steps": limit})
    return None


def _robot(match: re.Match[str], _: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return match[1].lower(), {"version": match[2]}


def _maze(match: re.Match[str], kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    options = {"goal": "separate", "continuing": kwargs.get("continuing_task", True)}
    return f"{match[1]}maze-{match[2]}".lower(), options | {"reward": kwargs.get("reward_type", "sparse")}


def _hand(match: re.Match[str], _: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return f"adroit-{match[1]}".lower(), {}


_KINDS: Mapping[str, Callable[[re.Match[str], Mapping[str, Any]], tuple[str, dict[str, Any]]]] = {
    r"(Hopper|Walker2d)-(v4|v5)": _robot,
    r"(HalfCheetah|Ant|Humanoid|Swimmer)-(v5)": _robot,
    r"(Point|Ant)Maze_(UMaze|Medium|Large)-v[345]": _maze,
    r"AdroitHand(Door|Hammer|Pen|Relocate)-v1": _hand,
}
"""Pattern of gymnasium's names -> our name and options."""


def option_text(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{option_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(option_text, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
