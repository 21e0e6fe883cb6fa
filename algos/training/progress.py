"""Progress of a run: a live bar on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0
WIDE = 100  # terminal width from which the bar shows the elapsed time
BAR_WIDTH, ROOM_OF_TITLE, RATE_WIDTH, TIME_WIDTH = 24, 14, 7, 7  # columns
_INTERESTING = (
    "eval/success",
    "eval/return",
    "rollout/success",
    "rollout/return",
    "policy/loss",
    "value/loss",
)


class Display(Protocol):
    """Shows the progress of a run."""

    def show(self, done: int, total: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_display(title: str, unit: str, total: int, done: int, *, bar: bool | None) -> Display:
    """Return a bar, or lines when `bar` is False or (None) there is no terminal."""
    if bar is None:
        bar = sys.stderr.isatty()
    return Bar(title, unit, total, done) if bar else Lines(title, unit, done)


def key_numbers(values: Mapping[str, float], count: int = 3) -> str:
    """Format the first `count` key metrics."""
    names = [name for name in _INTERESTING if name in values]
    names += [name for name in values if name not in names and not name.startswith("time/")]
    return "  ".join(f"{name} {values[name]:.4g}" for name in names[:count])


FIRST_LINE_S = 20.0
"""Seconds between log lines during the first iteration."""


@contextmanager
def announced(what: str, seconds: float = FIRST_LINE_S) -> Iterator[None]:
    """Log periodically that `what` is in progress: metrics appear only after an iteration."""
    ended, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(seconds):
            _log.info("%s has been under way for %.0f s.", what, time.monotonic() - began)

    thread = threading.Thread(target=tell, name="announced", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


LONG_S = 3600.0
"""Estimated duration [s] from which a run counts as long."""


def planned(total: int, unit: str, rate: float) -> str:
    """Return a line with the length of a run and its estimated duration.

    Args:
        total: Units of the whole run.
        unit: What is counted.
        rate: Units per second so far.
    """
    return (
        f"{total:,} {unit.replace('_', ' ')} are planned, about {total / rate / 3600:.3g} h at "
        f"{format_rate(rate)}/s. Experiments hold shorter settings: burnish list experiments."
    )


class _Rate(ProgressColumn):
    """Units per second."""

    def render(self, task: Task) -> Text:
        """Return the rate over the last updates."""
        speed = task.finished_speed or task.speed
        return Text(f"{format_rate(speed)}/s" if speed else "-/s", style="progress.data.speed")


def format_rate(speed: float) -> str:
    """Format a rate with three digits: 7.31, 73.1, 731, 7.31k, 7.31M."""
    if speed >= 1e6:
        return f"{speed / 1e6:.3g}M"
    return f"{speed / 1000:.3g}k" if speed >= 1000 else f"{speed:.3g}"


class Bar:
    """Progress bar with rate, remaining time and, if wide enough, key metrics.

    Args:
        title: Name of the run; truncated on narrow terminals.
        unit: What is counted.
        total: Units to do.
        done: Units done so far.
        console: Output console; None: standard error.
    """

    def __init__(
        self, title: str, unit: str, total: int, done: int, *, console: Console | None = None
    ) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._unit = unit.replace("_", " ")
        room = self._room(total)
        name = (
            title if len(title) <= max(room - BAR_WIDTH, ROOM_OF_TITLE) else f"{title[: ROOM_OF_TITLE - 1]}…"
        )
        self._bar_width = min(BAR_WIDTH, max(room - len(name), 4))
        self._title_width = len(name)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=self._bar_width),
            TextColumn(f"{{task.completed:,}}/{{task.total:,}} {self._unit}"),
            _Rate(),
            *([TimeElapsedColumn()] if self._is_wide else []),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
        )
        self._task = self._progress.add_task(name, total=total, completed=done, numbers="")
        self._values: dict[str, float] = {}
        self._progress.start()

    @property
    def _is_wide(self) -> bool:
        return self._console.width >= WIDE

    def _room(self, total: int) -> int:
        """Return the columns left beside count, rate and times."""
        times = TIME_WIDTH * (2 if self._is_wide else 1) + len("left")
        columns = 8 if self._is_wide else 7
        return self._console.width - len(f"{total:,}/{total:,} {self._unit}") - RATE_WIDTH - times - columns

    def show(self, done: int, total: int, values: Mapping[str, float]) -> None:
        self._values |= values
        room = self._room(max(done, total)) - self._title_width - self._bar_width
        candidates = (key_numbers(self._values, count) for count in (3, 2, 1))
        numbers = next((text for text in candidates if len(text) <= room), "")
        self._progress.update(self._task, completed=done, total=total, numbers=numbers)

    def close(self) -> None:
        self._progress.stop()


class Lines:
    """Log lines, at most one per `SECONDS_BETWEEN_LINES`, and always the last."""

    def __init__(self, title: str, unit: str, done: int) -> None:
        self._title, self._unit = title, unit.replace("_", " ")
        self._first, self._start = done, time.monotonic()
        self._last = float("-inf")
        self._values: dict[str, float] = {}

    def show(self, done: int, total: int, values: Mapping[str, float]) -> None:
        self._values |= values
        now = time.monotonic()
        if done < total and now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        rate = (done - self._first) / max(now - self._start, 1e-9)
        left = f"{max(total - done, 0) / rate:.0f} s left" if rate > 0 else "? left"
        _log.info(
            "%s: %d/%d %s, %s/s, %s, %s",
            self._title,
            done,
            total,
            self._unit,
            format_rate(rate),
            left,
            key_numbers(self._values),
        )

    def close(self) -> None:
        """See `Display`."""
