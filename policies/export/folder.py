"""The exported folder: files, contents, and replacement of an earlier export."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from policies.errors import ExportError
from policies.export.onnx_graph import OPSET, worst_of
from policies.policy import Policy
from policies.runner import ENCODER, LOOP, MODEL, SIGNATURE, STEP
from policies.storage.atomic_write import draft_folder, move_into
from policies.wrappers.best_of_n import BestOfN

REPORT, CARD, RUNNER = "report.json", "README.md", "runner.py"
MODELS = (MODEL, ENCODER, STEP, LOOP)  # files that hold the policy

Run = Callable[[Mapping[str, Tensor]], list[np.ndarray]]  # inputs -> actions (B, Ta, Da), plan (B, R, Da)


@dataclass(frozen=True)
class Surroundings:
    """Facts about the policy's task for the signature. None: unknown."""

    task: str | None = None  # name of the task
    control_hz: float | None = None  # execution rate of action-chunk rows [Hz]
    obs_names: Sequence[str] | None = None  # name and unit of every observation entry, (Do,)
    action_names: Sequence[str] | None = None  # name and unit of every action entry, (Da,)
    action_low: Sequence[float] | None = None  # action bounds of the task, (Da,); the graph does not clip
    action_high: Sequence[float] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)  # task, algorithm, seed; JSON values


@dataclass(frozen=True)
class ExportReport:
    """Parity and latency of an export.

    `parity` rows: batch, max_abs_difference (physical action units, relative to the largest magnitude
    where that exceeds 1). `latency` rows: batch, eager_ms and onnx_ms, medians on one thread.
    """

    directory: str
    graph: str
    opset: int
    tolerance: float
    parity: list[dict[str, float]]
    latency: list[dict[str, float]]

    @property
    def worst(self) -> float:
        """Largest difference over all batch sizes; NaN if any is."""
        return worst_of(self.parity)


def refuse_to_replace(directory: str | Path, *, overwrite: bool) -> None:
    """Refuse to write into a non-empty directory unless `overwrite` is set."""
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise ExportError(f"out={target} is a file; choose another directory.")
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise ExportError(f"out={target} exists; choose another directory or say overwrite=true.")


@contextlib.contextmanager
def draft_of(target: Path) -> Iterator[Path]:
    """Collect files in a draft and move them into `target` on success; a failure changes nothing.

    A program that is killed while they are moved leaves no signature, and so no export.
    """
    with draft_folder(target) as draft:
        yield draft
        for name in (SIGNATURE, *MODELS, RUNNER):  # files of another graph
            (target / name).unlink(missing_ok=True)
        move_into(draft, target, last=SIGNATURE)


def signature(policy: Policy | BestOfN, around: Surroundings, *, graph: str = "whole") -> dict[str, Any]:
    """Describe inputs and outputs of the export; `B` is the dynamic batch, null is unknown."""
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
    box = {"low": around.action_low, "high": around.action_high}
    limits: dict[str, Any] = {k: None if one is None else [*map(float, one)] for k, one in box.items()}
    names = _entries(around.action_names)
    action = feature(chunk.act_steps, chunk.action_dim, names=names, **limits)
    plan = feature(chunk.horizon - chunk.action_start, chunk.action_dim)
    return {
        "format": "onnx",
        "graph": graph,
        "inputs": inputs,
        "outputs": {"action": action, "plan": plan},
        "task": around.task,
        "control_hz": around.control_hz,
        "obs_steps": chunk.obs_steps,
        "horizon": chunk.horizon,
        "action_start": chunk.action_start,
        "act_steps": chunk.act_steps,
        "noise_changes_action": policy.noise_sensitive,
        "is_deterministic": bool(getattr(policy, "is_deterministic", False)),  # given where it starts
        "chooses": policy.chooses,
        "opset": OPSET,
        "provenance": dict(around.provenance),
    }


def _entries(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)
