"""Policy directories: what is shipped, loaded and shared.

    config.json         the parts by registered name, horizons, sizes, provenance; no code, no paths
    model.safetensors   weights and normaliser statistics
    README.md           a model card rendered from the facts above

A directory is written aside and then renamed, so a reader never sees half of it. One that exists already is
exchanged with the new one in a single step of the kernel (Linux); where that is impossible there is a moment
between two renames, and a program that is killed then leaves the earlier directory beside, whole, under a
name that the error of the next attempt to load tells. Loading looks names up in the registry and executes
nothing from the directory.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import shutil
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from policies import registry
from policies.compose import ComposedPolicy
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.fields import SwitchedField
from policies.operators import Composition
from policies.policy import Policy, PolicyConfig, build_policy

FORMAT = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
_HERE, _RENAME_EXCHANGE = -100, 2  # of the system call renameat2: relative to here; swap the two names
_PART_GROUPS = ("process", "encoder", "backbone", "sampler")


def describe(policy: Policy, provenance: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return everything needed to rebuild a policy around its weights; JSON types only."""
    config = replace(policy.config, sampler=getattr(policy, "sampler", policy.config.sampler))
    field = None if isinstance(policy, ComposedPolicy) else getattr(policy, "field", None)
    return {
        "format": FORMAT,
        "parts": {group: registry.to_json(group, getattr(config, group)) for group in _PART_GROUPS},
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
        **(_describe_composition(policy) if isinstance(policy, ComposedPolicy) else {}),
        "provenance": dict(provenance or {}),
    }


def _describe_composition(policy: ComposedPolicy) -> dict[str, Any]:
    """Return how a composition is combined, and its members as `describe` does."""
    members = [describe(member) for member in policy.fields]
    return {"composition": asdict(policy.composition), "members": members}


def save_policy(
    policy: Policy, directory: str | Path, *, provenance: Mapping[str, Any] | None = None
) -> Path:
    """Write a policy directory atomically and return its path.

    Args:
        policy: The policy, with the sampler it should be run with.
        directory: Where to; an existing policy directory is replaced.
        provenance: Facts for the model card (task, algorithm, dataset, versions, results); JSON types.

    Raises:
        CheckpointError: If `directory` exists and is not a policy directory.
    """
    target = Path(directory)
    if target.exists() and not (target / CONFIG).exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} exists and is not a policy directory; choose another place.")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
    aside.mkdir()
    try:
        description = describe(policy, provenance)
        (aside / CONFIG).write_text(json.dumps(description, indent=2, sort_keys=True) + "\n")
        state = {k: v.detach().cpu().contiguous().clone() for k, v in policy.state_dict().items()}
        save_file(state, aside / WEIGHTS)
        (aside / CARD).write_text(model_card(policy, description))
        _sync(aside)
        _swap(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the contents of config.json.

    Raises:
        CheckpointError: If it is missing, is not JSON, or has another format version.
    """
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"{directory} is not a policy directory: it has no {CONFIG}.{where_it_was_left(directory)}"
        )
    try:
        data = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise CheckpointError(f"{path} must have format {FORMAT}; got {found}.")
    return data


def where_it_was_left(directory: str | Path) -> str:
    """Say where a policy directory is whose replacement was cut off by a kill; empty where there is none."""
    target = Path(directory)
    left = sorted(target.parent.glob(glob.escape(_old(target)) + "*"))
    return f" A program was killed while replacing it; rename {left[-1]} to it." if left else ""


def load_policy(directory: str | Path) -> Policy:
    """Load a policy directory; needs no dataset and no simulator, and runs no code from it.

    Raises:
        CheckpointError: If a file is missing or damaged, weights and configuration disagree, or a weight is
            not finite.
    """
    data = read_config(directory)
    registry.scan_policies()
    try:
        policy = _rebuild(data)
    except (CapabilityError, ConfigError, KeyError, TypeError, ValueError) as error:
        reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{Path(directory) / CONFIG} does not describe a policy: {reason}") from error
    _load_weights(policy, Path(directory) / WEIGHTS)
    return policy.eval()


def _rebuild(data: Mapping[str, Any]) -> Policy:
    """Build the policy that `describe` described, around fresh weights."""
    if "members" in data:
        sampler = registry.from_json("sampler", data["parts"]["sampler"])
        members = [_rebuild(member) for member in data["members"]]
        return ComposedPolicy(members, Composition(**data["composition"]), sampler=sampler)
    described = {"encoder": {"name": "state"}} | data["parts"]  # there was one encoder at first
    parts = {group: registry.from_json(group, described[group]) for group in _PART_GROUPS}
    names = ("obs_steps", "horizon", "act_steps", "action_start")
    modes = {"state": "limits", "goal": "limits", "action": "limits"} | data["normalizer"]
    horizons = {name: data[name] for name in names}
    clip = data.get("observation_clip")
    goals = {name: data.get(name, default) for name, default in (("goal_dropout", 0.0), ("guidance", 1.0))}
    config = PolicyConfig(**parts, **horizons, normalizer=modes, observation_clip=clip, **goals)
    obs_dim, action_dim, goal_dim = (int(data[name]) for name in ("obs_dim", "action_dim", "goal_dim"))
    images = dict(data.get("images", {}))
    images = {camera: (int(h), int(w), int(c)) for camera, (h, w, c) in images.items()}
    policy = build_policy(config, obs_dim=obs_dim, action_dim=action_dim, goal_dim=goal_dim, images=images)
    if data.get("switch_time") is not None and isinstance(policy, DenoisingPolicy):
        switch, above = float(data["switch_time"]), bool(data.get("tuned_above"))
        policy.field = SwitchedField(policy.field, policy.clone().field, switch, tuned_above=above)
    return policy


def _load_weights(policy: Policy, path: Path) -> None:
    """Load weights strictly: every name and shape must agree, every value must be usable."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    own = policy.state_dict()
    missing, unknown = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or unknown:
        raise CheckpointError(
            f"{path} does not fit {CONFIG}: missing {missing[:4]}, unexpected {unknown[:4]}."
        )
    for name, value in state.items():
        if value.shape != own[name].shape:
            raise CheckpointError(
                f"{path}: '{name}' must have shape {tuple(own[name].shape)}; got {tuple(value.shape)}."
            )
        if fault := fault_of(name, value, own[name].dtype):
            raise CheckpointError(f"{path}: '{name}' {fault}. Export the policy again.")
    policy.load_state_dict(state)


def fault_of(name: str, value: Tensor, dtype: torch.dtype) -> str:
    """Say what is wrong with the values of a tensor that is loaded into one of `dtype`; empty if nothing."""
    if value.is_floating_point() != dtype.is_floating_point or value.is_complex():
        return f"must have a type like {dtype}; got {value.dtype}"
    value = value.to(dtype)
    if not value.isfinite().all():
        return "must be finite; it holds NaN or inf"
    if ".normalizer." in f".{name}" and name.endswith("_scale") and not value.all():
        return "must not hold zeros: it is divided by"
    return ""


def model_card(policy: Policy, description: Mapping[str, Any]) -> str:
    """Render README.md from facts."""
    parts, facts = description["parts"], description["provenance"]
    cameras = description["images"].items()
    count = sum(p.numel() for p in policy.parameters())
    lines = [
        "---",
        "library_name: burnish",
        "tags: [robotics, imitation-learning]",
        "---",
        f"# {facts.get('name', 'policy')}",
        "",
        f"{_kind(description)} ({count:,} parameters) made with burnish.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {group} | `{json.dumps(parts[group])}` |" for group in _PART_GROUPS),
        f"| observation | {description['obs_steps']} × {description['obs_dim']} |",
        *(f"| camera `{camera}` | {height} × {width} |" for camera, (height, width, _) in cameras),
        f"| action chunk | predicts {description['horizon']}, executes {description['act_steps']}, "
        f"{description['action_dim']} wide |",
        *(f"| {key} | {value} |" for key, value in sorted(facts.items())),
        "",
        "```python",
        "import burnish",
        "",
        'policy = burnish.load_policy("<this directory>")',
        f"actions = policy.act(observations)  # (B, {description['obs_steps']}, {description['obs_dim']}) -> "
        f"(B, {description['act_steps']}, {description['action_dim']})",
        "```",
    ]
    return "\n".join(lines) + "\n"


def _kind(description: Mapping[str, Any]) -> str:
    """Say what kind of policy it is."""
    if "members" not in description:
        return f"A {description['parts']['process']['name']} policy"
    how, count = description["composition"], len(description["members"])
    return f"A composition of {count} policies (`{how['operator']}`, weights `{json.dumps(how['weights'])}`)"


def _sync(directory: Path) -> None:
    """Flush the files of a directory to the disk."""
    for path in [*directory.iterdir(), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _swap(aside: Path, target: Path) -> None:
    """Put `aside` in the place of `target`; what stood there is removed, or left at `aside`."""
    if not target.exists():
        os.rename(aside, target)
        return
    if _exchange(aside, target):
        return
    old = target.parent / f"{_old(target)}{uuid.uuid4().hex[:8]}"
    os.rename(target, old)
    try:
        os.rename(aside, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _old(target: Path) -> str:
    """Return how the name begins under which `target` stands aside while it is replaced."""
    return f".{target.name}.old."


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths swap names in one atomic step; False where system or file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    done: int = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0
