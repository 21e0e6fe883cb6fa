"""Overrides: parsed once and checked before Hydra composes them."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from burnish.config.commands import COMMANDS
from burnish.config.errors import closest, error_message
from policies import registry
from policies.errors import ConfigError

HELP_WIDTH = 110  # columns of help pages
_MOST_ENTRIES = 256  # of an array as a value: longer ones are data
_NULL = r"(?<![\w.-])null(?![\w.-])"  # as a whole word


@cache
def presets(group: str) -> tuple[str, ...]:
    """Return the names of the packaged yaml files of a group, sorted."""
    folder = resources.files("configs") / group
    files = folder.iterdir() if folder.is_dir() else ()
    return tuple(sorted(Path(one.name).stem for one in files if one.name.endswith(".yaml")))


def experiments() -> tuple[str, ...]:
    """Return the names of the packaged experiments, sorted."""
    return presets("experiment")


def preset_text(group: str, name: str) -> str:
    """Return the content of a packaged yaml file."""
    return (resources.files("configs") / group / f"{name}.yaml").read_text(encoding="utf-8")


def preset_summary(group: str, name: str) -> str:
    """Return the comments of a packaged yaml file in one line."""
    lines = preset_text(group, name).splitlines()
    return " ".join(one[1:].strip() for one in lines if one.startswith("#") and "@package" not in one)


@cache
def default_options(command: str) -> dict[str, str | None]:
    """Return the groups of a command, in order, with their default options."""
    text = (resources.files("configs") / f"{COMMANDS[command].config_name}.yaml").read_text()
    entries = [entry.items() for entry in yaml.safe_load(text)["defaults"] if isinstance(entry, dict)]
    return {group: name for ((group, name),) in entries if not group.startswith("override ")}


def groups_of(command: str) -> tuple[str, ...]:
    """Return the groups of a command, in the order of its defaults."""
    return tuple(default_options(command))


def options_of(group: str) -> tuple[str, ...]:
    """Return the options of a group, sorted."""
    return tuple(sorted((*registry.names(group), *presets(group))))


def describe_groups(command: str) -> str:
    """Return the help text with the groups of a command and their options."""
    lines = []
    for group in groups_of(command):
        shown = f"{group}: {', '.join(options_of(group))}"
        lines += textwrap.wrap(
            shown, HELP_WIDTH, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False
        )
    return "\n".join(["", "options of the groups (group=option):", *lines, ""]) if lines else ""


@dataclass(frozen=True)
class Override:
    """One typed `key=value`."""

    text: str
    key: str  # key or group
    value: Any = None  # also None for sweeps over several values
    is_plain: bool = True  # sets one value of a key that exists
    has_package: bool = False


@dataclass(frozen=True)
class Overrides:
    """Typed overrides, in order."""

    items: tuple[Override, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Overrides:
        return cls(tuple(map(_parse, texts)))

    @property
    def texts(self) -> list[str]:
        return [item.text for item in self.items]

    @property
    def keys(self) -> list[str]:
        return [item.key for item in self.items]

    def value(self, key: str) -> Any:
        """Return the last value of a key; None if not typed."""
        return next((item.value for item in reversed(self.items) if item.key == key), None)

    def without(self, *keys: str) -> Overrides:
        """Return all overrides except those of the given keys."""
        return Overrides(tuple(item for item in self.items if item.key not in keys))

    def __add__(self, other: Overrides) -> Overrides:
        return Overrides(self.items + other.items)


NO_OVERRIDES = Overrides()


@dataclass(frozen=True)
class RunContext:
    """What a command is given beside its configuration."""

    directory: Path  # default output directory
    overrides: Overrides = NO_OVERRIDES
    is_proposed: bool = False  # the directory was generated; if it exists, a number is appended


def readable(override: str) -> str:
    """Quote a plain value with letters beyond ASCII, which Hydra's grammar takes in quotes only."""
    key, equals, value = override.partition("=")
    is_plain = not (key.startswith("-") or re.search(r"""['"$,(){}\[\]]""", value))
    return override if value.isascii() or not is_plain else key + equals + quoted(value.strip())


def with_no_option(command: str, texts: Sequence[str]) -> list[str]:
    """Write `group=null` as `group=[]`: Hydra takes null as the default of a group, and not as typed.

    So is null written among the values of a sweep, `group=null,name`.

    Raises:
        ConfigError: If the command needs an option of the group.
    """
    written = []
    for text in texts:
        group, _, value = text.partition("=")
        is_none = group in groups_of(command) and bool(re.search(_NULL, value))
        if is_none and default_options(command)[group] is not None:
            choices = f"choose one of: {', '.join(options_of(group))}"
            raise ConfigError(f"burnish {command} needs an option of {group}; {choices}.")
        written.append(f"{group}={re.sub(_NULL, '[]', value)}" if is_none else text)
    return written


@lru_cache(maxsize=1024)
def _parse(text: str) -> Override:
    text = readable(text)
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        key = text.partition("=")[0]
        hint = f""" Special characters need quotes: {key}="'…'", in a list {key}="['…','…']"."""
        problem = f"cannot read '{text}': {error_message(error).rstrip('.')}."
        raise ConfigError(problem + (hint if key.isascii() else "")) from error
    is_plain = not (parsed.is_add() or parsed.is_delete() or parsed.is_sweep_override() or parsed.package)
    value = None if parsed.is_delete() or parsed.is_sweep_override() else parsed.value()
    return Override(text, str(parsed.key_or_group), value, is_plain, parsed.package is not None)


def check_overrides(command: str, texts: Sequence[str]) -> Overrides:
    """Refuse invalid overrides, and groups that the command does not take.

    Raises:
        ConfigError: If there are any; the message shows the correct form.
    """
    if bare := [text for text in texts if "=" not in text and not text.startswith("~")]:
        raise ConfigError(f"'{bare[0]}' is not key=value; write {_key_for(command, bare[0])}={bare[0]}.")
    overrides = Overrides.parse(texts)
    every_group = {group for name, other in COMMANDS.items() if other.schema for group in groups_of(name)}
    for item in overrides.items:
        if item.key in every_group and item.key not in groups_of(command) and not item.has_package:
            known = ", ".join(keys_of(command))
            raise ConfigError(f"burnish {command} has no '{item.key}'; its keys are: {known}.")
    return overrides


def with_home(override: str) -> str:
    """Expand `~/` at the start of a value or list item: Hydra and most shells do not after `key=`."""
    key, equals, value = override.partition("=")
    is_quoted = "'" in value or '"' in value
    home = os.path.expanduser("~/")
    return override if is_quoted else key + equals + re.sub(r"(?<![^,[])~/", lambda _: home, value)


def check_arguments(command: str, arguments: Sequence[str]) -> Overrides:
    """Return the typed overrides; refuse as `check_overrides`, and options unknown to Hydra."""
    parser = get_args_parser()
    parser.allow_abbrev = False  # otherwise --experiment would abbreviate --experimental-rerun

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}. See burnish {command} --help.")

    parser.error = refuse  # type: ignore[method-assign]
    options, others = parser.parse_known_args(list(arguments))
    for text in others:
        if text.startswith("-"):
            raise ConfigError(_unknown_option(command, text, arguments))
        raise ConfigError(f"'{text}' stands behind an option; write every key=value before the options.")
    if options.shell_completion or options.experimental_rerun:
        return Overrides()
    is_ours = not (options.config_name or options.config_path or options.config_dir)
    return check_overrides(command, options.overrides) if is_ours else Overrides.parse(options.overrides)


def keys_of(command: str) -> tuple[str, ...]:
    """Return the top-level keys of a command's configuration, including its groups."""
    names = [field.name for field in fields(COMMANDS[command].config_class())]
    return (*names, *(group for group in groups_of(command) if group not in names))


def quoted(value: Any, key: str = "") -> str:
    """Write a value in Hydra's grammar: text, path, number, bool, None, or lists, arrays and dicts of these.

    Raises:
        ConfigError: If it is anything else, such as a loaded policy; names `key`.
    """
    if hasattr(value, "tolist"):
        if math.prod(value.shape) > _MOST_ENTRIES:
            raise ConfigError(_refused_object(key, value))
        value = value.tolist()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(quoted(one, key) for one in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{quoted(one, key)}' for name, one in value.items())}}}"
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(_refused_object(key, value))
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(os.fspath(value)))  # escapes interpolation
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    text = re.sub(r"(\\+)$", r"\1\1", text)  # a backslash is doubled only before a quote
    return f"'{text}'"


def _refused_object(key: str, value: Any) -> str:
    accepted, kind = "text, a path, a number, or a list of these", type(value).__name__
    problem = f"{key or 'a key'}= must be {accepted}; got an object {kind}."
    names = {cls.__name__ for cls in type(value).__mro__}
    if "Policy" in names:
        return f"{problem} Give a run or a directory; burnish.save_policy writes one."
    if "EpisodeDataset" in names:
        return f"{problem} Give the file or the folder that it was read from."
    if key in ("policy", "baseline"):
        own = "burnish.evaluate and .collect play objects with chunk, noise_shape, sample_noise and act"
        return f"{problem} Give a run or a directory; {own} (docs/evaluation.md)."
    if is_dataclass(value):
        return f"{problem} Give the name of a part, and its keys as '{key}.<key>'."
    return f"{problem} Give what the command line takes."


def _unknown_option(command: str, option: str, arguments: Sequence[str]) -> str:
    name, _, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    behind = list(arguments)[list(arguments).index(option) + 1 :]
    value = value or next((text for text in behind[:1] if "=" not in text and text[:1] != "-"), "<value>")
    if name.partition(".")[0] in keys_of(command):
        return f"keys are given without dashes; write {name}={value} instead of {option}."
    hint = closest(name, keys_of(command)) or f" See burnish {command} --help."
    return f"unknown option '{option}'; keys are given as key=value.{hint}"


def _key_for(command: str, text: str) -> str:
    for group in groups_of(command):
        if text in options_of(group):
            return group
    return COMMANDS[command].main_key
