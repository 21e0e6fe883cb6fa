"""A copy of this process, for what another process does: a new one would import everything again."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def exit_code_of(action: Callable[[], object]) -> int:
    """Run a function in a copy of this process and return its exit code: 1 if it raises."""
    copy = os.fork()
    if copy == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
