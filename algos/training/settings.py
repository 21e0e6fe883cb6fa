"""The keys of `trainer`, and defaults of what every algorithm is built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.bounds import Checked, bounded


@dataclass
class TrainerSettings(Checked):
    """When to log, to save and to evaluate; counts are units of the algorithm (see `Algorithm.unit`)."""

    key: ClassVar[str] = "trainer"

    log_every: int = bounded(0, ge=0)  # units between rows of metrics.jsonl; 0: after every iteration
    checkpoint_every: int | None = bounded(None, ge=0)  # units; null: a tenth of the run; 0: at the end
    eval_every: int | None = bounded(None, ge=0)  # units; null: a tenth of the run; 0: at the end only
    eval_first: bool = False  # also evaluate before the first iteration
    keep_checkpoints: int | None = bounded(None, ge=1)  # newest checkpoints to keep; null: all
    tensorboard: bool = False  # also write TensorBoard event files


@dataclass(frozen=True)
class BuildSettings:
    """How every algorithm is built."""

    num_workers: int = 2  # rollout processes, each with its own noise; 0: this one, as if 1
    num_threads: int | None = None  # null: 2 on-policy (sharing gradients), else 1 (of torch)
