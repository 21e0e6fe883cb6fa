"""Atomic writes: files and folders are written beside the target, flushed, then renamed into place.

A full disk raises a `WriteError` that names the path. Libraries that may crash on a failing write (HDF5,
torch) write to a `Draft`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import io
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from policies.errors import WriteError

_HERE, _RENAME_EXCHANGE = -100, 2  # arguments of renameat2: current directory; exchange names
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
"""What locking a file raises on file systems that have no locks."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_STALE_S = 60.0  # minimum age of a draft [s] before it counts as left by a killed program


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise a `WriteError` that names the path where the disk is full."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, WriteError) and error.errno not in _FULL:
            raise
        failure = WriteError(
            f"{path} cannot be written: {error.strerror}. What was there is unchanged. Free space on its "
            f"disk, or choose a place on another one."
        )
        failure.strerror = error.strerror  # for callers that write several paths
        raise failure from error


class Draft(io.FileIO):
    """New file whose writes never raise: on a full disk data is dropped and `failure` is set.

    A library that receives write errors, and again on close, may abort the process.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self.failure: OSError | None = None

    def write(self, content: Any) -> int:
        left = memoryview(content).cast("B")
        size = left.nbytes
        while left.nbytes and self.failure is None:
            try:
                left = left[super().write(left) :]
            except OSError as error:
                self.failure = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
            return self.tell() if size is None else size


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Draft]:
    """Write a file through a library, flush it to disk, and rename it into place on success."""
    aside = _draft_path(path)
    try:
        with write_errors(path), Draft(aside) as draft, _locked(draft.fileno()):
            try:
                yield draft
            except Exception:
                if draft.failure is None:
                    raise
            if draft.failure is not None:
                raise draft.failure
            os.fsync(draft.fileno())
            os.replace(aside, path)
    finally:
        with contextlib.suppress(OSError):  # a read-only disk refuses it too
            aside.unlink()


@contextlib.contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """Create a temporary folder beside a target; its remaining content is removed on exit."""
    draft = _draft_path(target)
    with write_errors(target):
        draft.mkdir()
        handle = os.open(draft, os.O_RDONLY)
        try:
            with _locked(handle):
                yield draft
        finally:
            os.close(handle)
            shutil.rmtree(draft, ignore_errors=True)


def move_into(draft: Path, target: Path, *, last: str = "") -> None:
    """Move the files of a folder into another, created if missing; the one of this name after all others."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(draft.iterdir(), key=lambda path: path.name == last):
        path.replace(target / path.name)


def _draft_path(target: Path) -> Path:
    """Return a new name beside a target; removes drafts of killed programs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    begin = f".{target.name}.draft-"
    for left in target.parent.glob(f"{glob.escape(begin)}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                _remove_unlocked(left)
    return target.with_name(f"{begin}{uuid.uuid4().hex[:8]}")


def _remove_unlocked(left: Path) -> None:
    handle = os.open(left, os.O_RDONLY)
    try:
        with _locked(handle):  # fails while its writer runs
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(handle: int) -> Iterator[None]:
    """Lock an open file or folder until it is closed; raises OSError if another program holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    yield


def sync_tree(root: Path) -> None:
    """Flush `root` and every file and folder below it to disk."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically; pipes and devices are written directly."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with atomic_file(path) as draft:
        draft.write(text.encode())


def replace_folder(aside: Path, target: Path) -> None:
    """Replace the folder `target` by `aside`; the old content is removed, or left at `aside`.

    On Linux the kernel exchanges both atomically. Elsewhere a program killed between the two renames leaves
    the old folder beside the target, under a name that begins with `aside_name`.
    """
    if not target.exists():
        os.rename(aside, target)
        return
    if _exchange(aside, target):
        return
    old = target.parent / f"{aside_name(target)}{uuid.uuid4().hex[:8]}"
    os.rename(target, old)
    try:
        os.rename(aside, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def aside_name(target: Path) -> str:
    """Return the name prefix of a target's old folder during replacement."""
    return f".{target.name}.old."


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths atomically; False if unsupported."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    done: int = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0
