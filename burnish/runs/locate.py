"""Locates policies: a policy directory, a checkpoint, a run (last checkpoint), an export."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from algos.training.run_directory import RunDirectory
from policies.errors import CheckpointError, ConfigError
from policies.export.exported_policy import ExportedPolicy
from policies.export.folder import MODELS
from policies.export.signature import is_exported, read_signature
from policies.policy import Policy
from policies.runner import SIGNATURE
from policies.storage import policy_folder
from policies.storage.checksums import sha256
from policies.storage.hub import PREFIX, fetch, is_on_hub
from policies.storage.policy_folder import CONFIG as POLICY_CONFIG
from policies.storage.policy_folder import WEIGHTS, interrupted_replacement, read_config

RUN_CONFIG = "config.yaml"
_SEED_FOLDER = re.compile(r"seed-(\d+)")


@dataclass(frozen=True)
class Located:
    """A policy directory with its run and step, if inside a run."""

    files: ClassVar[tuple[str, ...]] = (POLICY_CONFIG, WEIGHTS)

    path: Path
    run: Path | None = None
    step: int | None = None

    def content(self) -> dict[str, str]:
        """Return the place of the policy and the SHA-256 of what acts, which a run replaces as it grows."""
        place = self.path.resolve()
        files = [place / name for name in self.files if (place / name).is_file()]
        return {"path": str(place), **{file.name: sha256(file) for file in files}}

    @property
    def label(self) -> str:
        """A short name for tables and file names."""
        if self.run is None:
            return self.path.name
        name = name_of_run(self.run)
        return name if self.step is None else f"{name}@{self.step}"

    def load(self) -> Policy:
        return policy_folder.load_policy(self.path)

    def provenance(self) -> Mapping[str, Any]:
        """Facts stored with the policy (task, algorithm, seed, ...)."""
        facts = read_config(self.path).get("provenance")
        return facts if isinstance(facts, dict) else {}


@dataclass(frozen=True)
class LocatedExport(Located):
    """A folder written by `burnish export`."""

    files = (SIGNATURE, *MODELS)

    def load(self) -> Any:
        return ExportedPolicy(self.path)

    def provenance(self) -> Mapping[str, Any]:
        return read_signature(self.path).provenance


@dataclass(frozen=True)
class GivenPolicy(Located):
    """A policy that is an object of this program; see `envs.rollouts.player.EvaluatedPolicy`."""

    policy: Any = None

    def load(self) -> Any:
        return self.policy

    def provenance(self) -> Mapping[str, Any]:
        return getattr(self.policy, "provenance", {})


def given_policy(value: Any) -> GivenPolicy | None:
    """Return a policy that is given itself, named after its class; None for a path and other objects."""
    members = ("chunk", "noise_shape", "sample_noise", "act")
    is_policy = all(hasattr(value, name) for name in members)
    return GivenPolicy(Path(type(value).__name__), policy=value) if is_policy else None


def identified(policy: Located) -> dict[str, str]:
    """Return the name of a policy and the SHA-256 of its weights."""
    return {"name": policy.label, "sha256": sha256(policy.path / WEIGHTS)}


def load_policy(policy: str | os.PathLike[str]) -> Policy:
    """Load a policy without dataset or simulator, and without executing code from its directory.

    Args:
        policy: A run (last checkpoint), a checkpoint, or a policy directory; `hub://org/name` for the Hugging
            Face hub.

    Raises:
        CheckpointError: If there is no policy, a file is damaged, or weights and configuration disagree.
    """
    return locate(policy).load()


def check_file_to_write(path: str | os.PathLike[str]) -> None:
    """Refuse, with ConfigError, a path `out` where no file can be written."""
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"out={target} is a folder; give the name of a file, e.g. {target / 'name'}.")
    _check_parents(target, "out")
    require_writable(target, "out")


def require_writable(target: Path, what: str = "", remedy: str = "Choose another place") -> None:
    """Refuse, with ConfigError, a file in a folder that takes none, e.g. of a read-only disk."""
    real = target.resolve()
    if real.exists() and not real.is_file():  # pipes and devices are written directly
        return
    _require_access(real.parent, f"{what}={target}" if what else str(target), remedy)


def _require_access(folder: Path, name: str, remedy: str) -> None:
    folder = folder.resolve()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(nearest, os.W_OK):
        raise ConfigError(f"{name} cannot be written: {nearest} is read-only. {remedy}.")


def dated_folder(name: str) -> Path:
    """Return runs/<date>/<time>-<name>, which may exist (`algos.training.run_directory.new_folder`)."""
    return Path("runs") / datetime.now().strftime(f"%Y-%m-%d/%H-%M-%S-{name}")


def check_folder_to_write(path: str | os.PathLike[str], key: str = "out") -> None:
    """Refuse, with ConfigError, a path where no folder can be created, or a folder that takes no files."""
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{key}={target} is a file; choose another directory.")
    _check_parents(target, key)
    _require_access(target, f"{key}={target}", "Choose another place")


def check_folder_to_fill(target: Path, overwrite: bool | None = None) -> None:
    """Refuse, with ConfigError, a folder that cannot be created or holds files; None: no key `overwrite`."""
    check_folder_to_write(target)
    if not overwrite and target.is_dir() and any(target.iterdir()):
        remedy = "" if overwrite is None else " or say overwrite=true"
        raise ConfigError(f"out={target} exists; choose another directory{remedy}.")


def _check_parents(target: Path, key: str) -> None:
    parent = next(place for place in target.absolute().parents if place.exists())
    if not parent.is_dir():
        raise ConfigError(f"{key}={target} cannot be written: {parent} is a file, not a folder.")


def locate_actor(path: str | os.PathLike[str], key: str = "policy") -> Located:
    """Locate a policy or an exported folder for evaluation; see `locate` and `LocatedExport`."""
    return LocatedExport(Path(path)) if is_exported(Path(path)) else locate(path, key)


def locate(path: str | os.PathLike[str], key: str = "policy") -> Located:
    """Locate the policy directory of a path.

    Args:
        path: A policy directory, a checkpoint directory, or a run directory; or `hub://org/name[@revision]`,
            which is downloaded.
        key: Configuration key for errors.

    Raises:
        CheckpointError: If there is no policy; names the content found.
    """
    if is_on_hub(path):
        return Located(fetch(str(path)))
    place = Path(path)
    if not place.exists():
        raise CheckpointError(
            f"{key}={path} does not exist; give a policy directory or a run directory."
            f"{interrupted_replacement(place)}{_perhaps_on_hub(place)}"
        )
    if (place / RUN_CONFIG).is_file():
        run = RunDirectory.open(place)
        step = run.latest()
        return Located(run.policy_path(step), place, step)
    if (place / POLICY_CONFIG).is_file():
        return _with_run(place)
    if (place / "policy" / POLICY_CONFIG).is_file():
        return _with_run(place / "policy")
    if runs := seed_folders(place):
        raise CheckpointError(
            f"{key}={path} holds the runs of {len(runs)} seeds; give one of them, for example {runs[0]}."
        )
    if is_exported(place):
        raise CheckpointError(
            f"{key}={path} is an exported folder: graphs that act, without weights to train, merge or "
            "compose. Give the run or the policy directory that it was exported from."
        )
    raise CheckpointError(
        f"{key}={path} is neither a policy directory (no {POLICY_CONFIG}) nor a run (no {RUN_CONFIG}); "
        f"give one of these, for example runs/<date>/<name>."
    )


def folder_of(place: Path, seed: int) -> Path:
    """Return the run directory of a seed in a folder of several."""
    return place / f"seed-{seed}"


def name_of_run(path: Path) -> str:
    """Return the name of a run: its folder's; for one of several seeds, with the parent folder's in front."""
    real = path.resolve()
    return f"{real.parent.name}-{real.name}" if _SEED_FOLDER.fullmatch(real.name) else real.name


def seed_folders(place: str | Path | None) -> list[Path]:
    """Return the run folders in a folder by seed; empty for a single run."""
    if place is None or not Path(place).is_dir() or (Path(place) / RUN_CONFIG).is_file():
        return []
    names = [(_SEED_FOLDER.fullmatch(item.name), item) for item in Path(place).iterdir()]
    runs = [(int(name[1]), item) for name, item in names if name and (item / RUN_CONFIG).is_file()]
    return [item for _, item in sorted(runs)]


def runs_below(folder: str | Path) -> list[Path]:
    """Return the run directories below a folder, such as those of a sweep, by path."""
    configs = Path(folder).rglob(RUN_CONFIG) if Path(folder).is_dir() else ()
    return sorted(
        path.parent for path in configs if path.is_file() and (path.parent / "checkpoints").is_dir()
    )


def _perhaps_on_hub(place: Path) -> str:
    looks_so = len(place.parts) == 2 and not place.is_absolute() and not place.parent.exists()
    return f" One on the hub is written {PREFIX}{place.as_posix()}." if looks_so else ""


def _with_run(policy: Path) -> Located:
    """Recognise the layout <run>/checkpoints/<step>/policy."""
    real = policy.resolve()
    checkpoint = real.parent
    run = checkpoint.parent.parent
    if real.name == "policy" and checkpoint.name.isdecimal() and (run / RUN_CONFIG).is_file():
        return Located(policy, run, int(checkpoint.name))
    return Located(policy)
