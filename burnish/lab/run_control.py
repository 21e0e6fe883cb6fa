"""Stopping and continuing runs from the page, as a signal and `burnish train resume=` do in the shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from burnish.lab.runs import RunFolder
from policies.errors import ConfigError
from policies.storage.strict_json import read_small

LOG = "continued.log"  # in the run: what the newest continuation prints
_LOG_BYTES = 2**20


class RunControl:
    """Stops and continues the runs of a folder.

    A continued run is a process of its own: it goes on when the laboratory ends.
    """

    def __init__(self, runs: RunFolder) -> None:
        self._runs = runs
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def state(self, name: str) -> dict[str, Any]:
        """Return whether a process writes to a run, and the last words of a continuation that failed.

        Raises:
            ConfigError: If there is no such run.
        """
        run = self._of(name)
        started, problem = self._started.get(name), ""
        ended = started is not None and started.poll()
        if ended:
            problem = _last_line(run.path / LOG)
        is_running = run.writer() is not None or (started is not None and ended is None)
        return {"is_running": is_running, "problem": problem}

    def change(self, name: str, do: str) -> None:
        """Do what `do` says: stop | continue (ConfigError: it cannot be done)."""
        if do not in ("stop", "continue"):
            raise ConfigError(f"do must be stop or continue; got '{do[:20]}'.")
        (self.stop if do == "stop" else self.proceed)(name)

    def stop(self, name: str) -> None:
        """Ask a run to end after its iteration, with a checkpoint.

        Raises:
            ConfigError: If no process of this machine writes to it.
        """
        pid = self._of(name).writer()
        if pid is None:
            raise ConfigError(f"{name} is not running on this machine.")
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGTERM)

    def proceed(self, name: str) -> None:
        """Continue a run from its newest checkpoint, in a process of its own.

        Raises:
            ConfigError: If it is running, or cannot be written to.
        """
        run = self._of(name)
        if self.state(name)["is_running"]:
            raise ConfigError(f"{name} is running.")
        command = [sys.executable, "-m", "burnish", "train", f"resume={run.path}"]
        try:
            log = os.open(run.path / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
        except OSError as error:
            raise ConfigError(f"{name} cannot be continued: {error.strerror}.") from None
        try:
            self._started[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        finally:
            os.close(log)

    def _of(self, name: str) -> Any:
        if name not in self._runs.runs():
            raise ConfigError("there is no such run.")
        return self._runs.runs()[name]


def _last_line(path: Path) -> str:
    with suppress(OSError, ValueError):
        lines = [line.strip() for line in read_small(path, _LOG_BYTES).splitlines() if line.strip()]
        return lines[-1] if lines else ""
    return ""
