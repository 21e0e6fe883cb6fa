"""Trains an algorithm at its smallest, without end: `python algorithm_run.py RUN ALGO CHECKPOINT_EVERY`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys

import torch
from clone_run import terminate_at
from small_algorithms import PROCESSES, accepts, setup, small

from algos.training.run_directory import RunDirectory
from algos.training.signals import Interrupted
from algos.training.trainer import TrainerSettings, train
from policies import registry

ENDLESS = 1_000_000


def main(path: str, algo: str, checkpoint_every: int, until: int | None = None) -> None:
    """Train; `until`: stop at the first iteration that reaches it."""
    torch.set_num_threads(1)
    config = small(registry.lookup("algo", algo))
    fields = {field.name for field in dataclasses.fields(config)} & {"steps", "iterations", "total_steps"}
    config = dataclasses.replace(config, **dict.fromkeys(fields, ENDLESS))
    process = next(process for process in PROCESSES if accepts(algo, process))
    algorithm = config.build(setup(process))
    settings = TrainerSettings(log_every=4, checkpoint_every=checkpoint_every, keep_checkpoints=3)
    if until is not None:
        terminate_at(algorithm, until)
    with contextlib.suppress(Interrupted) if until is not None else contextlib.nullcontext():
        train(algorithm, RunDirectory.open(path), settings, progress=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
