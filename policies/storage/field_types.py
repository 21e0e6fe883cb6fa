"""Whether a value from a file is of the type that a dataclass declares for it."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from policies.errors import ConfigError


def check_types(kind: type, values: Mapping[str, Any], where: str) -> None:
    """Refuse values of another type than a dataclass declares; keys that it lacks are left to others.

    Lists stand for tuples, whole numbers for floating-point ones, and nothing else for anything else.
    """
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        if field.name in values and not fits(values[field.name], hints[field.name]):
            hint, found = hints[field.name], repr(values[field.name])[:80]
            wanted = hint.__name__ if isinstance(hint, type) else str(hint)
            raise ConfigError(f"{where}.{field.name} must be of type {wanted}; got {found}.")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON fits a type."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in options)
    if origin is tuple:
        inner = options[0] if len(options) == 2 and options[1] is Ellipsis else None
        if not isinstance(value, list | tuple):
            return False
        if inner is None:
            return len(value) == len(options) and all(map(fits, value, options))
        return all(fits(one, inner) for one in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint is float:
        return type(value) in (int, float)
    if hint is None or hint is type(None):
        return value is None
    return type(value) is hint if hint in (int, bool, str) else True
