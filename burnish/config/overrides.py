"""Checks what a person typed before Hydra sees it: the keys, groups and options that a command takes."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import resources
from typing import Any, NoReturn

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from burnish.config.commands import COMMANDS
from burnish.config.errors import closest, explain
from policies import registry
from policies.errors import ConfigError

HELP_WIDTH = 110  # columns of help pages


@cache
def experiments() -> tuple[str, ...]:
    """Return the names of the experiments that come with the package, sorted."""
    folder = resources.files("configs") / "experiment"
    return tuple(
        sorted(path.name[: -len(".yaml")] for path in folder.iterdir() if path.name.endswith(".yaml"))
    )


@cache
def default_options(command: str) -> dict[str, str | None]:
    """Return the groups that a command chooses options of, in their order, and what it chooses by default."""
    text = (resources.files("configs") / f"{COMMANDS[command].config_name}.yaml").read_text()
    entries = [entry for entry in yaml.safe_load(text)["defaults"] if isinstance(entry, dict)]
    return {
        group: name for one in entries for group, name in one.items() if not group.startswith("override ")
    }


def groups_of(command: str) -> tuple[str, ...]:
    """Return the groups that a command chooses options of, in the order of its defaults."""
    return tuple(default_options(command))


def options_of(group: str) -> tuple[str, ...]:
    """Return the options of a group, sorted."""
    return experiments() if group == "experiment" else tuple(sorted(registry.parts(group)))


def describe_groups(command: str) -> str:
    """Return the part of a help page that lists the groups of a command and their options."""
    lines = []
    for group in groups_of(command):
        shown = f"{group}: {', '.join(options_of(group))}"
        lines += textwrap.wrap(
            shown, HELP_WIDTH, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False
        )
    return "\n".join(["", "options of the groups (group=option):", *lines, ""]) if lines else ""


def check_overrides(command: str, overrides: Sequence[str]) -> None:
    """Refuse what is no override, and groups that the command does not take.

    Raises:
        ConfigError: If there is any; says what to write instead.
    """
    parser = OverridesParser.create()
    every_group = {group for name, one in COMMANDS.items() if one.schema for group in groups_of(name)}
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(f"'{text}' is not key=value; write {_key_for(command, text)}={text}.")
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise ConfigError(f"cannot read '{text}': {explain(error)}") from error
        group = override.key_or_group
        if override.package is not None or group in groups_of(command):
            continue
        if group in every_group:
            known = ", ".join(keys_of(command))
            raise ConfigError(f"burnish {command} has no '{group}'; its keys are: {known}.")


def with_home(override: str) -> str:
    """Write a `~/` that begins a value, or an item of a list, as the home folder.

    Hydra's grammar has no bare `~` in values, and most shells leave the one behind `key=` alone.
    """
    key, equals, value = override.partition("=")
    is_quoted = "'" in value or '"' in value
    home = os.path.expanduser("~/")
    return override if is_quoted else key + equals + re.sub(r"(?<![^,[])~/", lambda _: home, value)


def check_arguments(command: str, arguments: Sequence[str]) -> None:
    """Refuse options that neither the command nor Hydra has, and whatever `check_overrides` refuses.

    Raises:
        ConfigError: If there is any; says what to write instead.
    """
    parser = get_args_parser()
    parser.allow_abbrev = False  # --experiment is no abbreviation of --experimental-rerun

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}. See burnish {command} --help.")

    parser.error = refuse  # type: ignore[method-assign]
    options, others = parser.parse_known_args(list(arguments))
    for text in others:
        if text.startswith("-"):
            raise ConfigError(_unknown_option(command, text, arguments))
        raise ConfigError(f"'{text}' stands behind an option; write every key=value before the options.")
    is_ours = not (options.config_name or options.config_path or options.config_dir)
    if is_ours and not (options.shell_completion or options.experimental_rerun):
        check_overrides(command, options.overrides)


def keys_of(command: str) -> tuple[str, ...]:
    """Return the keys at the top of a command's configuration, its groups included."""
    names = [field.name for field in fields(COMMANDS[command].config_class())]
    return (*names, *(group for group in groups_of(command) if group not in names))


def quoted(value: Any, key: str = "") -> str:
    """Write a value in Hydra's grammar; numbers and arrays of numpy and torch as plain ones.

    Args:
        value: Text, path, number, truth value, None, or lists and dicts of these.
        key: What it is the value of, for errors.

    Raises:
        ConfigError: If it is anything else, such as a policy that was loaded.
    """
    if hasattr(value, "tolist"):
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
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(os.fspath(value)))  # no interpolation
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    text = re.sub(r"(\\+)$", r"\1\1", text)  # in front of a quote only, a backslash counts twice
    return f"'{text}'"


def _refused_object(key: str, value: Any) -> str:
    """Say what is given instead of an object of Python."""
    wanted, kind = "text, a path, a number, or a list of these", type(value).__name__
    given = f"{key or 'a key'}= must be {wanted}; got an object {kind}."
    names = {cls.__name__ for cls in type(value).__mro__}
    if "Policy" in names:
        return f"{given} Give a run or a directory; burnish.save_policy writes one."
    if "EpisodeDataset" in names:
        return f"{given} Give the file or the folder that it was read from."
    if is_dataclass(value):
        return f"{given} Give the name of a part, and its keys as '{key}.<key>'."
    return f"{given} Give what the command line takes."


def _unknown_option(command: str, option: str, arguments: Sequence[str]) -> str:
    """Say how a key that was written as an option is given."""
    name, _, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    behind = list(arguments)[list(arguments).index(option) + 1 :]
    value = value or next((text for text in behind[:1] if "=" not in text and text[:1] != "-"), "<value>")
    if name.partition(".")[0] in keys_of(command):
        return f"keys are given without dashes; write {name}={value} instead of {option}."
    hint = closest(name, keys_of(command)) or f" See burnish {command} --help."
    return f"unknown option '{option}'; keys are given as key=value.{hint}"


def _key_for(command: str, text: str) -> str:
    """Return the key that a bare word was probably meant for."""
    for group in groups_of(command):
        if text in options_of(group):
            return group
    return COMMANDS[command].main_key
