"""Ranges of configuration fields, declared with the field.

For example::

    @register("algo", "mine")
    @dataclass
    class MineConfig(Checked):
        steps: int = bounded(20_000, ge=1)  # gradient steps
        gamma: float = bounded(0.99, ge=0, le=1)  # discount per step
        search: str = bounded("lists", choices=("lists", "tree"))  # how neighbors are found

A value outside its range is refused at construction. The page of keys prints the ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar

from policies.errors import ConfigError

_BOUNDS = "bounds"
WAS = "was"


@dataclass(frozen=True)
class Bounds:
    """Admissible values of a field: a numeric range or a set of choices; `some`: one entry or more."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] = ()
    even: bool = False
    some: bool = False

    def admits(self, value: Any) -> bool:
        """Whether a single value is admissible; NaN never is, infinity only for infinite `le`."""
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            return False
        low = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        high = (self.le is None or value <= self.le) and (self.lt is None or value < self.lt)
        is_finite = math.isfinite(value) or self.le == math.inf
        return low and high and is_finite and not (self.even and value % 2)

    def __str__(self) -> str:
        if self.choices:
            return ("one of " if len(self.choices) > 1 else "") + ", ".join(map(str, self.choices))
        return ("one or more, each " * self.some) + ("even and " * self.even) + self._range()

    def _range(self) -> str:
        low, high = self.ge if self.gt is None else self.gt, self.le if self.lt is None else self.lt
        low = None if low == -math.inf else low
        if low is None and high is None:
            return "finite"
        if high is None or high == math.inf:
            return f"at least {low:g}" if self.gt is None else f"above {low:g}"
        if low is None:
            return f"at most {high:g}" if self.lt is None else f"below {high:g}"
        return f"in {'[' if self.gt is None else '('}{low:g}, {high:g}{']' if self.lt is None else ')'}"


def bounded(
    default: Any = MISSING,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Sequence[Any] = (),
    even: bool = False,
    some: bool = False,
    was: str = "",
) -> Any:
    """Declare a field with a range, choices or a former name.

    None is accepted for optional fields. Lists and tuples are checked per entry.

    Args:
        default: Default value; a list or dict becomes a factory. Without it the field is mandatory.
        ge: Inclusive lower bound.
        gt: Exclusive lower bound.
        le: Inclusive upper bound; `math.inf` admits infinity, which is refused otherwise.
        lt: Exclusive upper bound.
        choices: Admissible values.
        even: Admit even numbers only; needs a bound.
        some: Refuse an empty tuple; needs a bound.
        was: Former name, still accepted in saved configurations and on the command line.
    """
    has_range = choices or any(limit is not None for limit in (ge, gt, le, lt))
    bounds = Bounds(ge, gt, le, lt, tuple(choices), even, some)
    metadata: dict[str, Any] = {_BOUNDS: bounds} if has_range else {}
    metadata |= {WAS: was} if was else {}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def bounds_of(one: Field[Any]) -> Bounds | None:
    """Return the range of a field, or None."""
    return one.metadata.get(_BOUNDS)


def former_names(kind: type) -> dict[str, str]:
    """Return present field names by former name."""
    return {one.metadata[WAS]: one.name for one in fields(kind) if WAS in one.metadata}


def with_present_names(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return field values with former names replaced by present ones."""
    renamed = former_names(kind)
    return {renamed.get(key, key): value for key, value in values.items()}


class Checked:
    """Dataclass whose bounded fields are checked at construction; `register` sets `key` to the group."""

    key: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Make lists tuples where the default is one, and check ranges; errors name key, range and value."""
        for one in fields(self):  # type: ignore[arg-type]
            bounds, value = bounds_of(one), getattr(self, one.name)
            if isinstance(value, list) and isinstance(one.default, tuple):
                value = tuple(value)
                object.__setattr__(self, one.name, value)  # of a frozen dataclass too
            if bounds is None or value is None:
                continue
            entries = list(_entries(value))
            if not all(map(bounds.admits, entries)) or (bounds.some and not entries):
                raise ConfigError(f"{self._key_of(one.name)} must be {bounds}; got {_shown(value)}.")

    def require(self, name: str, holds: bool, rule: str) -> None:
        """Check a rule over several fields; a ConfigError names key, rule and value."""
        if not holds:
            raise ConfigError(f"{self._key_of(name)} must be {rule}; got {_shown(getattr(self, name))}.")

    def unused(self) -> dict[str, str]:
        """Return the fields without effect beside the values of others, by name, and why.

        A name stands for all keys below it. A reason completes "<key> has no effect …", such as
        "without algo.bc_weight". Typed keys among them are refused; defaults and experiments are not.
        """
        return {}

    def _key_of(self, name: str) -> str:
        return f"{self.key}.{name}" if self.key else name


def _entries(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        return iter(value.values())
    return iter(value) if isinstance(value, (list, tuple)) else iter((value,))


def _shown(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else f"{list(value) if isinstance(value, tuple) else value}"
