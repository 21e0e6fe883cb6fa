"""What a waiting person sees: it fits the terminal, and says nothing impossible."""

from __future__ import annotations

import io
import itertools
import logging
import math
import threading

import pytest
from rich.console import Console

from algos.training import progress
from algos.training.progress import Bar, Lines, announced

NUMBERS = {"eval/success": 0.5, "policy/loss": 0.0123, "value/explained_variance": 0.9}


def shown(width: int, title: str = "12-00-00-avoid_dppo") -> str:
    """Return what the bar shows in the middle of a run."""
    clock = itertools.count().__next__  # every look at it is a second later
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, get_time=clock)
    bar = Bar(title, "env_steps", 1_000_000, 0, console=console)
    for done in (100_000, 500_000):
        bar.show(done, 1_000_000, NUMBERS)
    paper = Console(file=io.StringIO(), width=width, color_system=None)
    with paper.capture() as capture:
        paper.print(bar._progress.get_renderable())
    bar.close()
    return capture.get().rstrip("\n")


@pytest.mark.parametrize(
    "title", ["walk", "12-00-00-avoid_dppo", "a-name-that-is-longer-than-any-terminal" * 3]
)
@pytest.mark.parametrize("width", [80, 99, 100, 120, 200])
def test_the_bar_fits_the_terminal_with_count_rate_and_time_left(width: int, title: str) -> None:
    text = shown(width, title)
    assert "\n" not in text and len(text) <= width
    assert "━━━" in text and "500,000/1,000,000 env steps" in text
    before, _, after = text.partition("left")
    assert "/s" in before and before.split("/s")[0].split()[-1] != "-"
    assert ":" in after


def test_numbers_are_what_a_narrow_terminal_drops_first() -> None:
    assert "eval/success" not in shown(80)
    assert "eval/success 0.5" in shown(125) and "explained_variance" not in shown(125)
    assert "explained_variance 0.9" in shown(200)


def test_lines_never_promise_negative_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    caplog.set_level(logging.INFO)
    lines = Lines("run", "env_steps", 0)
    lines.show(1000, 3000, {})
    lines.show(72218, 3000, {})
    assert "-" not in caplog.text.split("72218/3000 env steps")[1]
    assert ", 0 s left" in caplog.messages[-1]


def test_a_return_stays_where_no_episode_has_ended_and_a_diverged_loss_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    caplog.set_level(logging.INFO)
    lines = Lines("run", "env_steps", 0)
    lines.show(1000, 3000, {"rollout/return": 7.0, "policy/loss": 0.1})
    lines.show(2000, 3000, {"rollout/return": math.nan, "policy/loss": math.nan})
    assert "rollout/return 7" in caplog.messages[-1] and "policy/loss nan" in caplog.messages[-1]


def test_a_long_first_iteration_is_announced_until_it_ends() -> None:
    told, lines = threading.Event(), []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            told.set()

    log, listener = logging.getLogger("algos.training.progress"), Listener(logging.INFO)
    level = log.level
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    try:
        with announced("the first iteration", seconds=0.001, stage=lambda: "3 of 7"):
            assert told.wait(60)
        count = len(lines)
        assert lines[0].startswith("the first iteration has been under way for ")
        assert lines[0].endswith(" s: 3 of 7.")
        assert not any(thread.name == "announced" for thread in threading.enumerate())
        assert len(lines) == count
    finally:
        log.removeHandler(listener)
        log.setLevel(level)


def test_the_time_of_an_evaluation_is_no_training_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO)
    lines = Lines("run", "gradient_steps", 0)
    now[0] = 110.0
    lines.skip(100.0)
    lines.show(100, 200, {})
    assert "10/s, 10 s left" in caplog.messages[-1]
    console = Console(file=io.StringIO(), force_terminal=True, get_time=lambda: now[0])
    bar = Bar("run", "gradient_steps", 200, 0, console=console)
    before = bar._training_time()
    now[0] = 210.0
    bar.skip(100.0)
    assert bar._training_time() == before
    bar.close()
