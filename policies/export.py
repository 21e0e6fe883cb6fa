"""Export: one ONNX graph with normaliser, network and the whole sampler inside, noise as an input.

An export is a folder that needs nothing of ours to run:

    policy.onnx       (observation[, goal, images], noise) -> action, dynamic batch
    signature.json    names, shapes, types, units, limits, control rate, horizons of inputs and outputs
    sample.npz        one input/output pair
    report.json       parity on random inputs, latency
    README.md         how to run it with numpy and onnxruntime

An export that does not reproduce the policy is an error, not a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from policies.export_folder import (
    MODEL,
    ExportReport,
    Surroundings,
    draft_of,
    refuse_to_replace,
    signature,
    write_facts,
)
from policies.export_graph import OPSET, SampledPolicy, open_session, require_package, write_checked_graph
from policies.export_latency import latency_of
from policies.policy import Policy


def export_onnx(
    policy: Policy,
    directory: str | Path,
    *,
    batch_sizes: Sequence[int] = (1, 2, 7),
    latency_batches: Sequence[int] = (1, 40),
    tolerance: float = 1e-5,
    seed: int = 0,
    overwrite: bool = False,
    surroundings: Surroundings | None = None,
) -> ExportReport:
    """Export a policy, with the sampler it carries, and check the result.

    Args:
        policy: The policy; its sampler and steps are unrolled into the graph.
        directory: Where the folder is written.
        batch_sizes: Batches of random inputs on which graph and policy are compared.
        latency_batches: Batches for the latency table; empty skips it.
        tolerance: Largest difference allowed, see `ExportReport`.
        seed: Seed of the random inputs.
        overwrite: Replace the files of an export in a directory that is not empty.
        surroundings: Facts about the task for the signature.

    Raises:
        MissingExtraError: If onnx or onnxruntime are not installed.
        ExportError: If the directory holds something, the policy cannot be traced, or the graph does not
            reproduce it.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        require_package(name)
    refuse_to_replace(directory, overwrite=overwrite)
    model = SampledPolicy(policy.clone().float().cpu().eval())
    target = Path(directory)
    with draft_of(target) as draft:
        parity = write_checked_graph(model, draft / MODEL, batch_sizes, tolerance, seed)
        session, generator = open_session(draft / MODEL), torch.Generator().manual_seed(seed + 1)
        latency = [latency_of(model, session, batch, generator) for batch in latency_batches]
        report = ExportReport(str(target), OPSET, tolerance, parity, latency)
        facts = signature(model.policy, surroundings or Surroundings())
        write_facts(model, session, draft, report, generator, facts)
    return report
