"""Flow policies with the networks of ReinFlow's released code, both of which are our MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from official_networks import install, residual_dims
from torch import Tensor

from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.policy import PolicyConfig
from policies.processes.flow import RectifiedFlow
from policies.processes.shortcut import Shortcut


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
    widths = tuple(len(weights[f"cond_emb.moduleList.{i}.linear_1.bias"]) for i in (0, 1))
    backbone = MlpConfig(
        time_dim=widths[-1],
        times="joint",
        cond_dims=widths,
        add_cond=True,
        **residual_dims(weights, "vel_head."),
    )
    return _build(weights, obs, chunk_shape, process, backbone, sampler)


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
