"""Build a policy from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from policies.encoders import ImageShape
from policies.normalizer import Statistics
from policies.policy import Policy, PolicyConfig
from policies.seeds import seeded_weights


def build_policy(
    config: PolicyConfig,
    *,
    obs_dim: int,
    action_dim: int,
    goal_dim: int = 0,
    images: Mapping[str, ImageShape] | None = None,
    statistics: Statistics | None = None,
    seed: int = 0,
) -> Policy:
    """Make a policy with fresh weights.

    Args:
        config: Parts; a part that is None takes its default.
        obs_dim: Do.
        action_dim: Da.
        goal_dim: Dg, 0 without goals.
        images: Shapes (H, W, 3) of the images of every camera that there is; the encoder takes what it looks
            at.
        statistics: Per-feature statistics (`state`, `goal`, `action`); None leaves the maps at identity,
            for weights that will be loaded.
        seed: Seeds the initial weights; the global random state is left untouched.
    """
    config = complete(config)
    with seeded_weights(seed):
        policy = config.process.policy_class()(
            config, obs_dim=obs_dim, action_dim=action_dim, goal_dim=goal_dim, images=images
        )
    if statistics is not None:
        policy.normalizer.fit(statistics)
    return policy


def complete(config: PolicyConfig) -> PolicyConfig:
    """Fill the parts that are None with their defaults."""
    from policies.backbones.mlp import MlpConfig
    from policies.encoders.state import StateEncoderConfig
    from policies.processes.diffusion import VPDiffusion

    process = config.process if config.process is not None else VPDiffusion()
    encoder = config.encoder if config.encoder is not None else StateEncoderConfig()
    backbone = config.backbone if config.backbone is not None else MlpConfig()
    sampler = config.sampler if config.sampler is not None else process.default_sampler()
    return replace(config, process=process, encoder=encoder, backbone=backbone, sampler=sampler)
