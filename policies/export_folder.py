"""The exported folder: names of the files, what each of them says, and how they replace what was there."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from policies.errors import ExportError
from policies.export_graph import OPSET, SampledPolicy, feed_of, random_inputs, run_graph, worst_of
from policies.policy import Policy

MODEL, SIGNATURE, SAMPLE, REPORT, CARD = (
    "policy.onnx",
    "signature.json",
    "sample.npz",
    "report.json",
    "README.md",
)


@dataclass(frozen=True)
class Surroundings:
    """What is known of the task that a policy was made for; it goes into the signature. None: not known.

    Attributes:
        task: Name of the task.
        control_hz: Rate at which the rows of an action chunk are executed.
        obs_names: Name and unit of every observation entry, (Do,).
        action_names: Name and unit of every action entry, (Da,).
        action_low: Smallest action of the task, (Da,), physical units; the graph does not clip.
        action_high: Largest action of the task, (Da,).
    """

    task: str | None = None
    control_hz: float | None = None
    obs_names: Sequence[str] | None = None
    action_names: Sequence[str] | None = None
    action_low: Sequence[float] | None = None
    action_high: Sequence[float] | None = None


@dataclass(frozen=True)
class ExportReport:
    """What was written and how well it agrees.

    `parity` rows: batch, max_abs_difference (physical action units, relative to the largest magnitude
    where that exceeds 1). `latency` rows: batch, eager_ms, onnx_ms (medians, one thread).
    """

    directory: str
    opset: int
    tolerance: float
    parity: list[dict[str, float]]
    latency: list[dict[str, float]]

    @property
    def worst(self) -> float:
        """Largest difference over all batch sizes; NaN if any is."""
        return worst_of(self.parity)


def refuse_to_replace(directory: str | Path, *, overwrite: bool) -> None:
    """Refuse to write into a directory that holds something, unless told to.

    Raises:
        ExportError: If it is a file, or not empty and `overwrite` is false.
    """
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise ExportError(f"out={target} is a file; choose another directory.")
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise ExportError(f"out={target} exists; choose another directory or say overwrite=true.")


@contextlib.contextmanager
def draft_of(target: Path) -> Iterator[Path]:
    """Collect files aside and move them into `target` when all is well; a failure leaves nothing behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as draft:
        yield Path(draft)
        target.mkdir(exist_ok=True)
        for path in Path(draft).iterdir():
            path.replace(target / path.name)


def signature(policy: Policy, around: Surroundings) -> dict[str, Any]:
    """Describe inputs and outputs of the graph; `B` is the dynamic batch, null is what is not known."""
    chunk = policy.chunk

    def feature(*shape: int, units: str = "physical", **facts: Any) -> dict[str, Any]:
        return {"shape": ["B", *shape], "dtype": "float32", "units": units} | facts

    inputs = {
        "observation": feature(chunk.obs_steps, policy.obs_dim, names=_entries(around.obs_names)),
        "noise": feature(*policy.noise_shape, units="standard normal"),
    }
    if policy.goal_dim:
        inputs["goal"] = feature(policy.goal_dim, names=None)
    for camera, shape in policy.images.items():
        inputs[camera] = feature(chunk.obs_steps, *shape, units="0 to 255, red green blue", dtype="uint8")
    action = feature(
        chunk.act_steps,
        chunk.action_dim,
        names=_entries(around.action_names),
        low=_entries(around.action_low),
        high=_entries(around.action_high),
    )
    return {
        "inputs": inputs,
        "outputs": {"action": action},
        "task": around.task,
        "control_hz": around.control_hz,
        "obs_steps": chunk.obs_steps,
        "horizon": chunk.horizon,
        "action_start": chunk.action_start,
        "act_steps": chunk.act_steps,
        "noise_changes_action": policy.noise_sensitive,
        "opset": OPSET,
    }


def _entries(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)


@torch.no_grad()
def write_facts(
    model: SampledPolicy,
    session: Any,
    target: Path,
    report: ExportReport,
    generator: torch.Generator,
    facts: dict[str, Any],
) -> None:
    """Write signature, sample, report and README."""
    (target / SIGNATURE).write_text(json.dumps(facts, indent=2) + "\n")
    inputs = random_inputs(model.policy, 2, generator)
    arrays: dict[str, Any] = {**feed_of(session, inputs), "action": run_graph(session, inputs)}
    np.savez(target / SAMPLE, **arrays)
    (target / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n")
    (target / CARD).write_text(_card(facts, report))


def _card(facts: dict[str, Any], report: ExportReport) -> str:
    inputs = "\n".join(
        f"| `{name}` | {facts_of['shape']} | {facts_of['units']} |"
        for name, facts_of in facts["inputs"].items()
    )
    parity = "\n".join(f"| {row['batch']} | {row['max_abs_difference']:.1e} |" for row in report.parity)
    latency = "\n".join(
        f"| {row['batch']} | {row['eager_ms']:.2f} | {row['onnx_ms']:.2f} |" for row in report.latency
    )
    made_for = "" if facts["task"] is None else f"\nMade for the task `{facts['task']}`"
    made_for += "" if facts["control_hz"] is None else f", one action every {1e3 / facts['control_hz']:g} ms"
    return f"""# Exported policy

`{MODEL}` maps observations and noise to `act_steps` = {facts["act_steps"]} actions, in physical units.
Normaliser, network and the whole sampler are inside; opset {report.opset}.{made_for}{"." if made_for else ""}
`{SIGNATURE}` has the names of observations and actions, the action limits and the control rate, or null
where they are not known. The graph does not clip actions.

| input | shape | units |
|---|---|---|
{inputs}

```python
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession("{MODEL}")
sample = np.load("{SAMPLE}")
feed = {{node.name: sample[node.name] for node in session.get_inputs()}}
action = session.run(None, feed)[0]          # equals sample["action"]
```

Largest difference to the original on random inputs (tolerance {report.tolerance:.0e}):

| batch | difference |
|---|---|
{parity}

Median latency, one thread, on the machine that exported:

| batch | eager [ms] | onnx [ms] |
|---|---|---|
{latency}
"""
