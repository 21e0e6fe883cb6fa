"""Typed configuration of every command, and the Hydra groups filled from the registry.

The dataclasses here and next to the parts are the only home of defaults. `register_configs` hands them to
Hydra's ConfigStore, so that an unknown key, a wrong type or an unknown option is refused while composing.
`to_object` turns the composed tree back into the dataclasses, whose `__post_init__` checks the values.
`describe` and `restore` carry a configuration through JSON or YAML by registered names, never by Python path.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from burnish.config.errors import explain, unknown_key
from burnish.config.overrides import check_overrides, describe_groups
from policies import registry
from policies.errors import ConfigError
from policies.paths import at_home
from policies.policy_config import PART_GROUPS

GROUPS = ("algo", "env", *PART_GROUPS, "source")
"""Hydra groups filled from the registry; the chosen part stands under the group's name."""


@cache
def scan_parts() -> None:
    """Import the modules of all parts, and the plugins."""
    for group in GROUPS:
        registry.parts(group)


@cache
def register_configs() -> None:
    """Put the parts and the schemas of the commands into Hydra's ConfigStore, and what help pages say."""
    from burnish.config.commands import COMMANDS

    scan_parts()
    store = ConfigStore.instance()
    for group in GROUPS:
        for name, part in registry.parts(group).items():
            store.store(group=group, name=name, node=_thawed(part), provider="burnish")
    for command in COMMANDS.values():
        if command.schema is not None:
            node = _with_open_dicts(command.config_class())
            store.store(name=f"{command.config_name}_schema", node=node, provider="burnish")
    OmegaConf.register_new_resolver("burnish_groups", describe_groups, replace=True)


def _with_open_dicts(kind: type) -> DictConfig:
    """Return the schema of a command whose empty dictionaries take any key."""
    node: DictConfig = OmegaConf.structured(kind)
    for key in node:
        inner = node._get_node(key)
        if isinstance(inner, DictConfig) and not inner._is_none() and inner._metadata.object_type is dict:
            OmegaConf.set_struct(inner, False)
    return node


def _thawed(part: type) -> DictConfig:
    """Return the schema of a part, open to overrides even where the dataclass is frozen."""
    node = OmegaConf.structured(part)
    _set_writable(node)
    return node


def _set_writable(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            _set_writable(child)


def compose_config(command: str, overrides: Sequence[str]) -> Any:
    """Compose the configuration of a command from overrides, as the command line does.

    Raises:
        ConfigError: If a key, an option or a value is refused; in the words of the command line.
    """
    from burnish.config.commands import COMMANDS

    register_configs()
    check_overrides(command, overrides)
    try:
        with _hydra():
            node = compose(config_name=COMMANDS[command].config_name, overrides=list(overrides))
        return to_command(node)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error


@contextmanager
def _hydra() -> Iterator[None]:
    """Initialise Hydra for one composition, leaving an outer application untouched."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("configs", version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def to_command(node: DictConfig) -> Any:
    """Turn the composed configuration of a command into its dataclass; `~` in a path is the home folder.

    The parts of a run that is resumed are left out: they are those of the run with what was typed, and what
    was typed may fit to these and not to the defaults.

    Raises:
        ConfigError: As `to_object`.
    """
    return at_home(to_object(node if node.get("resume") is None else _without_parts(node)))


def _without_parts(node: DictConfig) -> DictConfig:
    bare = node.copy()
    for group in GROUPS:
        if group in bare:
            bare[group] = None
    return bare


def to_object(node: Any) -> Any:
    """Turn a composed tree into dataclasses, tuples, dicts and plain values.

    Raises:
        ConfigError: If a dataclass refuses its values or lacks a key, or a mandatory value is missing.
    """
    if isinstance(node, ListConfig):
        return [to_object(item) for item in node]
    if not isinstance(node, DictConfig):
        return node
    kind = OmegaConf.get_type(node)
    if not is_dataclass(kind):
        return {key: to_object(node[key]) for key in node}
    names = {f.name for f in fields(kind)}
    if unknown := [str(key) for key in node if key not in names]:
        raise ConfigError(unknown_key(node._get_full_key(unknown[0]), kind))
    hints = typing.get_type_hints(kind)
    return kind(**{f.name: _value(node, f.name, hints[f.name]) for f in fields(kind) if f.init})


def _value(node: DictConfig, name: str, hint: Any) -> Any:
    """Return one field; a missing one is None where the type allows it."""
    if not OmegaConf.is_missing(node, name):
        return _fit(to_object(node[name]), hint)
    if type(None) in typing.get_args(hint):
        return None
    where = node._get_full_key(name)
    raise ConfigError(f"{where} is mandatory; give it as {where}=<value>.")


def _fit(value: Any, hint: Any) -> Any:
    """Turn a list into a tuple where the dataclass declares one."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    is_tuple = any(option is tuple or typing.get_origin(option) is tuple for option in options)
    return tuple(value) if isinstance(value, list) and is_tuple else value


def describe(config: Any) -> dict[str, Any]:
    """Describe a configuration in JSON types; the part of a group carries its registered `name`.

    Raises:
        ConfigError: If the part of a group is not registered.
    """
    hints = typing.get_type_hints(type(config))
    out: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        is_part = f.name in GROUPS and hints[f.name] is Any and is_dataclass(value)
        out[f.name] = describe_part(f.name, value) if is_part else _plain(value)
    return out


def describe_part(group: str, part: Any) -> dict[str, Any]:
    """Describe one part in JSON types, with its registered name."""
    return {"name": registry.name_of(group, part), **describe(part)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return describe(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def restore(kind: type, data: Mapping[str, Any], overrides: Sequence[str] = ()) -> Any:
    """Rebuild a configuration from what `describe` returned.

    Args:
        kind: The dataclass of the configuration.
        data: Its description.
        overrides: Values to change, `key=value`; options of groups cannot be changed any more.

    Raises:
        ConfigError: If a part, a key or a value is unknown.
    """
    try:
        node = _described_node(kind, data)
        for key, value in map(_parse_value, overrides):
            OmegaConf.update(node, key, value)
        return to_object(node)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error


def restore_part(group: str, data: Mapping[str, Any]) -> Any:
    """Rebuild one part from what `describe_part` returned.

    Raises:
        ConfigError: If the name, a key or a value is unknown.
    """
    try:
        return to_object(_part_node(group, data))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error


def _described_node(kind: type, data: Mapping[str, Any]) -> DictConfig:
    node: DictConfig = OmegaConf.structured(kind)
    _set_writable(node)
    hints = typing.get_type_hints(kind)
    for key, value in data.items():
        inner = OmegaConf.get_type(node, key) if isinstance(value, Mapping) and key in node else None
        if isinstance(value, Mapping) and key in GROUPS and hints.get(key) is Any:
            node[key] = _part_node(key, value)
        elif inner is not None and is_dataclass(inner):
            node[key] = _described_node(inner, value)
        else:
            node[key] = value
    return node


def _part_node(group: str, data: Mapping[str, Any]) -> DictConfig:
    values = dict(data)
    name = values.pop("name", None)
    if name is None:
        raise ConfigError(f"the description of a {group} needs the key 'name'; got keys {sorted(values)}.")
    return _described_node(registry.lookup(group, str(name)), values)


def _parse_value(text: str) -> tuple[str, Any]:
    """Split an override of a value."""
    override = OverridesParser.create().parse_override(text)
    if (
        override.is_add()
        or override.is_delete()
        or override.is_sweep_override()
        or override.package is not None
    ):
        raise ConfigError(f"'{text}' cannot be used here; write key=value.")
    if override.key_or_group == "experiment":
        raise ConfigError(
            f"'{text}' would replace the whole configuration, and a run is resumed with its own. Leave it "
            f"out, or start a new run with it."
        )
    if override.key_or_group in GROUPS:
        raise ConfigError(f"'{text}' would replace a part; only values (key=value) can be changed here.")
    return override.key_or_group, override.value()
