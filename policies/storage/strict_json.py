"""Read untrusted JSON: small, unambiguous, finite numbers, and of the types that a dataclass declares."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from policies.errors import ConfigError

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 64
MAX_INTEGER = 2**63


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ValueError: If it is too large or nested too deep, is no JSON object, names a key twice, or holds NaN,
            inf or a number beyond 64 bits; names the file.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} must have at most {MAX_BYTES} bytes; got {size}.")
    try:
        data = json.loads(
            path.read_bytes().decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{path} is not valid JSON ({reason}).") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(data).__name__}.")
    if _depth(data) > MAX_DEPTH:
        raise ValueError(f"{path} is not valid JSON (nested too deep).")
    return data


def _no_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key '{twice[:80]}' stands twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"numbers must be finite; got {name}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"numbers must be finite; got {text[:20]}")
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or not abs(int(text)) < MAX_INTEGER:
        raise ValueError(f"whole numbers must have at most 64 bits; got {text[:20]}")
    return int(text)


def _depth(data: Any) -> int:
    """Return how many containers lie in each other, without recursion."""
    level, depth = [data], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    return depth


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
