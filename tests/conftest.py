"""Shared options and fixtures of the test suite."""

from __future__ import annotations

import functools
import gc
import os
import random
import shutil
import sys
import tempfile
import traceback
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import absl.logging
import composed_once
import numpy as np
import omegaconf.base
import pairwise
import pytest
import torch
from hydra.core.config_store import ConfigStore
from hypothesis import HealthCheck, settings
from torch.utils._traceback import CapturedTraceback

from algos.training import provenance
from envs.engine.rendering import replay_frames

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
    """One thread: small networks lose far more to waiting threads than they gain.

    Examples may be slow, as a busy machine makes them, and are the same in every run;
    `--hypothesis-profile=explore` draws others.
    """
    gc.disable()  # until everything is imported: a fifth of the time of collecting
    torch.set_num_threads(1)
    pairwise.everything = config.getoption("--all")
    # Hydra copies the store of configurations for every group it looks up, which takes most of a composition.
    # Nothing here changes a copy.
    ConfigStore.__deepcopy__ = lambda self, memo: self
    # Of the rest, parsing the few interpolations takes an eighth; a parse tree is only read.
    omegaconf.base.parse = functools.cache(omegaconf.base.parse)
    composed_once.install()
    torch.onnx.export = _with_one_table(torch.onnx.export)
    # What a test writes need not survive a power cut: waiting for the disk takes most of saving a small run.
    # That the handle is open is still asked.
    os.fsync = lambda handle: os.fstat(handle) and None
    provenance._git = functools.cache(provenance._git)  # asked twice by every run
    # absl, which comes with mujoco, closes the stream of its handler when logging is configured anew, unless
    # that is standard error at this moment. While a test captures that, it would be pytest's own file.
    absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("explore", patient)
    few = settings(patient, max_examples=100 if pairwise.everything else 40)
    settings.register_profile("burnish", few, derandomize=True)
    settings.load_profile("burnish")
    # Numbers and words of our files are no examples: to find them takes a tenth of collecting.
    providers = sys.modules.get("hypothesis.internal.conjecture.providers")
    if constants := getattr(providers, "Constants", None):
        providers._get_local_constants = functools.cache(constants)


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end: garbage is not looked for in it."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 50)  # compiled graphs stay too: looking at them often takes 7 % of the time


def _with_one_table(export: Callable[..., Any]) -> Callable[..., Any]:
    """Keep between exports what each makes anew: the tables of operators, a third of a small one.

    Where in Python a node of a graph was made, which nobody reads here, is a tenth of the rest.
    """

    @functools.cache
    def keep_table() -> None:
        import torch._export.utils as operators
        from torch.onnx._internal.exporter._registration import ONNXRegistry  # takes a while

        operators._materialize_cpp_cia_ops = functools.cache(operators._materialize_cpp_cia_ops)
        torch._ops.Callable = typing.Callable  # keeps the thousands of annotations of an export
        CapturedTraceback.summary = lambda self: traceback.StackSummary()
        ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))

    @functools.wraps(export)
    def exported(*args: Any, **kwargs: Any) -> Any:
        keep_table()
        return export(*args, **kwargs)

    return exported


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What fixtures draw without a generator does not depend on the tests before them."""
    _seed_global_generators(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """What a test draws without a generator does not depend on its fixtures or on other tests."""
    _seed_global_generators(1)


def _seed_global_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` looks for accelerators: 0.7 ms
    np.random.seed(seed)
    random.seed(seed)


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw few and small frames, without shadows and smooth edges: pages and clips hold the same."""
    plain = {"width": 96, "height": 96, "shadows": False, "samples": 0}
    for name, value in plain.items():
        monkeypatch.setitem(replay_frames.__kwdefaults__, name, value)
    monkeypatch.setattr("burnish.reports.videos.FPS", 4)
    monkeypatch.setattr("burnish.reports.figures.DPI", 20)
    monkeypatch.setattr("burnish.reports.rollouts._LARGE", {"width": 96, "height": 96})
    monkeypatch.setattr("burnish.reports.rollouts._MOVING_FRAMES", 6)
    monkeypatch.setattr("burnish.reports.rollouts._CLIP_FRAMES", 4)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give every test process a folder of its own for temporary files, and remove what simulators leave."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        yield
    shutil.rmtree(folder, ignore_errors=True)


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
