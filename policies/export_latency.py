"""How long one decision takes: the policy against its exported graph, both on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from policies.export_graph import SampledPolicy, feed_of, random_inputs
from policies.threads import torch_threads


@torch.no_grad()
def latency_of(
    model: SampledPolicy, session: Any, batch: int, generator: torch.Generator
) -> dict[str, float]:
    """Return a row of the latency table: batch and medians in milliseconds."""
    inputs = random_inputs(model.policy, batch, generator)
    feed = feed_of(session, inputs)
    with torch_threads(1):
        eager_s = _median_s(lambda: model(inputs))
    onnx_s = _median_s(lambda: session.run(None, feed))
    return {"batch": batch, "eager_ms": 1e3 * eager_s, "onnx_ms": 1e3 * onnx_s}


def _median_s(call: Callable[[], object], rounds: int = 30) -> float:
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))
