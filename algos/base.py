"""What every algorithm is to the trainer: a thing that advances, reports, saves and resumes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from envs.datasets.episodes import EpisodeDataset
from envs.spec import EnvConfig
from policies.policy import Policy, PolicyConfig

Metrics = dict[str, float | Tensor]
"""`component/quantity` -> value; tensors are read out by the logger, never inside a hot path."""


@dataclass
class Setup:
    """What an algorithm may ask for when it is built. Missing parts are refused by the algorithm, by name."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)  # for algorithms that build a policy anew
    env: EnvConfig | None = None
    dataset: EpisodeDataset | None = None
    init: Policy | None = None  # the policy to start from
    seed: int = 0
    num_workers: int = 2  # rollout processes
    num_threads: int = 2  # gradient threads
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class Algorithm(Protocol):
    """A training run in progress."""

    @property
    def progress(self) -> int:
        """Units done (gradient steps offline, environment steps online)."""
        ...

    @property
    def total(self) -> int:
        """Units to do."""
        ...

    @property
    def unit(self) -> str:
        """Name of the unit: `gradient_steps` or `env_steps`."""
        ...

    def advance(self) -> Metrics:
        """Do one iteration (one PPO iteration, or a block of gradient steps) and report it."""
        ...

    def snapshot(self) -> Policy:
        """Return the policy as it would be shipped now (evaluation mode, averaged weights)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything a bit-exact continuation needs: tensors and plain values only."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        ...

    def close(self) -> None:
        """Release processes and files."""
        ...


class AlgoConfig(Protocol):
    """A registered configuration (group `algo`) that builds its algorithm."""

    def build(self, setup: Setup) -> Algorithm:
        """Check the setup (ConfigError, CapabilityError) and return the algorithm, ready to advance."""
        ...
