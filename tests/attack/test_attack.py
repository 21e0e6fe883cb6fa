"""The attack of docs/security.md: short here, whole with `pytest -m attack tests/attack -s`."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import exit_code_of
from hostile_files import main as open_hostile_files
from hostile_frames import send_many
from small_algorithms import ALGOS

from algos.training.run_directory import RunDirectory
from policies.serving.messages import Schema
from policies.storage.features import Feature
from policies.storage.policy_folder import load_policy

HERE, TESTS, ROOT = (Path(__file__).resolve().parents[n] for n in range(3))
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS, TESTS / "e2e", HERE))),
    "OMP_NUM_THREADS": "1",
}
PATIENCE_S = 120.0


def tell(what: str, figures: dict[str, Any]) -> None:
    """Print the figures of docs/security.md."""
    print(f"\n{what}: {json.dumps(figures)}")


# -- files --------------------------------------------------------------------------------------------------


def judge_hostile_files(figures: dict[str, Any], count: int) -> None:
    tell("files", figures)
    assert not figures["faults"], "\n".join(figures["faults"])[:5000]
    assert figures["files"] == count and figures["refused"] > 0.3 * count
    assert figures["slowest_s"] < 20


def test_hostile_files_end_in_one_error(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("pyarrow")
    count, told = 12, tmp_path / "figures.json"

    def opened() -> None:
        told.write_text(json.dumps(open_hostile_files(tmp_path / "files", count, 0)))

    assert exit_code_of(opened) == 0
    judge_hostile_files(json.loads(told.read_text()), count)


@pytest.mark.attack
def test_thousands_of_hostile_files_end_in_one_error(tmp_path: Path) -> None:
    count = 4000
    command = [sys.executable, str(HERE / "hostile_files.py"), str(tmp_path / "files"), str(count), "1"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    judge_hostile_files(json.loads(done.stdout.splitlines()[-1]), count)


# -- frames -------------------------------------------------------------------------------------------------

SERVER = """
import sys
import numpy as np
from policies.serving.server import Server, ServerSettings
from policies.serving.messages import Schema
from policies.storage.features import Feature

class Still:
    schema = Schema({"observation": Feature((2, 3))}, Feature((1, 2)), 2)
    noise_shape = (1,)
    def decide(self, inputs, noise):
        return np.repeat(inputs["observation"][:, -1:, :1], 2, axis=2)

with Server(Still(), ServerSettings(port=0, deadline_ms=1e6)) as server:
    print(server.endpoint, flush=True)
    server.run()
"""
SCHEMA = Schema({"observation": Feature((2, 3))}, Feature((1, 2)), 2)


@contextmanager
def serving() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
        process.kill()


def send_hostile_frames(count: int) -> None:
    from policies.serving.client import Client

    with serving() as (endpoint, process), Client(endpoint, timeout_s=PATIENCE_S, retries=0) as robot:
        asked = 0

        def ask() -> None:
            nonlocal asked
            asked += 1
            seen = np.full((2, 3), asked, np.float32)
            np.testing.assert_array_equal(robot.decide({"observation": seen}, None), np.full((1, 2), asked))

        ask()
        first = robot.metrics()
        sent, _ = send_many(endpoint, SCHEMA, count, 0, ask)
        ask()
        last = robot.metrics()
        assert process.poll() is None
    refused = {reason: n for reason, n in last["rejected"].items() if n}
    figures = {"frames": sent, "messages": last["messages"], "honest": asked, "refused": refused}
    tell("frames", {**figures, "grown_mb": last["memory_mb"] - first["memory_mb"]})
    assert sent >= count
    assert last["messages"] > 0.5 * count / 3  # most frames came through; multi-part ones are one message
    assert last["memory_mb"] - first["memory_mb"] < 100


def test_hostile_frames_leave_an_honest_robot_alone() -> None:
    pytest.importorskip("zmq")
    send_hostile_frames(3000)


@pytest.mark.attack
def test_many_hostile_frames_leave_an_honest_robot_alone() -> None:
    send_hostile_frames(100_000)


# -- kills --------------------------------------------------------------------------------------------------


def check_checkpoints(run: RunDirectory) -> None:
    """Every checkpoint of the run is whole."""
    for step in run.checkpoints():
        run.load_training_state(step)
        load_policy(run.policy_path(step))


def kill_often(tmp_path: Path, algo: str, early: int, late: int) -> None:
    """Kill a run before and after its first checkpoint; compare its end with a run that was never killed."""
    sys.path.append(str(TESTS / "e2e"))
    from algorithm_run import main

    moments = random.Random(algo)
    run, whole = (
        RunDirectory.open(RunDirectory.create_at(tmp_path / name, {}).path) for name in ("killed", "whole")
    )
    command = [sys.executable, str(HERE / "algorithm_run.py"), str(run.path), algo, "1"]
    for kill in range(early + late):
        before = run.latest() or 0
        process = subprocess.Popen(command, env=ENVIRONMENT)
        deadline = time.monotonic() + PATIENCE_S
        while kill >= early and (run.latest() or 0) <= before:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.3))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert (run.latest() or 0) >= before
        check_checkpoints(run)
    newest = run.latest()
    assert newest is not None
    for one in (run, whole):
        main(str(one.path), algo, 0, until=newest + 20)
    assert run.latest() == whole.latest()
    first, second = (load_policy(one.policy_path()).state_dict() for one in (run, whole))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in second)
    tell("kills", {"algo": algo, "before the first checkpoint": early, "after it": late, "steps": newest})


@pytest.mark.attack
@pytest.mark.parametrize("algo", ALGOS)
def test_kills_lose_nothing(algo: str, tmp_path: Path) -> None:
    kill_often(tmp_path, algo, early=1, late=4)


# -- full disks and few descriptors -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import burnish

    folder = tmp_path_factory.mktemp("inputs")
    burnish.collect(env="avoid", episodes=2, out=folder / "demos.hdf5")
    tiny = {"backbone.width": 8, "algo.steps": 4, "algo.warmup_steps": 0, "algo.batch_size": 4}
    tiny |= {"algo.log_every": 2, "algo.validation_fraction": 0, "num_threads": 1, "progress": False}
    burnish.clone(
        folder / "demos.hdf5", directory=folder / "run", env="avoid", **{"evaluation.episodes": 0}, **tiny
    )
    return folder


def commands(inputs: Path, out: Path) -> dict[str, list[str]]:
    run, demos = inputs / "run", inputs / "demos.hdf5"
    tiny = [
        "backbone.width=8",
        "algo.steps=4",
        "algo.warmup_steps=0",
        "algo.batch_size=4",
        "algo.log_every=2",
    ]
    tiny += ["algo.validation_fraction=0", "num_threads=1", "progress=false", "evaluation.episodes=0"]
    return {
        "collect": ["collect", "env=avoid", "episodes=1", f"out={out}/x.hdf5"],
        "collect minari": ["collect", "env=avoid", "episodes=1", f"out={out}/x-v0"],
        "collect d4rl": ["collect", "env=avoid", "episodes=1", f"out={out}/d.hdf5", "format=d4rl"],
        "train": ["train", "algo=bc", f"dataset={demos}", f"hydra.run.dir={out}/run", *tiny],
        "eval": ["eval", f"policy={run}", "episodes=1", "num_workers=0", f"out={out}/x.json"],
        "report": ["report", f"run={run}", f"out={out}/report", "episodes=0", "num_workers=0"],
        "export": ["export", f"policy={run}", f"out={out}/export"],
        "data inspect": ["data", "inspect", f"dataset={demos}", f"out={out}/facts"],
    }


def starved(
    arguments: Sequence[str], limit: Callable[[], None], cwd: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "burnish", *arguments], env=ENVIRONMENT, cwd=cwd, preexec_fn=limit,
        timeout=300, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.attack
@pytest.mark.parametrize("size", [0, 1500, 20_000])
def test_a_full_disk_ends_every_command_in_one_error(size: int, inputs: Path, tmp_path: Path) -> None:
    ends: dict[str, int] = {}
    for name, arguments in commands(inputs, tmp_path).items():
        done = starved(arguments, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)), tmp_path)
        ends[name] = done.returncode
        assert done.returncode in (0, 2), f"{name}: {done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr, f"{name}: {done.stderr[-3000:]}"
        assert done.returncode == 0 or "burnish: error:" in done.stderr, f"{name}: {done.stderr[-3000:]}"
        left = [p for p in tmp_path.rglob("*") if ".draft-" in p.name]
        assert not left, f"{name} left {left}"
        if size == 0:
            assert done.returncode == 2
    tell(f"full disk at {size} bytes a file", ends)


@pytest.mark.attack
@pytest.mark.parametrize("count", [24, 48, 64])
def test_few_descriptors_end_in_one_error_or_do_no_harm(count: int, inputs: Path, tmp_path: Path) -> None:
    ends: dict[str, int] = {}
    for name, arguments in commands(inputs, tmp_path).items():
        done = starved(
            arguments, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count)), tmp_path
        )
        ends[name] = done.returncode
        assert done.returncode in (0, 2), f"{name}: {done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr, f"{name}: {done.stderr[-3000:]}"
    tell(f"{count} descriptors", ends)
