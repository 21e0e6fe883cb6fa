"""Ends that nobody prepared for: a killed or terminated process leaves a run that can be continued."""

from __future__ import annotations

import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from clone_run import main
from forked import started

from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from policies.storage.policy_folder import load_policy

PATIENCE_S = 300.0
"""How long a busy machine may take to start and to reach a checkpoint."""
ENDLESS = 1_000_000
"""Steps that nobody waits for: a run of so many is always interrupted, however fast its machine is."""


def start(run: RunDirectory, steps: int, checkpoint_every: int) -> BaseProcess:
    """Train in a process of its own, a copy of this one."""
    return started(main, str(run.path), steps, checkpoint_every)


def wait_for_progress(process: BaseProcess, run: RunDirectory, beyond: int) -> None:
    """Return when the process has written a checkpoint after `beyond`."""
    deadline = time.monotonic() + PATIENCE_S
    while (run.latest() or 0) <= beyond:
        assert process.is_alive(), "training ended before it was killed"
        assert time.monotonic() < deadline, "training made no progress"
        time.sleep(0.01)


def check_loadable(run: RunDirectory) -> int:
    """Every checkpoint of the run is whole; return the newest."""
    for step in run.checkpoints():
        assert run.load_training_state(step)["algorithm"]["done"] == step
        load_policy(run.policy_path(step))
    load_policy(run.path / "checkpoints" / "last" / "policy")
    newest = run.latest()
    assert newest is not None
    return newest


@pytest.mark.slow
def test_killed_runs_lose_nothing_before_their_last_checkpoint(tmp_path: Path) -> None:
    """Killed at a random moment, with a checkpoint at every step; the end is the same."""
    # Opened anew: a maker holds its run, and here other processes write.
    run, whole = (
        RunDirectory.open(RunDirectory.create_at(tmp_path / name, {}).path) for name in ("killed", "whole")
    )
    process = start(run, ENDLESS, 1)
    wait_for_progress(process, run, 0)
    time.sleep(random.Random(0).uniform(0.0, 0.25))
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    newest = check_loadable(run)
    main(str(run.path), ENDLESS, 50, until=newest + 100)
    main(str(whole.path), ENDLESS, 0, until=newest + 100)
    assert run.latest() == whole.latest() == newest + 100
    assert_same_end(run, whole)


def test_terminated_run_saves_the_step_it_reached(tmp_path: Path) -> None:
    run = RunDirectory.open(RunDirectory.create_at(tmp_path / "run", {}).path)
    process = start(run, ENDLESS, 50)
    wait_for_progress(process, run, 0)
    process.terminate()
    process.join(PATIENCE_S)
    assert process.exitcode == 128 + signal.SIGTERM
    newest = check_loadable(run)
    logged = [row["step"] for row in read_jsonl(run.metrics_path)]
    assert logged[-1] <= newest < logged[-1] + 5  # rows come every 5 steps, checkpoints every 50


def assert_same_end(run: RunDirectory, other: RunDirectory) -> None:
    """The last checkpoints and the metrics of two runs agree to the last bit."""
    first, second = (load_policy(r.policy_path()).state_dict() for r in (run, other))
    assert all(torch.equal(first[name], second[name]) for name in second)
    rows = [
        [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(r.metrics_path)]
        for r in (run, other)
    ]
    assert rows[0] == rows[1]
