"""Shared options and fixtures of the test suite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the folder of reference numbers."""
    parser.addoption(
        "--golden",
        default=str(REPOSITORY / "assets" / "golden"),
        help="folder of reference files; every oracle runs over every file whose name matches its pattern",
    )


def pytest_configure(config: pytest.Config) -> None:
    """One thread: small networks lose far more to waiting threads than they gain. Examples may be slow."""
    torch.set_num_threads(1)
    settings.register_profile("burnish", deadline=None)
    settings.load_profile("burnish")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run `@pytest.mark.golden("pattern*")` tests once per matching file, through `golden_path`."""
    mark = metafunc.definition.get_closest_marker("golden")
    if mark is None:
        return
    folder = Path(metafunc.config.getoption("--golden"))
    paths = sorted(path for path in folder.glob(mark.args[0]) if path.is_file())
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
