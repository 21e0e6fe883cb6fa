"""Stop signals: the first saves after the current iteration, the second stops immediately.

A scheduler's warning that a job is preempted or reaches its time limit (SIGUSR2, where the program that runs
the job handles it, as submitit does) saves too; that handler runs afterwards and queues the job again.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_log = logging.getLogger(__name__)


_WARNING = signal.SIGUSR2
_DEFAULT: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interrupted(SystemExit):
    """Raised after SIGINT or SIGTERM, once the checkpoint is written; exit code 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class StopSignals:
    """Records the first SIGINT, SIGTERM or warning; the second one has its default effect.

    Also effective in programs started with signals ignored (background jobs of a script).
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._immediate = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            is_warned = callable(signal.getsignal(_WARNING))
            for number in (signal.SIGINT, signal.SIGTERM, *((_WARNING,) if is_warned else ())):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self.number == _WARNING:
            signal.raise_signal(_WARNING)  # the scheduler's handler, which ends the program

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Raise `Interrupted` immediately inside this block.

        Libraries that are being imported turn it into errors of their own.
        """
        self._immediate = True
        try:
            if self.number is not None:
                raise Interrupted(self.number)
            yield
        except Exception as error:
            if self.number is not None:
                raise Interrupted(self.number) from error
            raise
        finally:
            self._immediate = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for known, handler in self._before.items():
            signal.signal(known, _DEFAULT[known] if handler is signal.SIG_IGN else handler)
        if self._immediate:
            raise Interrupted(number)
        _log.warning("stopping after this iteration, then saving; a second signal stops at once.")
