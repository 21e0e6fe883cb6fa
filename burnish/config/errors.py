"""One-line messages of user errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from policies.bounds import former_names
from policies.errors import BurnishError

USER_ERRORS = (BurnishError, HydraException, OmegaConfBaseException)
"""User errors; other exceptions are internal errors and keep their traceback."""


_NO_LIST = re.compile(r"Invalid value assigned: (\w+) is not a ListConfig")
_AMBIGUOUS = re.compile(r"Ambiguous value for argument '([^'=]+)=([^']*)'")


def error_message(error: BaseException) -> str:
    """Return one line: expected, received, where, remedy."""
    if isinstance(error, MissingConfigException):
        return _unknown_option(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        return _unknown_key(cause)
    if isinstance(cause, ValidationError):
        return _invalid(cause)
    if ambiguous := _AMBIGUOUS.search(str(error)):
        key, value = ambiguous.groups()
        return f"{key}={value} is no list; write {key}=[{value}]. To sweep over the values, add --multirun."
    if isinstance(cause, OmegaConfBaseException) and cause is not error:
        return f"{_one_line(error)}: {_first_line(cause)}"
    return _one_line(error)


def closest(word: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean '…'?` for a misspelt word, or an empty string."""
    match = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""


def listed(problem: str, hint: str, choices: str) -> str:
    """Insert the closest match, if any, between a problem and a possibly long list."""
    return f"{problem}.{hint} {choices[0].upper()}{choices[1:]}." if hint else f"{problem}; {choices}."


def unknown_key(key: str, owner: type) -> str:
    """Return the message for an unknown key of a dataclass, with its known keys."""
    names, name = [field.name for field in fields(owner)], key.rsplit(".", 1)[-1]
    renamed = former_names(owner).get(name)
    hint = closest(name, names) if renamed is None else f" It is called '{renamed}' now."
    return listed(f"unknown key '{key}'", hint, f"{owner.__name__} has: {', '.join(names) or '(none)'}")


def _invalid(error: ValidationError) -> str:
    key = str(error.full_key or "configuration")
    if value := _NO_LIST.search(str(error)):
        return f"{key} must be a list, written {key}=[a,b]; got one value ({value[1]})."
    return f"{key}: {_first_line(error)}."


def _unknown_key(error: OmegaConfBaseException) -> str:
    key = str(error.full_key or error.key)
    owner = error.object_type
    if not (isinstance(owner, type) and is_dataclass(owner)):
        group, dot, inner = key.partition(".")
        if "." in inner and isinstance(error.parent_node, DictConfig) and (known := [*error.parent_node]):
            hint = closest(key.rsplit(".", 1)[-1], known)
            return listed(f"unknown key '{key}'", hint, f"{key.rpartition('.')[0]} has: {', '.join(known)}")
        first = f" Where no {group} is chosen, give {group}=<name> with it." if dot else ""
        return f"unknown key '{key}'.{first} See the keys with --cfg job."
    return unknown_key(key, owner)


def _unknown_option(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or ""
    group, _, name = missing.rpartition("/")
    if not group or error.options is None:
        return _one_line(error)
    hint = closest(name, error.options)
    choices = f"choose one of: {', '.join(error.options) or '(none)'}"
    if group == "experiment":  # there are hundreds
        near = difflib.get_close_matches(name, error.options, n=6, cutoff=0.5)
        choices = "; ".join([*([f"near: {', '.join(near)}"] if near else []), "see burnish list experiments"])
    if group == "env" and not hint:
        others = "a gymnasium environment is env=gym env.id=<id>, a task of one file env=mjcf env.file=<file>"
        choices = f"{others}; {choices}"
    return listed(f"unknown option {group}={name}", hint, choices)


def _first_line(error: BaseException) -> str:
    line = str(error).strip().splitlines()[0].rstrip(".")
    return line if len(line) <= 400 else f"{line[:200]} … {line[-100:]}"  # values of files have any length


def _one_line(error: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    return text or type(error).__name__
