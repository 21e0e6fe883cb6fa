"""Progress without a terminal."""

from __future__ import annotations

import io
import logging

import pytest

from burnish import console
from burnish.cli import escape_odd_names


def test_long_work_logs_its_progress_where_there_is_no_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO, logger="burnish.console")
    with console.Counting("recording lift", 100) as counting:
        for done, at in ((10, 5.0), (40, 31.0), (41, 32.0), (90, 62.0)):
            now[0] = at
            counting.show(done, f"{done + 1} attempts")
    assert [record.getMessage() for record in caplog.records] == [
        "recording lift: 40/100, 41 attempts",
        "recording lift: 90/100, 91 attempts",
    ]


def test_names_of_files_that_are_no_text_are_printed_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="utf-8", errors="strict")
    monkeypatch.setattr("sys.stdout", stream)
    escape_odd_names(stream)
    console.output().print(console.table("", ("run",), [["r\udcff"]]))
    stream.flush()
    assert rb"r\udcff" in written.getvalue()
