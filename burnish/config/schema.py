"""Typed configuration of every command: compose with Hydra, convert to dataclasses.

Defaults are defined only in the dataclasses of commands and parts. Composition refuses unknown keys, wrong
types and unknown options. `to_object` converts the composed tree to dataclasses, whose `__post_init__` checks
the values.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from burnish.config.commands import COMMANDS
from burnish.config.errors import error_message, unknown_key
from burnish.config.hydra_sources import register_configs
from burnish.config.nodes import GROUPS
from burnish.config.overrides import Overrides, check_overrides, with_no_option
from policies.bounds import Checked
from policies.errors import ConfigError
from policies.paths import at_home
from policies.storage.strict_json import type_hints

_OF_HYDRA = ("launcher", "sweeper", "output", "help", "hydra_help", "hydra_logging", "job_logging")
_WITHOUT_HYDRA = [f"~hydra/{group}" for group in _OF_HYDRA]
"""Hydra's settings of itself, a third of the time of a composition from which it removes them afterwards."""


class Composed(NamedTuple):
    """Composed configuration of a command, and its overrides."""

    config: Any
    overrides: Overrides


def compose_config(command: str, overrides: Sequence[str]) -> Any:
    """Return the configuration of a command without keys that have no effect; see `compose_command`."""
    composed = compose_command(command, overrides)
    refuse_unused(*composed)
    return composed.config


def compose_command(command: str, overrides: Sequence[str]) -> Composed:
    """Compose the configuration of a command from overrides, as the command line does.

    Raises:
        ConfigError: If a key, an option or a value is refused; same message as on the command line.
    """
    register_configs()
    name = COMMANDS[command].config_name
    typed = check_overrides(command, with_no_option(command, overrides))
    sets_hydra = any(item.key.startswith("hydra") for item in typed.items)
    all_texts = [*typed.texts, *([] if sets_hydra else _WITHOUT_HYDRA)]
    try:
        with _hydra():
            return Composed(to_command(compose(config_name=name, overrides=all_texts)), typed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(error_message(error)) from error


@contextmanager
def _hydra() -> Iterator[None]:
    """Initialise Hydra for one composition, without affecting an outer application."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("configs", version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def to_command(node: DictConfig) -> Any:
    """Convert the composed configuration of a command to its dataclass; expands `~` in paths.

    The parts of a resumed run are skipped: they come from the run plus overrides, which may not fit the
    defaults.

    Raises:
        ConfigError: See `to_object`; if keys of a group are set of which no option is chosen.
    """
    config = to_object(node if node.get("resume") is None else _without_parts(node))
    for group in GROUPS:
        if isinstance(keys := getattr(config, group, None), dict):
            raise ConfigError(
                f"no {group} is chosen, but keys of one are set: {', '.join(map(str, keys))}. Give "
                f"{group}=<name>, or leave out what sets them."
            )
    return at_home(config)


def refuse_unused(config: Any, typed: Overrides) -> None:
    """Refuse typed values that have no effect beside others: see `policies.bounds.Checked.unused`."""
    for item in typed.items:
        part, _, name = item.key.partition(".")
        for key, section in ((item.key, config), (name, getattr(config, part, None))):
            for unused, why in section.unused().items() if isinstance(section, Checked) else ():
                if f"{key}.".startswith(f"{unused}.") and item.value is not None:
                    remedy = f"Change that, or leave {item.key} out."
                    raise ConfigError(f"{item.key} has no effect {why}. {remedy}")


def _without_parts(node: DictConfig) -> DictConfig:
    bare = node.copy()
    for group in GROUPS:
        if group in bare:
            bare[group] = None
    return bare


def to_object(node: Any) -> Any:
    """Convert a composed tree to dataclasses, tuples, dicts and plain values.

    Raises:
        ConfigError: If a dataclass refuses its values, or a key or mandatory value is missing.
    """
    if isinstance(node, ListConfig):
        return [to_object(item) for item in node]
    if not isinstance(node, DictConfig):
        return node
    kind = OmegaConf.get_type(node)
    if not is_dataclass(kind):
        return {key: to_object(node[key]) for key in node}
    names = {f.name for f in fields(kind)}
    for key in node:
        if key not in names:  # `+key=value` may add any key
            raise ConfigError(unknown_key(node._get_full_key(key), kind))
    hints = type_hints(kind)
    values = {f.name: _value(node, f.name, hints[f.name]) for f in fields(kind) if f.init}
    try:
        return kind(**values)
    except ConfigError as error:
        if outer := _outer_keys(node, kind, str(error)):
            raise ConfigError(f"{outer}{error}") from error
        raise


def _outer_keys(node: DictConfig, kind: type, text: str) -> str:
    """Return the keys above the one that a dataclass's error begins with, such as `evaluation.`; or ""."""
    place, own = str(node._get_full_key("") or ""), getattr(kind, "key", "")
    outer = place.removesuffix(own) if own else f"{place}."
    names = (own,) if own else tuple(f.name for f in fields(kind))
    return outer if place and outer.endswith(".") and text.startswith(names) else ""


def _value(node: DictConfig, name: str, hint: Any) -> Any:
    """Return one field; a missing one is None if the type allows it."""
    try:
        value = node[name]
    except MissingMandatoryValue:
        if type(None) in typing.get_args(hint):
            return None
        where = node._get_full_key(name)
        raise ConfigError(f"{where} is mandatory; give it as {where}=<value>.") from None
    return _fit(to_object(value), hint)


def _fit(value: Any, hint: Any) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    is_tuple = any(option is tuple or typing.get_origin(option) is tuple for option in options)
    return tuple(value) if isinstance(value, list) and is_tuple else value
