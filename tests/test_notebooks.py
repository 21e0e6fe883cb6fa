"""The notebooks run with small sizes, show tables and clips, and are stored without what they show."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from drawing import require_drawing
from IPython.core.interactiveshell import InteractiveShell
from pairwise import everything
from traitlets.config import Config

import burnish

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUN = NOTEBOOKS if everything else NOTEBOOKS[-1:]
"""Those that are run: the first takes the README's steps, which run, the second takes them with own data."""
LINK = re.compile(r"\]\(([^)\s]+)\)")

ALONE: dict[str, Any] = {"num_workers": 0}
TRAINING = ALONE | {"progress": False, "evaluation.episodes": 1}
CLONING = {
    "algo.steps": 2,
    "algo.warmup_steps": 0,
    "algo.batch_size": 16,
    "backbone.width": 16,
    "process.num_levels": 2,
}
TUNING = {
    "algo.env_steps": 40,
    "algo.num_envs": 2,
    "algo.steps_per_iteration": 5,
    "algo.batch_size": 10,
    "algo.update_epochs": 1,
    "algo.tuned_steps": 2,
}
SMALL: dict[str, Any] = {
    "demonstrations": 2,
    "arm": str(ROOT / "integrations/lerobot_policy_burnish/arm.py"),
    "cloning": TRAINING | CLONING,
    "tuning": TRAINING | TUNING,
    "evaluation": ALONE | {"episodes": 1, "videos": 1},
    "drawing": ALONE | {"episodes": 1},
}
"""Values for the cell with the tag `parameters`; a notebook takes those that it names."""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """IPython in this process, in an empty folder; a kernel of its own would import everything again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = Config({"HistoryManager": {"enabled": False}})
    yield InteractiveShell.instance(config=config, user_module=ModuleType("notebook"))
    InteractiveShell.clear_instance()
    sys.modules.pop("runner", None)  # of an exported folder


def executed(shell: InteractiveShell, cells: list[Any]) -> Iterator[str]:
    """Run code cells; yields the HTML of what each of them shows."""
    for cell in cells:
        result = shell.run_cell(cell.source)
        result.raise_error()
        shown, _ = shell.display_formatter.format(result.result)
        yield shown.get("text/html", "")


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_it_runs_and_shows_a_table_and_a_clip(path: Path, shell: InteractiveShell) -> None:
    require_drawing()
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    (sizes,) = (cell for cell in cells if "parameters" in cell.metadata.get("tags", ()))
    named = re.findall(r"^(\w+) = ", sizes.source, re.MULTILINE)
    sizes.source = "\n".join(f"{name} = {SMALL[name]!r}" for name in named)
    for cell in cells:
        cell.source = cell.source.replace("for episode in range(10):", "for episode in range(1):")
    shown = "".join(executed(shell, cells))
    assert "<th>95 % interval</th>" in shown and "data:image/webp;base64," in shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_calls_fit_our_functions(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    calls = [node for node in ast.walk(ast.parse("\n".join(cells))) if isinstance(node, ast.Call)]
    ours = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute) and is_named(call.func.value, "burnish")
    ]
    for call in ours:
        given = {key.arg: key for key in call.keywords if key.arg}
        inspect.signature(getattr(burnish, call.func.attr)).bind_partial(*call.args, **given)
    assert len(ours) >= 5


def is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs_and_its_links_exist(path: Path) -> None:
    nbformat.validate(nbformat.read(path, as_version=4))
    cells = json.loads(path.read_text())["cells"]
    assert "".join(cells[0]["source"]).startswith("# ")
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    texts = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = [link for text in texts for link in LINK.findall(text)]
    assert links and not [link for link in links if not (path.parent / link).exists()]
