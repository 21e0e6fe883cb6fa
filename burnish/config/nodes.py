"""Typed nodes of OmegaConf for the dataclasses of commands and parts."""

from __future__ import annotations

import copy
from functools import cache

from omegaconf import DictConfig, OmegaConf

from policies.policy_config import PART_GROUPS

GROUPS = ("algo", "env", *PART_GROUPS, "source", "fleet")
"""Hydra groups filled from the registry; the chosen part is the value of the group's key."""


def node_of(kind: type) -> DictConfig:
    """Return the typed node of a dataclass, writable even if frozen."""
    return copy.deepcopy(_pristine_node(kind))  # a seventh of the time of building it


@cache
def _pristine_node(kind: type) -> DictConfig:
    node: DictConfig = OmegaConf.structured(kind)
    _set_writable(node)
    return node


def with_free_keys(kind: type) -> DictConfig:
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
