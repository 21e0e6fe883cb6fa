"""Files as they come: what is no problem, what is warned of with counts, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from messages import mentions
from point_env import PointEnv

from algos.base import Setup
from algos.cdsa import CdsaConfig
from algos.iql import IqlConfig
from algos.offline.loop import OfflineRun
from algos.prdc import PrdcConfig
from envs.datasets import read_dataset
from policies.build import build_policy
from policies.errors import ConfigError, DatasetError
from policies.policy import PolicyConfig
from policies.processes import RectifiedFlow

FRAMES = 60
SMALL: dict[str, Any] = {
    "steps": 4, "log_every": 4, "batch_size": 8, "hidden_dims": (8,), "critic_dims": (8,),
}  # fmt: skip


def written(path: Path, **changes: Any) -> Path:
    """Write a file of the point task in D4RL's layout; None leaves a key out."""
    rng, over, cut = np.random.default_rng(0), np.zeros(FRAMES, bool), np.zeros(FRAMES, bool)
    over[[14, 44]], cut[[29, 59]] = True, True
    content = {
        "observations": rng.normal(size=(FRAMES, 2)).astype(np.float32),
        "actions": rng.uniform(-0.4, 0.4, (FRAMES, 2)).astype(np.float32),
        "rewards": rng.normal(size=FRAMES).astype(np.float32), "terminals": over, "timeouts": cut,
    } | changes  # fmt: skip
    with h5py.File(path, "w") as file:
        for key, value in content.items():
            if value is not None:
                file[key] = value
    return path


def run_on(path: Path, config: Any = None, **parts: Any) -> OfflineRun:
    config = config or PrdcConfig(**SMALL)
    return config.build(Setup(dataset=read_dataset(path), env=PointEnv(), seed=0, num_threads=1, **parts))


def rows_of(run: OfflineRun) -> torch.Tensor:
    return run.table._rows


def plain(tmp_path: Path) -> OfflineRun:
    return run_on(written(tmp_path / "plain.hdf5"))


def test_scalars_and_weights_of_other_programs_change_nothing(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    odd = {
        "metadata/algorithm": np.bytes_("SAC"), "metadata/iteration": np.int32(3), "metadata/note": "abc",
        "metadata/policy/fc0/weight": np.ones((4, 5)), "metadata/nothing": h5py.Empty("f"),
    }  # fmt: skip
    run = run_on(written(tmp_path / "odd.hdf5", **odd))
    assert torch.equal(rows_of(run), rows_of(plain(tmp_path))) and not caplog.records
    assert all(np.isfinite(float(value)) for value in run.advance().values())


@pytest.mark.parametrize("key", ["rewards", "terminals", "timeouts"])
def test_columns_and_other_number_types_change_nothing(tmp_path: Path, key: str) -> None:
    with h5py.File(written(tmp_path / "plain.hdf5")) as file:
        column = file[key][()][:, None].astype(np.float64)
    run = run_on(written(tmp_path / "column.hdf5", **{key: column}))
    assert torch.equal(rows_of(run), rows_of(plain(tmp_path)))
    assert rows_of(run).dtype == torch.float32, "double precision would make losses double, too"


def test_actions_outside_the_box_are_counted_clipped_and_learned_from(tmp_path: Path, caplog: Any) -> None:
    with h5py.File(written(tmp_path / "plain.hdf5")) as file:
        actions = file["actions"][()]
    actions[:5, 1] = 7.0
    with caplog.at_level(logging.WARNING):
        run = run_on(written(tmp_path / "wild.hdf5", actions=actions))
    (record,) = caplog.records
    assert "5 action entries" in record.message and "clipped" in record.message
    assert "wild.hdf5" in record.message and float(run.table.action.abs().max()) <= 1.0
    assert float(run.table.action.max()) == 1.0
    run.advance()
    caplog.clear()
    tuned = run_on(tmp_path / "wild.hdf5", init=run.snapshot())
    assert "5 action entries" in caplog.text and float(tuned.table.action.abs().max()) <= 1.0


def test_missing_timeouts_are_counted_and_said_once(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        run = run_on(written(tmp_path / "endless.hdf5", timeouts=None))
    (record,) = caplog.records
    assert "'timeouts'" in record.message and "2 terminals of 60 steps" in record.message
    assert len(run.table) == FRAMES - 1, (
        "the last frame has no successor; nobody knows that frame 29 has none"
    )


BAD: dict[str, tuple[str, Any, str]] = {
    "nan in observations": ("observations", np.full((FRAMES, 2), np.nan), "finite nan"),
    "nan in actions": ("actions", np.full((FRAMES, 2), np.nan), "finite nan"),
    "infinite reward": ("rewards", np.full(FRAMES, np.inf), "finite inf"),
    "nan in flags": ("terminals", np.full(FRAMES, np.nan), "terminals 0 1"),
    "a row less": ("actions", np.zeros((FRAMES - 1, 2)), "actions 60"),
    "an axis less": ("actions", np.zeros(FRAMES), "shape"),
    "rewards per dimension": ("rewards", np.zeros((FRAMES, 2)), "shape"),
    "no width": ("actions", np.zeros((FRAMES, 0)), "shape"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_learned_from_is_one_error_with_file_and_key(tmp_path: Path, kind: str) -> None:
    key, value, message = BAD[kind]
    with pytest.raises(DatasetError, match=mentions(message)) as refused:
        read_dataset(written(tmp_path / "bad.hdf5", **{key: value}))
    assert "bad.hdf5" in str(refused.value) and f"'{key}'" in str(refused.value)


def test_a_file_without_a_step_is_refused(tmp_path: Path) -> None:
    empty = {
        "observations": np.zeros((0, 2)), "actions": np.zeros((0, 2)), "rewards": np.zeros(0),
        "terminals": np.zeros(0, bool), "timeouts": np.zeros(0, bool),
    }  # fmt: skip
    with pytest.raises(DatasetError, match=mentions("observations (0, 2)")):
        read_dataset(written(tmp_path / "empty.hdf5", **empty))


def test_a_recording_of_single_cut_steps_has_no_transition(tmp_path: Path) -> None:
    cut = {"terminals": np.zeros(FRAMES, bool), "timeouts": np.ones(FRAMES, bool)}
    path = written(tmp_path / "single.hdf5", **cut)
    assert len(read_dataset(path).transition_frames) == 0
    with pytest.raises(DatasetError, match=mentions("60 truncated")):
        run_on(path)


@pytest.mark.parametrize("changes", [{}, {"reward_shift": -1.0}])
def test_rewards_that_are_all_zero_are_refused_with_what_to_do(tmp_path: Path, changes: Any) -> None:
    rewards = np.full(FRAMES, -changes.get("reward_shift", 0.0))
    path = written(tmp_path / "poor.hdf5", rewards=rewards)
    with pytest.raises(ConfigError, match=mentions("poor.hdf5 60 algo=iql reader.task= algo=bc")):
        run_on(path, IqlConfig(**SMALL, **changes))


def test_constant_rewards_are_told_where_no_end_gives_them_a_meaning(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    zero = written(tmp_path / "poor.hdf5", rewards=np.zeros(FRAMES))
    run_on(zero, PrdcConfig(**SMALL, reward_shift=-1.0))
    assert not caplog.records, "a step less to the end is worth something"
    endless = np.arange(FRAMES) % 20 == 19
    run_on(
        written(tmp_path / "flat.hdf5", rewards=np.full(FRAMES, 2.0), terminals=0 * endless, timeouts=endless)
    )
    (record,) = caplog.records
    assert "flat.hdf5: all 60 rewards are 2" in record.message and "worth the same" in record.message


@pytest.mark.parametrize("config", [IqlConfig(**SMALL), CdsaConfig(steps=4, log_every=4, batch_size=8)])
def test_constant_features_give_finite_numbers(tmp_path: Path, config: Any) -> None:
    still = {"observations": np.ones((FRAMES, 2)), "actions": np.zeros((FRAMES, 2))}
    one = torch.ones(2)
    limits = {"min": -one, "max": one, "mean": 0 * one, "std": one}
    flow = build_policy(
        PolicyConfig(process=RectifiedFlow(), horizon=2, act_steps=1), obs_dim=2, action_dim=2,
        statistics={"state": limits, "action": limits},
    )  # fmt: skip
    start = {"init": flow} if isinstance(config, CdsaConfig) else {}
    run = run_on(written(tmp_path / "still.hdf5", **still), config, **start)
    assert all(np.isfinite(float(value)) for value in run.advance().values())
