"""A package of another project in the place of ours: commands use ours, a program is told of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from messages import mentions

import burnish
from burnish.name_clashes import found_packages, require_own_packages

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = "import burnish; print(burnish.collect)"
IMPORTED = "import algos; from burnish.cli import main; main(['list', 'datasets'])"


def test_this_installation_is_its_own() -> None:
    assert all(is_ours for _, is_ours, _ in found_packages())
    require_own_packages()


def ran_beside(file: str, content: str, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder with a file, which comes first on the import path."""
    place = tmp_path / file
    place.parent.mkdir(exist_ok=True)
    place.write_text(content)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True
    )


@pytest.mark.parametrize("file", ["envs/__init__.py", "algos.py"])
def test_a_program_is_told_of_a_foreign_package_before_it_is_imported(file: str, tmp_path: Path) -> None:
    done = ran_beside(file, "raise SystemExit('imported')", tmp_path, "-c", SCRIPT)
    name = Path(file).parts[0].removesuffix(".py")
    assert done.returncode == 1 and "imported" not in done.stderr
    assert f"package {name}: {tmp_path / name}" in done.stderr and "hides ours" in done.stderr


def test_a_command_uses_our_packages_beside_foreign_ones(tmp_path: Path) -> None:
    foreign = "raise SystemExit('imported')"
    (tmp_path / "policies.py").write_text(foreign)
    done = ran_beside("envs/__init__.py", foreign, tmp_path, "-m", "burnish", "list", "algos")
    assert done.returncode == 0, done.stderr
    assert "dppo" in done.stdout


def test_a_command_refuses_a_foreign_package_that_is_imported_already(tmp_path: Path) -> None:
    done = ran_beside("algos.py", "", tmp_path, "-c", IMPORTED)
    assert done.returncode == 2
    assert f"package algos: {tmp_path / 'algos.py'} hides ours" in done.stderr


def test_a_program_is_told_of_a_missing_graphics_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """MuJoCo's import would end in an AttributeError of OpenGL."""
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(ImportError, match=mentions("MUJOCO_GL=osmesa libOSMesa libosmesa6")):
        burnish.collect  # noqa: B018 - names are imported at first use
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    assert burnish.collect


def test_a_folder_without_code_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    program = "from burnish.name_clashes import require_own_packages as check; check()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
