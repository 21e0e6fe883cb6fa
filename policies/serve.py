"""What a policy server serves: a policy, or an exported folder.

Legend: B batch, To observation history, Ta executed steps, Do and Da observation and action widths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from policies.errors import ExportError
from policies.export_folder import MODEL, SIGNATURE, Surroundings
from policies.export_graph import require_package
from policies.history import Array
from policies.policy import Policy
from policies.strict_json import read_json
from policies.wire import Feature, Schema

STATE = "observation"
"""What the state is called between machines, as in exported folders; policies call it `state`."""


class ServedPolicy:
    """A policy, on the device it is on.

    Args:
        policy: The policy.
        around: What is known of its task.
        fingerprint: Of its weights; tells a client that another policy is served.
    """

    def __init__(self, policy: Policy, around: Surroundings | None = None, fingerprint: str = "") -> None:
        self._policy = policy.eval()
        self.noise_shape = tuple(policy.noise_shape)
        chunk, around = policy.chunk, around or Surroundings()
        inputs = {STATE: Feature((chunk.obs_steps, policy.obs_dim))}
        if policy.goal_dim:
            inputs["goal"] = Feature((policy.goal_dim,))
        for camera, shape in policy.images.items():
            inputs[camera] = Feature((chunk.obs_steps, *shape), "uint8")
        self.schema = Schema(
            inputs,
            Feature((chunk.act_steps, chunk.action_dim)),
            chunk.obs_steps,
            around.task,
            around.control_hz,
            _floats(around.action_low),
            _floats(around.action_high),
            fingerprint,
        )

    def decide(self, inputs: Mapping[str, Array], noise: Array) -> Array:
        """Map inputs (B, ...) and noise (B, *noise_shape) to actions (B, Ta, Da), physical."""
        obs = {"state" if name == STATE else name: value for name, value in inputs.items()}
        drawn = torch.as_tensor(noise, dtype=self._policy.dtype, device=self._policy.device)
        actions: Array = self._policy.act(obs, noise=drawn).float().cpu().numpy()
        return actions


class ServedFolder:
    """An exported folder, run by onnxruntime.

    Args:
        directory: What `burnish export` wrote.
        threads: Of onnxruntime.

    Raises:
        ExportError: If the folder is none, or incomplete.
        MissingExtraError: If onnxruntime is not installed.
    """

    def __init__(self, directory: str | Path, threads: int = 1) -> None:
        folder = Path(directory)
        facts = read_signature(folder)
        runtime = require_package("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        try:
            self._session = runtime.InferenceSession(
                str(folder / MODEL), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises classes of its own
            raise ExportError(f"{folder / MODEL} cannot be run: {error}") from None
        self._used = {node.name for node in self._session.get_inputs()}
        fingerprint = hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()
        self.schema, self.noise_shape = _schema(folder, facts, fingerprint)

    def decide(self, inputs: Mapping[str, Array], noise: Array) -> Array:
        """Map inputs (B, ...) and noise (B, *noise_shape) to actions (B, Ta, Da), physical."""
        feed = {name: value for name, value in {**inputs, "noise": noise}.items() if name in self._used}
        actions: Array = np.asarray(self._session.run(None, feed)[0])
        return actions


def is_exported(directory: str | Path) -> bool:
    """Whether a directory is an exported folder."""
    return (Path(directory) / SIGNATURE).is_file()


def read_signature(folder: Path) -> dict[str, Any]:
    """Return signature.json of an exported folder.

    Raises:
        ExportError: If the folder is none, or its graph is missing.
    """
    for name in (SIGNATURE, MODEL):
        if not (folder / name).is_file():
            raise ExportError(f"{folder} is not an exported folder: it has no {name}. Run burnish export.")
    try:
        return read_json(folder / SIGNATURE)
    except ValueError as error:
        raise ExportError(str(error)) from None


def _schema(folder: Path, facts: Mapping[str, Any], policy: str) -> tuple[Schema, tuple[int, ...]]:
    """Return what an exported folder takes and gives, and the shape of a row of its noise."""
    try:
        rows = {name: _row(one) for name, one in facts["inputs"].items()}
        action = facts["outputs"]["action"]
        noise = rows.pop("noise").shape
        low, high = _floats(action.get("low")), _floats(action.get("high"))
        own = (facts["obs_steps"], facts.get("task"), facts.get("control_hz"))
        return Schema(rows, _row(action), *own, low, high, policy), noise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{folder / SIGNATURE} does not describe a policy: {error!r}.") from None


def _row(feature: Mapping[str, Any]) -> Feature:
    """Read a feature without its batch."""
    return Feature(tuple(int(n) for n in feature["shape"][1:]), str(feature["dtype"]))


def _floats(values: Any) -> tuple[float, ...] | None:
    return None if values is None else tuple(float(value) for value in values)
