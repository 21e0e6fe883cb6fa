"""The keys of `trainer`, and defaults of what every algorithm is built with."""

from __future__ import annotations

from dataclasses import dataclass

from policies.errors import ConfigError


@dataclass
class TrainerSettings:
    """When to log, to save and to evaluate; counts are units of the algorithm (see `Algorithm.unit`)."""

    log_every: int = 0  # units between rows of metrics.jsonl; 0: after every iteration
    checkpoint_every: int | None = (
        None  # units between checkpoints; None: a tenth of the run; 0: at the end only
    )
    eval_every: int | None = None  # units between evaluations; None: a tenth of the run; 0: at the end only
    eval_first: bool = False  # also evaluate before the first iteration
    keep_checkpoints: int | None = None  # newest checkpoints that stay; None: all
    tensorboard: bool = False  # also write TensorBoard event files

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("log_every", "checkpoint_every", "eval_every"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"trainer.{name} must be 0 or more; got {value}.")
        if self.keep_checkpoints is not None and self.keep_checkpoints < 1:
            raise ConfigError(
                f"trainer.keep_checkpoints must be 1 or more, or null; got {self.keep_checkpoints}."
            )


@dataclass(frozen=True)
class BuildSettings:
    """How every algorithm is built."""

    num_workers: int = 2  # rollout processes, each with its own noise; 0: this one, as if 1
    engine: str = "exact"  # exact | envpool, which only collects: see Environments; evaluation is exact
    num_threads: int | None = None  # null: 2 on-policy (sharing gradients), else 1 (of torch)
