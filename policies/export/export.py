"""Export to ONNX: normaliser, network and sampler of a policy, for machines without this package.

An export is a folder:

    policy.onnx       graph=whole: (observation[, goal, images], noise) -> action, dynamic batch
    encoder.onnx      graph=step: observation to condition of the network,
      step.onnx         one evaluation of the network,
      loop.json         sampler coefficients around it
    runner.py         runs the graphs with numpy and onnxruntime
    signature.json    names, shapes, types, units, limits, control rate, horizons of inputs and outputs
    sample.npz        one input/output pair
    report.json       parity on random inputs, latency
    README.md         how to run it

An export that does not reproduce the policy raises an error.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from policies import runner
from policies.errors import ExportError
from policies.export.card import card_of
from policies.export.folder import (
    CARD,
    REPORT,
    RUNNER,
    ExportReport,
    Run,
    Surroundings,
    draft_of,
    refuse_to_replace,
    signature,
)
from policies.export.onnx_graph import (
    OPSET,
    SampledPolicy,
    arrays_of,
    not_reproduced,
    parity_of,
    random_inputs,
    refuse_foreign_loops,
    worst_of,
    write_checked_graph,
)
from policies.export.signature import GRAPHS
from policies.export.stepwise import EncodedObservation, loop_of, one_step_of, require_steps
from policies.extras import require
from policies.policy import Policy
from policies.runner import ENCODER, LOOP, MODEL, SAMPLE, SIGNATURE, STEP, Runner
from policies.threads import torch_threads
from policies.wrappers.best_of_n import BestOfN
from policies.wrappers.planner import PlannerPolicy

_log = logging.getLogger(__name__)


def export_onnx(
    policy: Policy | BestOfN,
    directory: str | Path,
    *,
    graph: str = "whole",
    batch_sizes: Sequence[int] = (1, 2, 7),
    latency_batches: Sequence[int] = (1, 40),
    tolerance: float = 1e-5,
    seed: int = 0,
    overwrite: bool = False,
    surroundings: Surroundings | None = None,
) -> ExportReport:
    """Export a policy with its sampler to ONNX and verify the result.

    Args:
        policy: The policy, or one that chooses among plans of it by a scorer of torch operations.
        directory: Target folder.
        graph: `whole`: the sampler is unrolled; `step`: one evaluation and a table.
        batch_sizes: Batch sizes of random inputs for the parity check.
        latency_batches: Batch sizes of the latency table; empty: no table.
        tolerance: Maximum difference, see `ExportReport`.
        seed: Seed of the random inputs.
        overwrite: Replace an export in a non-empty directory.
        surroundings: Facts about the task for the signature; None: from the policy's provenance, if any.

    Raises:
        MissingExtraError: If onnx or onnxruntime is not installed.
        ExportError: If the directory is not empty, the policy cannot be exported, or the result does not
            reproduce it.
    """
    _require_exportable(policy, graph)
    refuse_to_replace(directory, overwrite=overwrite)
    model = SampledPolicy(policy.clone().float().cpu().eval())
    target = Path(directory)
    around = Surroundings(provenance=policy.provenance) if surroundings is None else surroundings
    facts = signature(model.policy, around, graph=graph)
    with draft_of(target) as draft:
        (draft / SIGNATURE).write_text(json.dumps(facts, indent=2) + "\n")
        shutil.copyfile(runner.__file__, draft / RUNNER)
        write = _write_whole if graph == "whole" else _write_steps
        parity = write(model, draft, batch_sizes, tolerance, seed)
        run, generator = _run_by_runner(draft), torch.Generator().manual_seed(seed + 1)
        latency = [latency_of(model, run, batch, generator) for batch in latency_batches]
        report = ExportReport(str(target), graph, OPSET, tolerance, parity, latency)
        inputs = random_inputs(model.policy, 2, generator)
        sample: dict[str, Any] = {**arrays_of(inputs), "action": run(inputs)[0]}
        np.savez(draft / SAMPLE, **sample)
        (draft / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n")
        (draft / CARD).write_text(card_of(facts, asdict(report)))
    return report


def _require_exportable(policy: Any, graph: str) -> None:
    if not isinstance(policy, Policy | BestOfN):
        raise ExportError(f"{type(policy).__name__} cannot be exported: it is no policy of this package.")
    if graph not in GRAPHS:
        raise ExportError(f"graph must be one of {', '.join(GRAPHS)}; got '{graph}'.")
    for name in ("onnx", "onnxscript", "onnxruntime"):
        require(name, extra="export", what="export")
    inner = policy.policy if isinstance(policy, BestOfN) else policy
    if isinstance(inner, PlannerPolicy) and inner.follows_value:
        raise ExportError(
            "a planner that follows the slope of its value cannot be exported. Train it with "
            "algo.guide_repeats=0, which chooses among plans alone."
        )
    if graph == "step":
        require_steps(policy)
    refuse_foreign_loops(policy)


def _write_whole(
    model: SampledPolicy, draft: Path, batch_sizes: Sequence[int], tolerance: float, seed: int
) -> list[dict[str, float]]:
    """Write one graph with the unrolled sampler; returns its parity table."""
    if model.has_gradients:
        _log.warning(
            "the gradient of the network becomes part of the graph once per sampler step, which takes long "
            "for large networks. graph=step traces it once; steps= lowers their number."
        )
    return write_checked_graph(model, draft / MODEL, batch_sizes, tolerance, seed)


def _write_steps(
    model: SampledPolicy, draft: Path, batch_sizes: Sequence[int], tolerance: float, seed: int
) -> list[dict[str, float]]:
    """Write encoder, step and loop; returns the parity table of the runner."""
    policy = require_steps(model.policy)
    write_checked_graph(EncodedObservation(policy), draft / ENCODER, batch_sizes, tolerance, seed)
    write_checked_graph(one_step_of(policy), draft / STEP, batch_sizes, tolerance, seed)
    (draft / LOOP).write_text(json.dumps(loop_of(policy), indent=1, allow_nan=False) + "\n")
    parity = parity_of(model, _run_by_runner(draft), batch_sizes, seed)
    if not worst_of(parity) <= tolerance:
        raise not_reproduced(model, worst_of(parity), batch_sizes, tolerance, seed)
    return parity


def _run_by_runner(folder: Path) -> Run:
    predict = Runner(folder).predict
    return lambda inputs: list(predict(arrays_of(inputs)))


@torch.no_grad()
def latency_of(model: SampledPolicy, run: Run, batch: int, generator: torch.Generator) -> dict[str, float]:
    """Return a row of the latency table: medians in ms of policy and export on one thread."""
    inputs = model.example(batch, generator)
    with torch_threads(1):
        eager_s, onnx_s = _median_s(lambda: model(inputs)), _median_s(lambda: run(inputs))
    return {"batch": float(batch), "eager_ms": 1e3 * eager_s, "onnx_ms": 1e3 * onnx_s}


def _median_s(call: Callable[[], object], rounds: int = 30) -> float:
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))
