"""Build a policy from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from policies.encoders import ImageShape
from policies.normalizer import Statistics
from policies.policy import Policy, PolicyConfig
from policies.registry import from_json, lookup
from policies.seeds import seeded_weights

DEFAULTS = {"process": "diffusion", "encoder": "state", "backbone": "mlp"}


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
    missing = {group: name for group, name in DEFAULTS.items() if getattr(config, group) is None}
    config = replace(config, **{group: lookup(group, name)() for group, name in missing.items()})
    if config.sampler is not None:
        return config
    return replace(config, sampler=from_json("sampler", config.process.default_sampler()))
