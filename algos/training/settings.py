"""Keys of `trainer`, and defaults of the build settings of every algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.bounds import Checked, bounded


@dataclass
class TrainerSettings(Checked):
    """Intervals of logging, checkpoints and evaluation, in units of the algorithm (`Algorithm.unit`)."""

    key: ClassVar[str] = "trainer"
    dropped: ClassVar[tuple[str, ...]] = ("tensorboard",)  # obsolete keys of saved runs, ignored

    log_every: int = bounded(0, ge=0)  # units between rows of metrics.jsonl; 0: every iteration
    checkpoint_every: int | None = bounded(None, ge=0)  # units; null: a tenth of the run; 0: at the end only
    eval_every: int | None = bounded(
        None, ge=0
    )  # units; null: a tenth of the run, within a fifth of its time; 0: at the end only
    eval_first: bool = False  # also evaluate before the first iteration
    keep_checkpoints: int | None = bounded(None, ge=1)  # newest checkpoints to keep; null: all
    loggers: tuple[str, ...] = ()  # trackers of metrics: tensorboard, wandb, mlflow, csv, or of a plug-in

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loggers = tuple(dict.fromkeys(self.loggers))


@dataclass(frozen=True)
class BuildSettings(Checked):
    """Build settings of every algorithm."""

    num_workers: int = bounded(2, ge=0)  # rollout processes with own noise; 0: this process, results as 1
    num_threads: int | None = bounded(None, ge=1)  # null: 2 gradient threads on-policy, else 1 torch thread
