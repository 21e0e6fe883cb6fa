"""Reader options: which format has them, and their types.

The keyword arguments of a format's `read` are its options; names, types, defaults and explanations are
defined there only. `checked_options` refuses unsupported options before a reader is called.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from policies.errors import ConfigError


@dataclass(frozen=True)
class Option:
    """One option of a reader: its key below `reader`, type, default and description."""

    name: str
    hint: Any
    default: Any
    text: str = ""


def reader_options_of(read: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of a reader by name: all arguments of its function but the first."""
    hints, texts = typing.get_type_hints(read), _explained(read)
    parameters = list(inspect.signature(read).parameters.values())[1:]
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return {p.name: Option(p.name, hints.get(p.name, Any), p.default, texts.get(p.name, "")) for p in named}


def _explained(read: Callable[..., Any]) -> dict[str, str]:
    found = re.search(r"^Args:\n((?:    .*\n|\n)+)", f"{inspect.getdoc(read)}\n", re.MULTILINE)
    entries = re.split(r"^    (?=\w+:)", found[1], flags=re.MULTILINE) if found else []
    named = (entry.partition(":") for entry in entries if entry.strip())
    return {name.strip(): " ".join(text.split()) for name, _, text in named}


def checked_options(
    options: Mapping[str, Any], form: str, readers: Mapping[str, Mapping[str, Option]], source: str | Path
) -> dict[str, Any]:
    """Return options of a format's reader, validated, with absolute paths."""
    known = readers[form]
    for name, value in options.items():
        if name not in known:
            raise ConfigError(_refused(name, form, readers, source))
        if not _fits(value, known[name].hint):
            raise ConfigError(
                f"reader.{name} of {form} must be {hint_name(known[name].hint)}; got {value!r}."
            )
    return absolute_paths(options, readers)


def absolute_paths(options: Mapping[str, Any], readers: Mapping[str, Mapping[str, Option]]) -> dict[str, Any]:
    """Return options with absolute paths; `~` is expanded."""
    places = {
        name
        for one in readers.values()
        for name, option in one.items()
        if Path in (option.hint, *typing.get_args(option.hint))
    }
    return {
        name: str(Path(value).expanduser().absolute()) if name in places and value is not None else value
        for name, value in options.items()
    }


def _refused(name: str, form: str, readers: Mapping[str, Mapping[str, Option]], source: str | Path) -> str:
    having = [other for other, options in readers.items() if name in options]
    every = sorted({option for options in readers.values() for option in options})
    near = get_close_matches(name, [*readers[form], *every], n=1, cutoff=0.6)
    hint = f" Did you mean '{near[0]}'?" if near and not having else ""
    problem = f"is an option of {' and '.join(having)}" if having else "is no option of any format."
    own = ", ".join(readers[form]) or "none"
    joint = "; " if having else f"{hint} "
    return f"reader.{name} {problem}{joint}{source} is {form}, whose options are: {own}."


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has a type; integers count as floats."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if hint in (None, type(None)):
        return value is None
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, (list, tuple)) and all(_fits(item, inner[0]) for item in value)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, {float: (int, float), Path: (str, Path)}.get(hint, hint))


def hint_name(hint: Any) -> str:
    """Return a type as text for documentation."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        names = [hint_name(one) for one in inner]
        return " or ".join(dict.fromkeys(sorted(names, key=lambda name: name == "null")))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list of {hint_name(inner[0])}"
    words = {type(None): "null", bool: "true or false", int: "a whole number", float: "a number"}
    words |= {str: "a text", Path: "a file", Any: "any value"}
    return words.get(hint, str(hint))
