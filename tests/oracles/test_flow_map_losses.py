"""Flow matching and flow-map objectives against MIP's released code: losses, gradients, samples.

Times and noise of a file go through the draws of our loss. The released numbers are summed over Da, ours are
averaged, so they differ by that factor. The trigonometric interpolant is tried on the losses, with the path
put in the place of the linear one; the package has no process for it.

Not covered, because the package does not implement it: `lmd` and `ctm`, which need a frozen reference
network. `regression`, `straight_flow`, `tsd`, `mip` and `mip_origin` belong to the oracle of regression.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from official_networks import read
from torch import Tensor, nn

from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.policy import PolicyConfig
from policies.processes.flow import RectifiedFlow
from policies.processes.flow_map import OBJECTIVES, FlowMap
from policies.protocols import TE, Cond
from policies.samplers.ode import Euler

LOSS = {"rtol": 1e-5, "atol": 0.0}
GRADIENT = {"rtol": 1e-4, "atol": 1e-5}
SAMPLE = {"rtol": 0.0, "atol": 1e-5}
WEIGHTS = ("A", "p", "q", "W", "b", "C", "d")
PREDICTIONS = {"flow", *OBJECTIVES}


@dataclass(frozen=True)
class ReferenceConfig:
    """Builds the network of the file."""

    arrays: dict[str, Tensor]

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> ReferenceNet:
        return ReferenceNet(self.arrays)


class ReferenceNet(nn.Module):
    """f(x, s, t) = tanh(x A + s p + t q + cond W + b) C + d, of every row; the second time is t - s."""

    def __init__(self, arrays: dict[str, Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(arrays[f"net_{name}"].clone()) for name in WEIGHTS}
        )

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
        second_time: Tensor | None = None,
    ) -> Tensor:
        w, end = self.weights, time if second_time is None else time + second_time
        offset = time[:, None] * w["p"] + end[:, None] * w["q"] + cond.vec @ w["W"] + w["b"]
        return torch.tanh(x @ w["A"] + offset[:, None]) @ w["C"] + w["d"]

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> Any:
        def bound(k: int, x: Tensor) -> Tensor:
            second = None if second_times is None else second_times[k].expand(len(x))
            return self(x, times[k].expand(len(x)), cond, second_time=second)

        return bound


class TrigFlow(RectifiedFlow):
    """Flow matching on cos(pi t / 2) eps + sin(pi t / 2) x0."""

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        angle = math.pi / 2 * t
        return angle.sin(), angle.cos()

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        angle = math.pi / 2 * t
        return math.pi / 2 * angle.cos(), -math.pi / 2 * angle.sin()

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        return self.express(x0, eps, t, "velocity")


class TrigFlowMap(TrigFlow, FlowMap):
    """Flow maps on the same."""


PATHS = {"linear": (RectifiedFlow, FlowMap), "trig": (TrigFlow, TrigFlowMap)}


def process_of(name: str, interpolant: str) -> RectifiedFlow:
    flow, flow_map = PATHS[interpolant]
    if name == "flow":
        return flow(time_scale=1.0)
    return flow_map(time_scale=1.0, objective=name, paper_compat=True)


def build(arrays: dict[str, Tensor], process: RectifiedFlow, sampler: Any = None) -> DenoisingPolicy:
    horizon, action_dim = arrays["act"].shape[1:]
    config = PolicyConfig(
        process=process,
        backbone=ReferenceConfig(arrays),
        sampler=sampler,
        horizon=horizon,
        act_steps=horizon,
    )
    policy = build_policy(config, obs_dim=arrays["cond"].shape[1], action_dim=action_dim)
    assert isinstance(policy, DenoisingPolicy)
    return policy


def draws_of(arrays: dict[str, Tensor], key: str) -> TE:
    """Bring the draws of a file into the order of ours."""
    found = sorted(
        (name for name in arrays if name.startswith(f"{key}__draw")),
        key=lambda name: int(name.removeprefix(f"{key}__draw").split("_")[0]),
    )
    t, eps, *more = (arrays[name] for name in found)
    if not more:
        return TE(t, eps)
    end = torch.maximum(more[0], more[1])
    start = torch.maximum(torch.minimum(more[0], more[1]), end - arrays["delta_t"])
    share = more[2] if len(more) == 3 else torch.zeros_like(t)
    return TE(t, eps, more={"start": start, "end": end, "share": share})


def cases(arrays: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Return the (loss, interpolant) that the package has, in squared norm."""
    named = [key.removeprefix("loss_") for key in arrays if key.startswith("loss_") and "__" not in key]
    split = [tuple(key.rsplit("_", 2)) for key in named if key.endswith("_l2")]
    return [(name, interpolant) for name, interpolant, _ in split if name in PREDICTIONS]


@pytest.mark.golden("mip_losses*.npz")
def test_losses_and_gradients_equal_the_released_ones(golden_path: Path) -> None:
    arrays = read(golden_path)
    found = cases(arrays)
    assert {name for name, _ in found} == PREDICTIONS
    for name, interpolant in found:
        key = f"loss_{name}_{interpolant}_l2"
        policy = build(arrays, process_of(name, interpolant))
        te, cond = draws_of(arrays, key), Cond(arrays["cond"])
        loss = arrays["act"].shape[2] * policy.matching_loss(cond, arrays["act"], te, reduce="mean")
        torch.testing.assert_close(loss.double(), arrays[key], **LOSS, msg=lambda m, key=key: f"{key}: {m}")
        loss.backward()
        recorded = [field for field in WEIGHTS if f"{key}__grad_{field}" in arrays]
        assert recorded
        for field in recorded:
            gradient = policy.field.weights[field].grad
            where = f"{key}__grad_{field}"
            torch.testing.assert_close(
                gradient, arrays[where], **GRADIENT, msg=lambda m, where=where: f"{where}: {m}"
            )


@pytest.mark.golden("mip_losses*.npz")
def test_both_parts_of_a_loss_equal_the_released_ones(golden_path: Path) -> None:
    arrays = {name: value.double() for name, value in read(golden_path).items()}
    for name, interpolant in cases(arrays):
        if name == "flow":
            continue
        key = f"loss_{name}_{interpolant}_l2"
        te, cond = draws_of(arrays, key), Cond(arrays["cond"])
        policies = (build(arrays, process_of(loss, interpolant)).double() for loss in ("flow", name))
        parts = [policy.matching_loss(cond, arrays["act"], te, reduce="mean") for policy in policies]
        first, both = (arrays["act"].shape[2] * part for part in parts)
        torch.testing.assert_close(first, arrays[f"{key}__flow_loss"], **LOSS)
        torch.testing.assert_close(both - first, arrays[f"{key}__{name}_term"], **LOSS)


@pytest.mark.golden("mip_losses*.npz")
def test_samples_equal_the_released_ones(golden_path: Path) -> None:
    arrays = read(golden_path)
    found = [key for key in arrays if key.startswith(("sample_ode_", "sample_flow_map_"))]
    assert {key.removeprefix("sample_").split("_N")[0] for key in found} == {
        f"{kind}_{start}" for kind in ("ode", "flow_map") for start in ("zero", "stochastic")
    }
    for key in found:
        process = process_of("flow" if "_ode_" in key else "psd", "linear")
        policy = build(arrays, process, Euler(steps=int(key.split("_N")[1]), clip_action=None))
        noise = arrays["sample_x_init"] if "_stochastic_" in key else torch.zeros_like(arrays["act"])
        chunk = policy.decode(Cond(arrays["cond"]), noise)
        torch.testing.assert_close(chunk, arrays[key], **SAMPLE, msg=lambda m, key=key: f"{key}: {m}")
