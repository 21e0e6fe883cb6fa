"""Clones the toy task into a run directory."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

import torch
from two_modes import two_mode_setup

from algos.base import Algorithm
from algos.bc import BcConfig
from algos.training.run_directory import RunDirectory
from algos.training.signals import Interrupted
from algos.training.trainer import TrainerSettings, train


def main(path: str, steps: int, checkpoint_every: int, until: int | None = None) -> None:
    """Train; `until`: stop there by a signal, however many steps there would be."""
    torch.set_num_threads(1)
    config = BcConfig(steps=steps, batch_size=16, log_every=1, warmup_steps=5, validation_fraction=0.1)
    algorithm = config.build(two_mode_setup(7))
    settings = TrainerSettings(log_every=5, checkpoint_every=checkpoint_every, keep_checkpoints=3)
    if until is not None:
        terminate_at(algorithm, until)
    with contextlib.suppress(Interrupted) if until is not None else contextlib.nullcontext():
        train(algorithm, RunDirectory.open(path), settings, progress=False)


def terminate_at(algorithm: Algorithm, step: int) -> None:
    """Let a run be terminated in the iteration to a step."""
    advance = algorithm.advance

    def advance_and_stop() -> Any:
        metrics = advance()
        if algorithm.progress >= step:
            signal.raise_signal(signal.SIGTERM)
        return metrics

    algorithm.advance = advance_and_stop  # type: ignore[method-assign]
