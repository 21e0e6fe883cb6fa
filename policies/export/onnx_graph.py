"""ONNX graphs of a policy: tracing and parity checks."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from policies import runner
from policies.errors import ExportError
from policies.extras import require
from policies.networks.weight_cache import seal
from policies.normalizer import CentredNormalizer, Normalizer
from policies.policy import Policy
from policies.wrappers.best_of_n import BestOfN

OPSET = 18

_WARM_BATCH = 3
_FIXED_BATCH = 127  # a prime: in a traced shape its multiples are sizes that follow the batch
SYMBOLIC_BATCH = 1009  # tracing merges equal sizes; this equals no other size or product
_NUDGE = 1e-6  # perturbation of unit-variance noise, about accumulated rounding error
_log = logging.getLogger(__name__)


class Traceable(nn.Module):
    """Function of tensors to be traced; subclasses define `forward(inputs)`."""

    outputs: tuple[str, ...] = ()
    fixed: frozenset[str] = frozenset()  # inputs whose first dimension is not the batch
    is_sealed = True  # whether values that depend on weights alone may become graph constants

    def __init__(self, policy: Policy | BestOfN) -> None:
        super().__init__()
        self.policy: Any = policy

    @property
    def has_gradients(self) -> bool:
        """Whether evaluation computes gradients; a graph must contain them as operations."""
        return any(getattr(part, "evaluates_gradients", False) for part in self.policy.modules())

    def copy(self) -> Self:
        return type(self)(self.policy.clone())

    def example(self, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        return random_inputs(self.policy, batch, generator)


class SampledPolicy(Traceable):
    """Exported function: physical observations and noise to physical actions."""

    outputs = ("action", "plan")

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return actions (B, Ta, Da) and the plan (B, R, Da), all rows from the first executed one.

        Shapes:
            inputs: `observation` (B, To, Do), `noise` (B, *noise_shape), and, if used by the policy, `goal`
                (B, Dg) and images (B, To, H, W, 3) by camera.
        """
        chunk, spec = self.policy.plan(observation_of(inputs), inputs["noise"]), self.policy.chunk
        plan = self.policy.physical(chunk[:, spec.action_start :])
        return plan[:, : spec.act_steps], plan


def observation_of(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the policy's observation from the inputs of a graph."""
    others = {name: value for name, value in inputs.items() if name not in ("observation", "noise")}
    return {"state": inputs["observation"], **others}


def random_inputs(policy: Policy, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw observations within the statistics' range, random-byte images, and noise."""

    def feature(name: str, *shape: int) -> Tensor:
        return policy.normalizer.decode(name, 0.7 * torch.randn(batch, *shape, generator=generator))

    inputs = {
        "observation": feature("state", policy.chunk.obs_steps, policy.obs_dim),
        "noise": torch.randn(batch, *policy.noise_shape, generator=generator),
    }
    if policy.goal_dim:
        inputs["goal"] = feature("goal", policy.goal_dim)
    for camera, shape in policy.images.items():
        size = (batch, policy.chunk.obs_steps, *shape)
        inputs[camera] = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    return inputs


def refuse_foreign_loops(policy: Policy | BestOfN) -> None:
    """Refuse samplers with Python control flow in each step."""
    layers = list(_layers(policy))
    if any(getattr(getattr(one, "table", None), "loop", None) is not None for one in layers):
        inside = "" if len(layers) == 1 else f", inside {type(policy).__name__},"
        raise ExportError(
            f"a policy with sampler=diffusers{inside} cannot be exported: its loop decides in Python at "
            "every step. Export policy.with_sampler(...) with a sampler of this package."
        )


def _layers(policy: Any) -> Iterator[Any]:
    """Yield a policy and the wrapped policies inside, outermost first."""
    while policy is not None:
        yield policy
        policy = getattr(policy, "base", None) or getattr(policy, "policy", None)


def write_checked_graph(
    model: Traceable, path: Path, batch_sizes: Sequence[int], tolerance: float, seed: int
) -> list[dict[str, float]]:
    """Write a graph that reproduces the model at every batch size; returns the parity table.

    Tracing at a fixed batch size, which is freed afterwards, takes a third of the time of symbolic tracing.
    The latter is used for graphs that do not reproduce the model otherwise.
    """
    traced = _ready_to_trace(model, seed)
    for is_symbolic in (False, True):
        _write_graph(traced, path, seed, is_symbolic=is_symbolic)
        parity = _parity(model, open_session(path), batch_sizes, seed)
        worst = worst_of(parity)
        if worst <= tolerance:
            return parity
    raise not_reproduced(model, worst, batch_sizes, tolerance, seed)


def _ready_to_trace(model: Traceable, seed: int) -> Any:
    """Return a copy of a model for tracing, with little rounding and weight-only values as constants."""
    traced = model.copy()
    for part in list(traced.modules()):
        for name, child in part.named_children():
            if isinstance(child, Normalizer):
                setattr(part, name, CentredNormalizer(child))
    if traced.is_sealed:
        with torch.no_grad():
            traced(traced.example(_WARM_BATCH, torch.Generator().manual_seed(seed)))
        seal(traced)
    return traced


def not_reproduced(
    model: Traceable, worst: float, batch_sizes: Sequence[int], tolerance: float, seed: int
) -> ExportError:
    """Return the error for an export that does not reproduce its policy."""
    own = own_rounding(model, batch_sizes, seed)
    why = (
        f" The policy itself changes by {own:.2e} where its noise does by {_NUDGE:.0e}: it amplifies "
        "rounding on any machine. Train a smoother one, or give tolerance=<difference>."
        if own > tolerance
        else ""
    )
    return ExportError(
        f"the exported graph must reproduce the policy within {tolerance:.0e} for batches of "
        f"{', '.join(map(str, batch_sizes))}; it differs by {worst:.2e}. Nothing was written.{why}"
    )


def own_rounding(model: Traceable, batch_sizes: Sequence[int], seed: int) -> float:
    """Return the largest output change under noise perturbed at rounding scale."""
    generator, largest = torch.Generator().manual_seed(seed), 0.0
    for batch in batch_sizes:
        inputs = model.example(batch, generator)
        if "noise" not in inputs:
            continue
        nudge = _NUDGE * torch.randn(inputs["noise"].shape, generator=generator)
        moved = model(inputs | {"noise": inputs["noise"] + nudge})
        for one, other in zip(model(inputs), moved, strict=True):
            largest = max(largest, float((one - other).detach().abs().max()))
    return largest


def _write_graph(model: Traceable, path: Path, seed: int, *, is_symbolic: bool) -> None:
    size = SYMBOLIC_BATCH if model.has_gradients and is_symbolic else _FIXED_BATCH
    inputs = model.example(size, torch.Generator().manual_seed(seed))
    batch = torch.export.Dim("batch", min=1, max=65536)
    shapes: dict[str, dict[int, Any]] = {k: {} if k in model.fixed else {0: batch} for k in inputs}
    call: dict[str, Any] = {"f": str(path)}
    try:
        with _quiet_tracing():
            if model.has_gradients:
                spelt = _spell_out(model, inputs, is_symbolic=is_symbolic)
                call |= {"model": spelt, "args": tuple(inputs.values())}
                call |= {"dynamic_shapes": tuple(shapes.values()) if is_symbolic else None}
            else:
                call |= {"model": model, "kwargs": {"inputs": inputs}}
                call |= {"dynamic_shapes": {"inputs": shapes} if is_symbolic else None}
            torch.onnx.export(
                **call,
                input_names=list(inputs),
                output_names=list(model.outputs),
                opset_version=OPSET,
                external_data=False,
                dynamo=True,
            )
    except Exception as error:
        raise ExportError(f"the policy could not be traced to ONNX: {error}") from error
    _forget_traces(path)
    if not is_symbolic:
        _free_batch(path, model.fixed)


def _forget_traces(path: Path) -> None:
    """Drop from a graph which lines of which files on this machine its nodes come from."""
    onnx = require("onnx", extra="export", what="export")
    model = onnx.load(path)
    for part in (*model.graph.node, *model.graph.value_info):
        del part.metadata_props[:]
    onnx.save(model, path)


@contextlib.contextmanager
def _quiet_tracing() -> Iterator[None]:
    """Trace without gradients and without output."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _spell_out(model: Traceable, inputs: Mapping[str, Tensor], *, is_symbolic: bool) -> nn.Module:
    """Return a function of input values in elementary operations, gradients included."""
    names = list(inputs)
    trace = make_fx(
        lambda *values: model(dict(zip(names, values, strict=True))),
        tracing_mode="symbolic" if is_symbolic else "fake",
        decomposition_table=dict(torch.export.default_decompositions()),
        _allow_non_fake_inputs=True,  # weights
    )
    return trace(*inputs.values())


def _free_batch(path: Path, fixed: frozenset[str]) -> None:
    """Let a graph that was traced at `_FIXED_BATCH` take any batch; drops intermediate shapes."""
    onnx = require("onnx", extra="export", what="export")
    model = onnx.load(path)
    inputs = [value for value in model.graph.input if value.name not in fixed]
    for value in (*inputs, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.value_info[:]
    _free_shapes(onnx, model.graph, inputs[0].name)
    onnx.save(model, path)


def _free_shapes(onnx: Any, graph: Any, source: str) -> None:
    """Let constant shapes, and constants that repeat for every row of a batch, follow the input `source`."""
    make, to_array = onnx.helper.make_node, onnx.numpy_helper.to_array
    constants = {one.name: one for one in graph.initializer}
    constants |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    added: dict[str, list[Any]] = {}

    def following(shape: np.ndarray, *, is_inferred: bool = False) -> str:
        """Return the name of a shape; -1 stands for the rows if they can be inferred."""
        rows = shape // _FIXED_BATCH * _follows(shape)
        others = np.where(rows, 0, shape)
        name = f"shape_{'_'.join(map(str, shape))}{'_inferred' * is_inferred}"
        if is_inferred:
            added[name] = [make("Constant", [], [name], value_ints=np.where(rows, -1, others))]
        else:
            added[name] = [
                make("Constant", [], [f"{name}_rows"], value_ints=rows),
                make("Constant", [], [f"{name}_others"], value_ints=others),
                make("Shape", [source], [f"{name}_batch"], start=0, end=1),
                make("Mul", [f"{name}_rows", f"{name}_batch"], [f"{name}_all_rows"]),
                make("Add", [f"{name}_all_rows", f"{name}_others"], [name]),
            ]
        return name

    for node in graph.node:
        place = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}.get(node.op_type)
        if place is not None and node.input[place] in constants:
            shape = to_array(constants[node.input[place]])
            if count := int(_follows(shape).sum()):
                is_inferred = node.op_type == "Reshape" and count == 1 and bool((shape >= 0).all())
                node.input[place] = following(shape, is_inferred=is_inferred)
    for constant in graph.initializer:
        shape = np.array(constant.dims, dtype=np.int64)
        if _follows(shape).sum() == 1:
            values, axis = to_array(constant), int(_follows(shape).argmax())
            one = np.split(values, _FIXED_BATCH, axis)[0]
            rounding = 1e-5 if values.dtype.kind == "f" else 0.0  # a product rounds equal rows differently
            if np.allclose(values, np.concatenate([one] * _FIXED_BATCH, axis), rtol=rounding, atol=rounding):
                name, times = constant.name, following(np.where(_follows(shape), _FIXED_BATCH, 1))
                constant.CopyFrom(onnx.numpy_helper.from_array(one, f"{name}_one"))
                added[name] = [make("Tile", [f"{name}_one", times], [name])]
    nodes = [*(node for made in added.values() for node in made), *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _follows(shape: np.ndarray) -> np.ndarray:
    """Return which sizes of a traced shape follow the batch."""
    return (shape > 0) & (shape % _FIXED_BATCH == 0)


def _parity(model: Traceable, session: Any, batch_sizes: Sequence[int], seed: int) -> list[dict[str, float]]:
    return parity_of(model, lambda inputs: runner.run(session, arrays_of(inputs)), batch_sizes, seed)


def parity_of(model: Traceable, run: Any, batch_sizes: Sequence[int], seed: int) -> list[dict[str, float]]:
    """Compare a function with the model on random inputs, one row per batch size."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for batch in batch_sizes:
        inputs = model.example(batch, generator)
        rows.append({"batch": batch, "max_abs_difference": _difference(model, run, inputs)})
    return rows


@torch.no_grad()
def _difference(model: Traceable, run: Any, inputs: dict[str, Tensor]) -> float:
    """Return the difference as in `ExportReport`; infinite if the graph fails or has another output shape."""
    expected = [output.numpy() for output in model(inputs)]
    try:
        found = run(inputs)
    except Exception as error:  # onnxruntime's errors have no common class
        _log.warning("the graph does not run on inputs of batch %d: %s", len(expected[0]), error)
        return math.inf
    if [array.shape for array in found] != [array.shape for array in expected]:
        return math.inf
    pairs = zip(found, expected, strict=True)
    return float(np.max([np.abs(a - b).max() / max(1.0, np.abs(b).max()) for a, b in pairs]))


def worst_of(parity: Sequence[dict[str, float]]) -> float:
    """Return the largest difference of a parity table; NaN if any is."""
    return float(np.max([row["max_abs_difference"] for row in parity]))


def open_session(path: str | Path) -> Any:
    """Open an ONNX file with onnxruntime on the CPU."""
    require("onnxruntime", extra="export", what="export")
    return runner.open_session(path)


def arrays_of(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return inputs as arrays."""
    return {name: value.numpy() for name, value in inputs.items()}
