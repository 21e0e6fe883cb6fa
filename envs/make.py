"""Environments by name; families register themselves, simulators are imported on use."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from envs.spec import EnvConfig
from policies.errors import ConfigError
from policies.registry import lookup, names


def env(name: str, **options: Any) -> EnvConfig:
    """Return the configuration of a registered environment.

    Args:
        name: One of `list_envs()`.
        **options: Fields of its configuration, e.g. `max_episode_steps`.

    Raises:
        ConfigError: If the name or an option is unknown.

    Example:
        >>> env("hopper", max_episode_steps=200).spec.max_episode_steps
        200
    """
    cls = lookup("env", name)
    known = [f.name for f in fields(cls)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"env={name} has no option {unknown}; it has {known}.")
    config: EnvConfig = cls(**options)
    return config


def list_envs() -> list[str]:
    """Return the names of all environments, installed or not."""
    return list(names("env"))
