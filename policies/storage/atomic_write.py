"""Files and folders that are written aside: flushed to the disk, and put in their place in one step."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import uuid
from pathlib import Path

_HERE, _RENAME_EXCHANGE = -100, 2  # of the system call renameat2: relative to here; swap the two names


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
    """Write a file aside, flush it and rename it; a pipe or device is written to directly."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with aside.open("w", encoding="utf-8") as file:
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
