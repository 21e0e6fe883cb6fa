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

import fcntl
import itertools
import json
import os
import pickle
import platform
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

from algos.training.metrics import append_jsonl, truncate_jsonl
from algos.training.provenance import describe_environment
from algos.training.serialization import from_plain, to_plain
from policies.errors import CheckpointError
from policies.policy import Policy
from policies.storage.atomic_write import atomic_file, sync, sync_tree, write_errors, write_text
from policies.storage.checksums import CHECKSUMS, is_intact, write_checksums
from policies.storage.policy_folder import save_policy
from policies.storage.strict_json import MAX_DEPTH, depth_of, fits, own_file, read_small

STATE_FORMAT = 1
_CONFIG, _OVERRIDES, _ENVIRONMENT = "config.yaml", "overrides.txt", "environment.json"
_METRICS, _LOCK = "metrics.jsonl", ".lock"
_CONFIG_BYTES, _LOCK_BYTES = 2**18, 2**10
_CHECKPOINTS, _LAST, _ASIDE = "checkpoints", "last", ".aside-"
_EVAL, _EVAL_NAME = "eval", re.compile(r"step-(\d+)(-.+)?")
_STATE_FILE = Path("training_state") / "state.pt"
_UNREADABLE = (  # raised by `torch.load` on damaged files
    *(RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError),
    *(AttributeError, TypeError, IndexError),
)


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
        run._lock = run._take_lock()
        if (path / _CONFIG).exists():
            raise CheckpointError(f"{path} holds a run. Continue it with resume={path}, or choose another.")
        (path / _CHECKPOINTS).mkdir(exist_ok=True)
        (path / _EVAL).mkdir(exist_ok=True)
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
        folders = [self.path / name for name in (_CHECKPOINTS, _EVAL)]
        found = {path for folder in (self.path, *folders) if folder.is_dir() for path in folder.iterdir()}
        return not found - {*self._removable(), *folders}

    def remove_if_bare(self) -> bool:
        """Remove the folder if it is bare; return whether it is gone."""
        if not self.is_bare():
            return False
        for file in self._removable():
            file.unlink(missing_ok=True)
        for folder in (self.path / _CHECKPOINTS, self.path / _EVAL, self.path):
            if folder.is_dir():
                folder.rmdir()
        return True

    def _removable(self) -> set[Path]:
        known = {self.path / name for name in (_CONFIG, _OVERRIDES, _ENVIRONMENT, _LOCK)}
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
            self._config = _read_config(self.path / _CONFIG)
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
        lock, self._lock = self._lock or self._take_lock(), None
        with lock:
            (self.path / _CHECKPOINTS).mkdir(exist_ok=True)
            self._clean()
            yield

    def _take_lock(self) -> IO[str]:
        lock = (self.path / _LOCK).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise CheckpointError(
                f"{self.path} is being written by another process. Wait for it, or start another run."
            ) from None
        lock.truncate(0)
        lock.write(json.dumps({"pid": os.getpid(), "host": platform.node()}))
        lock.flush()
        return lock

    def writer(self) -> int | None:
        """Return the number of the process of this machine that holds the write lock; None: there is none."""
        try:
            with own_file(self.path / _LOCK).open() as lock:
                held = json.loads(lock.read(_LOCK_BYTES) or "{}")
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            is_here = isinstance(held, dict) and held.get("host") == platform.node()
            return held["pid"] if is_here and fits(held.get("pid"), int) and held["pid"] > 1 else None
        except (OSError, ValueError):
            pass
        return None

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
        state = to_plain({"format": STATE_FORMAT, "step": step, **training_state}, "training_state")
        facts = {"run": self.path.name, "step": step, **(provenance or {})}
        try:
            with write_errors(target):
                aside.mkdir()
                save_policy(policy, aside / "policy", provenance=facts)
                (aside / _STATE_FILE).parent.mkdir()
                with atomic_file(aside / _STATE_FILE) as file:
                    torch.save(state, cast(IO[bytes], file))
                write_checksums(aside)
                sync_tree(aside)
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
        folder = self.checkpoint_path(step)
        path = folder / _STATE_FILE
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: this checkpoint can be run but not resumed.")
        try:
            if not is_intact(folder, _STATE_FILE):
                raise OSError(f"its SHA-256 is not that of {CHECKSUMS}")
            state = torch.load(path, map_location="cpu", weights_only=True)
        except _UNREADABLE as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(
                f"{path} is damaged ({reason}). Remove its checkpoint to continue from the one before."
            ) from None
        if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
            found = state.get("format") if isinstance(state, dict) else type(state).__name__
            raise CheckpointError(f"{path} must have format {STATE_FORMAT}; got {found}.")
        return from_plain(state)

    def rewind(self, step: int | None, *, metrics_bytes: int = 0) -> None:
        """Remove everything after a checkpoint: later checkpoints and metrics rows.

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
        truncate_jsonl(self.metrics_path, metrics_bytes, through=step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        append_jsonl(self.metrics_path, values, step)

    @property
    def metrics_bytes(self) -> int:
        """Size of metrics.jsonl, saved with a checkpoint to truncate later rows exactly."""
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    def write_eval(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write `eval/<name>.json` and return its path; an earlier one is replaced."""
        path = self.path / _EVAL / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps(content, indent=2) + "\n")
        return path

    def evals(self) -> list[EvalFile]:
        """Return the evaluations of checkpoints, by step and name."""
        named = ((path, _EVAL_NAME.fullmatch(path.stem)) for path in (self.path / _EVAL).glob("*.json"))
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
        """Replace the link `last` atomically."""
        aside = self._aside()
        os.symlink(str(step), aside)
        os.replace(aside, aside.with_name(_LAST))
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


class _PlainLoader(get_yaml_loader()):  # type: ignore[misc]
    """YAML of scalars, lists and mappings; aliases are refused, as they can expand a short text."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not read", mark)
        return super().compose_node(parent, index)


def _read_config(path: Path) -> dict[str, Any]:
    """Read a mapping of plain values without resolving or building anything."""
    try:
        found = yaml.load(read_small(own_file(path), _CONFIG_BYTES), Loader=_PlainLoader)
        if not isinstance(found, dict):
            raise ValueError(f"it must hold keys with values; got {type(found).__name__}")
        if depth_of(found) > MAX_DEPTH:
            raise ValueError("it is nested too deep")
        _require_plain(found)
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{path} is damaged ({' '.join(reason.split())}). Restore it.") from None
    return found


def _require_plain(value: Any) -> None:
    """Refuse values outside JSON, such as dates, sets and non-string keys."""
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"keys must be text; got {odd[0]!r}")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _require_plain(item)
    elif not (value is None or isinstance(value, str | int | float)):
        raise ValueError(f"values must be text or numbers; got {type(value).__name__}")


def new_folder(path: Path) -> Path:
    """Create and return a new folder: `path`, or `path-2`, `path-3`, … if taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        made = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            made.mkdir()
            break
    return made
