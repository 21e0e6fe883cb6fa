"""A recording that ends early keeps its episodes, and the same command goes on."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from messages import mentions

import burnish
from burnish.commands import collect as command
from envs.datasets import Episode, read_dataset
from envs.engine.workers import ProcessWorkers
from envs.tasks.avoid.task import Avoid
from policies.build import build_policy
from policies.errors import CheckpointError, DatasetError, WorkerError, WriteError
from policies.policy import PolicyConfig
from policies.storage.policy_folder import save_policy

EPISODES = 5


def record(out: Path, *, episodes: int = EPISODES, **options: Any) -> bytes:
    """Record demonstrations with a failed attempt among them; return the file."""
    values = {"env": "avoid", "first_seed": 21, "noise": 3.0} | options
    return burnish.collect(episodes=episodes, out=out, **values).read_bytes()


def stop_after(num: int, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    """Raise an error when the episode after the first `num` kept ones has ended."""
    show = command.Counting.show

    def counted(counting: command.Counting, done: int, *rest: Any, **options: Any) -> None:
        if done > num:
            raise error
        show(counting, done, *rest, **options)

    patch.setattr(command.Counting, "show", counted)


def interrupt(out: Path, num: int, error: BaseException | None = None, **options: Any) -> None:
    """Record until `num` episodes are counted; the next one is kept, too."""
    error = error or KeyboardInterrupt()
    with pytest.MonkeyPatch.context() as patch:
        stop_after(num, error, patch)
        with pytest.raises(type(error)):
            record(out, **options)


def left_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.unfinished")


def kept(out: Path) -> int:
    return len(list(left_of(out).glob("*.npz")))


def saved_policy(folder: Path, *, obs_dim: int, action_dim: int) -> Path:
    ones = {"state": torch.ones(obs_dim), "action": torch.ones(action_dim)}
    statistics = {name: {"min": -value, "max": value} for name, value in ones.items()}
    save_policy(
        build_policy(PolicyConfig(), obs_dim=obs_dim, action_dim=action_dim, statistics=statistics), folder
    )
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("whole") / "demos.hdf5"
    content = record(out)
    assert read_dataset(out).meta["attempts"] > EPISODES  # one fails
    return content


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_going_on_records_what_one_go_records(tmp_path: Path, whole: bytes, num_workers: int) -> None:
    out = tmp_path / "demos.hdf5"
    for num in (0, 1, 4):
        interrupt(out, num, num_workers=num_workers)
        assert kept(out) == num + 1 and not out.exists()
    assert record(out, num_workers=num_workers) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["demos.hdf5"]


def test_the_message_says_how_to_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "demos.hdf5"
    with caplog.at_level(logging.INFO):
        interrupt(out, 1)
        assert f"kept 2 of 5 episodes in {left_of(out)}" in caplog.text and "episodes=2" in caplog.text
        record(out, episodes=2)
    assert f"going on after the 2 episodes in {left_of(out)}" in caplog.text


def test_images_are_kept(tmp_path: Path) -> None:
    seen = {"env.cameras": ["top"], "env.image_size": [8, 8], "episodes": 3}
    interrupt(tmp_path / "parts.hdf5", 1, **seen)
    assert record(tmp_path / "parts.hdf5", **seen) == record(tmp_path / "whole.hdf5", **seen)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_episodes_of_a_policy_are_kept(tmp_path: Path, num_workers: int) -> None:
    policy = saved_policy(tmp_path / "policy", obs_dim=4, action_dim=2)
    played = {"policy": policy, "env.max_episode_steps": 3, "keep_failures": True, "noise": None}
    one_go = record(tmp_path / "whole.hdf5", episodes=43, **played)
    for num in (3, 19, 40):
        interrupt(tmp_path / "parts.hdf5", num, episodes=43, num_workers=num_workers, **played)
    assert record(tmp_path / "parts.hdf5", episodes=43, num_workers=num_workers, **played) == one_go


def test_a_run_that_went_on_in_between_is_another_policy(tmp_path: Path) -> None:
    out, policy = tmp_path / "parts.hdf5", saved_policy(tmp_path / "policy", obs_dim=4, action_dim=2)
    played = {"policy": policy, "env.max_episode_steps": 3, "keep_failures": True, "noise": None}
    interrupt(out, 1, **played)
    first = policy.rename(tmp_path / "first")
    loaded = burnish.load_policy(first)
    with torch.no_grad():
        next(loaded.parameters()).add_(1.0)
    save_policy(loaded, policy)
    with pytest.raises(DatasetError, match=mentions(f"2 episodes differ in policy It was policy={policy}")):
        record(out, **played)
    assert kept(out) == 2
    shutil.rmtree(policy)
    first.rename(policy)
    assert record(out, **played) == record(tmp_path / "whole.hdf5", **played)


def test_an_environment_of_a_notebook_may_be_made_again(tmp_path: Path) -> None:
    out, policy = tmp_path / "parts.hdf5", saved_policy(tmp_path / "policy", obs_dim=3, action_dim=1)
    played = {"policy": policy, "noise": None, "allow_other_task": True}
    interrupt(out, 1, env=lambda: gym.make("Pendulum-v1"), **played)
    whole = tmp_path / "whole.hdf5"
    for path in (out, whole):  # whose metadata name the address of the function
        record(path, env=lambda: gym.make("Pendulum-v1"), **played)
    resumed, at_once = read_dataset(out), read_dataset(whole)
    np.testing.assert_array_equal(resumed.observations, at_once.observations)
    np.testing.assert_array_equal(resumed.actions, at_once.actions)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_ended_keeps_its_episodes(tmp_path: Path, whole: bytes, stop: int) -> None:
    out, keys = tmp_path / "demos.hdf5", ["env=avoid", "first_seed=21", "noise=3.0", "episodes=5000"]
    words = [sys.executable, "-m", "burnish", "collect", *keys, f"out={out}"]
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # unlike background jobs of a script
    process = subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env=dict(os.environ), preexec_fn=heeds
    )
    wait_for(lambda: kept(out) >= 2, process)
    process.send_signal(stop)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == (130 if stop == signal.SIGINT else -stop)
    assert ("goes on from there" in errors) == (stop == signal.SIGINT)
    assert record(out) == whole


def wait_for(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not is_so():
        assert process.poll() is None and time.monotonic() < until, "nothing was recorded"
        time.sleep(0.02)


def test_a_worker_that_dies_takes_no_finished_episode_with_it(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, call, calls = tmp_path / "demos.hdf5", ProcessWorkers.call, []

    def dying(workers: ProcessWorkers, *rest: Any, **options: Any) -> list[Any]:
        calls.append(rest)
        if len(calls) == 3:
            os.kill(workers.pids[1], signal.SIGKILL)
        return call(workers, *rest, **options)

    monkeypatch.setattr(ProcessWorkers, "call", dying)
    with pytest.raises(WorkerError, match=mentions("worker 1 of 2")):
        record(out, num_workers=2)
    assert kept(out) and record(out) == whole


def test_a_full_disk_at_the_end_loses_nothing(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, replace = tmp_path / "demos.hdf5", os.replace
    full = OSError(errno.ENOSPC, "No space left on device")

    def refused(aside: Path, path: Path) -> None:
        if path == out:
            raise full
        replace(aside, path)

    monkeypatch.setattr("os.replace", refused)
    with pytest.raises(WriteError, match=mentions("demos.hdf5 cannot be written")):
        record(out)
    monkeypatch.undo()
    monkeypatch.setattr(Avoid, "demonstrate", lambda *_: pytest.fail("recorded again"))
    assert record(out) == whole


def test_fewer_episodes_write_those_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = record(tmp_path / "few.hdf5", episodes=3)
    interrupt(tmp_path / "demos.hdf5", 2)
    monkeypatch.setattr(Avoid, "demonstrate", lambda *_: pytest.fail("recorded again"))
    assert record(tmp_path / "demos.hdf5", episodes=3) == few


def test_fewer_episodes_than_are_there_are_refused_and_drop_none(tmp_path: Path, whole: bytes) -> None:
    out = tmp_path / "demos.hdf5"
    interrupt(out, 3)
    with pytest.raises(DatasetError, match=mentions(f"{left_of(out)} 4 episodes=1 drop 3 episodes=4")):
        record(out, episodes=1)
    assert kept(out) == 4 and not out.exists()
    assert record(out) == whole


def test_another_path_to_the_same_policy_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = saved_policy(tmp_path / "policy", obs_dim=4, action_dim=2)
    played = {"env.max_episode_steps": 3, "keep_failures": True, "noise": None}
    monkeypatch.chdir(tmp_path)
    interrupt(tmp_path / "demos.hdf5", 1, policy="policy", **played)
    one_go = record(tmp_path / "whole.hdf5", policy=policy, **played)
    assert record(tmp_path / "demos.hdf5", policy=policy, **played) == one_go


def test_other_settings_do_not_go_on(tmp_path: Path, whole: bytes) -> None:
    out = tmp_path / "demos.hdf5"
    interrupt(out, 2)
    for changed in (
        {"noise": 1.0},
        {"first_seed": 22},
        {"env.max_episode_steps": 80},
        {"keep_failures": True},
    ):
        key = next(iter(changed)).split(".")[0]
        with pytest.raises(DatasetError, match=mentions(f"{left_of(out)} 3 {key} remove")):
            record(out, **changed)
    for content in ("{", "null"):
        (left_of(out) / "settings.json").write_text(content)
        with pytest.raises(DatasetError, match=mentions("settings.json cannot be read remove")):
            record(out)


def test_a_damaged_episode_is_recorded_again_with_those_after_it(
    tmp_path: Path, whole: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "demos.hdf5"
    interrupt(out, 3)
    caplog.clear()
    damaged, *later = sorted(left_of(out).glob("*.npz"))[1:]
    damaged.write_bytes(damaged.read_bytes()[:99])
    with pytest.raises(DatasetError, match=mentions(f"{damaged.name} cannot be read later again")):
        record(out)
    assert "kept 4 of 5" in caplog.text and "goes on" not in caplog.text.partition("kept")[2]
    for path in (damaged, *later):
        path.unlink()
    assert record(out) == whole


def test_an_episode_that_is_not_finite_is_refused_at_once_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, demonstrate = tmp_path / "demos.hdf5", Avoid.demonstrate

    def damaged(self: Avoid, seed: int) -> Episode:
        episode = demonstrate(self, seed)
        return replace(episode, rewards=episode.rewards * np.nan) if kept(out) == 2 else episode

    monkeypatch.setattr(Avoid, "demonstrate", damaged)
    with pytest.raises(DatasetError, match=mentions("episode 2 rewards finite")):
        record(out)
    assert kept(out) == 2
    monkeypatch.undo()
    record(out, episodes=2)


def test_another_expert_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, demonstrate = tmp_path / "demos.hdf5", Avoid.demonstrate
    interrupt(out, 2)
    monkeypatch.setattr(Avoid, "demonstrate", lambda self, seed: demonstrate(self, seed + 1))
    with pytest.raises(DatasetError, match=mentions(f"{left_of(out)} differs episodes=3 remove")):
        record(out)


def test_what_begins_nothing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Avoid, "demonstrate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record(tmp_path / "demos.hdf5")
    assert not list(tmp_path.iterdir())


def test_a_file_is_recorded_by_one_process_at_a_time(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, refused = tmp_path / "demos.hdf5", []

    def show(*_: Any) -> None:
        with pytest.raises(CheckpointError, match=mentions("demos.hdf5 another process")):
            record(out, overwrite=True)
        refused.append(True)

    monkeypatch.setattr(command.Counting, "show", show)
    assert record(out) == whole and refused
