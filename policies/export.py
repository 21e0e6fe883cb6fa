"""Export: one ONNX graph with normaliser, network and the whole sampler inside, noise as an input.

An export is a folder that needs nothing of ours to run:

    policy.onnx       (observation[, goal], noise) -> action, dynamic batch
    signature.json    names, shapes, types, units, limits, control rate, horizons of inputs and outputs
    sample.npz        one input/output pair
    report.json       parity on random inputs, latency
    README.md         how to run it with numpy and onnxruntime

An export that does not reproduce the policy is an error, not a warning.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policies.errors import ExportError, MissingExtraError
from policies.policy import Policy
from policies.threads import torch_threads
from policies.weight_cache import seal

MODEL, SIGNATURE, SAMPLE, REPORT, CARD = (
    "policy.onnx",
    "signature.json",
    "sample.npz",
    "report.json",
    "README.md",
)
OPSET = 18

_TRACED_BATCH = 3
_log = logging.getLogger(__name__)


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
        return _worst(self.parity)


class SampledPolicy(nn.Module):
    """The function that is exported: physical observations and noise to physical actions."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, observation: Tensor, noise: Tensor, goal: Tensor | None = None) -> Tensor:
        """(B, To, Do), (B, *noise_shape)[, (B, Dg)] -> (B, Ta, Da)."""
        obs = {"state": observation} if goal is None else {"state": observation, "goal": goal}
        return self.policy.executed(self.policy.decode(self.policy.encode(obs), noise))


def export_onnx(
    policy: Policy,
    directory: str | Path,
    *,
    batch_sizes: Sequence[int] = (1, 2, 7),
    latency_batches: Sequence[int] = (1, 40),
    tolerance: float = 1e-5,
    seed: int = 0,
    overwrite: bool = False,
    surroundings: Surroundings | None = None,
) -> ExportReport:
    """Export a policy, with the sampler it carries, and check the result.

    Args:
        policy: The policy; its sampler and steps are unrolled into the graph.
        directory: Where the folder is written.
        batch_sizes: Batches of random inputs on which graph and policy are compared.
        latency_batches: Batches for the latency table; empty skips it.
        tolerance: Largest difference allowed, see `ExportReport`.
        seed: Seed of the random inputs.
        overwrite: Replace the files of an export in a directory that is not empty.
        surroundings: Facts about the task for the signature.

    Raises:
        MissingExtraError: If onnx or onnxruntime are not installed.
        ExportError: If the directory holds something, the policy cannot be traced, or the graph does not
            reproduce it.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        _require(name)
    refuse_to_replace(directory, overwrite=overwrite)
    model = SampledPolicy(policy.clone().float().cpu().eval())
    target = Path(directory)
    with _draft_of(target) as draft:
        parity = _write_checked_graph(model, draft / MODEL, batch_sizes, tolerance, seed)
        session, generator = open_session(draft / MODEL), torch.Generator().manual_seed(seed + 1)
        latency = [_latency(model, session, batch, generator) for batch in latency_batches]
        report = ExportReport(str(target), OPSET, tolerance, parity, latency)
        facts = signature(model.policy, surroundings or Surroundings())
        _write_facts(model, session, draft, report, generator, facts)
    return report


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


def open_session(path: str | Path, *, threads: int = 1) -> Any:
    """Open an ONNX file with onnxruntime on the CPU."""
    runtime = _require("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised, not printed as well
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def random_inputs(policy: Policy, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw observations inside the range of the statistics, and noise."""

    def feature(name: str, *shape: int) -> Tensor:
        return policy.normalizer.decode(name, 0.7 * torch.randn(batch, *shape, generator=generator))

    inputs = {
        "observation": feature("state", policy.chunk.obs_steps, policy.obs_dim),
        "noise": torch.randn(batch, *policy.noise_shape, generator=generator),
    }
    if policy.goal_dim:
        inputs["goal"] = feature("goal", policy.goal_dim)
    return inputs


def signature(policy: Policy, around: Surroundings) -> dict[str, Any]:
    """Describe inputs and outputs of the graph; `B` is the dynamic batch, null is what is not known."""
    chunk = policy.chunk

    def feature(*shape: int, units: str = "physical", **facts: Any) -> dict[str, Any]:
        return {"shape": ["B", *shape], "dtype": "float32", "units": units, **facts}

    inputs = {
        "observation": feature(chunk.obs_steps, policy.obs_dim, names=_entries(around.obs_names)),
        "noise": feature(*policy.noise_shape, units="standard normal"),
    }
    if policy.goal_dim:
        inputs["goal"] = feature(policy.goal_dim, names=None)
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


@contextlib.contextmanager
def _draft_of(target: Path) -> Iterator[Path]:
    """Collect files aside and move them into `target` when all is well; a failure leaves nothing behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as draft:
        yield Path(draft)
        target.mkdir(exist_ok=True)
        for path in Path(draft).iterdir():
            path.replace(target / path.name)


def _write_checked_graph(
    model: SampledPolicy, path: Path, batch_sizes: Sequence[int], tolerance: float, seed: int
) -> list[dict[str, float]]:
    """Write a graph that reproduces the model at every batch size and return the parity table.

    Tracing at one batch size and freeing that dimension afterwards takes a third of the time of tracing with
    a symbolic one, but is wrong for a network that computes with its batch size: then the latter is done.

    Raises:
        ExportError: If neither graph reproduces the model.
    """
    traced = SampledPolicy(model.policy.clone())
    with torch.no_grad():
        traced(**random_inputs(traced.policy, _TRACED_BATCH, torch.Generator().manual_seed(seed)))
    seal(traced)  # what depends on weights alone becomes constants of the graph
    for is_symbolic in (False, True):
        _write_graph(traced, path, seed, is_symbolic=is_symbolic)
        parity = _parity(model, open_session(path), batch_sizes, seed)
        worst = _worst(parity)
        if worst <= tolerance:
            return parity
    raise ExportError(
        f"the exported graph must reproduce the policy within {tolerance:.0e} for batches of "
        f"{', '.join(map(str, batch_sizes))}; it differs by {worst:.2e}. Nothing was written."
    )


def _write_graph(model: SampledPolicy, path: Path, seed: int, *, is_symbolic: bool) -> None:
    """Trace the model and write the graph, weights included, with a dynamic batch."""
    inputs = random_inputs(model.policy, _TRACED_BATCH, torch.Generator().manual_seed(seed))
    batch = torch.export.Dim("batch", min=1, max=65536)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            _quiet("torch.onnx"),
            torch.no_grad(),
        ):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                (),
                str(path),
                kwargs=inputs,
                dynamic_shapes={name: {0: batch} for name in inputs} if is_symbolic else None,
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


def _free_batch(path: Path) -> None:
    """Let the first dimension of inputs and outputs be any number; forget the shapes between them."""
    onnx = _require("onnx")
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
    expected = model(**inputs).numpy()
    try:
        found = _run(session, inputs)
    except Exception:  # onnxruntime's errors have no common class
        _log.debug("the graph does not run on inputs of batch %d", len(expected), exc_info=True)
        return math.inf
    if found.shape != expected.shape:
        return math.inf
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


def _worst(parity: Sequence[dict[str, float]]) -> float:
    return float(np.max([row["max_abs_difference"] for row in parity]))


@torch.no_grad()
def _latency(model: SampledPolicy, session: Any, batch: int, generator: torch.Generator) -> dict[str, float]:
    inputs = random_inputs(model.policy, batch, generator)
    feed = _feed(session, inputs)
    with torch_threads(1):
        eager_s = _median_s(lambda: model(**inputs))
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


def _feed(session: Any, inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Keep what the graph uses (a policy may ignore its noise) as arrays."""
    used = {node.name for node in session.get_inputs()}
    return {name: value.numpy() for name, value in inputs.items() if name in used}


def _run(session: Any, inputs: dict[str, Tensor]) -> np.ndarray:
    return session.run(None, _feed(session, inputs))[0]


@torch.no_grad()
def _write_facts(
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
    arrays: dict[str, Any] = {**_feed(session, inputs), "action": _run(session, inputs)}
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


def _require(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingExtraError(f"export needs '{name}': pip install 'burnish[export]'.") from None
