"""Copies of this process, for what another process does: a new one would import everything again."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

from entry import exit_code


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


def started(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Run a function in a copy of this process; returns it while it runs."""
    copy = multiprocessing.get_context("fork").Process(target=target, args=arguments, daemon=True)
    copy.start()
    return copy


@contextmanager
def command(folder: Path, *words: str) -> Iterator[tuple[BaseProcess, TextIO]]:
    """Run `burnish` with these words in a copy of this process; yields it and what it prints."""
    ours, theirs = os.pipe()

    def run() -> None:
        os.dup2(theirs, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        os.chdir(folder)
        sys.exit(exit_code(*words))

    copy = started(run)
    os.close(theirs)
    with open(ours) as printed:
        try:
            yield copy, printed
        finally:
            copy.kill()
            copy.join()
