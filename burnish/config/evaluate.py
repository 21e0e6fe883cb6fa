"""Configuration of `burnish eval`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from algos.training.gpc_settings import EstimateSettings, SearchSettings
from envs.evaluation.settings import EvaluationSettings
from policies.bounds import bounded
from policies.errors import ConfigError
from policies.paths import path_field

_OF_COMPOSE = ("weights", "operator", "temperature", "sampler", "search", "estimate")


@dataclass(frozen=True)
class EvalConfig(EvaluationSettings):
    """Configuration of `burnish eval`."""

    episodes: int = bounded(100, ge=1)
    policy: str | None = path_field()  # a run (last checkpoint), a checkpoint, a policy or an exported folder
    baseline: str | None = path_field(was="versus")  # a second policy: same episodes, paired difference
    env: Any = None  # null: the policy's own task
    allow_other_task: bool = False  # evaluate policies on another task than the one that they were made for
    videos: int = bounded(0, ge=0)  # moving pictures of episodes, failures first, beside the JSON file
    num_workers: int = bounded(2, ge=0)  # rollout processes; 0: this one; results are equal for any number
    fleet: Any = None  # where they run: local (null), or ray, the actors of a cluster
    out: str | None = (
        path_field()  # JSON file; null: <run>/eval/ of the policy's run, else eval-<policy>.json;
        # with compose a folder; null: runs/<date>/<time>-compose
    )
    compose: Any = path_field()  # instead of policy: list of policies to compose, the lead first
    weights: Any = (
        None  # of compose, one per member: numbers, or knots [[t, w], …] over sampling time;
        # estimate: from `dataset`; null: searched by rollouts
    )
    operator: str = "convex"  # of compose: convex | product | cfg_sum | or
    temperature: float = 1.0  # of operator=or: values above 1 soften the choice between members
    sampler: Any = None  # of compose; null: the lead's sampler
    dataset: str | None = (
        path_field()  # held-out demonstrations: compares the policy's actions with them, without a simulator;
        # of compose: estimates weights
    )
    reader: dict[str, Any] = bounded({}, was="data")  # options of the dataset's reader: see Data
    search: SearchSettings = field(default_factory=SearchSettings)
    estimate: EstimateSettings = field(default_factory=EstimateSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reader and self.dataset is None:
            raise ConfigError(f"reader={self.reader} needs dataset=<file>, whose reader has these options.")

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return which of some keys do not have their default."""
        default = type(self)()
        return [name for name in names if getattr(self, name) != getattr(default, name)]

    def require_single(self) -> None:
        """Refuse, with ConfigError, keys of compositions beside a single policy."""
        if given := self.changed(_OF_COMPOSE):
            raise ConfigError(f"{given[0]} belongs to compose=[a,b]; a single policy has no use for it.")
