"""Parts that `burnish new` begins are complete: their tests pass, and commands know them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from entry import exit_code
from forked import exit_code_of
from messages import mentions

from burnish.commands.new import KINDS, write
from policies.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("parts")
    for kind in KINDS:
        assert [path.name for path in write(kind, f"my_{kind}", place)] == [
            f"my_{kind}.py", f"test_my_{kind}.py", f"my_{kind}.md"
        ]  # fmt: skip
    return place


def run(folder: Path, *arguments: str, plugins: str = "") -> str:
    paths = os.pathsep.join([str(ROOT), str(folder)])
    variables = {**os.environ, "PYTHONPATH": paths, "BURNISH_PLUGINS": plugins}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


@pytest.mark.slow
def test_commands_know_the_modules_that_a_variable_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = "from burnish.commands import list; list.main(['datasets']); list.main(['samplers'])"
    listed = run(folder, "-c", both, plugins="my_sampler, my_reader")
    assert "my_reader" in listed and "my_sampler" in listed
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
