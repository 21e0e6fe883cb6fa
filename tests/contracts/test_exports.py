"""The law of every export: the graph gives the actions of the policy, at any batch.

A graph is made of a process with its sampler, and of a backbone. So every process is exported with the
sampler that it has by itself, every other sampler with a process, every backbone with a flow, and one with
attention with an energy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_policies import build, fits, small

from policies import registry
from policies.errors import ExportError
from policies.export.export import GRAPHS, export_onnx
from policies.export.exported_policy import ExportedPolicy
from policies.export.onnx_graph import observation_of, random_inputs
from policies.wrappers.score_correction import Correction

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

TOLERANCE = 1e-5
CHUNK = {"horizon": 4, "act_steps": 3}


def few(part: type) -> Any:
    """Build a small part that takes two steps where it can be told."""
    return small(part, steps=2, num_levels=2)


def cases() -> Iterator[Any]:
    """Yield (process, backbone, sampler) so that every part is exported once."""
    seen = set()
    for process in registry.parts("process"):
        sampler = registry.lookup("sampler", registry.lookup("process", process)().default_sampler()["name"])
        seen.add(sampler)
        yield pytest.param(process, "mlp", few(sampler), id=f"{process}-mlp")
    for name, sampler in registry.parts("sampler").items():
        if sampler not in seen and name != "diffusers":
            process = next(p for p in registry.parts("process") if fits(p, sampler=name))
            yield pytest.param(process, "mlp", few(sampler), id=f"{process}-mlp-{name}")
    for backbone in registry.parts("backbone"):
        if backbone != "mlp":
            euler = few(registry.lookup("sampler", "euler"))
            yield pytest.param("flow", backbone, euler, id=f"flow-{backbone}")
    # Gradients of attention are another part of a graph than those of a perceptron.
    ddim = few(registry.lookup("sampler", "ddim"))
    yield pytest.param("energy", "transformer", ddim, id="energy-transformer")


@pytest.mark.slow
@pytest.mark.parametrize(("process", "backbone", "sampler"), list(cases()))
def test_the_export_gives_the_actions_of_the_policy(
    process: str, backbone: str, sampler: Any, tmp_path: Path
) -> None:
    policy = build(process, backbone, sampler, **CHUNK)
    report = export_onnx(policy, tmp_path, latency_batches=())
    assert [row["batch"] for row in report.parity] == [1, 2, 7]
    assert report.worst <= TOLERANCE
    inputs = random_inputs(policy, 40, torch.Generator().manual_seed(99))
    ours, theirs = (
        one.act(observation_of(inputs), noise=inputs["noise"]) for one in (policy, ExportedPolicy(tmp_path))
    )
    torch.testing.assert_close(theirs, ours, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_another_program_s_loop_is_refused_with_a_reason(layers: int, graph: str, tmp_path: Path) -> None:
    sampler = small(registry.lookup("sampler", "diffusers"), clip_action=None)
    policy = build("diffusion", "mlp", sampler, **CHUNK)
    for _ in range(layers):
        policy = small(Correction, hidden_dims=(16,), dynamics_dims=(16,)).wrap(policy)
    inside = ", inside CorrectedPolicy," if layers else ""
    with pytest.raises(ExportError, match=f"sampler=diffusers{inside} cannot .* another program's loop"):
        export_onnx(policy, tmp_path / "out", graph=graph)
    assert not (tmp_path / "out").exists()
