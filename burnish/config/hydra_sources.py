"""What Hydra composes from: the registered parts, the schemas of commands, and yaml files."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from burnish.config.commands import COMMANDS
from burnish.config.nodes import GROUPS, node_of, with_free_keys
from burnish.config.overrides import describe_groups
from policies import registry

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
        node = with_free_keys(kind) if group in ("", "env") else node_of(kind)
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


class _Installed(ImportlibResourcesConfigSource):
    """Files of an installed package, each looked for and parsed once."""

    def load_config(self, config_path: str) -> ConfigResult:
        result = self._once("load_config", config_path)
        return replace(result, config=copy.deepcopy(result.config), header=dict(result.header))

    def is_group(self, config_path: str) -> bool:
        is_group: bool = self._once("is_group", config_path)
        return is_group

    def is_config(self, config_path: str) -> bool:
        is_config: bool = self._once("is_config", config_path)
        return is_config

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return [*self._once("list", config_path, results_filter)]

    def _once(self, method: str, *arguments: Any) -> Any:
        return _packaged(self.provider, self.path, method, *arguments)


@cache
def _packaged(provider: str, path: str, method: str, *arguments: Any) -> Any:
    source = ImportlibResourcesConfigSource(provider, f"{ImportlibResourcesConfigSource.scheme()}://{path}")
    return getattr(source, method)(*arguments)


# Processes of launchers register Hydra's own source again, which it refuses unless the class names agree.
_Installed.__name__ = ImportlibResourcesConfigSource.__name__


@cache
def register_configs() -> None:
    """Register the sources of schemas, parts and packaged files with Hydra, and the help text."""
    Plugins.instance().register(PartSource)
    Plugins.instance().register(PartSearchPath)
    SourcesRegistry.instance().types["pkg"] = _Installed
    OmegaConf.register_new_resolver("burnish_groups", describe_groups, replace=True)
