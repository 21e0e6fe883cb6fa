"""Shared options and fixtures of the test suite."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pairwise
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the folder of reference numbers, and the switch from pairs of parts to all combinations."""
    parser.addoption(
        "--golden",
        default=str(REPOSITORY / "assets" / "golden"),
        help="folder of reference files; every oracle runs over every file whose name matches its pattern",
    )
    parser.addoption(
        "--all", action="store_true", help="every combination of parts, instead of every pair of them"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests; the one that hands them out needs no torch, and starts sooner."""
    pairwise.everything = config.getoption("--all")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import prepared

        config.pluginmanager.register(prepared)


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw few and small frames, without shadows and smooth edges: pages and clips hold the same."""
    from envs.engine.rendering import replay_frames

    plain = {"width": 96, "height": 96, "shadows": False, "samples": 0}
    for name, value in plain.items():
        monkeypatch.setitem(replay_frames.__kwdefaults__, name, value)
    monkeypatch.setattr("burnish.reports.videos.FPS", 4)
    monkeypatch.setattr("burnish.reports.figures.DPI", 20)
    monkeypatch.setattr("burnish.reports.rollouts._LARGE", {"width": 96, "height": 96})
    monkeypatch.setattr("burnish.reports.rollouts._MOVING_FRAMES", 6)
    monkeypatch.setattr("burnish.reports.rollouts._CLIP_FRAMES", 4)


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the picture of a dataset, which takes most of the time, where only facts are looked at."""
    monkeypatch.setattr("burnish.commands.data_inspect.draw_dataset", lambda *_: b"")


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give every test process a folder of its own for temporary files, and remove what simulators leave."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _quiet_loggers() -> Iterator[None]:
    """Undo what a command that a test runs in this process sets: Hydra lets every logger speak."""
    loggers = [logging.getLogger(name) for name in ("", "algos", "burnish", "envs", "policies")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run `@pytest.mark.golden("pattern*")` tests once per matching file, through `golden_path`.

    With `but="pattern*"` those of another pattern are left to other tests.
    """
    mark = metafunc.definition.get_closest_marker("golden")
    if mark is None:
        return
    folder = Path(metafunc.config.getoption("--golden"))
    others = set(folder.glob(mark.kwargs["but"])) if "but" in mark.kwargs else set()
    paths = sorted(path for path in folder.glob(mark.args[0]) if path.is_file() and path not in others)
    if paths:
        metafunc.parametrize("golden_path", paths, ids=[path.name for path in paths])
    else:
        metafunc.parametrize("golden_path", [None], ids=["no-matching-file"], indirect=True)


@pytest.fixture
def golden_path(request: pytest.FixtureRequest) -> Path:
    """Path of one reference file (set per test by the `golden` mark)."""
    mark = request.node.get_closest_marker("golden")
    if getattr(request, "param", None) is None:
        folder = request.config.getoption("--golden")
        pytest.fail(f"no file in {folder} matches '{mark.args[0] if mark else '?'}'")
    return Path(request.param)


@pytest.fixture
def arrays(golden_path: Path) -> dict[str, Any]:
    """Every array of one reference file as a tensor, and every text."""
    from official_critics import arrays_of  # in the folder of the oracles

    return arrays_of(golden_path)
