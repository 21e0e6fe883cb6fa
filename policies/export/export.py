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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from policies.errors import ExportError
from policies.export.folder import (
    ExportReport,
    Run,
    Surroundings,
    draft_of,
    refuse_to_replace,
    signature,
    write_facts,
    write_signature,
)
from policies.export.onnx_graph import (
    OPSET,
    SampledPolicy,
    arrays_of,
    parity_of,
    refuse_foreign_loops,
    unlike,
    worst_of,
    write_checked_graph,
)
from policies.export.signature import GRAPHS
from policies.export.stepwise import EncodedObservation, loop_of, one_step_of, require_steps
from policies.extras import require
from policies.policy import Policy
from policies.runner import ENCODER, LOOP, MODEL, STEP, Runner
from policies.threads import torch_threads

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    """Settings of an export and its checks."""

    model: SampledPolicy
    draft: Path
    batch_sizes: Sequence[int]
    tolerance: float
    seed: int

    @property
    def options(self) -> tuple[Sequence[int], float, int]:
        return self.batch_sizes, self.tolerance, self.seed


def export_onnx(
    policy: Policy,
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
        policy: The policy.
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
        write_signature(draft, facts)
        write = _write_whole if graph == "whole" else _write_steps
        parity = write(_Job(model, draft, batch_sizes, tolerance, seed))
        run, generator = _run_by_runner(draft), torch.Generator().manual_seed(seed + 1)
        latency = [latency_of(model, run, batch, generator) for batch in latency_batches]
        report = ExportReport(str(target), graph, OPSET, tolerance, parity, latency)
        write_facts(model, run, draft, report, generator, facts)
    return report


def _require_exportable(policy: Policy, graph: str) -> None:
    """Refuse policies that cannot be exported, before any work."""
    if not isinstance(policy, Policy):
        raise ExportError(
            f"{type(policy).__name__} cannot be exported: what it does around its policy is decided in "
            f"Python. Export the policy itself."
        )
    if graph not in GRAPHS:
        raise ExportError(f"graph must be one of {', '.join(GRAPHS)}; got '{graph}'.")
    for name in ("onnx", "onnxscript", "onnxruntime"):
        require(name, extra="export", what="export")
    if graph == "step":
        require_steps(policy)
    refuse_foreign_loops(policy)


def _write_whole(job: _Job) -> list[dict[str, float]]:
    """Write one graph with the unrolled sampler; returns its parity table."""
    if job.model.has_gradients:
        _log.warning(
            "the gradient of the network becomes part of the graph once for every step of the sampler, which "
            "takes long for large networks. graph=step traces it once; steps= lowers their number."
        )
    return write_checked_graph(job.model, job.draft / MODEL, *job.options)


def _write_steps(job: _Job) -> list[dict[str, float]]:
    """Write encoder, step and loop; returns the parity table of the runner."""
    policy = require_steps(job.model.policy)
    write_checked_graph(EncodedObservation(policy), job.draft / ENCODER, *job.options)
    write_checked_graph(one_step_of(policy), job.draft / STEP, *job.options)
    (job.draft / LOOP).write_text(json.dumps(loop_of(policy), indent=1, allow_nan=False) + "\n")
    parity = parity_of(job.model, _run_by_runner(job.draft), job.batch_sizes, job.seed)
    if not worst_of(parity) <= job.tolerance:
        raise unlike(job.model, worst_of(parity), *job.options)
    return parity


def _run_by_runner(folder: Path) -> Run:
    runner = Runner(folder)

    def run(inputs: Mapping[str, Tensor]) -> list[np.ndarray]:
        return list(runner.predict(arrays_of(inputs)))

    return run


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


__all__ = ["GRAPHS", "export_onnx"]
