"""Console output: data on standard output, progress and logs on standard error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

logger = logging.getLogger(__name__)

PLAIN_WIDTH = 160  # columns without a terminal
LOG_EVERY_S = 30.0  # of long work without a terminal
LOGGERS = ("burnish", "policies", "algos", "envs")


def output() -> Console:
    """Return the console of standard output: tables and results, plain without a terminal."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def logs() -> Console:
    """Return the console of standard error: progress and logs."""
    return Console(file=sys.stderr, width=None if sys.stderr.isatty() else PLAIN_WIDTH, highlight=False)


@contextmanager
def log_lines() -> Iterator[None]:
    """Show log lines on standard error, unless the program has configured logging."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    silent = [(logger, logger.level) for logger in loggers if not logger.hasHandlers()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s", "%H:%M:%S"))
    for logger, level in silent:
        logger.addHandler(handler)
        if level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in silent:
            logger.removeHandler(handler)
            logger.setLevel(level)


class RateColumn(ProgressColumn):
    """Finished units per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f}/s" if speed else "", style="progress.data.speed")


def progress_bar() -> Progress:
    """Return a bar with count, rate and remaining time; silent without a terminal."""
    console = logs()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


class Counting:
    """Progress bar as a context manager; without a terminal, a log line every `LOG_EVERY_S`."""

    def __init__(self, description: str, total: int) -> None:
        self._bar = progress_bar()
        self._task = self._bar.add_task(description, total=total, note="")
        self._shown = time.monotonic()

    def show(self, done: int, note: str = "", *, total: int | None = None) -> None:
        """Show the number of finished units and, if given, a new total."""
        self._bar.update(self._task, completed=done, note=note, total=total)
        if self._bar.disable and time.monotonic() - self._shown >= LOG_EVERY_S:
            self._shown, task = time.monotonic(), self._bar.tasks[self._task]
            logger.info("%s: %d/%d%s", task.description, done, task.total, f", {note}" if note else "")

    def __enter__(self) -> Counting:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table; cells are converted to text and never interpreted as markup."""
    out = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        out.add_column(Text(column), overflow="fold")
    for row in rows:
        out.add_row(*(Text(str(cell)) for cell in row))
    return out
