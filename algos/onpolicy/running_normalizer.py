"""Training from scratch: an untrained policy, and a normaliser fitted to visited observations.

Actions are scaled to the task's bounds. Observation statistics are gathered during training and applied
between iterations only: within an iteration, collection and updates use the same normalisation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from algos.base import Setup
from policies.build import build_policy
from policies.errors import ConfigError
from policies.normalizer import Normalizer, Statistics, box_statistics
from policies.policy import Policy


def fresh_policy(setup: Setup, algo: str, statistics: Statistics | None = None) -> Policy:
    """Build an untrained policy from the configuration, for the task of the setup.

    Actions are normalised by the task's bounds. Without `statistics` of `state` and `goal`, observations are
    unscaled until `RunningMeanStd.apply`. Goals are normalised as states are.

    Raises:
        ConfigError: If the task is missing, or observations need unknown limits.
    """
    if setup.env is None:
        raise ConfigError(f"algo={algo} learns in an environment and got none. Give env=<name>.")
    spec, mode = setup.env.spec, setup.policy.normalizer["state"]
    if mode == "limits" and statistics is None:
        raise ConfigError(
            f"algo={algo} without init has no demonstrations for policy.normalizer.state=limits. "
            "Use gaussian, which is fitted during training, or identity; or give init=<policy directory>."
        )
    low, high = (torch.tensor(side) for side in (spec.action_low, spec.action_high))
    widths = {"state": spec.obs_dim, "goal": spec.goal_dim}
    ones = {name: torch.ones(width) for name, width in widths.items() if width}
    known = {name: box_statistics(-one, one) for name, one in ones.items()}
    modes = setup.policy.normalizer | ({"goal": mode} if spec.goal_dim else {})
    return build_policy(
        replace(setup.policy, normalizer=modes),
        obs_dim=spec.obs_dim,
        action_dim=spec.action_dim,
        goal_dim=spec.goal_dim,
        images=getattr(setup.env, "images", None),
        statistics={**known, **(statistics or {}), "action": box_statistics(low, high)},
        seed=setup.seed,
    )


def running_moments(policy: Policy) -> dict[str, RunningMeanStd]:
    """Return empty statistics of a policy's state and, if it has one, goal."""
    widths = {"state": policy.obs_dim, "goal": policy.goal_dim}
    return {name: RunningMeanStd(width) for name, width in widths.items() if width}


class RunningMeanStd:
    """Running count, mean and variance of observations (Do,), in float64.

    Source: Chan, Golub, LeVeque 1979: moments of two samples merge exactly, in any order.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self.mean = torch.zeros(width, dtype=torch.float64)
        self.squares = torch.zeros(width, dtype=torch.float64)  # sum of squared deviations from the mean

    def update(self, obs: Tensor) -> None:
        """Merge observations (..., Do), physical units."""
        new = obs.detach().cpu().double().reshape(-1, len(self.mean))
        if not len(new):
            return
        total = self.count + len(new)
        delta = new.mean(0) - self.mean
        self.squares += (new - new.mean(0)).square().sum(0) + delta.square() * (self.count * len(new) / total)
        self.mean = self.mean + delta * (len(new) / total)
        self.count = total

    @property
    def std(self) -> Tensor:
        return (self.squares / max(1, self.count - 1)).sqrt()

    def apply(self, normalizer: Normalizer, feature: str) -> None:
        """Fit the map of a feature to the observations so far: mean 0, standard deviation 1."""
        if not self.count:
            return
        moments = {"mean": self.mean, "std": self.std, "min": self.mean, "max": self.mean}
        normalizer.refit(feature, moments)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean.clone(), "squares": self.squares.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])
        self.mean, self.squares = state["mean"].clone(), state["squares"].clone()
