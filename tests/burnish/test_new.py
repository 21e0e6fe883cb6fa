"""Parts that `burnish new` begins are complete: their tests pass, and commands know them."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
from entry import exit_code
from forked import exit_code_of
from messages import mentions

from burnish.commands.new import KINDS, write
from envs.datasets import readers
from policies import registry
from policies.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("parts")
    for kind in KINDS:
        assert [path.name for path in write(kind, f"my_{kind}", place)] == [
            f"my_{kind}.py", f"test_my_{kind}.py", f"my_{kind}.md"
        ]  # fmt: skip
    return place


@pytest.mark.slow
def test_their_tests_pass_as_they_are(folder: Path) -> None:
    """In a copy of this process, which is given their folder as the first one of its path."""

    class Counting:
        passed = 0

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.passed += report.when == "call" and report.passed

    def tested() -> None:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        counting = Counting()
        assert pytest.main(["-q", "-p", "no:cacheprovider", "."], plugins=[counting]) == 0
        assert counting.passed == 10

    assert exit_code_of(tested) == 0


def test_commands_know_the_modules_that_a_variable_names(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a copy of this process, whose plug-ins are looked for anew."""
    told = tmp_path / "told"

    def listed() -> None:
        os.environ[registry.PLUGIN_VARIABLE] = "my_sampler, my_reader"
        sys.path.insert(0, str(folder))
        registry._plugins.cache_clear()
        readers.cache_clear()
        with told.open("w") as page, contextlib.redirect_stdout(page):
            assert [exit_code("list", kind) for kind in ("datasets", "samplers")] == [0, 0]

    assert exit_code_of(listed) == 0
    assert "my_reader" in told.read_text() and "my_sampler" in told.read_text()
    assert exit_code("list", "samplers") == 0
    assert "my_sampler" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "name", "parts"),
    [
        ("sampler", "euler", "sampler=euler"),
        ("task", "two words", "two words"),
        ("reader", "csv", "csv"),
        ("task", "my_task", "my_task.py exists"),
    ],
)
def test_names_that_are_taken_or_none_are_refused(kind: str, name: str, parts: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=mentions(parts)):
        write(kind, name, folder)
