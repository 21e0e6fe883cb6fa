"""MuJoCo's warnings, such as that of an unstable simulation, as log lines.

By itself MuJoCo appends them to MUJOCO_LOG.TXT in the current folder.
"""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger(__name__)


def log_warnings() -> None:
    """Log MuJoCo's warnings from here on, unless it is not imported or a program handles them already."""
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None and mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_Counter())


class _Counter:
    """Count the warnings of this process; log the first, tenth, hundredth and so on."""

    def __init__(self) -> None:
        self._count, self._next = 0, 1

    def __call__(self, text: str) -> None:
        self._count += 1
        if self._count == self._next:
            self._next *= 10
            _log.warning("MuJoCo warns (%s so far in this process): %s", f"{self._count:,}", text)
