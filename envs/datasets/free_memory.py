"""Free-memory check before data are read: a process that exceeds memory is killed without an error."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path, PurePath
from typing import NamedTuple

from policies.errors import DatasetError

SHARE = 0.8
"""Share of the free memory that one dataset may take."""
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_FACTS = Path("/proc/meminfo")
_GIBI = 2**30
_LARGE = _GIBI  # bytes from which on the required memory is logged

_log = logging.getLogger(__name__)


class _CgroupFiles(NamedTuple):
    """Mount points and file names of a control-group version."""

    folder: str
    limit: str
    used: str
    caches: str


_V2 = _CgroupFiles("", "memory.max", "memory.current", "inactive_file")
_V1 = _CgroupFiles("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def fits(needed: int) -> bool:
    """Whether this many bytes are free; True if unknown."""
    free = free_memory()
    return free is None or needed <= SHARE * free


def log_use(needed: int, source: str | Path) -> None:
    """Log large memory requirements."""
    if needed >= _LARGE:
        _log.info("%s: reading takes %.2f GiB of memory.", source, needed / _GIBI)


def require_memory(needed: int, source: str | Path) -> None:
    """Refuse data that must be in memory and exceed `SHARE` of the free memory."""
    if not fits(needed):
        raise DatasetError(
            f"{source}: reading it takes {needed / _GIBI:.2f} GiB of memory; "
            f"{(free_memory() or 0) / _GIBI:.2f} GiB are free, of which {SHARE:.0%} may be taken. End other "
            f"programs, or use a machine with more memory."
        )
    log_use(needed, source)


def free_memory() -> int | None:
    """Return the bytes available to this process, of the machine or its container; None if unknown."""
    found = [free for free in (_of_the_machine(), _of_the_container()) if free is not None]
    return min(found, default=None)


def _of_the_machine() -> int | None:
    try:
        lines = _FACTS.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _of_the_container() -> int | None:
    """Return the smallest remaining memory among this process's control groups."""
    found = (_left_in(_GROUPS / form.folder / path, form) for form, path in _own_groups())
    return min((left for left in found if left is not None), default=None)


def _own_groups() -> set[tuple[_CgroupFiles, PurePath]]:
    """Return the control groups of this process with all ancestors; "." is the root."""
    groups = {(form, PurePath(".")) for form in (_V1, _V2)}
    with suppress(OSError, ValueError):  # no control groups here
        for line in _OWN_GROUPS.read_text(encoding="utf-8").splitlines():
            _, kinds, path = line.split(":", 2)  # 0::/a/b, or 4:memory:/a/b
            form = _V1 if "memory" in kinds.split(",") else None if kinds else _V2
            if form is not None and ".." not in path:
                group = PurePath(path.lstrip("/"))
                groups |= {(form, one) for one in (group, *group.parents)}
    return groups


def _left_in(folder: Path, form: _CgroupFiles) -> int | None:
    """Return limit minus use of a group, file caches counted as free. None without a limit."""
    try:
        limit, used = (int((folder / name).read_text()) for name in (form.limit, form.used))
        facts = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        caches = next(int(value) for name, value in facts if name == form.caches)
    except (OSError, ValueError, StopIteration):
        return None
    return limit - used + caches
