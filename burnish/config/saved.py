"""Save and restore a configuration: JSON or YAML by registered names, never by Python path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from burnish.config.errors import error_message
from burnish.config.nodes import GROUPS, node_of
from burnish.config.overrides import NO_OVERRIDES, Override, Overrides
from burnish.config.schema import to_object
from policies import registry
from policies.bounds import with_present_names
from policies.errors import ConfigError
from policies.storage.strict_json import type_hints


def describe(config: Any) -> dict[str, Any]:
    """Describe a configuration in JSON types; group parts carry their registered `name`.

    Raises:
        ConfigError: If the part of a group is not registered.
    """
    hints = type_hints(type(config))
    description: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        is_part = f.name in GROUPS and hints[f.name] is Any and is_dataclass(value)
        description[f.name] = describe_part(f.name, value) if is_part else _plain(value)
    return description


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


def restore(kind: type, data: Mapping[str, Any], overrides: Overrides = NO_OVERRIDES) -> Any:
    """Rebuild a configuration from `describe`, of this or an earlier version.

    Overrides change values, and the fleet.

    Raises:
        ConfigError: If a part, a key or a value is unknown, or the description contains a reference.
    """
    _refuse_references(data)
    try:
        node = _described_node(kind, data)
        for item in overrides.items:
            if item.key == "fleet":  # where a run acts may change, unlike what it is
                node.fleet = item.value and node_of(registry.lookup("fleet", str(item.value)))
                continue
            _require_value(item)
            OmegaConf.update(node, item.key, item.value)
        return to_object(node)
    except OmegaConfBaseException as error:
        raise ConfigError(error_message(error)) from error


def restore_part(group: str, data: Mapping[str, Any]) -> Any:
    """Rebuild one part from `describe_part`.

    Raises:
        ConfigError: If the name, a key or a value is unknown, or the description contains a reference.
    """
    _refuse_references(data)
    try:
        return to_object(_part_node(group, data))
    except OmegaConfBaseException as error:
        raise ConfigError(error_message(error)) from error


def _refuse_references(data: Any, key: str = "") -> None:
    """Refuse `${…}`: descriptions come from files, which must not read environment variables."""
    if isinstance(data, str) and "${" in data:
        raise ConfigError(
            f"{key} must be a plain value in a saved configuration; got '{data[:80]}'. Write it there "
            f"itself, or give {key}=<value>."
        )
    items = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for name, item in items:
        _refuse_references(name)
        _refuse_references(item, f"{key}.{name}" if key else str(name))


def _described_node(kind: type, data: Mapping[str, Any]) -> DictConfig:
    node = node_of(kind)
    hints = type_hints(kind)
    for key, value in with_present_names(kind, data).items():
        if key in getattr(kind, "dropped", ()):
            continue
        inner = OmegaConf.get_type(node, key) if key in node else None
        is_part = key in GROUPS and hints.get(key) is Any
        if isinstance(value, Mapping) and is_part:
            node[key] = _part_node(key, value)
        elif isinstance(value, Mapping) and is_dataclass(inner):
            node[key] = _described_node(inner, value)
        elif value is not None and (is_part or is_dataclass(inner)):
            raise ConfigError(f"{key} must hold keys with values; got {str(value)[:80]}.")
        else:
            node[key] = value
    return node


def _part_node(group: str, data: Mapping[str, Any]) -> DictConfig:
    values = dict(data)
    name = values.pop("name", None)
    if name is None:
        raise ConfigError(f"the description of a {group} needs the key 'name'; got keys {sorted(values)}.")
    return _described_node(registry.lookup(group, str(name)), values)


def _require_value(item: Override) -> None:
    if not item.is_plain:
        raise ConfigError(f"'{item.text}' cannot be used here; write key=value.")
    if item.key == "experiment":
        raise ConfigError(
            f"'{item.text}' would replace the configuration of the run; start a new run with it."
        )
    if item.key in GROUPS:
        raise ConfigError(f"'{item.text}' would replace a part; only values (key=value) can be changed here.")
