"""Stepwise export: graphs of the observation and of a network evaluation, and a table of the loop.

Tracing takes 1/K of the time of the whole sampler. An energy descent exports one step for all iterations.

Legend: B batch, K denoising steps, Th predicted horizon, Da action width, C condition width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from policies.composition.policy import ComposedPolicy
from policies.denoising import DenoisingPolicy
from policies.errors import ExportError
from policies.export.onnx_graph import Traceable, observation_of, random_inputs, refuse_foreign_loops
from policies.policy import Policy
from policies.protocols import Cond
from policies.samplers.descent import DescentPolicy
from policies.samplers.step_table import Coefficients, StepTable
from policies.wrappers.best_of_n import BestOfN

_SPELLED_OUT = ("x0_x", "x0_pred", "eps_x", "eps_pred", "slope", "to_x0", "to_eps")
_COMPACT = ("ratio", "limit", "mean_y", "mean_x", "mean_pred")
_TIMES = frozenset({"time", "second_time"})


def require_steps(policy: Policy | BestOfN) -> DenoisingPolicy | DescentPolicy:
    """Return a policy whose steps can be exported individually."""
    refuse_foreign_loops(policy)
    if isinstance(policy, ComposedPolicy):
        reason = "its members are evaluated at times of their own and weighted anew at every step"
    elif not isinstance(policy, DenoisingPolicy | DescentPolicy):
        reason = f"{type(policy).__name__} has no denoising steps of one evaluation each"
    else:
        return policy
    raise ExportError(f"graph=step cannot export this policy: {reason}. Use graph=whole.")


def parts_of(cond: Cond) -> dict[str, Tensor]:
    """Return the tensors of a condition by name."""
    parts = {"cond": cond.vec, "tokens": cond.tokens}
    if cond.free is not None:
        parts |= {"free": cond.free.vec, "free_tokens": cond.free.tokens}
    return {name: part for name, part in parts.items() if part is not None}


def cond_of(parts: Mapping[str, Tensor]) -> Cond:
    """Rebuild a condition from `parts_of`."""
    free = Cond(parts["free"], parts.get("free_tokens")) if "free" in parts else None
    return Cond(parts["cond"], parts.get("tokens"), free)


class EncodedObservation(Traceable):
    """First graph: physical observations to the tensors of a condition."""

    has_gradients = False

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.outputs = tuple(parts_of(_example_cond(policy, 1, torch.Generator().manual_seed(0))))

    def example(self, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        inputs = random_inputs(self.policy, batch, generator)
        return {name: value for name, value in inputs.items() if name != "noise"}

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(parts_of(self.policy.encode(observation_of(inputs))).values())


class OneEvaluation(Traceable):
    """Second graph: state, condition and time to the network output (B, Th, Da)."""

    outputs = ("prediction",)
    fixed = _TIMES
    is_sealed = False  # time tables would become constants, but times are inputs here

    def example(self, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        x = torch.randn(batch, *self.policy.chunk.shape, generator=generator)
        cond = parts_of(_example_cond(self.policy, batch, generator))
        k = int(torch.randint(self.policy.table.num_steps, (1,), generator=generator))
        times = {name: value[k : k + 1].clone() for name, value in _times_of(self.policy.table).items()}
        return {"x": x, **cond, **times}

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor]:
        times = [inputs[name] for name in ("time", "second_time") if name in inputs]
        return (self.policy.bind_at(cond_of(inputs), *times)(0, inputs["x"]),)


class OneStepDown(Traceable):
    """Second graph of a descent: chunk and velocity before and after a step, and its gradient norm."""

    outputs = ("x_next", "v_next", "slope")

    def example(self, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        x, v = (torch.randn(batch, *self.policy.chunk.shape, generator=generator) for _ in range(2))
        return {"x": x, "v": v, **parts_of(_example_cond(self.policy, batch, generator))}

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return x and v (B, Th, Da) after the step and the gradient norm (B,) at it."""
        process, energy = self.policy.process, self.policy.bind(cond_of(inputs))
        x, v, _, gradient = process.step(energy, inputs["x"], inputs["v"])
        return x, v, process.slope(gradient)


def one_step_of(policy: DenoisingPolicy | DescentPolicy) -> Traceable:
    """Return the second graph of a policy."""
    return OneStepDown(policy) if isinstance(policy, DescentPolicy) else OneEvaluation(policy)


def loop_of(policy: DenoisingPolicy | DescentPolicy) -> dict[str, Any]:
    """Return the sampler loop as JSON values; see `policies.runner`."""
    chunk = policy.chunk
    scale, offset = (policy.normalizer.get_buffer(f"action_{name}") for name in ("scale", "offset"))
    if isinstance(policy, DescentPolicy):
        steps = {"walk": {"steps": policy.sampler.steps, "min_slope": policy.sampler.min_slope}}
    else:
        steps = _denoising(policy.table)
    return {
        "action_start": chunk.action_start,
        "act_steps": chunk.act_steps,
        "action_scale": scale.tolist(),
        "action_offset": offset.tolist(),
        **steps,
    }


def _denoising(table: StepTable) -> dict[str, Any]:
    is_spelled_out = table.eps_clip is not None or table.memory is not None
    names = _SPELLED_OUT if is_spelled_out else _COMPACT
    limits = ("clip_x0", "eps_clip", "noise_clip", "clip_state", "clip_action", "start_std", "predicts_x0")
    return {
        "is_deterministic": table.is_deterministic,
        "is_spelled_out": is_spelled_out,
        **{name: getattr(table, name) for name in limits},
        "rows": [_row(table, k, names) for k in range(table.num_steps)],
    }


def _row(table: StepTable, k: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Return step k: times, coefficients (1 or Da numbers each), noise, memory."""
    columns = Coefficients(*table.coefficients[:, k])
    row = {name: getattr(columns, name).nan_to_num(0.0, 0.0, 0.0).tolist() for name in names}  # inf: unused
    row |= {name: value[k : k + 1].tolist() for name, value in _times_of(table).items()}
    row["std"] = table.std[k].tolist()
    memory = {} if table.memory is None else table.memory._asdict()
    return row | {name: values[k] for name, values in memory.items()}


def _times_of(table: StepTable) -> dict[str, Tensor]:
    second = {} if table.second_time is None else {"second_time": table.second_time}
    return {"time": table.net_time, **second}


@torch.no_grad()
def _example_cond(policy: Policy, batch: int, generator: torch.Generator) -> Cond:
    return policy.encode(observation_of(random_inputs(policy, batch, generator)))
