"""Parse and validate the metadata of an untrusted exported folder, before anything is opened or allocated.

Legend: B batch, To observation history, Th predicted horizon, Ta executed steps, R rows of a plan, Do, Da, Dg
widths of observation, action and goal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.errors import CheckpointError, ConfigError, ExportError
from policies.policy_config import ChunkSpec
from policies.runner import SIGNATURE
from policies.storage.features import Feature, short
from policies.storage.strict_json import own_file, read_json

GRAPHS = ("whole", "step")  # sampler inside one graph, or one network evaluation and a table of the loop
MAX_NUMBERS = 2**26  # of one row of an input or output; a camera of 1080 by 1920 pixels has 2**23

_DTYPES = ("float32", "uint8")


@dataclass(frozen=True)
class Signature:
    """Metadata of an exported folder."""

    facts: Mapping[str, Any]  # all of `signature.json`
    inputs: Mapping[str, Feature]  # without batch: `observation` (To, Do), `goal` (Dg,), images (To, H, W, 3)
    noise_shape: tuple[int, ...]  # shape of one noise row
    action: Feature  # (Ta, Da)
    chunk: ChunkSpec  # horizons
    low: tuple[float, ...] | None  # lower action bounds (Da,), physical; None: unknown
    high: tuple[float, ...] | None  # upper action bounds (Da,)
    task: str | None  # name of the task; None: unknown
    control_hz: float | None  # execution rate of actions [Hz]; None: unknown
    provenance: Mapping[str, Any]  # recorded origin of the policy

    @property
    def obs_dim(self) -> int:
        return self.inputs["observation"].shape[-1]

    @property
    def goal_dim(self) -> int:
        return self.inputs["goal"].shape[0] if "goal" in self.inputs else 0

    @property
    def images(self) -> dict[str, tuple[int, ...]]:
        """Image shapes (H, W, 3) by camera."""
        return {name: one.shape[1:] for name, one in self.inputs.items() if one.dtype == "uint8"}


def is_exported(folder: Path) -> bool:
    """Whether a folder is an output of `burnish export`."""
    return (folder / SIGNATURE).is_file()


def read_signature(folder: Path) -> Signature:
    """Return the validated metadata of an exported folder.

    Raises:
        CheckpointError: If it is no exported folder.
        ExportError: If its signature cannot be read, or does not describe a policy; names file and key.
    """
    if not is_exported(folder):
        raise CheckpointError(f"{folder} is no exported policy: it holds no {SIGNATURE}.")
    try:
        facts = read_json(own_file(folder / SIGNATURE))  # its errors name the file
    except (OSError, ValueError) as error:
        raise ExportError(f"{error} It must describe an exported policy; export that again.") from None
    try:
        return _checked(facts)
    except ValueError as error:
        raise ExportError(f"{folder / SIGNATURE} must describe an exported policy: {error}") from None


def _checked(facts: dict[str, Any]) -> Signature:
    if facts.get("format") != "onnx":
        raise ValueError(f"format must be onnx; got {short(facts.get('format'))}.")
    if facts.get("graph") not in GRAPHS:
        raise ValueError(f"graph must be one of {', '.join(GRAPHS)}; got {short(facts.get('graph'))}.")
    inputs = {str(name): _feature(f"inputs.{name}", one) for name, one in _map(facts, "inputs").items()}
    outputs = _map(facts, "outputs")
    action, plan = (_feature(f"outputs.{name}", outputs.get(name)) for name in ("action", "plan"))
    if not {"observation", "noise"} <= inputs.keys():
        raise ValueError(f"inputs must hold observation and noise; got {short(sorted(inputs))}.")
    noise = inputs.pop("noise")
    chunk = _chunk(facts, action, plan)
    _check_inputs(inputs, chunk)
    described, task, rate = outputs["action"], facts.get("task"), facts.get("control_hz")
    if task is not None and not isinstance(task, str):
        raise ValueError(f"task must be a text, or null; got {short(task)}.")
    if rate is not None and not (_is_number(rate) and rate > 0):
        raise ValueError(f"control_hz must be positive, or null; got {short(rate)}.")
    return Signature(
        facts=facts,
        inputs=inputs,
        noise_shape=noise.shape,
        action=action,
        chunk=chunk,
        low=_limits(described, "low", chunk.action_dim),
        high=_limits(described, "high", chunk.action_dim),
        task=task,
        control_hz=None if rate is None else float(rate),
        provenance=_map(facts, "provenance") if "provenance" in facts else {},
    )


def _chunk(facts: Mapping[str, Any], action: Feature, plan: Feature) -> ChunkSpec:
    """Return the horizons, which must agree with the output shapes."""
    if len(action.shape) != 2:
        raise ValueError(f"outputs.action.shape must be [B, Ta, Da]; got {action.shape} without its batch.")
    names = ("horizon", "act_steps", "obs_steps", "action_start")
    horizon, act_steps, obs_steps, start = (_count(name, facts.get(name), least=0) for name in names)
    try:
        chunk = ChunkSpec(action.shape[1], horizon, act_steps, obs_steps, start)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    for name, found, rows in (("action", action, act_steps), ("plan", plan, horizon - start)):
        if found != Feature((rows, chunk.action_dim)):
            raise ValueError(
                f"outputs.{name} must have {rows} rows of {chunk.action_dim} float32 by the horizons; got "
                f"{found.shape}, {found.dtype}."
            )
    return chunk


def _check_inputs(inputs: Mapping[str, Feature], chunk: ChunkSpec) -> None:
    for name, feature in inputs.items():
        shape, is_image = feature.shape, feature.dtype == "uint8"
        if name == "goal":
            fits = len(shape) == 1 and not is_image
        elif name == "observation":
            fits = len(shape) == 2 and shape[0] == chunk.obs_steps and not is_image
        else:
            fits = len(shape) == 4 and (shape[0], shape[3]) == (chunk.obs_steps, 3) and is_image
        if not fits:
            raise ValueError(
                f"inputs.{short(name)} must be observation (To, Do), goal (Dg) or images (To, H, W, 3) of "
                f"uint8 with To={chunk.obs_steps}; got {shape}, {feature.dtype}."
            )


def _feature(key: str, data: Any) -> Feature:
    """Parse shape and dtype of an input or output, without its batch."""
    if not isinstance(data, dict) or data.get("dtype") not in _DTYPES:
        raise ValueError(f"{short(key)} must be an object with shape, and dtype one of {', '.join(_DTYPES)}.")
    shape = data.get("shape")
    if not isinstance(shape, list) or not 1 <= len(shape) <= 8 or shape[0] != "B":
        raise ValueError(f"{short(key)}.shape must be a list that begins with 'B'; got {short(shape)}.")
    sizes = tuple(_count(f"{key}.shape", size) for size in shape[1:])
    if math.prod(sizes) > MAX_NUMBERS:
        raise ValueError(f"{short(key)}.shape must have at most {MAX_NUMBERS} numbers; got {short(shape)}.")
    return Feature(sizes, data["dtype"])


def _map(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = data.get(key)
    if not isinstance(found, dict):
        raise ValueError(f"{key} must be an object; got {short(found)}.")
    return found


def _count(key: str, value: Any, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= MAX_NUMBERS:
        raise ValueError(f"{short(key)} must be whole, {least} to {MAX_NUMBERS}; got {short(value)}.")
    return value


def _limits(action: Mapping[str, Any], key: str, width: int) -> tuple[float, ...] | None:
    """Parse action bounds; `read_json` has refused non-finite numbers."""
    values = action.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != width or not all(map(_is_number, values)):
        raise ValueError(f"outputs.action.{key} must hold {width} numbers, or null; got {short(values)}.")
    return tuple(float(value) for value in values)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
