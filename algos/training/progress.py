"""Progress of a run: a live bar on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

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
LONG_ITERATION_S = 10.0  # duration [s] from which the next iteration is announced
LONG_S = 3600.0  # estimated duration [s] from which a run counts as long
_WIDE = 100  # terminal width from which the bar shows the elapsed time
_BAR_WIDTH, _TITLE_WIDTH, _RATE_WIDTH, _TIME_WIDTH = 24, 14, 7, 7  # columns
_KEY_METRICS = (
    *("eval/success", "eval/return", "rollout/success", "rollout/return"),
    *("policy/loss", "value/loss"),
)


def open_display(title: str, unit: str, total: int, done: int, *, bar: bool | None) -> Bar | Lines:
    """Return a bar, or lines when `bar` is False or (None) there is no terminal."""
    if bar is None:
        bar = sys.stderr.isatty()
    return Bar(title, unit, total, done) if bar else Lines(title, unit, done)


def _key_metrics(values: Mapping[str, float], count: int = 3) -> str:
    names = [name for name in _KEY_METRICS if name in values]
    names += [name for name in values if name not in names and not name.startswith("time/")]
    return "  ".join(f"{name} {values[name]:.4g}" for name in names[:count])


def _measured(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values without those of episodes where none has ended; the last known ones stay."""
    return {name: x for name, x in values.items() if not (name.startswith("rollout/") and math.isnan(x))}


@contextmanager
def announced(what: str, seconds: float = 20.0, *, stage: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Log every `seconds` that `what` is in progress, and its stage; metrics appear after an iteration."""
    ended, began = threading.Event(), time.monotonic()

    def log() -> None:
        while not ended.wait(seconds):
            took, at = time.monotonic() - began, stage()
            _log.info("%s has been under way for %.0f s%s.", what, took, f": {at}" if at else "")

    thread = threading.Thread(target=log, name="announced", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def planned(total: int, unit: str, rate: float, budget: str = "") -> str:
    """Return a line with the length of a run, its duration at `rate` units per second, and what shortens it.

    Args:
        total: Length of the run.
        unit: Its unit.
        rate: Units per second.
        budget: Key that sets the length.
    """
    faster = "a smaller algo.batch_size, network, encoder or image, device=cuda"
    ways = [f"a smaller {budget}"] if budget else []
    ways += [faster] if unit == "gradient_steps" else []
    return (
        f"{total:,} {unit.replace('_', ' ')} are planned, about {total / rate / 3600:.3g} h at "
        f"{_format_rate(rate)}/s. To shorten it: {', '.join([*ways, 'experiment=auto'])}."
    )


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{_format_rate(speed)}/s" if speed else "-/s", style="progress.data.speed")


def _format_rate(speed: float) -> str:
    """Format a rate with three digits: 7.31, 73.1, 731, 7.31k, 7.31M."""
    if speed >= 1e6:
        return f"{speed / 1e6:.3g}M"
    return f"{speed / 1000:.3g}k" if speed >= 1000 else f"{speed:.3g}"


class Bar:
    """Progress bar with rate, remaining time and, if wide enough, key metrics."""

    def __init__(
        self, title: str, unit: str, total: int, done: int, *, console: Console | None = None
    ) -> None:
        self._console, self._skipped = Console(stderr=True) if console is None else console, 0.0
        self._unit = unit.replace("_", " ")
        free = self._free_width(total)
        is_short = len(title) <= max(free - _BAR_WIDTH, _TITLE_WIDTH)
        name = title if is_short else f"{title[: _TITLE_WIDTH - 1]}…"
        bar_width = min(_BAR_WIDTH, max(free - len(name), 4))
        self._fixed_width = len(name) + bar_width
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=bar_width),
            TextColumn(f"{{task.completed:,}}/{{task.total:,}} {self._unit}"),
            _Rate(),
            *([TimeElapsedColumn()] if self._is_wide else []),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            get_time=self._training_time,
        )
        self._task = self._progress.add_task(name, total=total, completed=done, numbers="")
        self._values: dict[str, float] = {}
        self._progress.start()

    def skip(self, seconds: float) -> None:
        """Leave a time, such as that of an evaluation, out of rate and remaining time."""
        self._skipped += seconds

    def _training_time(self) -> float:
        return self._console.get_time() - self._skipped

    @property
    def _is_wide(self) -> bool:
        return self._console.width >= _WIDE

    def _free_width(self, total: int) -> int:
        """Return the columns left beside count, rate and times."""
        times = _TIME_WIDTH * (2 if self._is_wide else 1) + len("left")
        gaps = 8 if self._is_wide else 7
        return self._console.width - len(f"{total:,}/{total:,} {self._unit}") - _RATE_WIDTH - times - gaps

    def show(self, done: int, total: int, values: Mapping[str, float]) -> None:
        self._values |= _measured(values)
        free = self._free_width(max(done, total)) - self._fixed_width
        candidates = (_key_metrics(self._values, count) for count in (3, 2, 1))
        numbers = next((text for text in candidates if len(text) <= free), "")
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
        self._values |= _measured(values)
        now = time.monotonic()
        if done < total and now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        rate = (done - self._first) / max(now - self._start, 1e-9)
        left = f"{max(total - done, 0) / rate:.0f} s left" if rate > 0 else "? left"
        speed, numbers = _format_rate(rate), _key_metrics(self._values)
        _log.info("%s: %d/%d %s, %s/s, %s, %s", self._title, done, total, self._unit, speed, left, numbers)

    def skip(self, seconds: float) -> None:
        """Leave a time, such as that of an evaluation, out of rate and remaining time."""
        self._start += seconds

    def close(self) -> None:
        """Hold nothing open."""
