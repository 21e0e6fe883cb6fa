"""Write lock of a run: one process writes to it; file systems without locks have none."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
from pathlib import Path
from typing import IO

from policies.errors import CheckpointError
from policies.storage.atomic_write import WITHOUT_LOCKS, write_errors
from policies.storage.strict_json import fits, own_file

LOCK = ".lock"
_MOST_BYTES = 2**10


def take_lock(run: Path) -> IO[str]:
    """Lock a run and return the lock, which is released when it is closed.

    Raises:
        CheckpointError: If another process holds it.
        WriteError: If the disk takes no more.
    """
    with write_errors(run / LOCK):
        lock = (run / LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            lock.close()
            raise CheckpointError(
                f"{run} is being written by another process. Wait for it, or choose another place."
            ) from None
    try:
        with write_errors(run / LOCK):
            lock.truncate(0)
            lock.write(json.dumps({"pid": os.getpid(), "host": platform.node()}))
            lock.flush()
    except BaseException:
        with contextlib.suppress(OSError):  # closing writes what is left
            lock.close()
        raise
    return lock


def holder(run: Path) -> int | None:
    """Return the number of the process of this machine that holds the lock of a run; None: there is none."""
    try:
        with own_file(run / LOCK).open() as lock:
            held = json.loads(lock.read(_MOST_BYTES) or "{}")
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        is_here = isinstance(held, dict) and held.get("host") == platform.node()
        return held["pid"] if is_here and fits(held.get("pid"), int) and held["pid"] > 1 else None
    except (OSError, ValueError):
        pass
    return None
