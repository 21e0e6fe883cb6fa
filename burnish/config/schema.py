"""Typed configuration of every command: compose with Hydra, convert to dataclasses, save, restore.

Defaults are defined only in the dataclasses of commands and parts. Composition refuses unknown keys, wrong
types and unknown options. `to_object` converts the composed tree to dataclasses, whose `__post_init__` checks
the values. `describe` and `restore` convert a configuration to and from JSON or YAML by registered names,
never by Python path.
"""

from __future__ import annotations

import copy
import logging
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

from hydra import compose, initialize_config_module
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from burnish.config.commands import COMMANDS
from burnish.config.errors import error_message, unknown_key
from burnish.config.overrides import NO_OVERRIDES, Override, Overrides, check_overrides, describe_groups
from policies import registry
from policies.bounds import former_names, with_present_names
from policies.errors import ConfigError
from policies.paths import at_home
from policies.policy_config import PART_GROUPS

T = TypeVar("T")

_log = logging.getLogger(__name__)


GROUPS = ("algo", "env", *PART_GROUPS, "source", "fleet")
"""Hydra groups filled from the registry; the chosen part is the value of the group's key."""
RENAMED: ContextVar[Mapping[str, str]] = ContextVar("renamed")
"""Former to present key names of one composition, both from the top of the configuration."""
_PROVIDER = "burnish"
_SCHEMAS = {f"{one.config_name}_schema": one for one in COMMANDS.values() if one.schema is not None}


class PartSource(ConfigSource):
    """Hydra's view of the registry: `<group>/<name>` is a part, `<command>_schema` a schema."""

    @staticmethod
    def scheme() -> str:
        return _PROVIDER

    def available(self) -> bool:
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        path = config_path.removesuffix(".yaml")
        if not self.is_config(path):
            raise ConfigLoadError(f"{path} is no part.")
        group, _, name = path.rpartition("/")
        kind = registry.lookup(group, name) if group else _SCHEMAS[name].config_class()
        node = _with_free_keys(kind) if group in ("", "env") else node_of(kind)
        where = f"{self.scheme()}://{self.path}"
        return ConfigResult(provider=_PROVIDER, path=where, config=node, header={"package": None})

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", *GROUPS)

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return registry.is_known(group, name) if group in GROUPS else not group and name in _SCHEMAS

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        path = config_path.strip("/")
        groups = list(GROUPS) if not path and results_filter in (None, ObjectType.GROUP) else []
        configs = registry.names(path) if path else _SCHEMAS
        return groups + (list(configs) if results_filter in (None, ObjectType.CONFIG) else [])


class PartSearchPath(SearchPathPlugin):
    """Adds the source of parts to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider=_PROVIDER, path=f"{_PROVIDER}://parts")


class _Renaming:
    """A file source that renames former keys to present ones."""

    def load_config(self, config_path: str) -> ConfigResult:
        result: ConfigResult = super().load_config(config_path)  # type: ignore[misc]
        if renamed := RENAMED.get({}):
            package = result.header.get("package")
            group = config_path.rpartition("/")[0].replace("/", ".")
            above = {None: group, "_global_": "", "_group_": group}.get(package, package or "")
            content: Any = OmegaConf.to_container(result.config, resolve=False)
            for former, present in renamed.items():
                _rename(content, above, former, present)
            result.config = OmegaConf.create(content)
        return result


class _Files(_Renaming, FileConfigSource):
    pass


class _Installed(ImportlibResourcesConfigSource):
    """Files of an installed package, each looked for and parsed once."""

    def load_config(self, config_path: str) -> ConfigResult:
        result = self._once("load_config", config_path)
        return replace(result, config=copy.deepcopy(result.config), header=dict(result.header))

    def is_group(self, config_path: str) -> bool:
        found: bool = self._once("is_group", config_path)
        return found

    def is_config(self, config_path: str) -> bool:
        found: bool = self._once("is_config", config_path)
        return found

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return [*self._once("list", config_path, results_filter)]

    def _once(self, method: str, *arguments: Any) -> Any:
        return _asked(self.provider, self.path, method, *arguments)


@cache
def _asked(provider: str, path: str, method: str, *arguments: Any) -> Any:
    source = ImportlibResourcesConfigSource(provider, f"{ImportlibResourcesConfigSource.scheme()}://{path}")
    return getattr(source, method)(*arguments)


class _Package(_Renaming, _Installed):
    pass


for _own, _replaced in ((_Files, FileConfigSource), (_Package, ImportlibResourcesConfigSource)):
    _own.__name__ = _replaced.__name__  # processes of launchers register Hydra's again: equal names are one


def _rename(content: Any, above: str, former: str, present: str) -> None:
    """Rename a key in the content of a file located below `above`."""
    prefix = f"{above}." if above else ""
    if not former.startswith(prefix):
        return
    *way, last = former.removeprefix(prefix).split(".")
    for name in way:
        content = content.get(name) if isinstance(content, dict) else None
    if isinstance(content, dict) and last in content:
        content[present.rpartition(".")[2]] = content.pop(last)


def node_of(kind: type) -> DictConfig:
    """Return the typed node of a dataclass, writable even if frozen."""
    return copy.deepcopy(_pristine_node(kind))  # a seventh of the time of building it


@cache
def _pristine_node(kind: type) -> DictConfig:
    node: DictConfig = OmegaConf.structured(kind)
    _set_writable(node)
    return node


def _with_free_keys(kind: type) -> DictConfig:
    """Return the node of a schema or a task; its dictionaries accept any key."""
    node = node_of(kind)
    for key in node:
        inner = node._get_node(key)
        if isinstance(inner, DictConfig) and not inner._is_none() and inner._metadata.object_type is dict:
            OmegaConf.set_struct(inner, False)
    return node


def _set_writable(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            _set_writable(child)


@cache
def register_configs() -> None:
    """Register the sources of schemas, parts and files with Hydra, and the help text."""
    Plugins.instance().register(PartSource)
    Plugins.instance().register(PartSearchPath)
    SourcesRegistry.instance().types.update(file=_Files, pkg=_Package)
    OmegaConf.register_new_resolver("burnish_groups", describe_groups, replace=True)


_OF_HYDRA = ("launcher", "sweeper", "output", "help", "hydra_help", "hydra_logging", "job_logging")
_WITHOUT_HYDRA = [f"~hydra/{group}" for group in _OF_HYDRA]
"""Hydra's settings of itself, a third of the time of a composition from which it removes them afterwards."""


class Composed(NamedTuple):
    """Composed configuration of a command, and its overrides (with present key names)."""

    config: Any
    overrides: Overrides


def compose_config(command: str, overrides: Sequence[str]) -> Any:
    """Return the configuration of a command; see `compose_command`."""
    return compose_command(command, overrides).config


def compose_command(command: str, overrides: Sequence[str]) -> Composed:
    """Compose the configuration of a command from overrides, as the command line does.

    Raises:
        ConfigError: If a key, an option or a value is refused; same message as on the command line.
    """
    register_configs()
    name = COMMANDS[command].config_name

    def compose_once(typed: Overrides) -> Composed:
        without = [] if any(item.key.startswith("hydra") for item in typed.items) else _WITHOUT_HYDRA
        with _hydra():
            return Composed(to_command(compose(config_name=name, overrides=[*typed.texts, *without])), typed)

    try:
        return compose_renamed(check_overrides(command, overrides), compose_once)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(error_message(error)) from error


def compose_renamed(overrides: Overrides, compose: Callable[[Overrides], T]) -> T:
    """Compose overrides after renaming former keys to present ones, with one warning each."""
    renamed: dict[str, str] = {}
    token = RENAMED.set(renamed)
    try:
        while True:
            try:
                return compose(overrides)
            except (HydraException, OmegaConfBaseException) as error:
                found = _former_key(error)
                if found is None or found[0] in renamed:
                    raise
                warn_of_former_key(*found)
                overrides = overrides.renamed(*found)
                renamed[found[0]] = found[1]
    finally:
        RENAMED.reset(token)


def warn_of_former_key(former: str, present: str) -> None:
    """Warn of a former key and log its present name."""
    _log.warning("%s is called %s now; the former name goes with the next version.", former, present)


def _former_key(error: BaseException) -> tuple[str, str] | None:
    for one in _chain(error):
        owner = getattr(one, "object_type", None)
        if isinstance(one, (ConfigKeyError, ConfigAttributeError)) and is_dataclass(owner):
            key = str(one.full_key or one.key)
            above, dot, name = key.rpartition(".")
            present = former_names(owner).get(name)  # type: ignore[arg-type]
            return None if present is None else (key, f"{above}{dot}{present}")
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
        ConfigError: See `to_object`.
    """
    return at_home(to_object(node if node.get("resume") is None else _without_parts(node)))


def _without_parts(node: DictConfig) -> DictConfig:
    bare = node.copy()
    for group in GROUPS:
        if group in bare:
            bare[group] = None
    return bare


_hints: Callable[[Any], dict[str, Any]] = cache(typing.get_type_hints)
"""Types of the fields of a dataclass, which are looked up for every configuration."""


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
    names, former = {f.name for f in fields(kind)}, former_names(kind)
    for key in [str(key) for key in node if key not in names]:  # `+key=value` may add any key
        if key not in former:
            raise ConfigError(unknown_key(node._get_full_key(key), kind))
        warn_of_former_key(node._get_full_key(key), node._get_full_key(former[key]))
        node[former[key]] = node[key]
    hints = _hints(kind)
    return kind(**{f.name: _value(node, f.name, hints[f.name]) for f in fields(kind) if f.init})


def _value(node: DictConfig, name: str, hint: Any) -> Any:
    """Return one field; a missing one is None if the type allows it."""
    if not OmegaConf.is_missing(node, name):
        return _fit(to_object(node[name]), hint)
    if type(None) in typing.get_args(hint):
        return None
    where = node._get_full_key(name)
    raise ConfigError(f"{where} is mandatory; give it as {where}=<value>.")


def _fit(value: Any, hint: Any) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    is_tuple = any(option is tuple or typing.get_origin(option) is tuple for option in options)
    return tuple(value) if isinstance(value, list) and is_tuple else value


def describe(config: Any) -> dict[str, Any]:
    """Describe a configuration in JSON types; group parts carry their registered `name`.

    Raises:
        ConfigError: If the part of a group is not registered.
    """
    hints = _hints(type(config))
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
    hints = _hints(kind)
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
