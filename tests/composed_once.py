"""Keeps what Hydra composes from one choice of groups: typed values are set in a copy of it.

Finding and merging the files of a choice takes most of a composition, and tests choose the same ones again.
Of a new choice the files that were read for others are kept. Nothing is kept of folders of a person, or of
mistakes.
"""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
from hydra._internal import config_loader_impl as hydra_loader
from hydra._internal import defaults_list as hydra_defaults
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides, create_defaults_list
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.base import Box

from burnish.config.nodes import GROUPS
from policies import registry

_FOUND: dict[Any, tuple[DefaultsList, Any]] = {}
_MERGED: dict[Any, bytes] = {}  # pickled: a fifth of the time of a deep copy
_READ: dict[Any, Any] = {}
_MAP = hydra_defaults._create_interpolation_map


class _Defaults(list[ResultDefault]):
    """Files of a choice, which is kept by this key."""

    key: Any = None


def install() -> None:
    """Replace the two steps of Hydra, and its parsing of a typed value, which depends on nothing else."""
    loader = hydra_loader.ConfigLoaderImpl
    merge, parse = loader._compose_config_from_defaults_list, functools.cache(OverridesParser.parse_rule)

    def merge_once(self: Any, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        key = getattr(defaults, "key", None)
        if key is None:
            return merge(self, defaults, repo)
        repo.get_sources = list  # they are noted next, a fourth of what is left, and never read
        if key in _MERGED:
            found: DictConfig = pickle.loads(_MERGED[key])
            OmegaConf.clear_cache(found)  # the time of day
            return found
        with pytest.MonkeyPatch.context() as patch:  # each file sets the parents of all before it anew
            patch.setattr(Box, "_re_parent", lambda self: None)
            fresh = merge(self, defaults, repo)
        fresh._re_parent()
        _MERGED[key] = pickle.dumps(fresh)
        return fresh

    def parse_once(self: OverridesParser, s: str, rule_name: str) -> Any:
        return copy.deepcopy(parse(_PARSER, s, rule_name))

    read = ConfigRepository.load_config

    def read_once(self: ConfigRepository, config_path: str) -> Any:
        group, _, name = config_path.rpartition("/")
        sources = _sources(self)
        if sources is None:
            return read(self, config_path)
        part = registry.lookup(group, name) if _is_part(group, name) else None
        key = (sources, config_path, part)
        if key not in _READ:  # a part is copied below its group, what else is read is merged in place
            found = read(self, config_path)
            _READ[key] = pickle.dumps(found) if part is None else found
        return pickle.loads(_READ[key]) if part is None else copy.copy(_READ[key])

    ConfigRepository.load_config = read_once
    hydra_defaults._create_interpolation_map = _map_where_read
    hydra_loader.create_defaults_list = _find_once
    loader._compose_config_from_defaults_list = merge_once
    OverridesParser.parse_rule = parse_once


_PARSER = OverridesParser.create()


def forget() -> None:
    """Compose anew from here on."""
    _FOUND.clear()
    _MERGED.clear()
    _READ.clear()


def _sources(repo: Any) -> tuple[Any, ...] | None:
    """Return what files are read from; None where they may change."""
    sources = tuple((source.scheme(), source.path) for source in repo.get_sources())
    return None if any(scheme == "file" for scheme, _ in sources) else sources


def _map_where_read(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """Make the map of choices, a seventh of the time, only for a list with an interpolation."""
    names = [str(vars(one).get("value", vars(one).get("path"))) for one in defaults]
    return _MAP(overrides, defaults, self_added) if any("$" in name for name in names) else None


def _find_once(repo: IConfigRepository, overrides_list: list[Override], **choice: Any) -> DefaultsList:
    fresh = functools.partial(create_defaults_list, repo=repo, overrides_list=overrides_list, **choice)
    sources = _sources(repo)
    if sources is None:
        return fresh()
    values = Overrides(repo, overrides_list).config_overrides
    groups = tuple(one.input_line for one in overrides_list if one not in values)
    key = (sources, groups, *choice.items())
    if key not in _FOUND or _FOUND[key][1] != _parts(_FOUND[key][0]):
        found = fresh()
        _MERGED.pop(key, None)
        _FOUND[key] = found, _parts(found)
    found = copy.copy(_FOUND[key][0])
    found.defaults, found.config_overrides = _Defaults(found.defaults), values
    found.defaults.key = key
    return found


def _parts(found: DefaultsList) -> list[Any]:
    """Return the registered classes of a choice: a test may register another one by the same name."""
    paths = [(one.config_path or "").rpartition("/") for one in found.defaults]
    return [registry.lookup(group, name) for group, _, name in paths if _is_part(group, name)]


def _is_part(group: str, name: str) -> bool:
    return group in GROUPS and registry.is_known(group, name)
