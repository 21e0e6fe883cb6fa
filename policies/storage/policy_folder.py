"""Policy directories: saving and loading.

    config.json         the parts by registered name, horizons, sizes, provenance; no code, no paths
    model.safetensors   weights and normaliser statistics
    SHA256SUMS          checksums of both, verified on loading
    README.md           a model card rendered from the facts above; ignored on loading

A directory is untrusted input. Loading resolves names in the registry and executes nothing from it. Types and
sizes are checked before anything is built, memory is bounded by the size of the weights file
(`policies.storage.size_limits`), files must be regular ones of the directory, and other files are not opened.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_of
from torch import Tensor

from policies.errors import CheckpointError, MissingExtraError
from policies.policy import Policy
from policies.storage.atomic_write import aside_name, draft_folder, replace_folder, sync_tree
from policies.storage.checksums import CHECKSUMS, is_intact, write_checksums
from policies.storage.config_json import FORMAT, check_description, describe, rebuild, steps_of
from policies.storage.model_card import CARD, render_card
from policies.storage.size_limits import Budget
from policies.storage.strict_json import own_file, read_json

CONFIG, WEIGHTS = "config.json", "model.safetensors"

_SPARE_BYTES, _BYTES_PER_BYTE = 512 * 2**20, 32  # allocation allowance: constant, and per byte of weights
_SPARE_OPERATIONS, _OPERATIONS_PER_TENSOR = 5_000, 100
_OPERATIONS_PER_STEP, _MOST_STEPS = 200, 1000  # table operations per sampler step; most steps


def save_policy(
    policy: Policy, directory: str | Path, *, provenance: Mapping[str, Any] | None = None
) -> Path:
    """Write a policy directory atomically and return its path.

    Args:
        policy: The policy with its sampler.
        directory: Target; an existing policy directory is replaced.
        provenance: Facts for the model card (task, algorithm, dataset, versions, results); JSON types.
            None: those of the directory from which the policy was loaded, if any.

    Raises:
        CheckpointError: If `directory` exists and is no policy directory, or the policy could not be loaded
            again: a weight or setting is not finite or exceeds the stored precision.
        WriteError: If the disk is full; existing content is unchanged.
    """
    target = Path(directory)
    if target.is_symlink():
        target = target.resolve()  # replaces the target of a link, not the link
    is_replaceable = target.is_dir() and ((target / CONFIG).exists() or not any(target.iterdir()))
    if target.exists() and not is_replaceable:
        raise CheckpointError(f"{target} exists and is not a policy directory; choose another place.")
    facts = policy.provenance if provenance is None else provenance
    description, state = _as_json(describe(policy, facts)), _weights_of(policy)
    with draft_folder(target) as aside:
        (aside / CONFIG).write_text(description + "\n")
        (aside / WEIGHTS).write_bytes(safetensors_of(state))
        write_checksums(aside, (CONFIG, WEIGHTS))
        count = sum(p.numel() for p in policy.parameters())
        (aside / CARD).write_text(render_card(json.loads(description), count))
        sync_tree(aside)
        replace_folder(aside, target)
    return Path(directory)


def _as_json(description: dict[str, Any]) -> str:
    try:
        return json.dumps(description, indent=2, sort_keys=True, allow_nan=False)
    except (ValueError, TypeError) as error:
        advice = (
            "numbers, text, lists and dicts" if isinstance(error, TypeError) else "null for an absent bound"
        )
        raise CheckpointError(
            f"the description of this policy cannot be saved: {error}. Use {advice}."
        ) from None


def _weights_of(policy: Policy) -> dict[str, Tensor]:
    """Return the weights on the CPU as stored."""
    state = {k: v.detach().cpu().contiguous().clone() for k, v in policy.state_dict().items()}
    for name, value in state.items():
        if value.dtype == torch.float64:
            raise CheckpointError(f"'{name}' has double precision, which is not stored; call .float() first.")
        if fault := fault_of(name, value, value.dtype):
            raise CheckpointError(f"this policy cannot be saved: '{name}' {fault}.")
    return state


def policy_in(place: str | Path) -> Path:
    """Return the policy directory of a path, which is one, or a run with a last checkpoint."""
    given = Path(place).expanduser()
    return given if (given / CONFIG).is_file() else given / "checkpoints" / "last" / "policy"


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the contents of config.json; `CheckpointError` for a bad file or another format version."""
    path = Path(directory) / CONFIG
    if not path.is_file():
        hint = interrupted_replacement(directory)
        raise CheckpointError(f"{directory} is not a policy directory: it has no {CONFIG}.{hint}")
    try:
        data = read_json(_own_file(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from None
    if type(data.get("format")) is not int or data["format"] != FORMAT:
        raise CheckpointError(f"{path} must have format {FORMAT}; got {str(data.get('format'))[:80]}.")
    return data


def _own_file(path: Path) -> Path:
    try:
        return own_file(path)
    except (OSError, ValueError, RuntimeError) as error:  # circular links
        raise CheckpointError(str(error)) from None


def interrupted_replacement(directory: str | Path) -> str:
    """Return a hint at the remains of a killed replacement; empty if there are none."""
    target = Path(directory)
    left = sorted(target.parent.glob(glob.escape(aside_name(target)) + "*"))
    return f" A program was killed while replacing it; rename {left[-1]} to it." if left else ""


def load_policy(directory: str | Path) -> Policy:
    """Load a policy directory without dataset or simulator; runs no code from it.

    A directory that is replaced meanwhile is read again, so that all files are of one policy.

    Raises:
        CheckpointError: If a file is missing, damaged or fails its checksum, weights and configuration
            disagree, or a weight is not finite.
        MissingExtraError: If a part needs a missing package.
    """
    home = Path(directory)
    begun = _identity(home)
    try:
        policy = _load(home)
    except CheckpointError:
        if _identity(home) == begun:
            raise
    else:
        if _identity(home) == begun:
            return policy
    return load_policy(home)


def _identity(home: Path) -> tuple[int, int] | None:
    """Return what changes when a directory is replaced as a whole; None: there is none."""
    try:
        facts = home.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _load(home: Path) -> Policy:
    data = read_config(home)
    shapes, nbytes = _read_shapes(home / WEIGHTS)
    try:
        check_description(data)
        operations = _SPARE_OPERATIONS + _OPERATIONS_PER_TENSOR * len(shapes)
        operations += _OPERATIONS_PER_STEP * min(steps_of(data), _MOST_STEPS)
        with Budget(_SPARE_BYTES + _BYTES_PER_BYTE * nbytes, operations):
            policy = rebuild(data)
    except MissingExtraError:
        raise
    except Exception as error:  # parts may raise anything on invalid values
        reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{home / CONFIG} does not describe a policy: {reason}") from error
    _check_names(policy, shapes, home / WEIGHTS)
    _load_weights(policy, home / WEIGHTS)
    _check_checksums(home)
    policy.provenance = data.get("provenance", {})
    return policy.eval()


def _read_shapes(path: Path) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return the shapes of the weights, and the size of the file."""
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
    """Verify the checksums of the directory, or of the checkpoint that contains it."""
    real = home.resolve()
    has_own = os.path.lexists(real / CHECKSUMS)
    folder, inside = (real, Path()) if has_own else (real.parent, Path(real.name))
    for name in (CONFIG, WEIGHTS):
        try:
            if is_intact(folder, inside / name):
                continue
        except (OSError, ValueError) as error:
            raise CheckpointError(str(error)) from None
        raise CheckpointError(
            f"{home / name} has another SHA-256 than {folder / CHECKSUMS} records. Copy the directory again; "
            f"if you changed the file on purpose, remove its line there."
        )


def fault_of(name: str, value: Tensor, dtype: torch.dtype) -> str:
    """Return the fault of a tensor to be loaded as `dtype`; empty if there is none."""
    if value.is_floating_point() != dtype.is_floating_point or value.is_complex():
        return f"must have a type like {dtype}; got {value.dtype}"
    value = value.to(dtype)
    if not value.isfinite().all():
        return "must be finite; it holds NaN or inf"
    if ".normalizer." in f".{name}" and name.endswith("_scale") and not value.all():
        return "must not hold zeros: it is divided by"
    return ""
