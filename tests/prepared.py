"""Prepares a process that runs tests, and makes it quicker: what no test sees is not done, or done once."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import os
import random
import sys
import traceback
import typing
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import absl.logging
import composed_once
import mujoco
import numpy as np
import omegaconf.base
import pairwise
import pytest
import torch
from _pytest.logging import catching_logs
from _pytest.runner import runtestprotocol
from hydra.core.config_store import ConfigStore
from hypothesis import HealthCheck, settings
from torch.utils._traceback import CapturedTraceback

from algos.training import provenance


def pytest_configure() -> None:
    """One thread: small networks lose far more to waiting threads than they gain.

    Examples may be slow, as a busy machine makes them, and are the same in every run;
    `--hypothesis-profile=explore` draws others.
    """
    gc.disable()  # until everything is imported: a fifth of the time of collecting
    torch.set_num_threads(1)
    # Hydra copies the store of configurations for every group it looks up, which takes most of a composition.
    # Nothing here changes a copy.
    ConfigStore.__deepcopy__ = lambda self, memo: self
    # Of the rest, parsing the few interpolations takes an eighth; a parse tree is only read.
    omegaconf.base.parse = functools.cache(omegaconf.base.parse)
    composed_once.install()
    # Of a module 12 dictionaries and sets of hooks, nearly all empty: most of copying a small policy.
    copy._deepcopy_dispatch |= {OrderedDict: _copied_dictionary, set: _copied_set}
    torch.onnx.export = _with_one_table(torch.onnx.export)
    # What a test writes need not survive a power cut: waiting for the disk takes most of saving a small run.
    # That the handle is open is still asked.
    os.fsync = lambda handle: os.fstat(handle) and None
    provenance._git = functools.cache(provenance._git)  # asked twice by every run
    mujoco.MjModel.from_xml_string = staticmethod(_compiled_once(mujoco.MjModel.from_xml_string))
    if "attached_loggers" in catching_logs.__slots__:
        catching_logs.__enter__ = _listen_at_the_root
    # absl, which comes with mujoco, closes the stream of its handler when logging is configured anew, unless
    # that is standard error at this moment. While a test captures that, it would be pytest's own file.
    absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("explore", patient)
    few = settings(patient, max_examples=100 if pairwise.everything else 25)
    settings.register_profile("burnish", few, derandomize=True)
    settings.load_profile("burnish")
    # Numbers and words of our files are no examples: to find them takes a tenth of collecting.
    providers = sys.modules.get("hypothesis.internal.conjecture.providers")
    if constants := getattr(providers, "Constants", None):
        providers._get_local_constants = functools.cache(constants)


_HALVES = {"oracles": 1, "policies": 1, "contracts/test_policies.py": 1, "contracts/test_exports.py": 1}
_HALVES |= {"envs": 2, "contracts/test_environments.py": 2, "contracts/test_readers.py": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put last what needs compilers, and then simulators: each of two workers begins with one half of all.

    A world takes a second or two to compile, and the first export of a process three to import its compiler.
    """

    def half(item: pytest.Item) -> int:
        folder, name = item.path.parts[-2:]
        return _HALVES.get(folder, _HALVES.get(f"{folder}/{name}", 0))

    items.sort(key=half)


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end: garbage is not looked for in it."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 50)  # compiled graphs stay too: looking at them often takes 7 % of the time


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A worker tells of a test once: of how it is set up and cleaned only what did not pass, or is timed.

    Six messages a test take as long as all else around one.
    """
    if not hasattr(item.config, "workerinput") or item.config.getoption("durations"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


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


def _copied_dictionary(original: OrderedDict[Any, Any], memo: dict[int, Any]) -> OrderedDict[Any, Any]:
    found = memo[id(original)] = OrderedDict()
    for key, value in original.items():
        found[copy.deepcopy(key, memo)] = copy.deepcopy(value, memo)
    return found


def _copied_set(original: set[Any], memo: dict[int, Any]) -> set[Any]:
    found = memo[id(original)] = {copy.deepcopy(value, memo) for value in original}
    return found


def _compiled_once(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Compile what is written in the same words once, which takes a second of an arm, and give copies.

    Ours and OGBench's own worlds are, as are those of its tasks and of its data.
    """
    made: dict[Any, Any] = {}

    @functools.wraps(compiled)
    def copied(xml: str, assets: dict[str, bytes] | None = None) -> Any:
        if not assets:  # its files may change
            return compiled(xml, assets)
        key = xml, tuple(sorted(assets.items()))
        if key not in made:
            made[key] = compiled(xml, assets)
        return copy.copy(made[key])

    return copied


def _listen_at_the_root(self: catching_logs[Any]) -> Any:
    """Attach what collects the messages of a test to the root alone.

    pytest looks six times a test through all loggers for those that keep their messages to themselves, of
    which torch has dozens: most of the time of an empty test. Nobody here reads those.
    """
    root = logging.getLogger()
    root.addHandler(self.handler)
    self.attached_loggers.append(root)
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(root.level, self.level))
    return self.handler


def _with_one_table(export: Callable[..., Any]) -> Callable[..., Any]:
    """Keep between exports what each makes anew: the tables of operators, a third of a small one.

    Where in Python a node of a graph was made, which nobody reads here, is a tenth of the rest; trying rules
    that rewrite other operators than that of a node is more.
    """

    @functools.cache
    def keep_table() -> None:
        import torch._export.utils as operators
        from onnxscript.rewriter._rewrite_rule import Pattern
        from torch.onnx._internal.exporter._registration import ONNXRegistry  # takes a while

        operators._materialize_cpp_cia_ops = functools.cache(operators._materialize_cpp_cia_ops)
        torch._ops.Callable = typing.Callable  # keeps the thousands of annotations of an export
        CapturedTraceback.summary = lambda self: traceback.StackSummary()
        ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
        Pattern.match = _of_its_operator(Pattern.match)

    @functools.wraps(export)
    def exported(*args: Any, **kwargs: Any) -> Any:
        keep_table()
        return export(*args, **kwargs)

    return exported


def _of_its_operator(match: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(match)
    def matched(self: Any, model: Any, graph: Any, node: Any, **how: Any) -> Any:
        operator = self._target_pattern.output_nodes[0].op_identifier()
        return match(self, model, graph, node, **how) if operator in (None, node.op_identifier()) else None

    return matched
