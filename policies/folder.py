"""Policy directories: what is shipped, loaded and shared.

    config.json         the parts by registered name, horizons, sizes, provenance; no code, no paths
    model.safetensors   weights and normaliser statistics
    SHA256SUMS          checksums of the two, compared on loading
    README.md           a model card rendered from the facts above; nobody reads it

A directory is written aside and then renamed, so a reader never sees half of it. One that exists already is
exchanged with the new one in a single step of the kernel (Linux); where that is impossible there is a moment
between two renames, and a program that is killed then leaves the earlier directory beside, whole, under a
name that the error of the next attempt to load tells.

A directory may come from a stranger. Loading looks names up in the registry and executes nothing from it;
types and sizes are checked before anything is built, memory is bounded by the size of the file of weights
(`policies.budget`), files must be regular ones of the directory, and whatever else lies there is not opened.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from policies import registry
from policies.budget import Budget
from policies.card import CARD, render_card
from policies.checksums import CHECKSUMS, is_intact, write_checksums
from policies.compose import ComposedPolicy
from policies.denoising import DenoisingPolicy
from policies.errors import CheckpointError, ConfigError, MissingExtraError
from policies.fields import SwitchedField
from policies.operators import Composition
from policies.policy import PART_GROUPS, Policy, PolicyConfig, build_policy
from policies.strict_json import read_json
from policies.typed import check_types
from policies.wrappers import WrappedPolicy

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"

_HERE, _RENAME_EXCHANGE = -100, 2  # of the system call renameat2: relative to here; swap the two names
_SIZES = ("obs_dim", "goal_dim", "action_dim", "obs_steps", "horizon", "act_steps", "action_start")
_KEYS = {
    *("format", "parts", "switch_time", "images", "normalizer", "observation_clip", "goal_dropout"),
    "tuned_above",
    *("guidance", "composition", "members", "wrappers", "provenance", *_SIZES),
}
_MAX_SIZE, _MAX_TEXT, _MAX_MEMBERS, _MAX_NESTED = 100_000, 1000, 64, 8
_SPARE_BYTES, _BYTES_PER_BYTE = 512 * 2**20, 32  # what may be allocated beside, and for, a byte of weights
_SPARE_OPERATIONS, _OPERATIONS_PER_TENSOR = 5_000, 100
_OPERATIONS_PER_STEP, _MOST_STEPS = 200, 1000  # to lay out what a sampler does, of as many steps


def describe(policy: Policy, provenance: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return everything needed to rebuild a policy around its weights; JSON types only."""
    if isinstance(policy, WrappedPolicy):
        inner = describe(policy.base, provenance)
        inner["wrappers"] = [*inner["wrappers"], registry.to_json("wrapper", policy.wrapper)]
        return inner
    config = replace(policy.config, sampler=getattr(policy, "sampler", policy.config.sampler))
    field = None if isinstance(policy, ComposedPolicy) else getattr(policy, "field", None)
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
        **(_describe_composition(policy) if isinstance(policy, ComposedPolicy) else {}),
        "wrappers": [],  # the innermost first
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
        provenance: Facts for the model card (task, algorithm, dataset, versions, results); JSON types. None:
            those of the directory that the policy was loaded from, if it was.

    Raises:
        CheckpointError: If `directory` exists and is not a policy directory, or if the policy could not be
            loaded again: a weight or a setting is not finite, or more precise than a file keeps.
    """
    target = Path(directory)
    if target.is_symlink():
        target = target.resolve()  # what the link leads to is replaced, not the link
    if target.exists() and not _may_be_replaced(target):
        raise CheckpointError(f"{target} exists and is not a policy directory; choose another place.")
    facts = policy.provenance if provenance is None else provenance
    description, state = _as_json(describe(policy, facts)), _weights_of(policy)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
    aside.mkdir()
    try:
        (aside / CONFIG).write_text(description + "\n")
        save_file(state, aside / WEIGHTS)
        write_checksums(aside, (CONFIG, WEIGHTS))
        count = sum(p.numel() for p in policy.parameters())
        (aside / CARD).write_text(render_card(json.loads(description), count))
        _sync(aside)
        _swap(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Path(directory)


def _may_be_replaced(target: Path) -> bool:
    """Tell whether a path is a policy directory, or an empty one."""
    return target.is_dir() and ((target / CONFIG).exists() or not any(target.iterdir()))


def _as_json(description: dict[str, Any]) -> str:
    """Return a description as text.

    Raises:
        CheckpointError: If a number in it is not finite, or it holds what is no JSON.
    """
    try:
        return json.dumps(description, indent=2, sort_keys=True, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"the description of this policy cannot be saved: {error}. Use null where there is no bound."
        ) from None


def _weights_of(policy: Policy) -> dict[str, Tensor]:
    """Return the weights on the CPU, as a file keeps them.

    Raises:
        CheckpointError: If a value could not be loaded again.
    """
    state = {k: v.detach().cpu().contiguous().clone() for k, v in policy.state_dict().items()}
    for name, value in state.items():
        if value.dtype == torch.float64:
            raise CheckpointError(
                f"'{name}' has double precision, which files do not keep; call .float() first."
            )
        if fault := fault_of(name, value, value.dtype):
            raise CheckpointError(f"this policy cannot be saved: '{name}' {fault}.")
    return state


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the contents of config.json.

    Raises:
        CheckpointError: If it is missing, is not JSON of finite numbers, or has another format version.
    """
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"{directory} is not a policy directory: it has no {CONFIG}.{where_it_was_left(directory)}"
        )
    try:
        data = read_json(_own_file(path))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if type(data.get("format")) is not int or data["format"] != FORMAT:
        raise CheckpointError(f"{path} must have format {FORMAT}; got {str(data.get('format'))[:80]}.")
    return data


def _own_file(path: Path) -> Path:
    """Return the file of a policy directory if it is a regular one, and lies in it.

    The cache of the hub is a special case: its files are links to a folder of contents beside the directory.

    Raises:
        CheckpointError: If it is not.
    """
    real, home = path.resolve(), path.parent.resolve()
    blobs = home.parent.parent / "blobs"
    if home not in real.parents and not (home.parent.name == "snapshots" and real.parent == blobs):
        raise CheckpointError(
            f"{path} is a link that leads out of its directory. Copy the file to this place."
        )
    if real.exists() and not stat.S_ISREG(real.stat().st_mode):
        raise CheckpointError(f"{path} must be a regular file.")
    return real


def where_it_was_left(directory: str | Path) -> str:
    """Say where a policy directory is whose replacement was cut off by a kill; empty where there is none."""
    target = Path(directory)
    left = sorted(target.parent.glob(glob.escape(_old(target)) + "*"))
    return f" A program was killed while replacing it; rename {left[-1]} to it." if left else ""


def load_policy(directory: str | Path) -> Policy:
    """Load a policy directory; needs no dataset and no simulator, and runs no code from it.

    Raises:
        CheckpointError: If a file is missing, damaged, or not what its checksum says, weights and
            configuration disagree, or a weight is not finite.
        MissingExtraError: If a part needs a package that is not installed.
    """
    home = Path(directory)
    data = read_config(home)
    shapes, nbytes = _read_shapes(home / WEIGHTS)
    registry.scan_policies()
    try:
        _check_description(data)
        operations = _SPARE_OPERATIONS + _OPERATIONS_PER_TENSOR * len(shapes)
        operations += _OPERATIONS_PER_STEP * min(_steps_of(data), _MOST_STEPS)
        with Budget(_SPARE_BYTES + _BYTES_PER_BYTE * nbytes, operations):
            policy = _rebuild(data)
    except MissingExtraError:
        raise
    except Exception as error:  # parts that are given nonsense may raise anything
        reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{home / CONFIG} does not describe a policy: {reason}") from error
    _check_names(policy, shapes, home / WEIGHTS)
    _load_weights(policy, home / WEIGHTS)
    _check_checksums(home)
    policy.provenance = data.get("provenance", {})
    return policy.eval()


def _check_description(data: Any, nested: int = 0) -> None:
    """Refuse what cannot describe a policy: unknown keys, values of other types, sizes beyond all reason.

    Raises:
        ConfigError: Names the key.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"a policy must be described by an object; got {type(data).__name__}.")
    if unknown := sorted(set(data) - _KEYS):
        raise ConfigError(f"unknown keys {[name[:80] for name in unknown[:4]]}; it has {sorted(_KEYS)}.")
    _check_values({name: value for name, value in data.items() if name not in ("provenance", "members")})
    for name in _SIZES:
        if type(data[name]) is not int:
            raise ConfigError(f"{name} must be a whole number; got {str(data[name])[:80]}.")
    for name, kind in (("parts", dict), ("normalizer", dict), ("images", dict), ("provenance", dict)):
        if not isinstance(data.get(name, {}), kind):
            raise ConfigError(f"{name} must be an object; got {type(data[name]).__name__}.")
    for name in ("switch_time", "observation_clip", "goal_dropout", "guidance"):
        if name in data and data[name] is not None and type(data[name]) not in (int, float):
            raise ConfigError(f"{name} must be a number; got {str(data[name])[:80]}.")
    if type(data.get("tuned_above", False)) is not bool:
        raise ConfigError(f"tuned_above must be true or false; got {str(data['tuned_above'])[:80]}.")
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
            _check_description(member, nested + 1)


def _steps_of(data: Mapping[str, Any]) -> int:
    """Return how many steps the samplers of a description take together, members included."""
    steps = data["parts"]["sampler"].get("steps")
    own = steps if type(steps) is int else 0
    return own + sum(_steps_of(member) for member in data.get("members", ()))


def _check_values(value: Any) -> None:
    """Refuse texts, lists and whole numbers beyond all reason."""
    if type(value) is int and abs(value) > _MAX_SIZE:
        raise ConfigError(f"whole numbers must be at most {_MAX_SIZE}; got {value}.")
    if isinstance(value, str | list | dict) and len(value) > _MAX_TEXT:
        raise ConfigError(f"texts, lists and objects may have {_MAX_TEXT} entries; got {len(value)}.")
    if isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            _check_values(one)


def _rebuild(data: Mapping[str, Any]) -> Policy:
    """Build the policy that `describe` described, around fresh weights."""
    policy = _rebuild_inner(data)
    for wrapper in data.get("wrappers", ()):
        policy = registry.from_json("wrapper", wrapper).wrap(policy)
    return policy


def _rebuild_inner(data: Mapping[str, Any]) -> Policy:
    """Build the innermost policy."""
    if "members" in data:
        sampler = registry.from_json("sampler", data["parts"]["sampler"])
        members = [_rebuild(member) for member in data["members"]]
        return ComposedPolicy(members, Composition(**data["composition"]), sampler=sampler)
    described = {"encoder": {"name": "state"}} | data["parts"]  # there was one encoder at first
    parts = {group: registry.from_json(group, described[group]) for group in PART_GROUPS}
    names = ("obs_steps", "horizon", "act_steps", "action_start")
    modes = {"state": "limits", "goal": "limits", "action": "limits"} | data["normalizer"]
    horizons = {name: data[name] for name in names}
    clip = data.get("observation_clip")
    goals = {name: data.get(name, default) for name, default in (("goal_dropout", 0.0), ("guidance", 1.0))}
    config = PolicyConfig(**parts, **horizons, normalizer=modes, observation_clip=clip, **goals)
    obs_dim, action_dim, goal_dim = (data[name] for name in ("obs_dim", "action_dim", "goal_dim"))
    images = dict(data.get("images", {}))
    images = {camera: (int(h), int(w), int(c)) for camera, (h, w, c) in images.items()}
    policy = build_policy(config, obs_dim=obs_dim, action_dim=action_dim, goal_dim=goal_dim, images=images)
    if data.get("switch_time") is not None and isinstance(policy, DenoisingPolicy):
        switch, above = float(data["switch_time"]), data.get("tuned_above", False)
        policy.field = SwitchedField(policy.field, policy.clone().field, switch, tuned_above=above)
    return policy


def _read_shapes(path: Path) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return the shapes of the weights, and the size of their file; no weight is read.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    real = _own_file(path)
    if not real.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        with safe_open(real, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    return shapes, real.stat().st_size


def _check_names(policy: Policy, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Refuse weights of another policy: every name and shape must agree."""
    own = policy.state_dict()
    missing, unknown = sorted(set(own) - set(shapes)), sorted(set(shapes) - set(own))
    if missing or unknown:
        raise CheckpointError(
            f"{path} does not fit {CONFIG}: missing {missing[:4]}, unexpected {unknown[:4]}."
        )
    for name, shape in shapes.items():
        if shape != tuple(own[name].shape):
            raise CheckpointError(f"{path}: '{name}' must have shape {tuple(own[name].shape)}; got {shape}.")


def _load_weights(policy: Policy, path: Path) -> None:
    """Load weights whose names and shapes agree; every value must be usable."""
    try:
        state = load_file(path)
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    own = policy.state_dict()
    for name, value in state.items():
        if fault := fault_of(name, value, own[name].dtype):
            raise CheckpointError(f"{path}: '{name}' {fault}. Export the policy again.")
    policy.load_state_dict(state)


def _check_checksums(home: Path) -> None:
    """Compare with the checksums of the directory, or else of the checkpoint around it.

    Raises:
        CheckpointError: If a file is not what was written.
    """
    real = home.resolve()
    has_own = (real / CHECKSUMS).is_file()
    folder, inside = (real, Path()) if has_own else (real.parent, Path(real.name))
    for name in (CONFIG, WEIGHTS):
        if not is_intact(folder, inside / name):
            raise CheckpointError(
                f"{home / name} is not what was written: its SHA-256 is not that of {folder / CHECKSUMS}. "
                f"Copy the directory again; if you changed the file on purpose, remove its line there."
            )


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
