"""How long one decision takes: the policy against what was exported, all on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from policies.export.folder import Run
from policies.export.onnx_graph import SampledPolicy
from policies.threads import torch_threads


@torch.no_grad()
def latency_of(
    model: SampledPolicy, runs: Mapping[str, Run], batch: int, generator: torch.Generator
) -> dict[str, float]:
    """Return a row of the latency table: batch, and medians in milliseconds by name."""
    inputs = model.example(batch, generator)
    row = {"batch": float(batch)}
    with torch_threads(1):
        row["eager_ms"] = 1e3 * _median_s(lambda: model(inputs))
        for name, run in runs.items():
            row[f"{name}_ms"] = 1e3 * _median_s(lambda run=run: run(inputs))  # type: ignore[misc]
    return row


def _median_s(call: Callable[[], object], rounds: int = 30) -> float:
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))
