"""Best of N against Q-chunking: candidates, their values, the one that is chosen, what it is worth; cloning.

The flow and the critics of the file are rebuilt here; sampling, aggregating, choosing and the loss are
ours. Not compared: gradients of the critic, whose loss no algorithm of ours has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.networks.critics import aggregate
from policies.policy import PolicyConfig
from policies.processes import RectifiedFlow
from policies.protocols import TE, BoundField, Cond, Observation
from policies.samplers.ode import Euler
from policies.wrappers.best_of_n import BestOfN, Selection

qc = pytest.mark.golden("qc_bestofn_*.npz")
CLOSE = {"rtol": 0.0, "atol": 5e-6}


@dataclass(frozen=True)
class FlowConfig:
    """Builds the flow of a file."""

    layers: tuple[Layer, ...]

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> Flow:
        return Flow(self.layers, shape)


class Flow(nn.Module):
    """Dense layers over [observation, chunk, time] with GELU between them."""

    def __init__(self, layers: tuple[Layer, ...], shape: tuple[int, int]) -> None:
        super().__init__()
        self.layers, self.shape = layers, shape

    def forward(
        self, x: Tensor, time: Tensor, cond: Cond, *_: Any, time_row: Any = None, **__: Any
    ) -> Tensor:
        h = torch.cat([cond.vec, x.flatten(1), time.expand(len(x))[:, None]], dim=1)
        return evaluate(self.layers, h).view(-1, *self.shape)

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> BoundField:
        return lambda k, x: self(x, times[k], cond)


@dataclass(frozen=True)
class Layer:
    """A dense layer (in, out), or a stack of them, and the normalisation after its activation, if any."""

    kernel: Tensor
    bias: Tensor
    scale: Tensor | None
    shift: Tensor | None


def layers_of(arrays: Mapping[str, Any], prefix: str) -> tuple[Layer, ...]:
    def part(kind: str, i: int, what: str) -> Tensor | None:
        return arrays.get(f"{prefix}.{kind}_{i}.{what}")

    found = []
    for i in takewhile(lambda i: part("Dense", i, "kernel") is not None, count()):
        dense = (arrays[f"{prefix}.Dense_{i}.{what}"] for what in ("kernel", "bias"))
        found.append(Layer(*dense, *(part("LayerNorm", i, what) for what in ("scale", "bias"))))
    return tuple(found)


def evaluate(layers: tuple[Layer, ...], h: Tensor) -> Tensor:
    """Return what dense layers make of (B, in), or stacks of layers of (1, B, in)."""
    for i, layer in enumerate(layers):
        h = torch.matmul(h, layer.kernel) + layer.bias.unsqueeze(-2)
        if i < len(layers) - 1:
            h = F.gelu(h, approximate="tanh")
        if layer.scale is not None and layer.shift is not None:
            h = F.layer_norm(h, h.shape[-1:], eps=1e-6)
            h = h * layer.scale.unsqueeze(-2) + layer.shift.unsqueeze(-2)
    return h


def values_of(arrays: Mapping[str, Any], net: str, state: Tensor, chunk: Tensor) -> Tensor:
    """Return what the critics (E, B) of a file say of states (B, Do) and flat chunks (B, A)."""
    prefix = f"param_{net}.value_net"
    return evaluate(layers_of(arrays, prefix), torch.cat([state, chunk], dim=1)[None]).squeeze(-1)


@pytest.fixture
def arrays(golden_path: Path) -> dict[str, Any]:
    with np.load(golden_path, allow_pickle=False) as file:
        return {
            name: str(file[name]) if file[name].dtype.kind == "U" else torch.from_numpy(file[name])
            for name in file.files
        }


@pytest.fixture
def policy(arrays: dict[str, Any]) -> DenoisingPolicy:
    horizon, width = int(arrays["cfg_H"]), int(arrays["cfg_action_dim"])
    config = PolicyConfig(
        process=RectifiedFlow(time_scale=1.0),
        backbone=FlowConfig(layers_of(arrays, "param_actor_bc_flow.mlp")),
        sampler=Euler(steps=int(arrays["cfg_flow_steps"])),
        horizon=horizon,
        act_steps=horizon,
        normalizer={"state": "identity", "action": "identity"},
        observation_clip=None,
    )
    made = build_policy(config, obs_dim=arrays["batch_observations"].shape[1], action_dim=width)
    assert isinstance(made, DenoisingPolicy)
    return made


def best_of(policy: DenoisingPolicy, arrays: dict[str, Any]) -> BestOfN:
    """Return the policy that takes the candidate of the largest aggregated value."""

    def worth(plans: Tensor, obs: Observation) -> Tensor:
        state = obs["state"][:, -1].repeat_interleave(plans.shape[1], dim=0)
        values = values_of(arrays, "critic", state, plans.flatten(0, 1).flatten(1))
        return aggregate(values, arrays["cfg_q_agg"]).unflatten(0, plans.shape[:2])

    return BestOfN(policy, worth, Selection(candidates=int(arrays["cfg_N"])))


@qc
def test_candidates_their_values_and_the_choice_are_the_official_ones(
    arrays: dict[str, Any], policy: DenoisingPolicy
) -> None:
    best, state = best_of(policy, arrays), arrays["batch_next_observations"][:, -1]
    obs, noise = {"state": state[:, None]}, arrays["noises"].unflatten(-1, policy.chunk.shape)
    with torch.no_grad():
        plans = best.candidates(obs, noise)
        scores = best.scorer(plans, obs)
    torch.testing.assert_close(plans.flatten(2), arrays["candidates"], **CLOSE)
    torch.testing.assert_close(scores, arrays["q_candidates_agg"], **CLOSE)
    assert torch.equal(best.selection.choose(scores), arrays["best_index"].long())
    torch.testing.assert_close(best.act(obs, noise=noise).flatten(1), arrays["next_actions"], **CLOSE)


@qc
def test_targets_of_the_chosen_chunks_are_the_official_ones(
    arrays: dict[str, Any], policy: DenoisingPolicy
) -> None:
    obs = {"state": arrays["batch_next_observations"][:, -1:]}
    noise = arrays["noises"].unflatten(-1, policy.chunk.shape)
    chosen = best_of(policy, arrays).act(obs, noise=noise).flatten(1)
    values = values_of(arrays, "target_critic", obs["state"][:, 0], chosen)
    torch.testing.assert_close(values, arrays["next_qs"], **CLOSE)
    later = float(arrays["cfg_discount"]) ** int(arrays["cfg_H"]) * arrays["batch_masks"][:, -1]
    target = arrays["batch_rewards"][:, -1] + later * aggregate(values, arrays["cfg_q_agg"])
    torch.testing.assert_close(target.float(), arrays["target_q"], **CLOSE)


@qc
def test_cloning_is_the_official_loss_of_recorded_steps(
    arrays: dict[str, Any], policy: DenoisingPolicy
) -> None:
    cond = policy.encode({"state": arrays["batch_observations"][:, None]})
    te = TE(t=arrays["bc_t"][:, 0], eps=arrays["bc_x0"].unflatten(-1, policy.chunk.shape))
    loss = policy.matching_loss(cond, arrays["batch_actions"], te, reduce="none")
    found = (loss * arrays["batch_valid"][..., None]).mean()
    torch.testing.assert_close(found, arrays["bc_flow_loss"], **CLOSE)
