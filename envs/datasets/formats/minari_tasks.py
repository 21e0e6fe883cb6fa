"""Which of our tasks a Minari dataset was recorded in, as far as its environment's specification tells."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from policies.errors import ConfigError

Options = dict[str, Any]


def task_of(env_spec: Any, obs_dim: int, action_dim: int) -> str | None:
    """Return the task as it is typed, e.g. `env=pointmaze-umaze env.goal=separate`; None if none of ours.

    Args:
        env_spec: gymnasium's specification, as JSON text or parsed: `id`, `kwargs`, `max_episode_steps`.
        obs_dim: Do of the dataset; a task whose observation is another one is not named.
        action_dim: Da of the dataset.
    """
    from envs.make import list_envs

    found = named_task(env_spec)
    if found is None or found[0] not in list_envs():
        return None
    return typed_task(*found, obs_dim, action_dim)


def named_task(env_spec: Any) -> tuple[str, Options] | None:
    """Return our name and the options of a specified environment; None if it is of a kind that we lack."""
    return _named(_parsed(env_spec))


def typed_task(name: str, options: Options, obs_dim: int, action_dim: int) -> str | None:
    """Return one of our tasks as it is typed; None if it has other options or widths; see `task_of`."""
    from envs.make import env

    known = {field.name: field.default for field in fields(type(env(name)))}  # type: ignore[arg-type]
    chosen = {key: value for key, value in options.items() if key in known and value != known[key]}
    try:
        spec = env(name, **chosen).spec
    except (ConfigError, TypeError, ValueError):
        return None
    if (spec.obs_dim, spec.action_dim) != (obs_dim, action_dim):
        return None
    return " ".join([f"env={name}", *(f"env.{key}={_typed(value)}" for key, value in chosen.items())])


def _parsed(env_spec: Any) -> Mapping[str, Any]:
    """Return a specification as a mapping; empty if it is none."""
    try:
        found = json.loads(env_spec) if isinstance(env_spec, str) else env_spec
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}


def _named(spec: Mapping[str, Any]) -> tuple[str, Options] | None:
    """Return our name and the options of a specified environment."""
    kwargs = spec.get("kwargs")
    for pattern, read in _KINDS.items():
        match = re.fullmatch(pattern, str(spec.get("id")))
        if match is not None:
            name, options = read(match, kwargs if isinstance(kwargs, Mapping) else {})
            limit = spec.get("max_episode_steps")
            return name, options | ({} if limit is None else {"max_episode_steps": limit})
    return None


def _robot(match: re.Match[str], _: Mapping[str, Any]) -> tuple[str, Options]:
    return match[1].lower(), {"version": match[2]}


def _maze(match: re.Match[str], kwargs: Mapping[str, Any]) -> tuple[str, Options]:
    options = {"goal": "separate", "continuing": kwargs.get("continuing_task", True)}
    return f"{match[1]}maze-{match[2]}".lower(), options | {"reward": kwargs.get("reward_type", "sparse")}


def _hand(match: re.Match[str], _: Mapping[str, Any]) -> tuple[str, Options]:
    return f"adroit-{match[1]}".lower(), {}


_KINDS: Mapping[str, Callable[[re.Match[str], Mapping[str, Any]], tuple[str, Options]]] = {
    r"(Hopper|Walker2d)-(v4|v5)": _robot,
    r"(HalfCheetah|Ant|Humanoid|Swimmer)-(v5)": _robot,
    r"(Point|Ant)Maze_(UMaze|Medium|Large)-v[345]": _maze,
    r"AdroitHand(Door|Hammer|Pen|Relocate)-v1": _hand,
}
"""Pattern of gymnasium's names -> our name and options."""


def _typed(value: Any) -> str:
    """Write a value as one types it."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_typed, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
