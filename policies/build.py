"""Build a policy from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from policies.encoders import ImageShape
from policies.normalizer import Statistics
from policies.policy import Policy, PolicyConfig
from policies.registry import from_json, lookup
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
    """Build a policy with fresh weights drawn from `seed`; the global random state is unchanged.

    Args:
        config: Parts; None selects the default of a part.
        obs_dim: Do.
        action_dim: Da.
        goal_dim: Dg, 0 without goals.
        images: Shapes (H, W, 3) by camera; the encoder selects among them.
        statistics: Per feature (`state`, `goal`, `action`); None: identity, for weights loaded later.
        seed: Seed of the initial weights.
    """
    config = complete(config)
    with seeded_weights(seed):
        policy = lookup("policy_class", config.process.policy_class)(
            config, obs_dim=obs_dim, action_dim=action_dim, goal_dim=goal_dim, images=images
        )
    if statistics is not None:
        policy.normalizer.fit(statistics)
    return policy


def complete(config: PolicyConfig) -> PolicyConfig:
    """Replace parts that are None by their defaults."""
    process = config.process if config.process is not None else lookup("process", "diffusion")()
    encoder = config.encoder if config.encoder is not None else lookup("encoder", "state")()
    backbone = config.backbone if config.backbone is not None else lookup("backbone", "mlp")()
    sampler = (
        config.sampler if config.sampler is not None else from_json("sampler", process.default_sampler())
    )
    return replace(config, process=process, encoder=encoder, backbone=backbone, sampler=sampler)
