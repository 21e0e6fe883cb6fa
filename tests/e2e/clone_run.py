"""Clones the toy task into a run directory: `python clone_run.py RUN STEPS CHECKPOINT_EVERY`."""

from __future__ import annotations

import sys

import torch
from two_modes import two_mode_setup

from algos.bc import BcConfig
from algos.state import RunDirectory
from algos.trainer import TrainerSettings, train


def main(path: str, steps: int, checkpoint_every: int) -> None:
    torch.set_num_threads(1)
    config = BcConfig(steps=steps, batch_size=16, block_steps=1, warmup_steps=5, validation_fraction=0.1)
    algorithm = config.build(two_mode_setup(7))
    settings = TrainerSettings(log_every=5, checkpoint_every=checkpoint_every, keep_checkpoints=3)
    train(algorithm, RunDirectory.open(path), settings, progress=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
