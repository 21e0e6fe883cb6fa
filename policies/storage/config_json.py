"""Serialisation of a policy to config.json, validation, and reconstruction.

config.json is untrusted input: names are resolved in the registry, types and sizes are checked before
anything is built, and nothing in it is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from policies import registry
from policies.backbones.switched import SwitchedField
from policies.build import build_policy
from policies.composition.operators import Composition
from policies.composition.policy import ComposedPolicy
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.policy import Policy
from policies.policy_config import PART_GROUPS, PolicyConfig
from policies.storage.strict_json import check_types, fits
from policies.wrappers.base import WrappedPolicy
from policies.wrappers.plan_field import PlanField

FORMAT = 1

_SIZES = ("obs_dim", "goal_dim", "action_dim", "obs_steps", "horizon", "act_steps", "action_start")
_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(_SIZES, (int, "a whole number")),
    **dict.fromkeys(("parts", "normalizer", "images", "provenance"), (dict[str, Any], "an object")),
    **dict.fromkeys(
        ("switch_time", "observation_clip", "goal_dropout", "guidance"), (float | None, "a number or null")
    ),
    "tuned_above": (bool, "true or false"),
}
_KEYS = {*_TYPES, "format", "composition", "members", "wrappers"}
_MAX_SIZE, _MAX_TEXT, _MAX_MEMBERS, _MAX_NESTED = 100_000, 1000, 64, 8


def describe(policy: Policy, provenance: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the description of a policy without its weights; JSON types only."""
    if isinstance(policy, PlanField):
        return describe(policy.planner, provenance)
    if isinstance(policy, WrappedPolicy):
        inner = describe(policy.base, provenance)
        inner["wrappers"] = [*inner["wrappers"], registry.to_json("wrapper", policy.wrapper)]
        return inner
    config = replace(policy.config, sampler=getattr(policy, "sampler", policy.config.sampler))
    field, composed = None, {}
    if isinstance(policy, ComposedPolicy):
        members = [describe(member) for member in policy.fields]
        composed = {"composition": asdict(policy.composition), "members": members}
    else:
        field = getattr(policy, "field", None)
    return {
        "format": FORMAT,
        "parts": {group: registry.to_json(group, getattr(config, group)) for group in PART_GROUPS},
        "switch_time": field.switch_time if isinstance(field, SwitchedField) else None,
        "tuned_above": isinstance(field, SwitchedField) and field.tuned_above,
        "obs_dim": policy.obs_dim,
        "goal_dim": policy.goal_dim,
        "images": {camera: list(shape) for camera, shape in policy.images.items()},
        "action_dim": policy.chunk.action_dim,
        "obs_steps": config.obs_steps,
        "horizon": config.horizon,
        "act_steps": config.act_steps,
        "action_start": config.action_start,
        "normalizer": dict(policy.normalizer.modes),
        "observation_clip": config.observation_clip,
        "goal_dropout": config.goal_dropout,
        "guidance": config.guidance,
        **composed,
        "wrappers": [],  # innermost first
        "provenance": dict(provenance or {}),
    }


def check_description(data: Any, nested: int = 0) -> None:
    """Refuse invalid descriptions: unknown keys, wrong types, excessive sizes."""
    if not isinstance(data, dict):
        raise ConfigError(f"a policy must be described by an object; got {type(data).__name__}.")
    if unknown := sorted(set(data) - _KEYS):
        raise ConfigError(f"unknown keys {[name[:80] for name in unknown[:4]]}; it has {sorted(_KEYS)}.")
    _check_values({name: value for name, value in data.items() if name not in ("provenance", "members")})
    for name, (hint, words) in _TYPES.items():
        if (name in data or name in _SIZES) and not fits(data[name], hint):
            raise ConfigError(f"{name} must be {words}; got {str(data[name])[:80]}.")
    for group, part in data["parts"].items():
        if group not in PART_GROUPS or not isinstance(part, dict):
            raise ConfigError(f"parts must hold objects for {', '.join(PART_GROUPS)}; got '{group[:80]}'.")
        check_types(registry.lookup(group, str(part.get("name"))), part, group)
    wrappers = data.get("wrappers", [])
    if not isinstance(wrappers, list) or len(wrappers) > _MAX_NESTED:
        raise ConfigError(f"wrappers must be a list of at most {_MAX_NESTED}.")
    for wrapper in wrappers:
        if not isinstance(wrapper, dict):
            raise ConfigError(f"wrappers must hold objects; got {type(wrapper).__name__}.")
        check_types(registry.lookup("wrapper", str(wrapper.get("name"))), wrapper, "wrapper")
    if "members" in data:
        members = data["members"]
        if not isinstance(members, list) or not 1 <= len(members) <= _MAX_MEMBERS or nested >= _MAX_NESTED:
            raise ConfigError(f"members must be a list of at most {_MAX_MEMBERS}, {_MAX_NESTED} deep.")
        check_types(Composition, data["composition"], "composition")
        for member in members:
            check_description(member, nested + 1)


def steps_of(data: Mapping[str, Any]) -> int:
    """Return the total number of sampler steps of a description, members included."""
    steps = data["parts"]["sampler"].get("steps")
    own = steps if type(steps) is int else 0
    return own + sum(steps_of(member) for member in data.get("members", ()))


def _check_values(value: Any) -> None:
    """Refuse excessive texts, lists and integers."""
    if type(value) is int and abs(value) > _MAX_SIZE:
        raise ConfigError(f"whole numbers must be at most {_MAX_SIZE}; got {value}.")
    if isinstance(value, str | list | dict) and len(value) > _MAX_TEXT:
        raise ConfigError(f"texts, lists and objects may have {_MAX_TEXT} entries; got {len(value)}.")
    if isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            _check_values(one)


def rebuild(data: Mapping[str, Any]) -> Policy:
    """Build the policy from the output of `describe`, with fresh weights."""
    policy = _rebuild_inner(data)
    for wrapper in data.get("wrappers", ()):
        policy = registry.from_json("wrapper", wrapper).wrap(policy)
    return policy


def _rebuild_inner(data: Mapping[str, Any]) -> Policy:
    if "members" in data:
        sampler = registry.from_json("sampler", data["parts"]["sampler"])
        members = [rebuild(member) for member in data["members"]]
        return ComposedPolicy(members, Composition(**data["composition"]), sampler=sampler)
    described = {"encoder": {"name": "state"}} | data["parts"]  # early descriptions predate other encoders
    parts = {group: registry.from_json(group, described[group]) for group in PART_GROUPS}
    modes = {"state": "limits", "goal": "limits", "action": "limits"} | data["normalizer"]
    sizes = {name: data[name] for name in ("obs_dim", "goal_dim", "action_dim")}
    horizons = {name: data[name] for name in _SIZES if name not in sizes}
    optional = {"observation_clip": None, "goal_dropout": 0.0, "guidance": 1.0}
    others = {name: data.get(name, default) for name, default in optional.items()}
    config = PolicyConfig(**parts, **horizons, **others, normalizer=modes)
    images = {camera: (int(h), int(w), int(c)) for camera, (h, w, c) in data.get("images", {}).items()}
    policy = build_policy(config, **sizes, images=images)
    if data.get("switch_time") is not None and isinstance(policy, DenoisingPolicy):
        switch, above = float(data["switch_time"]), data.get("tuned_above", False)
        policy.field = SwitchedField(policy.field, policy.clone().field, switch, tuned_above=above)
    return policy
