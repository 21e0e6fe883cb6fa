"""Freed memory is kept: steps that free what they allocate cause no page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from algos.training import memory

PROGRAM = """
import resource, sys
import numpy as np
if sys.argv[1] == "kept":
    from algos.training.memory import keep_freed_memory
    keep_freed_memory()
def step():
    parts = [np.ones(1_000_000, np.float32) for _ in range(20)]  # 4 MB each
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 5 * 20 * 1000  # of the blocks of five steps, about


def faults(how: str) -> int:
    """Return the page faults of five steps in a process of its own."""
    return int(subprocess.check_output([sys.executable, "-c", PROGRAM, how], text=True))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_steps_cause_no_page_faults() -> None:
    assert faults("kept") < 0.01 * PAGES
    assert faults("plain") > 0.1 * PAGES


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    asked: list[object] = []
    monkeypatch.setattr(memory.ctypes, "CDLL", asked.append)
    memory.keep_freed_memory()
    assert not asked
