"""Read small untrusted files: bounded text, and unambiguous JSON of declared types."""

from __future__ import annotations

import json
import math
import stat
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from policies.errors import ConfigError

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 64
MAX_INTEGER = 2**63

type_hints: Callable[[Any], dict[str, Any]] = cache(typing.get_type_hints)
"""Types of the fields of a dataclass, which are looked up for every policy and configuration."""


def own_file(path: Path) -> Path:
    """Return a path that is missing, or a regular file of its folder or of the hub's cache."""
    real, home = path.resolve(), path.parent.resolve()
    blobs = home.parent.parent / "blobs"  # files of the hub's cache are links to here
    if home not in real.parents and not (home.parent.name == "snapshots" and real.parent == blobs):
        raise ValueError(f"{path} is a link that leads out of its directory. Copy the file to this place.")
    if real.exists() and not stat.S_ISREG(real.stat().st_mode):
        raise ValueError(f"{path} must be a regular file.")
    return real


def read_small(path: Path, most: int = MAX_BYTES) -> str:
    """Read a regular UTF-8 file of at most `most` bytes; a ValueError names the file."""
    try:
        return _small_content(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}).") from None


def _small_content(path: Path, most: int) -> bytes:
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError(f"{path} must be a regular file.")
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} must have at most {most} bytes; got {facts.st_size}.")
    return content


def peek(path: Path) -> str:
    """Return the beginning of a text file, for format detection; empty if missing."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(MAX_BYTES).decode("utf-8", errors="replace")


def read_json(path: Path, most: int = MAX_BYTES, *, finite: bool = True) -> dict[str, Any]:
    """Read a JSON object from a file of at most `most` bytes; `finite` refuses NaN and infinite numbers.

    Raises:
        OSError: If it is missing or cannot be read.
        ValueError: If it is too large or nested too deep, is no JSON object, repeats a key, or holds NaN,
            inf or a number beyond 64 bits; names the file.
    """
    return parse_json(_small_content(path, most), path, finite=finite)


def parse_json(text: str | bytes, source: object, *, finite: bool = True) -> dict[str, Any]:
    """Parse a JSON object; see `read_json`. `source` is its name in errors."""
    try:
        data = json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_refuse_constant if finite else float,
            parse_float=_finite if finite else float,
            parse_int=_integer,
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{source} is not valid JSON ({reason}).") from None
    if not isinstance(data, dict):
        raise ValueError(f"{source} must hold a JSON object; got {type(data).__name__}.")
    if depth_of(data) > MAX_DEPTH:
        raise ValueError(f"{source} is not valid JSON (nested too deep).")
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


def depth_of(data: Any) -> int:
    """Return the nesting depth of containers, computed without recursion."""
    level, depth = [data], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    return depth


def check_types(kind: type, values: Mapping[str, Any], where: str) -> None:
    """Refuse values of other types than a dataclass's fields; lists fit tuples, integers fit floats."""
    hints = type_hints(kind)
    for field in fields(kind):
        if field.name in values and not fits(values[field.name], hints[field.name]):
            hint, found = hints[field.name], repr(values[field.name])[:80]
            wanted = hint.__name__ if isinstance(hint, type) else str(hint)
            raise ConfigError(f"{where}.{field.name} must be of type {wanted}; got {found}.")


def fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the hinted type."""
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
