"""Locates policies: a policy directory, a checkpoint, a run (its last checkpoint), an export."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from algos.training.run_directory import RunDirectory
from policies.errors import CheckpointError, ConfigError
from policies.export.exported_policy import ExportedPolicy
from policies.export.signature import is_exported, read_signature
from policies.policy import Policy
from policies.storage import policy_folder
from policies.storage.hub import PREFIX, fetch, is_on_hub
from policies.storage.policy_folder import CONFIG as POLICY_CONFIG
from policies.storage.policy_folder import read_config, where_it_was_left

RUN_CONFIG = "config.yaml"
_SEED_FOLDER = re.compile(r"seed-(\d+)")


@dataclass(frozen=True)
class Located:
    """A policy directory and, where it lies in one, its run and step."""

    path: Path
    run: Path | None = None
    step: int | None = None

    @property
    def label(self) -> str:
        """A short name for tables and file names."""
        if self.run is None:
            return self.path.name
        name = name_of_run(self.run)
        return name if self.step is None else f"{name}@{self.step}"

    def load(self) -> Policy:
        """Load the policy."""
        return policy_folder.load_policy(self.path)

    def provenance(self) -> Mapping[str, Any]:
        """Facts stored with the policy (task, algorithm, seed, ...)."""
        facts = read_config(self.path).get("provenance")
        return facts if isinstance(facts, dict) else {}


@dataclass(frozen=True)
class LocatedExport(Located):
    """A folder that `burnish export` wrote."""

    def load(self) -> Any:
        """Open the exported policy."""
        return ExportedPolicy(self.path)

    def provenance(self) -> Mapping[str, Any]:
        """Facts stored with the policy that was exported."""
        return read_signature(self.path).provenance


def load_policy(policy: str | os.PathLike[str]) -> Policy:
    """Load a policy; needs no dataset and no simulator, and runs no code from its directory.

    Args:
        policy: A run (its last checkpoint), a checkpoint, or a policy directory; `hub://org/name` for one on
            the Hugging Face hub.

    Raises:
        CheckpointError: If there is no policy, a file is damaged, or weights and configuration disagree.
    """
    return locate(policy).load()


def check_file_to_write(path: str | os.PathLike[str], key: str = "out") -> None:
    """Refuse a place where no file can be written, before any work is done for it.

    Raises:
        ConfigError: If it is a folder, or lies below a file.
    """
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"{key}={target} is a folder; give the name of a file, e.g. {target / 'name'}.")
    _check_parents(target, key)


def place_now(name: str) -> Path:
    """Return runs/<date>/<time>-<name>, which may be taken (`algos.training.run_directory.new_folder`)."""
    return Path("runs") / datetime.now().strftime(f"%Y-%m-%d/%H-%M-%S-{name}")


def check_folder_to_write(path: str | os.PathLike[str], key: str = "out") -> None:
    """Refuse a place where no folder can be made, before any work is done for it.

    Raises:
        ConfigError: If it is a file, or lies below one.
    """
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{key}={target} is a file; choose another directory.")
    _check_parents(target, key)


def _check_parents(target: Path, key: str) -> None:
    parent = next(place for place in target.absolute().parents if place.exists())
    if not parent.is_dir():
        raise ConfigError(f"{key}={target} cannot be written: {parent} is a file, not a folder.")


def locate_actor(path: str | os.PathLike[str], key: str = "policy") -> Located:
    """Find what can be evaluated: a policy, or an exported folder; see `locate` and `LocatedExport`."""
    return LocatedExport(Path(path)) if is_exported(Path(path)) else locate(path, key)


def locate(path: str | os.PathLike[str], key: str = "policy") -> Located:
    """Find the policy directory behind a path.

    Args:
        path: A policy directory, a checkpoint directory, or a run directory; or `hub://org/name[@revision]`,
            which is fetched.
        key: Configuration key to name in errors.

    Raises:
        CheckpointError: If there is no policy; names what was found instead.
    """
    if is_on_hub(path):
        return Located(fetch(str(path)))
    given = Path(path)
    if not given.exists():
        raise CheckpointError(
            f"{key}={path} does not exist; give a policy directory or a run directory."
            f"{where_it_was_left(given)}{_perhaps_on_hub(given)}"
        )
    if (given / RUN_CONFIG).is_file():
        run = RunDirectory.open(given)
        step = run.latest()
        return Located(run.policy_path(step), given, step)
    if (given / POLICY_CONFIG).is_file():
        return _with_run(given)
    if (given / "policy" / POLICY_CONFIG).is_file():
        return _with_run(given / "policy")
    if runs := seed_folders(given):
        raise CheckpointError(
            f"{key}={path} holds the runs of {len(runs)} seeds; give one of them, for example {runs[0]}."
        )
    raise CheckpointError(
        f"{key}={path} is neither a policy directory (no {POLICY_CONFIG}) nor a run (no {RUN_CONFIG}); "
        f"give one of these, for example runs/<date>/<name>."
    )


def folder_of(place: Path, seed: int) -> Path:
    """Return where the run of a seed is, among several in a folder."""
    return place / f"seed-{seed}"


def name_of_run(path: Path) -> str:
    """Return what a run is called: its folder's name, for one of several seeds after that of their folder."""
    real = path.resolve()
    return f"{real.parent.name}-{real.name}" if _SEED_FOLDER.fullmatch(real.name) else real.name


def seed_folders(place: str | Path | None) -> list[Path]:
    """Return the runs of seeds in a folder by their seeds; none if it is a run itself, or there are none."""
    if place is None or not Path(place).is_dir() or (Path(place) / RUN_CONFIG).is_file():
        return []
    found = [(_SEED_FOLDER.fullmatch(item.name), item) for item in Path(place).iterdir()]
    runs = [(int(name[1]), item) for name, item in found if name and (item / RUN_CONFIG).is_file()]
    return [item for _, item in sorted(runs)]


def _perhaps_on_hub(given: Path) -> str:
    """Say how a policy of the hub is written, where the path looks like the name of one."""
    looks_so = len(given.parts) == 2 and not given.is_absolute() and not given.parent.exists()
    return f" One on the hub is written {PREFIX}{given.as_posix()}." if looks_so else ""


def _with_run(policy: Path) -> Located:
    """Recognise the layout <run>/checkpoints/<step>/policy."""
    real = policy.resolve()
    checkpoint = real.parent
    run = checkpoint.parent.parent
    if real.name == "policy" and checkpoint.name.isdecimal() and (run / RUN_CONFIG).is_file():
        return Located(policy, run, int(checkpoint.name))
    return Located(policy)
