"""The exported graph: a policy as one function, traced to ONNX and compared with the original."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from policies.energy import EnergyField
from policies.errors import ExportError, MissingExtraError
from policies.policy import Policy
from policies.weight_cache import seal

OPSET = 18

_TRACED_BATCH = 3
_SYMBOLIC_BATCH = 1009  # sizes that are equal would be taken for one, so this is no other size, nor a product
_log = logging.getLogger(__name__)


class SampledPolicy(nn.Module):
    """The function that is exported: physical observations and noise to physical actions."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return actions (B, Ta, Da).

        Shapes:
            inputs: `observation` (B, To, Do), `noise` (B, *noise_shape) and what else the policy sees: `goal`
            (B, Dg), images (B, To, H, W, 3) by camera.
        """
        seen = {name: value for name, value in inputs.items() if name not in ("observation", "noise")}
        cond = self.policy.encode({"state": inputs["observation"], **seen})
        return self.policy.executed(self.policy.decode(cond, inputs["noise"]))


def random_inputs(policy: Policy, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw observations inside the range of the statistics, images of random bytes, and noise."""

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


def write_checked_graph(
    model: SampledPolicy, path: Path, batch_sizes: Sequence[int], tolerance: float, seed: int
) -> list[dict[str, float]]:
    """Write a graph that reproduces the model at every batch size and return the parity table.

    Tracing at one batch size and freeing that dimension afterwards takes a third of the time of tracing with
    a symbolic one, but is wrong for a network that computes with its batch size: then the latter is done, and
    at once where gradients of energies are part of the graph.

    Raises:
        ExportError: If neither graph reproduces the model.
    """
    _refuse_foreign_loops(model.policy)
    traced = SampledPolicy(model.policy.clone())
    with torch.no_grad():
        traced(random_inputs(traced.policy, _TRACED_BATCH, torch.Generator().manual_seed(seed)))
    seal(traced)  # what depends on weights alone becomes constants of the graph
    for is_symbolic in (True,) if _has_gradients(traced) else (False, True):
        _write_graph(traced, path, seed, is_symbolic=is_symbolic)
        parity = _parity(model, open_session(path), batch_sizes, seed)
        worst = worst_of(parity)
        if worst <= tolerance:
            return parity
    raise ExportError(
        f"the exported graph must reproduce the policy within {tolerance:.0e} for batches of "
        f"{', '.join(map(str, batch_sizes))}; it differs by {worst:.2e}. Nothing was written."
    )


def _refuse_foreign_loops(policy: Policy) -> None:
    """Refuse a sampler that decides in Python at every step.

    Raises:
        ExportError: If the policy has one.
    """
    if getattr(getattr(policy, "table", None), "loop", None) is not None:
        raise ExportError(
            "a policy with sampler=diffusers cannot be exported: it runs another program's loop, which "
            "decides in Python at every step. Export policy.with_sampler(...) with a sampler of this package."
        )


def _write_graph(model: SampledPolicy, path: Path, seed: int, *, is_symbolic: bool) -> None:
    """Trace the model and write the graph, weights included, with a dynamic batch."""
    has_gradients = _has_gradients(model)
    size = _SYMBOLIC_BATCH if has_gradients else _TRACED_BATCH
    inputs = random_inputs(model.policy, size, torch.Generator().manual_seed(seed))
    batch = torch.export.Dim("batch", min=1, max=65536)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            _quiet("torch.onnx"),
            torch.no_grad(),
        ):
            warnings.simplefilter("ignore")
            shapes = {name: {0: batch} for name in inputs}
            call: dict[str, Any] = {"f": str(path)}
            if has_gradients:
                call |= {"model": _spell_out(model, inputs), "args": tuple(inputs.values())}
                call |= {"dynamic_shapes": tuple(shapes.values())}
            else:
                call |= {"model": model, "kwargs": {"inputs": inputs}}
                call |= {"dynamic_shapes": {"inputs": shapes} if is_symbolic else None}
            torch.onnx.export(
                **call,
                input_names=list(inputs),
                output_names=["action"],
                opset_version=OPSET,
                external_data=False,
                dynamo=True,
            )
    except Exception as error:
        raise ExportError(f"the policy could not be traced to ONNX: {error}") from error
    if not is_symbolic:
        _free_batch(path)


def _has_gradients(model: nn.Module) -> bool:
    """Tell whether acting takes gradients, which a graph cannot: they must be part of it."""
    return any(isinstance(part, EnergyField) for part in model.modules())


def _spell_out(model: SampledPolicy, inputs: Mapping[str, Tensor]) -> nn.Module:
    """Return a function of the inputs' values, of elementary operations, those of gradients among them."""
    names = list(inputs)
    spell_out = make_fx(
        lambda *values: model(dict(zip(names, values, strict=True))),
        tracing_mode="symbolic",
        decomposition_table=dict(torch.export.default_decompositions()),
        _allow_non_fake_inputs=True,  # weights
    )
    return spell_out(*inputs.values())


def _free_batch(path: Path) -> None:
    """Let the first dimension of inputs and outputs be any number; forget the shapes between them."""
    onnx = require_package("onnx")
    graph = onnx.load(path)
    for value in (*graph.graph.input, *graph.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del graph.graph.value_info[:]
    onnx.save(graph, path)


def _parity(
    model: SampledPolicy, session: Any, batch_sizes: Sequence[int], seed: int
) -> list[dict[str, float]]:
    """Compare graph and model on random inputs, one row per batch size."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for batch in batch_sizes:
        inputs = random_inputs(model.policy, batch, generator)
        rows.append({"batch": batch, "max_abs_difference": _difference(model, session, inputs)})
    return rows


@torch.no_grad()
def _difference(model: SampledPolicy, session: Any, inputs: dict[str, Tensor]) -> float:
    """Return the difference of `ExportReport`; infinite where the graph does not run or has another shape."""
    expected = model(inputs).numpy()
    try:
        found = run_graph(session, inputs)
    except Exception:  # onnxruntime's errors have no common class
        _log.debug("the graph does not run on inputs of batch %d", len(expected), exc_info=True)
        return math.inf
    if found.shape != expected.shape:
        return math.inf
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


def worst_of(parity: Sequence[dict[str, float]]) -> float:
    """Return the largest difference of a parity table; NaN if any is."""
    return float(np.max([row["max_abs_difference"] for row in parity]))


def open_session(path: str | Path, *, threads: int = 1) -> Any:
    """Open an ONNX file with onnxruntime on the CPU."""
    runtime = require_package("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised, not printed as well
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def feed_of(session: Any, inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Keep what the graph uses (a policy may ignore its noise) as arrays."""
    used = {node.name for node in session.get_inputs()}
    return {name: value.numpy() for name, value in inputs.items() if name in used}


def run_graph(session: Any, inputs: dict[str, Tensor]) -> np.ndarray:
    """Return the actions of the graph, (B, Ta, Da)."""
    return session.run(None, feed_of(session, inputs))[0]


def require_package(name: str) -> ModuleType:
    """Import a package of the extra `export`.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingExtraError(f"export needs '{name}': pip install 'burnish[export]'.") from None


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence a chatty logger for the duration."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
