"""Path-valued configuration fields, declared with `path_field`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass, replace
from typing import Any, TypeVar

from policies.bounds import WAS

T = TypeVar("T")

_NAMES_A_PATH = "names_a_path"


def path_field(default: Any = None, *, was: str = "") -> Any:
    """Declare a dataclass field for a file or folder, or a list of them; `was` as in `bounded`."""
    return field(default=default, metadata={_NAMES_A_PATH: True} | ({WAS: was} if was else {}))


def with_paths(config: T, change: Callable[[str], str]) -> T:
    """Apply `change` to all set paths of a dataclass and its nested parts; return other values unchanged."""
    if not is_dataclass(config) or isinstance(config, type):
        return config
    new: dict[str, Any] = {}
    for f in fields(config):
        old = getattr(config, f.name)
        value = _changed(old, change) if f.metadata.get(_NAMES_A_PATH) else with_paths(old, change)
        if value is not old:
            new[f.name] = value
    return replace(config, **new) if new else config


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def at_home(config: T) -> T:
    """Return a configuration with `~` expanded in its paths."""
    return with_paths(config, os.path.expanduser)


def lasting(config: T) -> T:
    """Return a configuration with absolute paths, valid in any working directory."""
    return with_paths(config, _absolute)


def _absolute(path: str) -> str:
    """Return an absolute path; `hub://…` addresses are unchanged."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))
