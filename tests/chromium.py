"""A browser for tests, which are skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.chromium import Browser
from benchmarks.chromium import browser as start

__all__ = ["Browser", "browser"]


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser; skip the test where there is none."""
    with ExitStack() as stack:
        try:
            tab = stack.enter_context(start())
        except FileNotFoundError as error:
            pytest.skip(str(error))
        yield tab
