"""Names for environments: every family registers itself, and simulators load only when they are used."""

from __future__ import annotations

import importlib
from dataclasses import fields
from functools import cache
from types import ModuleType
from typing import Any

from envs.spec import EnvConfig
from policies.errors import ConfigError, MissingExtraError
from policies.registry import load_plugins, lookup, parts, scan

SECOND_STEP = {
    "robomimic": ("robomimic==0.3.0",),
    "d4rl": ("d4rl==1.1", "gym==0.23.1"),
    "metaworld": ("metaworld==3.1.1",),
}
"""Extra -> packages that are installed in a second step, as their own requirements contradict the rest."""


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
    _scan()
    cls = lookup("env", name)
    known = [f.name for f in fields(cls)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"env={name} has no option {unknown}; it has {known}.")
    config: EnvConfig = cls(**options)
    return config


def list_envs() -> list[str]:
    """Return the names of all environments, installed or not."""
    _scan()
    return list(parts("env"))


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional package.

    Raises:
        MissingExtraError: If it is not importable; the message names the extra and the reason.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"this needs the package '{module.partition('.')[0]}', which cannot be imported ({error}): "
            f"{install_command(extra)}."
        ) from error


def install_command(extra: str) -> str:
    """Return what has to be typed to install an extra."""
    command, pins = f"pip install 'burnish[{extra}]'", SECOND_STEP.get(extra)
    return f"{command} && {second_command(extra)}" if pins else command


def second_command(extra: str) -> str:
    """Return what has to be typed for the packages of an extra that pip cannot bring along."""
    return f"pip install --no-deps {' '.join(SECOND_STEP[extra])}"


@cache
def _scan() -> None:
    """Import every environment module once, so that it registers."""
    import envs

    scan(envs)
    load_plugins()
