"""Whether what is about to be read fits into memory; asked before it is taken.

A process that takes more than there is does not end with an error: it is killed, or the machine stands still.
What does not fit is kept in files instead (`envs.datasets.room`), images apart (`envs.datasets.images`).
"""

from __future__ import annotations

import logging
from pathlib import Path

from policies.errors import DatasetError

SHARE = 0.8
"""Share of the free memory that one reading may take."""
WORTH_SAYING = 2**30
"""Bytes from which on it is said how much a reading takes."""
_GROUPS = Path("/sys/fs/cgroup")
_FACTS = Path("/proc/meminfo")
_GIBI = 2**30

_log = logging.getLogger(__name__)


def fits(needed: int) -> bool:
    """Tell whether so many bytes may be taken; yes where the system does not say how many are free."""
    free = free_memory()
    return free is None or needed <= SHARE * free


def tell(needed: int, source: str | Path) -> None:
    """Say how much a reading takes where it is much."""
    if needed >= WORTH_SAYING:
        _log.info("%s: reading takes %.2f GiB of memory.", source, needed / _GIBI)


def require_memory(needed: int, source: str | Path) -> None:
    """Refuse what has to be in memory and does not fit there.

    Args:
        needed: Bytes that it takes.
        source: Names the file, and where in it, in messages.

    Raises:
        DatasetError: If it is more than `SHARE` of what is free; names both.
    """
    if not fits(needed):
        raise DatasetError(
            f"{source}: reading it takes {needed / _GIBI:.2f} GiB of memory; "
            f"{(free_memory() or 0) / _GIBI:.2f} GiB are free, of which {SHARE:.0%} may be taken. End other "
            f"programs, or use a machine with more memory."
        )
    tell(needed, source)


def free_memory() -> int | None:
    """Return the bytes that this process can still take: of the machine, or of its container if that is less.

    None where the system does not tell.
    """
    found = [free for free in (_of_the_machine(), _of_the_container()) if free is not None]
    return min(found, default=None)


def _of_the_machine() -> int | None:
    """Read what Linux calls available: free, or held by caches that give way."""
    try:
        lines = _FACTS.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _of_the_container() -> int | None:
    """Read limit and use of the container; its file caches give way, too."""
    try:
        limit, used = (int((_GROUPS / f"memory.{name}").read_text()) for name in ("max", "current"))
        facts = (line.split() for line in (_GROUPS / "memory.stat").read_text().splitlines())
        caches = next(int(value) for name, value in facts if name == "inactive_file")
    except (OSError, ValueError, StopIteration):
        return None
    return limit - used + caches
