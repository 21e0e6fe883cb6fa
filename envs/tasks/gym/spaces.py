"""Spaces of gymnasium: what of an observation is the state, and what bounds actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envs.spec import Array
from policies.errors import ConfigError


def parts_of(space: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a space of observations by name; a Box has the name ''."""
    if not hasattr(space, "spaces") or not isinstance(space.spaces, Mapping):
        return {prefix: space}
    found: dict[str, Any] = {}
    for key in sorted(space.spaces):
        found |= parts_of(space.spaces[key], f"{prefix}/{key}" if prefix else key)
    return found


def is_image(space: Any) -> bool:
    """Say whether a part of an observation is an image (H, W, 3) uint8."""
    return space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == 3


def _is_vector(space: Any) -> bool:
    from gymnasium.spaces import Box, MultiBinary

    return isinstance(space, Box | MultiBinary) and not is_image(space)


def vector_names(space: Any) -> tuple[str, ...]:
    """Return the names of the parts that are vectors, sorted."""
    return tuple(name for name, one in parts_of(space).items() if _is_vector(one))


def never_seen(space: Any) -> dict[str, str]:
    """Return the parts that are neither vectors nor images, which nothing observes, with their kinds."""
    parts = parts_of(space).items()
    return {name: type(one).__name__ for name, one in parts if not is_image(one) and not _is_vector(one)}


def state_names(space: Any, keys: tuple[str, ...], title: str) -> tuple[str, ...]:
    """Return a name for every entry of the state.

    Raises:
        ConfigError: If a part is missing or no vector, or there is none.
    """
    parts = parts_of(space)
    wanted = keys or vector_names(space)
    unusable = [key for key in wanted if key not in parts or not _is_vector(parts[key])]
    if unusable or not wanted:
        raise ConfigError(
            f"{title} needs an observation with vectors of numbers{f' {unusable}' if unusable else ''}; it "
            f"has {space}. Name some of {list(vector_names(space))} by env.obs_keys, or wrap it."
        )
    sizes = {key: int(np.prod(parts[key].shape)) for key in wanted}
    return tuple(f"{key or 'observation'} {i}" for key in wanted for i in range(sizes[key]))


def part(obs: Any, name: str) -> Array:
    """Return a part of an observation by its name."""
    for key in name.split("/") if name else ():
        obs = obs[key]
    return np.asarray(obs)


def flattened(obs: Any, keys: tuple[str, ...]) -> Array:
    """Return the state (Do,) float64 of an observation: these parts of it, one after another."""
    return np.concatenate([part(obs, key).astype(np.float64).reshape(-1) for key in keys])


def action_limits(space: Any, title: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the action box, flat.

    Raises:
        ConfigError: If actions are no bounded box.
    """
    from gymnasium.spaces import Box

    if not isinstance(space, Box) or not np.isfinite([space.low, space.high]).all():
        raise ConfigError(
            f"{title} needs a bounded Box as action space; it has {space}. Give it one, for example by "
            "gymnasium.wrappers.TransformAction(env, lambda action: action, Box(low, high))."
        )
    low, high = (tuple(float(x) for x in bound.reshape(-1)) for bound in (space.low, space.high))
    return low, high
