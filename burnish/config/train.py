"""The configuration of `burnish train`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, get_type_hints

from omegaconf import MISSING

from algos.training.settings import BuildSettings, TrainerSettings
from envs.evaluation.settings import EvaluationSettings
from policies.bounds import bounded
from policies.paths import path_field
from policies.policy_config import PART_GROUPS, PolicyConfig


def _shape_schema() -> type:
    """Return PolicyConfig without its parts, which stand at the top of the configuration."""
    hints, kept = get_type_hints(PolicyConfig), []
    for f in fields(PolicyConfig):
        if f.name not in PART_GROUPS:
            own = {k: getattr(f, k) for k in ("default", "default_factory")}
            kept.append(
                (
                    f.name,
                    hints[f.name],
                    field(**{k: v for k, v in own.items() if v is not dataclasses.MISSING}),
                )
            )
    schema = make_dataclass("PolicyShape", kept)
    schema.__module__ = __name__
    return schema


PolicyShape = _shape_schema()


@dataclass(frozen=True)
class TrainConfig(BuildSettings):
    """What `burnish train` does."""

    dropped: ClassVar[tuple[str, ...]] = ("engine",)  # keys of saved runs that mean nothing any more

    algo: Any = None  # what learns
    env: Any = None  # the task; null: no rollouts (cloning from a file)
    dataset: str | None = path_field()  # file of demonstrations or transitions, or name of a downloaded one
    reader: dict[str, Any] = bounded({}, was="data")  # options of its format's reader: see Data
    init: str | None = path_field()  # policy to start from: a run or a policy directory
    requires_init: bool = bounded(False, was="tunes")  # set by experiments that fine-tune; warns without init
    resume: str | None = path_field()  # run to continue, with the configuration it was last run with
    name: str | None = MISSING  # end of the run directory's name; the algorithm's name when left out
    seed: int = 0  # root of every random stream of the run
    seeds: list[int] | None = None  # several runs at once, each in <run directory>/seed-<n>; see Offline
    process: Any = None  # what the output of a new policy's network means
    encoder: Any = None  # what a new policy sees of an observation
    backbone: Any = None  # network of a new policy
    sampler: Any = None  # how a new policy is integrated; null: the process's own
    policy: Any = field(default_factory=PolicyShape)  # horizons and normalisation of a new policy
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    evaluation: EvaluationSettings = field(default_factory=lambda: EvaluationSettings(episodes=50))
    device: str = "cpu"  # cpu, cuda or cuda:<n>: where gradients are computed; rollouts stay on the CPU
    progress: bool | None = None  # null: a bar on a terminal, lines elsewhere

    def policy_config(self) -> PolicyConfig:
        """Return what a new policy is made of."""
        shape = {f.name: getattr(self.policy, f.name) for f in fields(self.policy)}
        return PolicyConfig(**{name: getattr(self, name) for name in PART_GROUPS}, **shape)
