"""A package of another project in the place of ours is told before anything is imported from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.name_clashes import found_packages, require_own_packages

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = "import burnish; print(burnish.collect)"
COMMAND = "from burnish.cli import main; main(['list', 'envs'])"


def test_this_installation_is_its_own() -> None:
    assert all(is_ours for _, is_ours, _ in found_packages())
    require_own_packages()


@pytest.mark.parametrize("program", [SCRIPT, COMMAND])
@pytest.mark.parametrize("file", ["envs/__init__.py", "algos.py"])
def test_a_foreign_package_is_named_at_the_start(program: str, file: str, tmp_path: Path) -> None:
    place = tmp_path / file
    place.parent.mkdir(exist_ok=True)
    place.write_text("raise SystemExit('imported')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    name = Path(file).parts[0].removesuffix(".py")
    assert done.returncode == (1 if program == SCRIPT else 2)
    assert f"package {name}: {tmp_path / name}" in done.stderr and "hides ours" in done.stderr
    assert "imported" not in done.stderr


def test_a_folder_without_code_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    program = "from burnish.name_clashes import require_own_packages as check; check()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
