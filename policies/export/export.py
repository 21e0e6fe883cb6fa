"""Export: a policy with normaliser, network and the whole sampler, for machines that know nothing of ours.

An export is a folder:

    policy.onnx       format=onnx graph=whole: (observation[, goal, images], noise) -> action, dynamic batch
    encoder.onnx      format=onnx graph=step: observations to what the network is conditioned on,
      step.onnx         one evaluation of the network,
      loop.json         and what the sampler does around it
    policy.pt2        format=torch: the same function for torch.export, policy.aot.pt2 compiled ahead of time
    runner.py         runs the ONNX formats with numpy and onnxruntime
    signature.json    names, shapes, types, units, limits, control rate, horizons of inputs and outputs
    sample.npz        one input/output pair
    report.json       parity on random inputs, latency
    README.md         how to run it

An export that does not reproduce the policy is an error, not a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from policies.errors import ExportError
from policies.export.folder import (
    PACKAGE,
    PROGRAM,
    ExportReport,
    Run,
    Surroundings,
    draft_of,
    refuse_to_replace,
    signature,
    write_facts,
    write_signature,
)
from policies.export.latency import latency_of
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
from policies.export.signature import KINDS
from policies.export.stepwise import EncodedObservation, loop_of, one_step_of, require_steps
from policies.export.torch_program import missing_compiler, write_checked_package, write_checked_program
from policies.extras import require
from policies.policy import Policy
from policies.runner import ENCODER, LOOP, MODEL, STEP, Runner

FORMATS, GRAPHS = (tuple(dict.fromkeys(names)) for names in zip(*KINDS, strict=True))

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    """What is checked, and how."""

    model: SampledPolicy
    draft: Path
    batch_sizes: Sequence[int]
    tolerance: float
    seed: int

    @property
    def options(self) -> tuple[Sequence[int], float, int]:
        return self.batch_sizes, self.tolerance, self.seed


class _Written(NamedTuple):
    """What a format left in the folder: how it is run, the sample's way first, and how well it agrees."""

    runs: Mapping[str, Run]
    parity: list[dict[str, float]]
    notes: Sequence[str] = ()


def export_onnx(
    policy: Policy, directory: str | Path, *, graph: str = "whole", **options: object
) -> ExportReport:
    """Export a policy, with the sampler it carries, to ONNX; see `export_policy`."""
    return export_policy(policy, directory, format="onnx", graph=graph, **options)  # type: ignore[arg-type]


def export_policy(
    policy: Policy,
    directory: str | Path,
    *,
    format: str = "onnx",
    graph: str = "whole",
    compiled: bool = True,
    batch_sizes: Sequence[int] = (1, 2, 7),
    latency_batches: Sequence[int] = (1, 40),
    tolerance: float = 1e-5,
    seed: int = 0,
    overwrite: bool = False,
    surroundings: Surroundings | None = None,
) -> ExportReport:
    """Export a policy, with the sampler it carries, and check the result.

    Args:
        policy: The policy.
        directory: Where the folder is written.
        format: `onnx` or `torch`.
        graph: `whole`: the sampler is unrolled; `step`: one evaluation and a table (ONNX only).
        compiled: Compile ahead of time as well, where there is a C++ compiler (torch only).
        batch_sizes: Batches of random inputs on which export and policy are compared.
        latency_batches: Batches for the latency table; empty skips it.
        tolerance: Largest difference allowed, see `ExportReport`.
        seed: Seed of the random inputs.
        overwrite: Replace the files of an export in a directory that is not empty.
        surroundings: Facts about the task for the signature; None: where the policy comes from, if it knows.

    Raises:
        MissingExtraError: If onnx or onnxruntime are not installed.
        ExportError: If the directory holds something, the policy cannot be exported, or the result does not
            reproduce it.
    """
    write = _writer(policy, format, graph, compiled)
    refuse_foreign_loops(policy)
    refuse_to_replace(directory, overwrite=overwrite)
    model = SampledPolicy(policy.clone().float().cpu().eval())
    target = Path(directory)
    around = Surroundings(provenance=policy.provenance) if surroundings is None else surroundings
    facts = signature(model.policy, around, kind=format, graph=graph)
    with draft_of(target) as draft:
        write_signature(draft, facts)
        written = write(_Job(model, draft, batch_sizes, tolerance, seed))
        generator = torch.Generator().manual_seed(seed + 1)
        latency = [latency_of(model, written.runs, batch, generator) for batch in latency_batches]
        opset = OPSET if format == "onnx" else None
        notes = list(written.notes)
        report = ExportReport(str(target), format, graph, opset, tolerance, written.parity, latency, notes)
        write_facts(model, next(iter(written.runs.values())), draft, report, generator, facts)
    return report


def _writer(policy: Policy, format: str, graph: str, compiled: bool) -> Callable[[_Job], _Written]:
    """Choose the format, and refuse what it cannot do before any work is done.

    Raises:
        MissingExtraError: If a package is missing.
        ExportError: If there is no such format, or not for this policy.
    """
    if not isinstance(policy, Policy):
        raise ExportError(
            f"{type(policy).__name__} cannot be exported: what it does around its policy is decided in "
            f"Python. Export the policy itself."
        )
    if (format, graph) not in KINDS:
        known = ", ".join(" with ".join(one) for one in KINDS)
        raise ExportError(f"format and graph must be one of {known}; got {format} with {graph}.")
    if format == "torch":
        return lambda job: _write_torch(job, compiled)
    for name in ("onnx", "onnxscript", "onnxruntime"):
        require(name, extra="export", what="export")
    if graph == "whole":
        return _write_whole
    require_steps(policy)
    return _write_steps


def _write_whole(job: _Job) -> _Written:
    """Write one graph with the sampler inside."""
    if job.model.has_gradients:
        _log.warning(
            "the gradient of the network becomes part of the graph once for every step of the sampler, which "
            "takes long for large networks. graph=step traces it once; steps= lowers their number."
        )
    parity = write_checked_graph(job.model, job.draft / MODEL, *job.options)
    return _Written({"onnx": _run_by_runner(job.draft)}, parity)


def _write_steps(job: _Job) -> _Written:
    """Write the pieces, and check what the runner makes of them."""
    policy = require_steps(job.model.policy)
    write_checked_graph(EncodedObservation(policy), job.draft / ENCODER, *job.options)
    write_checked_graph(one_step_of(policy), job.draft / STEP, *job.options)
    (job.draft / LOOP).write_text(json.dumps(loop_of(policy), indent=1, allow_nan=False) + "\n")
    run = _run_by_runner(job.draft)
    parity = parity_of(job.model, run, job.batch_sizes, job.seed)
    if not worst_of(parity) <= job.tolerance:
        raise unlike(job.model, worst_of(parity), *job.options)
    return _Written({"onnx": run}, parity)


def _write_torch(job: _Job, compiled: bool) -> _Written:
    """Write a program, and compile it where that can be done."""
    program, parity = write_checked_program(job.model, job.draft / PROGRAM, *job.options)
    reason = missing_compiler() if compiled else "The program was not compiled ahead of time: not asked for."
    if reason is not None:
        return _Written({"pt2": program}, parity, [reason])
    package, more = write_checked_package(job.model, job.draft / PROGRAM, job.draft / PACKAGE, *job.options)
    worse = [max(pair, key=lambda row: row["max_abs_difference"]) for pair in zip(parity, more, strict=True)]
    return _Written({"pt2": program, "aot": package}, worse)


def _run_by_runner(folder: Path) -> Run:
    """Return the runner of a folder as a function of tensors."""
    runner = Runner(folder)

    def run(inputs: Mapping[str, Tensor]) -> list[np.ndarray]:
        return list(runner.predict(arrays_of(inputs)))

    return run


__all__ = ["FORMATS", "GRAPHS", "export_onnx", "export_policy"]
