"""Steps that an accelerator replays: all that Python decides in them is said, and none waits for a number."""

from __future__ import annotations

from typing import Any

import pairwise
import pytest
import torch
from small_algorithms import ALGOS, FROM_SCRATCH, PROCESSES, accepts, dataset, setup, small
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from algos.bc import Bc
from algos.offline.loop import OfflineRun
from algos.offpolicy.loop import OffPolicyRun
from policies import registry
from policies.networks import recorded, weight_cache

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique")
"""Operations after which an accelerator's numbers are read, or decide a shape."""


class Kernels(TorchDispatchMode):
    """Keeps the operations of a call with the arguments that a recording makes constants."""

    rates = True  # whether learning rates are constants; else tensors, on an accelerator

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        constants = {name: value for name, value in (kwargs or {}).items() if name != "lr" or self.rates}
        facts = torch.utils._pytree.tree_map(_described, (args, constants))
        self.found.append(f"{func} {facts}")
        return func(*args, **(kwargs or {}))


def _described(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> dict[Any, list[list[str]]]:
    """Record on the CPU what would be recorded on an accelerator: the kernels of every call, by signature."""
    calls: dict[Any, list[list[str]]] = {}

    def call(self: Any, *inputs: Any) -> Any:
        signature = self._signature(list(recorded._leaves(inputs)))
        if not self._is_on:
            return self.function(*inputs)
        with Kernels() as kernels, weight_cache.without_caches():
            out = self.function(*inputs)
        calls.setdefault(signature, []).append(kernels.found)
        return out

    monkeypatch.setattr(recorded.Recorded, "__call__", call)
    return calls


def run_of(algo: str) -> Any:
    process = next(one for one in ("flow", "diffusion", "deterministic", *PROCESSES) if accepts(algo, one))
    changes: dict[str, Any] = {"init": None} if algo in FROM_SCRATCH else {}
    return small(registry.lookup("algo", algo), process).build(setup(process, dataset=dataset(), **changes))


def one_step(run: Any) -> None:
    if isinstance(run, OfflineRun):
        run._step()
    elif isinstance(run, Bc):
        run._step(run._draw())
    else:
        run.advance()


@pytest.mark.parametrize("algo", ALGOS if pairwise.everything else ["bc", "expo", "sac", "td3_bc"])
def test_equal_decisions_are_equal_kernels_and_none_waits(
    algo: str, replayed: dict[Any, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(algo)
    monkeypatch.setattr(Kernels, "rates", not hasattr(getattr(run, "learner", None), "prepare"))
    if not isinstance(run, OfflineRun | OffPolicyRun | Bc):
        run.close()
        pytest.skip("its loop replays nothing")
    for _ in range(9 if isinstance(run, OfflineRun | Bc) else 2):
        one_step(run)
    run.close()
    if isinstance(run, OfflineRun) and getattr(run.learner, "decisions", None) is None:
        assert not replayed
        return
    assert replayed
    for calls in replayed.values():
        for kernels in calls[3:]:  # before the fourth, moments of optimisers are created
            assert kernels == calls[2]
            assert not [one for one in kernels if any(wait in one.split(" ")[0] for wait in WAITS)]
