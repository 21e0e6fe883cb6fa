"""Run directory: files of a training run, and its checkpoints.

    <root>/<date>/<name>/
      config.yaml  overrides.txt  environment.json  metrics.jsonl  eval/*.json
      checkpoints/<step>/policy/                    the exported policy (see policies.storage.policy_folder)
      checkpoints/<step>/training_state/state.pt    resume state: tensors and plain values
      checkpoints/<step>/SHA256SUMS                 checksums of both; the resume state's is verified
      checkpoints/last -> <step>

A checkpoint is written to a temporary folder, flushed to disk and renamed. The rename is atomic: after a
kill, a checkpoint exists completely or not at all. Checkpoints are never rewritten.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from omegaconf import OmegaConf

from algos.training.checkpoint_files import is_copy, read_training_state, write_checkpoint
from algos.training.metrics import append_jsonl, truncate_jsonl
from algos.training.provenance import describe_environment
from algos.training.run_config import read_config
from algos.training.run_lock import LOCK, holder, take_lock
from policies.errors import CheckpointError
from policies.policy import Policy
from policies.storage.atomic_write import sync, write_errors, write_text
from policies.storage.strict_json import own_file, read_small

_CONFIG, _OVERRIDES, _ENVIRONMENT = "config.yaml", "overrides.txt", "environment.json"
_METRICS = "metrics.jsonl"
_CHECKPOINTS, _LAST, _ASIDE = "checkpoints", "last", ".aside-"
EVAL, _EVAL_NAME = "eval", re.compile(r"step-(\d+)(-.+)?")


class EvalFile(NamedTuple):
    """An evaluation of a checkpoint."""

    step: int
    path: Path  # JSON
    is_of_training: bool  # made during training, not by `burnish eval`


def eval_name(step: int, *details: str) -> str:
    """Return the name of an evaluation of a checkpoint; without details, of the one during training."""
    return "-".join([f"step-{step}", *details])


class RunDirectory:
    """A training run on disk; see `create_at` and `open`.

    Reading needs no lock; checkpoints and metrics are written under `claim`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._config: dict[str, Any] | None = None  # of the file, once read
        self._lock: IO[str] | None = None  # held from `create_at` to the end of the first `claim`

    @classmethod
    def create_at(
        cls, path: str | Path, config: Mapping[str, Any], overrides: Sequence[str] = ()
    ) -> RunDirectory:
        """Create a run in a given folder, which may exist, and write its configuration.

        The write lock is held from here to the end of the first `claim`.

        Raises:
            CheckpointError: If the folder holds a run, or another process is creating one.
        """
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        run = cls(path)
        run._lock = take_lock(path)
        if (path / _CONFIG).exists():
            raise CheckpointError(f"{path} holds a run. Continue it with resume={path}, or choose another.")
        (path / _CHECKPOINTS).mkdir(exist_ok=True)
        (path / EVAL).mkdir(exist_ok=True)
        write_text(path / _ENVIRONMENT, json.dumps(describe_environment(), indent=2) + "\n")
        run._describe(config, overrides)
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open an existing run.

        Raises:
            CheckpointError: If this is not a run directory.
        """
        if not (Path(path) / _CONFIG).is_file():
            why = f"it has no {_CONFIG}" if Path(path).is_dir() else "there is no such folder"
            raise CheckpointError(
                f"{path} is not a run directory: {why}. Give a run, for example runs/<date>/<name>."
            )
        return cls(path)

    def is_bare(self) -> bool:
        """Return whether the folder holds only the files of `create_at`, logs and empty files."""
        folders = [self.path / name for name in (_CHECKPOINTS, EVAL)]
        found = {path for folder in (self.path, *folders) if folder.is_dir() for path in folder.iterdir()}
        return not found - {*self._removable(), *folders}

    def remove_if_bare(self) -> bool:
        """Remove the folder if it is bare; return whether it is gone."""
        if not self.is_bare():
            return False
        for file in self._removable():
            file.unlink(missing_ok=True)
        for folder in (self.path / _CHECKPOINTS, self.path / EVAL, self.path):
            if folder.is_dir():
                folder.rmdir()
        return True

    def _removable(self) -> set[Path]:
        known = {self.path / name for name in (_CONFIG, _OVERRIDES, _ENVIRONMENT, LOCK)}
        empty = {item for item in self.path.glob("*") if item.is_file() and not item.stat().st_size}
        return known | empty | set(self.path.glob("*.log"))

    def amend(self, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
        """Replace the configuration; new overrides are appended to the list."""
        self._describe(config, [*self.overrides, *overrides])

    def _describe(self, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
        write_text(self.path / _OVERRIDES, "".join(f"{line}\n" for line in overrides))
        write_text(self.path / _CONFIG, OmegaConf.to_yaml(OmegaConf.create(dict(config))))
        self._config = None

    @property
    def config(self) -> dict[str, Any]:
        """Configuration at the start or the last resume of the run: plain values.

        Raises:
            CheckpointError: If the file is damaged or not a mapping.
        """
        if self._config is None:
            self._config = read_config(self.path / _CONFIG)
        return self._config

    def section(self, key: str) -> dict[str, Any]:
        """Return the section of the configuration under a key; empty if missing."""
        found = self.config.get(key)
        if found is not None and not isinstance(found, dict):
            raise CheckpointError(
                f"{self.path / _CONFIG}: '{key}' must hold keys with values; got {str(found)[:80]}."
            )
        return found or {}

    @property
    def overrides(self) -> list[str]:
        """Overrides at the start and at every resume, in order."""
        try:
            return read_small(own_file(self.path / _OVERRIDES)).splitlines()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{error} Restore it.") from None

    @property
    def metrics_path(self) -> Path:
        return self.path / _METRICS

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Hold the write lock; leftovers of an earlier kill are removed first.

        Raises:
            CheckpointError: If another process holds the lock.
        """
        lock, self._lock = self._lock or take_lock(self.path), None
        with lock:
            (self.path / _CHECKPOINTS).mkdir(exist_ok=True)
            self._clean()
            yield

    def writer(self) -> int | None:
        """Return the number of the process of this machine that holds the write lock; None: there is none."""
        return holder(self.path)

    def checkpoints(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        folder = self.path / _CHECKPOINTS
        if not folder.is_dir():
            return []
        return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and not p.is_symlink())

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint; None without one."""
        steps = self.checkpoints()
        return steps[-1] if steps else None

    def checkpoint_path(self, step: int | None = None) -> Path:
        """Return the directory of a checkpoint (the newest by default).

        Raises:
            CheckpointError: If it is missing; lists the existing checkpoints.
        """
        steps = self.checkpoints()
        if not steps:
            raise CheckpointError(f"{self.path} has no checkpoint yet. Start the run again from its config.")
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.path} has no checkpoint {step}; it has {steps}.")
        return self.path / _CHECKPOINTS / str(steps[-1] if step is None else step)

    def policy_path(self, step: int | None = None) -> Path:
        """Return the policy directory of a checkpoint (the newest by default)."""
        return self.checkpoint_path(step) / "policy"

    def save_checkpoint(
        self,
        step: int,
        policy: Policy,
        training_state: Mapping[str, Any],
        *,
        provenance: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint atomically, update `last` and return its directory.

        Args:
            step: Completed units.
            policy: The exported policy.
            training_state: Resume state; see `algos.training.serialization`.
            provenance: Facts for the model card.

        Raises:
            CheckpointError: If this checkpoint exists already or the state cannot be serialised.
            WriteError: If the disk is full; earlier checkpoints are unchanged.
        """
        target, aside = self.path / _CHECKPOINTS / str(step), self._aside()
        if target.exists():
            raise CheckpointError(f"{target} exists already; a checkpoint is never rewritten.")
        state, facts = {"step": step, **training_state}, {"run": self.path.name, "step": step}
        try:
            with write_errors(target):
                write_checkpoint(aside, policy, state, provenance=facts | dict(provenance or {}))
            os.rename(aside, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        sync(target.parent)
        self._point_last(step)
        return target

    def _aside(self) -> Path:
        """Return a new temporary path; leftovers are removed by `claim`."""
        return self.path / _CHECKPOINTS / f"{_ASIDE}{uuid.uuid4().hex[:8]}"

    def keep_newest(self, count: int) -> None:
        """Remove all checkpoints but the newest `count`, at least 1."""
        for old in self.checkpoints()[: -max(count, 1)]:
            self._remove(old)

    def load_training_state(self, step: int | None = None) -> dict[str, Any]:
        """Return the training state of a checkpoint (the newest by default), on the CPU.

        Raises:
            CheckpointError: If it is missing, damaged, or of another format.
        """
        return read_training_state(self.checkpoint_path(step))

    def rewind(self, step: int | None, *, metrics_bytes: int = 0) -> None:
        """Remove everything after a checkpoint: later checkpoints, metrics rows and evaluations.

        Args:
            step: Checkpoint to resume from; None: remove everything.
            metrics_bytes: Size of metrics.jsonl at that checkpoint; the row of its evaluation may follow.
        """
        later = [s for s in self.checkpoints() if step is None or s > step]
        if step is not None:
            self._point_last(step)
        else:
            (self.path / _CHECKPOINTS / _LAST).unlink(missing_ok=True)
        for old in reversed(later):
            self._remove(old)
        for one in self.evals():
            if step is None or one.step > step:
                one.path.unlink()
        truncate_jsonl(self.metrics_path, metrics_bytes, through=step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        append_jsonl(self.metrics_path, values, step)

    @property
    def metrics_bytes(self) -> int:
        """Size of metrics.jsonl, saved with a checkpoint to truncate later rows exactly."""
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    def write_eval(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write `eval/<name>.json` and return its path; an earlier one is replaced."""
        path = self.path / EVAL / f"{name}.json"
        with write_errors(path):
            path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps(content, indent=2) + "\n")
        return path

    def evals(self) -> list[EvalFile]:
        """Return the evaluations of checkpoints, by step and name."""
        named = ((path, _EVAL_NAME.fullmatch(path.stem)) for path in (self.path / EVAL).glob("*.json"))
        return sorted(EvalFile(int(found[1]), path, found[2] is None) for path, found in named if found)

    def _clean(self) -> None:
        """Remove leftovers of a kill and repair `last`."""
        for path in (self.path / _CHECKPOINTS).glob(f"{_ASIDE}*"):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)
        if (newest := self.latest()) is not None:
            self._point_last(newest)

    def _point_last(self, step: int) -> None:
        """Replace the link `last` atomically; a copy of a checkpoint in its place, left by `cp -rL`, goes.

        Raises:
            CheckpointError: If `last` is a folder of something else.
        """
        aside = self._aside()
        last = aside.with_name(_LAST)
        if last.is_dir() and not last.is_symlink():
            if not any(is_copy(last, self.checkpoint_path(known)) for known in self.checkpoints()):
                raise CheckpointError(
                    f"{last} must be a link to checkpoint {step}; it is a folder, and a copy of no "
                    "checkpoint. Move it away."
                )
            shutil.rmtree(last)
        os.symlink(str(step), aside)
        os.replace(aside, last)
        sync(aside.parent)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint: an atomic rename, then deletion."""
        aside = self._aside()
        os.rename(aside.with_name(str(step)), aside)
        shutil.rmtree(aside, ignore_errors=True)


class FollowedRun(RunDirectory):
    """A run that another process writes: reading works, writing does nothing."""

    @contextmanager
    def claim(self) -> Iterator[None]:
        yield

    def save_checkpoint(self, step: int, policy: Policy, *_: Any, **__: Any) -> Path:
        return self.path / _CHECKPOINTS / str(step)

    def amend(self, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
        """Do nothing; so do the others."""

    def keep_newest(self, count: int) -> None: ...

    def rewind(self, step: int | None, *, metrics_bytes: int = 0) -> None: ...

    def log(self, values: Mapping[str, float], step: int) -> None: ...


def new_folder(path: Path) -> Path:
    """Create and return a new folder: `path`, or `path-2`, `path-3`, … if taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        made = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            made.mkdir()
            break
    return made
