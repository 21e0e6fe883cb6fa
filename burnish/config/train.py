"""Configuration of `burnish train`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, get_type_hints

from omegaconf import MISSING

from algos.training.settings import BuildSettings, TrainerSettings
from envs.datasets.curation import Curation
from envs.evaluation.settings import EvaluationSettings
from envs.rollouts.fleet import RolloutSettings
from envs.rollouts.starts import StartSettings
from policies.bounds import bounded
from policies.paths import path_field
from policies.policy_config import PART_GROUPS, PolicyConfig


def _shape_schema() -> type:
    """Return PolicyConfig without its parts, which are top-level groups of the configuration."""
    hints, kept = get_type_hints(PolicyConfig), []
    for f in fields(PolicyConfig):
        if f.name not in PART_GROUPS:
            default = {k: getattr(f, k) for k in ("default", "default_factory")}
            default = {k: value for k, value in default.items() if value is not dataclasses.MISSING}
            kept.append((f.name, hints[f.name], field(**default, metadata=f.metadata)))
    schema = make_dataclass("PolicyShape", kept)
    schema.__module__ = __name__
    return schema


PolicyShape = _shape_schema()


@dataclass(frozen=True)
class TrainConfig(BuildSettings):
    """Configuration of `burnish train`."""

    dropped: ClassVar[tuple[str, ...]] = ("engine",)  # obsolete keys of saved runs, ignored

    algo: Any = None  # algorithm
    env: Any = None  # task; null: that of init, else none and no rollouts (cloning from a file)
    allow_other_task: bool = False  # accept a dataset, init, teacher or resumed run of another task
    dataset: str | None = path_field()  # file of demonstrations or transitions, or name of a download
    reader: dict[str, Any] = bounded({}, was="data")  # options of the format's reader: see Data
    curation: Curation = field(default_factory=Curation)
    control_hz: float | None = bounded(None, gt=0)  # rate of the data [Hz], kept for the export; without env
    action_low: Any = None  # lowest actions of the robot, a number or one per entry, kept for the export
    action_high: Any = None  # highest actions
    init: str | None = path_field()  # policy to start from: a run or a policy directory
    start: StartSettings = field(default_factory=StartSettings)
    requires_init: bool = bounded(False, was="tunes")  # set by fine-tuning experiments; warns without init
    resume: str | None = path_field()  # run to resume, with its last configuration
    name: str | None = MISSING  # suffix of the run directory's name; default: the algorithm's name
    seed: int = 0  # seed of all random streams of the run
    seeds: list[int] | None = None  # several runs at once, each in <run directory>/seed-<n>; see Offline
    process: Any = None  # generative process of a new policy: meaning of its network output
    encoder: Any = None  # observation encoder of a new policy
    backbone: Any = None  # network of a new policy
    sampler: Any = None  # sampler of a new policy; null: the process's default
    policy: Any = field(default_factory=PolicyShape)  # horizons and normalisation of a new policy
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    evaluation: EvaluationSettings = field(
        # protocol of the evaluations
        default_factory=lambda: EvaluationSettings(episodes=50)
    )
    fleet: Any = None  # where rollout workers run: local (null), or ray, the actors of a cluster
    device: str = "cpu"  # device of gradients: cpu, cuda or cuda:<n>
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    progress: bool | None = None  # null: a bar on a terminal, lines elsewhere

    @property
    def is_evaluated(self) -> bool:
        """Whether episodes are played while training: there is a task, and the result acts in it."""
        is_model = getattr(self.algo, "makes_model", False)
        return self.env is not None and self.evaluation.episodes > 0 and not is_model

    def policy_config(self) -> PolicyConfig:
        """Return the configuration of a new policy."""
        shape = {f.name: getattr(self.policy, f.name) for f in fields(self.policy)}
        return PolicyConfig(**{name: getattr(self, name) for name in PART_GROUPS}, **shape)
