"""Files and folders that are written aside: flushed to the disk, and put in their place in one step.

A disk that takes no more is one error, a `WriteError` that names the place. Libraries that write files (HDF5,
torch) do not all survive a failing write; they are given a `Draft`.
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

_HERE, _RENAME_EXCHANGE = -100, 2  # of the system call renameat2: relative to here; swap the two names


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""What the system says of a disk that takes no more."""
_SETTLED_S = 60.0  # how old a draft must be before it can have been left by a killed program


@contextlib.contextmanager
def told_if_full(place: Path) -> Iterator[None]:
    """Turn what is raised because a disk takes no more into one error.

    Args:
        place: What is written; the error names it.

    Raises:
        WriteError: If the disk takes no more.
    """
    try:
        yield
    except OSError as error:
        if not isinstance(error, WriteError) and error.errno not in _FULL:
            raise
        told = WriteError(
            f"{place} cannot be written: {error.strerror}. What was there is unchanged. Free space on its "
            f"disk, or choose a place on another one."
        )
        told.strerror = error.strerror  # for whoever writes more than this place
        raise told from error


class Draft(io.RawIOBase):
    """A new file whose writing never fails: what a full disk does not take is lost, and `failure` says so.

    A library that is told that it cannot write, and again as it closes the file, may end the process.

    Args:
        path: The file; what is there is emptied.

    Attributes:
        failure: Why it could not be written; None: it could.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = io.FileIO(path, "w+")
        self.failure: OSError | None = None

    def write(self, content: Any) -> int:
        """Write all bytes."""
        left = memoryview(content).cast("B")
        size = left.nbytes
        while left.nbytes and self.failure is None:
            try:
                left = left[self._file.write(left) :]
            except OSError as error:
                self.failure = error
        return size

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer."""
        return self._file.readinto(buffer)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the place."""
        return self._file.tell()

    def truncate(self, size: int | None = None) -> int:
        """Set the size."""
        try:
            return self._file.truncate(size)
        except OSError as error:
            self.failure = self.failure or error
            return self.tell() if size is None else size

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def writable(self) -> bool:
        """Tell that it can be written."""
        return True

    def seekable(self) -> bool:
        """Tell that it has places."""
        return True

    def fileno(self) -> int:
        """Return the number of the open file."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


@contextlib.contextmanager
def written(path: Path) -> Iterator[Draft]:
    """Write a file through a library, flush it to the disk, and put it in its place when all is well.

    Raises:
        WriteError: If the disk takes no more, whatever the library makes of that.
    """
    aside = _place_beside(path)
    try:
        with told_if_full(path), Draft(aside) as draft, _held(draft.fileno()):
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
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """Make a folder beside a target, to be filled; what of it is still there at the end is removed.

    Raises:
        WriteError: If the disk takes no more.
    """
    draft = _place_beside(target)
    with told_if_full(target):
        draft.mkdir()
        handle = os.open(draft, os.O_RDONLY)
        try:
            with _held(handle):
                yield draft
        finally:
            os.close(handle)
            shutil.rmtree(draft, ignore_errors=True)


def move_into(draft: Path, target: Path) -> None:
    """Move the files of a folder into another, which is made if it is missing."""
    target.mkdir(parents=True, exist_ok=True)
    for path in draft.iterdir():
        path.replace(target / path.name)


def _place_beside(target: Path) -> Path:
    """Return a new name beside a target, and remove what killed programs left under such names."""
    target.parent.mkdir(parents=True, exist_ok=True)
    begin = f".{target.name}.draft-"
    for left in target.parent.glob(f"{glob.escape(begin)}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _SETTLED_S:
                _remove_unheld(left)
    return target.with_name(f"{begin}{uuid.uuid4().hex[:8]}")


def _remove_unheld(left: Path) -> None:
    handle = os.open(left, os.O_RDONLY)
    try:
        with _held(handle):  # whoever writes it holds it
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
    finally:
        os.close(handle)


@contextlib.contextmanager
def _held(handle: int) -> Iterator[None]:
    """Hold an open file or folder meanwhile; the end of a program, however it comes, lets go of it.

    Raises:
        OSError: If another program holds it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):  # a file system without locks
            raise
    yield


def sync_tree(root: Path) -> None:
    """Flush every file and folder below (and with) `root` to the disk."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a file aside, flush it and rename it; a pipe or device is written to directly.

    Raises:
        WriteError: If the disk takes no more.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with told_if_full(path), aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def replace_folder(aside: Path, target: Path) -> None:
    """Put the folder `aside` in the place of `target`; what stood there is removed, or left at `aside`.

    On Linux the two are exchanged in a single step of the kernel. Where that is impossible there is a moment
    between two renames, and a program that is killed then leaves the earlier folder beside, whole, under a
    name that begins with `aside_name`.
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
    """Return how the name begins under which `target` stands aside while it is replaced."""
    return f".{target.name}.old."


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two paths in one atomic step; False where that is not supported."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    done: int = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0
