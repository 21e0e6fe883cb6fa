"""Read untrusted JSON: small, unambiguous, finite numbers only."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

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
