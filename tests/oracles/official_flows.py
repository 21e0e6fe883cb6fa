"""Flow policies around the networks of ReinFlow's released code.

The network of rectified flows is our MLP. The shortcut network, which embeds both times together, is rebuilt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from official_networks import install, residual_dims
from torch import Tensor, nn

from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.networks.embeddings import sinusoid
from policies.networks.mlp_blocks import PlainTrunk, TrunkConfig
from policies.policy import PolicyConfig
from policies.processes.flow import RectifiedFlow
from policies.processes.shortcut import Shortcut
from policies.protocols import Cond


@dataclass(frozen=True)
class OfficialConfig:
    """Builds the released shortcut network with the widths of a file."""

    weights: dict[str, Tensor]

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> OfficialShortcut:
        return OfficialShortcut(self.weights, shape)

    def official_keys(self) -> dict[str, str]:
        dims = residual_dims(self.weights, "vel_head.")
        trunk = TrunkConfig(**dims).official_trunk_keys("vel_head.", "trunk.")
        plain = {
            f"cond_emb.moduleList.{i}.linear_1.{kind}": f"cond_encoder.{name}.{kind}"
            for i, name in enumerate(("inlet", "layers.0"))
            for kind in ("weight", "bias")
        }
        times = {f"t_emb.{i}.{kind}": f"times.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
        return trunk | plain | times


class OfficialShortcut(nn.Module):
    """Embeds [pos(t), pos(d)] and adds the encoded condition; a residual trunk reads [x, embedding]."""

    def __init__(self, weights: dict[str, Tensor], shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape = shape
        width, both = weights["t_emb.0.weight"].shape
        self.dim = both // 2
        self.times = nn.Sequential(nn.Linear(both, width), nn.Mish(), nn.Linear(width, width))
        first, last = (weights[f"cond_emb.moduleList.{i}.linear_1.weight"].shape for i in (0, 1))
        self.cond_encoder = PlainTrunk((first[1], first[0], last[0]), "relu")
        dims = residual_dims(weights, "vel_head.")
        inputs, outputs = weights["vel_head.layers.0.weight"].shape[1], shape[0] * shape[1]
        self.trunk = TrunkConfig(**dims).build_trunk(inputs, outputs)
        install(self, OfficialConfig(weights).official_keys(), weights)

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
        second_time: Tensor | None = None,
    ) -> Tensor:
        assert second_time is not None
        of_time, of_cond = self.features(cond, time, second_time)
        of_time = of_time if time_row is None else of_time[time_row]
        embedded = of_time + (of_cond if cond_row is None else of_cond[cond_row])
        return self.trunk(torch.cat([x.flatten(1), embedded], dim=1)).view(-1, *self.shape)

    def features(
        self, cond: Cond, times: Tensor, second_times: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert second_times is not None
        waves = torch.cat([sinusoid(times, self.dim), sinusoid(second_times, self.dim)], dim=-1)
        return self.times(waves), self.cond_encoder(cond.vec)

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> Any:
        assert second_times is not None

        def bound(k: int, x: Tensor) -> Tensor:
            time, second = (value[k].expand(len(x)) for value in (times, second_times))
            return self(x, time, cond, second_time=second)

        return bound


def official_reflow(
    weights: dict[str, Tensor], obs: Tensor, chunk_shape: Sequence[int], sampler: Any = None
) -> DenoisingPolicy:
    """Build a rectified flow with released weights, for observations like `obs` (B, To, Do)."""
    time_dim = weights["time_embedding.1.weight"].shape[1]
    backbone = MlpConfig(time_dim=time_dim, **residual_dims(weights, "mlp_mean."))
    return _build(weights, obs, chunk_shape, RectifiedFlow(time_scale=1.0), backbone, sampler)


def official_shortcut(
    weights: dict[str, Tensor],
    obs: Tensor,
    chunk_shape: Sequence[int],
    sampler: Any = None,
    *,
    max_steps: int = 64,
) -> DenoisingPolicy:
    """Build a shortcut model with released weights, for observations like `obs` (B, To, Do)."""
    process = Shortcut(time_scale=1.0, max_steps=max_steps)
    return _build(weights, obs, chunk_shape, process, OfficialConfig(weights), sampler)


def _build(
    weights: dict[str, Tensor], obs: Tensor, shape: Sequence[int], process: Any, backbone: Any, sampler: Any
) -> DenoisingPolicy:
    config = PolicyConfig(
        process=process,
        backbone=backbone,
        sampler=sampler,
        horizon=shape[0],
        act_steps=shape[0],
        observation_clip=None,
        normalizer=dict.fromkeys(("state", "goal", "action"), "identity"),
    )
    policy = build_policy(config, obs_dim=obs[0].numel(), action_dim=shape[1])
    assert isinstance(policy, DenoisingPolicy)
    install(policy.field, backbone.official_keys(), weights)
    return policy
