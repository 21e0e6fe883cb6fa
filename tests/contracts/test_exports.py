"""The law of every export: graph and program give the actions of the policy, at any batch.

A graph is made of a process with its sampler, and of a backbone. So every process is exported with the
sampler that it has by itself, every other sampler with a process, every backbone with a flow, and one with
attention with an energy.

A graph is made of a program of torch.export, so programs alone are checked for every backbone, also under a
gradient, and with `--all` for the same cases as graphs. `HEAVY` has none: tracing these two takes longer than
all others together; their graphs are checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from pairwise import representatives
from test_policies import STEEP, build, fits, small

from policies import registry
from policies.errors import ExportError
from policies.export.export import FORMATS, GRAPHS, export_policy
from policies.export.exported_policy import ExportedPolicy
from policies.export.onnx_graph import observation_of, random_inputs
from policies.wrappers.score_correction import Correction

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

TOLERANCE = 1e-5
HEAVY = (("flow", "unet1d"), ("energy", "transformer"))
"""Processes and backbones whose programs are left out."""

CHUNK = {"horizon": 4, "act_steps": 3}


def few(part: type) -> Any:
    """Build a small part that takes two steps where it can be told."""
    return small(part, steps=2, num_levels=2)


def cases() -> Iterator[Any]:
    """Yield (process, backbone, sampler) so that every part is exported once."""
    seen = set()
    for process in registry.parts("process"):
        sampler = type(registry.lookup("process", process)().default_sampler())
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


def formats() -> Iterator[Any]:
    """Yield every case as a graph, and the programs that are checked alone."""
    light = [case for case in cases() if case.values[:2] not in HEAVY]
    programs = representatives(light, lambda case: (case.values[1], case.values[0] in STEEP))
    for format in FORMATS:
        for case in programs if format == "torch" else cases():
            yield pytest.param(*case.values, format, id=f"{case.id}-{format}")


@pytest.mark.slow
@pytest.mark.parametrize(("process", "backbone", "sampler", "format"), list(formats()))
def test_the_export_gives_the_actions_of_the_policy(
    process: str, backbone: str, sampler: Any, format: str, tmp_path: Path
) -> None:
    policy = build(process, backbone, sampler, **CHUNK)
    report = export_policy(policy, tmp_path, format=format, compiled=False, latency_batches=())
    assert [row["batch"] for row in report.parity] == [1, 2, 7]
    assert report.worst <= TOLERANCE
    inputs = random_inputs(policy, 40, torch.Generator().manual_seed(99))
    ours, theirs = (
        one.act(observation_of(inputs), noise=inputs["noise"])
        for one in (policy, ExportedPolicy(tmp_path, trust=True))
    )
    torch.testing.assert_close(theirs, ours, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_another_program_s_loop_is_refused_with_a_reason(layers: int, graph: str, tmp_path: Path) -> None:
    sampler = small(registry.lookup("sampler", "diffusers"), clip_action=None)
    policy = build("diffusion", "mlp", sampler, **CHUNK)
    for _ in range(layers):
        policy = small(Correction, hidden_dims=(16,), dynamics_dims=(16,)).wrap(policy)
    with pytest.raises(ExportError, match=mentions("sampler=diffusers loop")):
        export_policy(policy, tmp_path / "out", graph=graph)
    assert not (tmp_path / "out").exists()
