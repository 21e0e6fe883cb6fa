"""Which task a dataset says that it was recorded in, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from envs.datasets.formats.minari_tasks import named_task, typed_task
from policies.errors import ConfigError

_ROBOSUITE = {
    "Lift": "lift",
    "PickPlaceCan": "can",
    "NutAssemblySquare": "square",
    "TwoArmTransport": "transport",
}
"""Names of robosuite's tasks -> ours."""


def recorded_task(meta: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None] | None:
    """Return name and options of the task that a dataset was recorded in; None if it names none of ours.

    Args:
        meta: Of the dataset. Files of ours tell under `env` or `env_args`, Minari's under `env_spec`,
            robomimic's under `env_args`, which has no options of ours: they are None.
    """
    from envs.make import list_envs

    found = _of_ours(meta) or _of_robosuite(meta) or named_task(meta.get("env_spec"))
    return found if found is not None and found[0] in list_envs() else None


def describe_task(meta: Mapping[str, Any], obs_dim: int, action_dim: int) -> str | None:
    """Return the recorded task as it is typed, e.g. `env=pointmaze-umaze env.hold=5`; None if none of ours.

    Args:
        meta: Of the dataset.
        obs_dim: Do of the dataset; a task whose observation is another one is not named.
        action_dim: Da of the dataset.
    """
    found = recorded_task(meta)
    return None if found is None else typed_task(found[0], found[1] or {}, obs_dim, action_dim)


def recorded_spec(name: str, options: Mapping[str, Any]) -> Any:
    """Return the specification of a recorded task; None where its options are no longer what they were."""
    from envs.make import env

    known = {field.name for field in fields(type(env(name)))}  # type: ignore[arg-type]
    try:
        return env(name, **{key: value for key, value in options.items() if key in known}).spec
    except (ConfigError, TypeError, ValueError):
        return None


def _of_ours(meta: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return what `burnish collect` writes."""
    own, args = meta.get("env"), meta.get("env_args")
    if isinstance(own, Mapping) and "name" in own:
        return str(own["name"]), _plain({key: value for key, value in own.items() if key != "name"})
    if isinstance(args, Mapping) and isinstance(args.get("env_kwargs"), Mapping):
        name = str(args.get("env_name"))
        return None if name in _ROBOSUITE else (name, _plain(args["env_kwargs"]))
    return None


def _of_robosuite(meta: Mapping[str, Any]) -> tuple[str, None] | None:
    """Return what robomimic writes."""
    args = meta.get("env_args")
    name = _ROBOSUITE.get(str(args.get("env_name"))) if isinstance(args, Mapping) else None
    return None if name is None else (name, None)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a configuration has them, without those of its parts (who demonstrated)."""
    kept = {key: value for key, value in options.items() if not isinstance(value, Mapping)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()}
