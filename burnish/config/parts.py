"""Hydra config sources: registered parts, schemas of the commands, and files.

A part is imported when Hydra composes it; the options of a group are read from the sources
(`policies.registry.names`). In files, former key names are replaced by present ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from burnish.config.commands import COMMANDS
from policies import registry
from policies.policy_config import PART_GROUPS

GROUPS = ("algo", "env", *PART_GROUPS, "source")
"""Hydra groups filled from the registry; the chosen part is the value of the group's key."""
RENAMED: ContextVar[Mapping[str, str]] = ContextVar("renamed")
"""Former to present key names of one composition, both from the top of the configuration."""
_PROVIDER = "burnish"
_SCHEMAS = {f"{one.config_name}_schema": one for one in COMMANDS.values() if one.schema is not None}


class PartSource(ConfigSource):
    """Hydra's view of the registry: `<group>/<name>` is a part, `<command>_schema` a schema."""

    @staticmethod
    def scheme() -> str:
        """Return the URL scheme of this source."""
        return _PROVIDER

    def available(self) -> bool:
        """Return whether the source is readable: always, as it is in this process."""
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the node of a part or a schema; imports its module.

        Raises:
            ConfigLoadError: If it is unknown.
        """
        path = config_path.removesuffix(".yaml")
        if not self.is_config(path):
            raise ConfigLoadError(f"{path} is no part.")
        group, _, name = path.rpartition("/")
        kind = registry.lookup(group, name) if group else _SCHEMAS[name].config_class()
        node = _with_free_keys(kind) if group in ("", "env") else node_of(kind)
        where = f"{self.scheme()}://{self.path}"
        return ConfigResult(provider=_PROVIDER, path=where, config=node, header={"package": None})

    def is_group(self, config_path: str) -> bool:
        """Return whether the path is a group, or the root."""
        return config_path.strip("/") in ("", *GROUPS)

    def is_config(self, config_path: str) -> bool:
        """Return whether the path is a part or a schema."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return registry.is_known(group, name) if group in GROUPS else not group and name in _SCHEMAS

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the options of a group; for the root, groups and schemas."""
        path = config_path.strip("/")
        groups = list(GROUPS) if not path and results_filter in (None, ObjectType.GROUP) else []
        configs = registry.names(path) if path else _SCHEMAS
        return groups + (list(configs) if results_filter in (None, ObjectType.CONFIG) else [])


class PartSearchPath(SearchPathPlugin):
    """Adds the source of parts to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the source after the files."""
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


class _Package(_Renaming, ImportlibResourcesConfigSource):
    pass


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


@cache
def register_sources() -> None:
    """Register the sources above with Hydra."""
    Plugins.instance().register(PartSource)
    Plugins.instance().register(PartSearchPath)
    SourcesRegistry.instance().types.update(file=_Files, pkg=_Package)


def node_of(kind: type) -> DictConfig:
    """Return the typed node of a dataclass, writable even if frozen."""
    node: DictConfig = OmegaConf.structured(kind)
    _set_writable(node)
    return node


def _with_free_keys(kind: type) -> DictConfig:
    """Return the node of a command's schema or a task; its dictionaries accept any key."""
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
