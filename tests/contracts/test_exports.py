"""The law of every export: the graph gives the actions of the policy, at any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_policies import build, exported, small

from policies import registry
from policies.errors import ExportError
from policies.export import onnx_graph
from policies.export.export import GRAPHS, export_onnx
from policies.export.exported_policy import ExportedPolicy
from policies.export.onnx_graph import observation_of, random_inputs
from policies.wrappers.score_correction import Correction

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

TOLERANCE = 1e-5
CHUNK = {"horizon": 5, "act_steps": 3}


@pytest.mark.slow
@pytest.mark.parametrize(("process", "backbone", "sampler"), exported())
def test_the_export_gives_the_actions_of_the_policy(
    process: str, backbone: str, sampler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, traced = onnx_graph._write_graph, []

    def count(*args: Any, is_symbolic: bool) -> None:
        traced.append(is_symbolic)
        write(*args, is_symbolic=is_symbolic)

    monkeypatch.setattr(onnx_graph, "_write_graph", count)
    policy = build(process, backbone, sampler, **CHUNK)
    report = export_onnx(policy, tmp_path, latency_batches=())
    assert [row["batch"] for row in report.parity] == [1, 2, 7]
    assert report.worst <= TOLERANCE
    assert traced == [False], "a symbolic batch takes three times as long"
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
    with pytest.raises(ExportError, match=f"sampler=diffusers{inside} cannot .* loop"):
        export_onnx(policy, tmp_path / "out", graph=graph)
    assert not (tmp_path / "out").exists()
