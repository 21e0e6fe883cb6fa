"""The task recorded in a dataset's metadata, for all formats."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from policies.errors import ConfigError

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


def describe_task(meta: Mapping[str, Any], obs_dim: int, action_dim: int) -> str | None:
    """Return the recorded task as `env=pointmaze-umaze env.hold=5`; None if unknown or of other widths."""
    from envs.make import env

    found = recorded_task(meta)
    if found is None:
        return None
    name, options = found[0], found[1] or {}
    spec = recorded_spec(name, options)
    if spec is None or (spec.obs_dim, spec.action_dim) != (obs_dim, action_dim):
        return None
    default = {field.name: field.default for field in fields(type(env(name)))}  # type: ignore[arg-type]
    chosen = {key: value for key, value in options.items() if key in default and value != default[key]}
    return " ".join([f"env={name}", *(f"env.{key}={_typed(value)}" for key, value in chosen.items())])


def recorded_spec(name: str, options: Mapping[str, Any]) -> Any:
    """Return the specification of a recorded task; None if its options are no longer valid."""
    from envs.make import env

    known = {field.name for field in fields(type(env(name)))}  # type: ignore[arg-type]
    try:
        return env(name, **{key: value for key, value in options.items() if key in known}).spec
    except (ConfigError, TypeError, ValueError):
        return None


def _of_ours(meta: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    own, args = meta.get("env"), meta.get("env_args")
    if isinstance(own, Mapping) and "name" in own:
        return str(own["name"]), _plain({key: value for key, value in own.items() if key != "name"})
    if isinstance(args, Mapping) and isinstance(args.get("env_kwargs"), Mapping):
        name = str(args.get("env_name"))
        return None if name in _ROBOSUITE else (name, _plain(args["env_kwargs"]))
    return None


def _of_robosuite(meta: Mapping[str, Any]) -> tuple[str, None] | None:
    args = meta.get("env_args")
    name = _ROBOSUITE.get(str(args.get("env_name"))) if isinstance(args, Mapping) else None
    return None if name is None else (name, None)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as in a configuration, without those of nested parts (the expert)."""
    kept = {key: value for key, value in options.items() if not isinstance(value, Mapping)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()}


def _of_gymnasium(spec: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the task from Minari's metadata: gymnasium's `id`, `kwargs` and `max_episode_steps`."""
    with contextlib.suppress(ValueError):
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


def _typed(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_typed, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
