"""The path of README and tutorial, executed as it is written, at the smallest sizes."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from entry import exit_code
from pairwise import everything

import burnish

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "tutorial.md")

BC = [
    "algo.steps=4",
    "algo.batch_size=16",
    "algo.warmup_steps=2",
    "backbone.width=16",
    "evaluation.episodes=2",
    "num_workers=0",
]
DIFFUSION = [*BC, "process.num_levels=2"]
DPPO = ["algo.env_steps=40", "algo.num_envs=2", "algo.steps_per_iteration=5", "algo.batch_size=10"]
DPPO += ["algo.tuned_steps=2", "evaluation.episodes=2", "num_workers=0"]
SMALL = {
    "collect": ["episodes=2"],
    "train algo=bc env=avoid experiment=avoid_bc": DIFFUSION,
    "train algo=bc": BC,
    "train algo=dppo": DPPO,
    "train experiment=avoid_dppo": DPPO,
    "eval": ["episodes=3", "num_workers=0"],
    "report": ["episodes=1", "num_workers=0"],
}
"""What is appended to a command that begins like this."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.usefixtures("small_pictures")]


def blocks(language: str, pages: tuple[Path, ...] = PAGES) -> list[str]:
    """Return the fenced blocks of README and tutorial, in the order of reading."""
    fence = rf"^```{language}\n(.*?)^```"
    return [block for page in pages for block in re.findall(fence, page.read_text(), flags=re.S | re.M)]


def commands() -> list[str]:
    """Return the commands of the README, with `--all` also of the tutorial, which `test_docs` composes."""
    shown = blocks("bash", PAGES if everything else PAGES[:1])
    return [line for block in shown for line in block.splitlines() if line and not line.startswith("#")]


def shortened(command: str) -> list[str]:
    """Return the words after `burnish`, at the smallest sizes."""
    program, *words = shlex.split(command)
    assert program == "burnish"
    extra = next((more for begin, more in SMALL.items() if " ".join(words).startswith(begin)), [])
    options = words.index("--cfg") if "--cfg" in words else len(words)
    return [*words[:options], *extra, *words[options:]]


def test_the_shell_path_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in map(shortened, commands()):
        assert exit_code(*words) == 0, words
    assert Path("exported", "policy.onnx").stat().st_size > 0
    page = Path("runs", "tuned", "report", "index.html").read_text()
    assert "<h2>Learning</h2>" in page and "<h2>Behaviour</h2>" in page
    assert page.count("data:image/png;base64,") == 1, "the paths of both policies"
    assert "before: " in page and "after: " in page
    assert "://" not in page, "the page needs nothing from elsewhere"


def test_the_python_path_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("python")
    for begin, more in (("avoid_bc", DIFFUSION), ("avoid_dppo", DPPO)):
        code = code.replace(
            f'"experiment={begin}"', ", ".join(f'"{x}"' for x in (f"experiment={begin}", *more))
        )
    code = code.replace("episodes=20", "episodes=2").replace("episodes=100", "episodes=3, num_workers=0")
    code = code.replace("burnish.report(tuned)", "burnish.report(tuned, episodes=1, num_workers=0)")
    monkeypatch.chdir(tmp_path)
    called = []

    def recorded(name: str) -> Callable[..., None]:
        fits = inspect.signature(getattr(burnish, name)).bind
        return lambda *given, **more: called.append((name, fits(*given, **more)))

    for name in () if everything else ("report", "export"):  # which the path of the shell runs
        monkeypatch.setattr(burnish, name, recorded(name))
    exec(compile(code, "README.md", "exec"), {})
    exported = Path("exported_from_python", "policy.onnx").exists()
    assert exported if everything else [name for name, _ in called] == ["report", "export"]
