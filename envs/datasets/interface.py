"""What the entries of a dataset are: names, rate, limits, task texts; they travel with its policies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.errors import ConfigError

if TYPE_CHECKING:
    from envs.spec import EnvSpec

NAMES = {"obs_names": "obs_dim", "action_names": "action_dim"}
LIMITS = ("action_low", "action_high")


def interface_of(meta: Mapping[str, Any], obs_dim: int, action_dim: int) -> dict[str, Any]:
    """Return the facts under `interface` of a dataset's metadata that fit its widths.

    Args:
        meta: Metadata of the dataset; a file may hold anything.
        obs_dim: Do.
        action_dim: Da.

    Returns:
        Any of `obs_names` (Do,), `action_names` (Da,), `control_hz`, `action_low` and `action_high` (Da,),
        `instructions`, `robot`, and what the `actions` are.
    """
    given, sizes = meta.get("interface"), {"obs_dim": obs_dim, "action_dim": action_dim}
    if not isinstance(given, Mapping):
        return {}
    found: dict[str, Any] = {}
    for key, width in NAMES.items():
        names = given.get(key)
        if isinstance(names, list) and len(names) == sizes[width] and all(isinstance(n, str) for n in names):
            found[key] = names
    for key in LIMITS:
        limits = given.get(key)
        if isinstance(limits, list) and len(limits) == action_dim and all(map(_is_number, limits)):
            found[key] = [float(one) for one in limits]
    if _is_number(given.get("control_hz")) and given["control_hz"] > 0:
        found["control_hz"] = float(given["control_hz"])
    texts = given.get("instructions")
    if isinstance(texts, list) and texts and all(isinstance(one, str) for one in texts):
        found["instructions"] = texts
    for key in ("robot", "actions"):
        if isinstance(given.get(key), str):
            found[key] = given[key]
    return found


def interface_of_task(spec: EnvSpec) -> dict[str, Any]:
    """Return names, rate and limits of a task; without limits where its actions are unbounded."""
    found: dict[str, Any] = {"obs_names": list(spec.obs_names), "action_names": list(spec.action_names)}
    limits = {"action_low": list(spec.action_low), "action_high": list(spec.action_high)}
    bounded = all(map(_is_number, [*spec.action_low, *spec.action_high]))
    return found | {"control_hz": float(spec.control_hz)} | (limits if bounded else {})


def with_given(
    interface: Mapping[str, Any],
    action_dim: int,
    *,
    control_hz: float | None,
    action_low: Any,
    action_high: Any,
) -> dict[str, Any]:
    """Return the facts with a rate and limits given by the user; a number is a limit of all entries.

    Raises:
        ConfigError: If the rate is not positive, or limits are no numbers, of another width, or the lower
            ones not below the upper.
    """
    found = dict(interface)
    if control_hz is not None:
        if not 0 < control_hz < math.inf:
            raise ConfigError(f"control_hz must be positive and finite, or null; got {control_hz}.")
        found["control_hz"] = float(control_hz)
    for key, value in (("action_low", action_low), ("action_high", action_high)):
        if value is not None:
            found[key] = _limits(key, value, action_dim)
    if set(LIMITS) & set(found):
        low, high = found.get("action_low"), found.get("action_high")
        if low is None or high is None or not all(a < b for a, b in zip(low, high, strict=True)):
            raise ConfigError(f"action_low must be below action_high in every entry; got {low} and {high}.")
    return found


def _limits(key: str, value: Any, action_dim: int) -> list[float]:
    values = [value] * action_dim if _is_number(value) else value
    if not isinstance(values, (list, tuple)) or len(values) != action_dim or not all(map(_is_number, values)):
        raise ConfigError(f"{key} must be a number, or a list of {action_dim}; got {value}.")
    return np.asarray(values, np.float64).tolist()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
