"""What does not fit into memory is kept in files, and nobody can tell by the numbers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from messages import mentions

from algos.base import Setup
from algos.bc import BcConfig
from algos.transitions import Rewarding, tabulate
from envs.datasets import (
    Episode,
    EpisodeDataset,
    array_storage,
    free_memory,
    read_dataset,
    statistics,
    write_d4rl,
    write_minari,
    write_robomimic,
)
from envs.datasets.array_storage import ArrayStorage, Column, Disk
from envs.datasets.windows import Windows
from policies.build import build_policy
from policies.errors import DatasetError
from policies.policy import PolicyConfig
from policies.policy_config import ChunkSpec

LENGTHS = (40, 7, 33)


@pytest.fixture
def data() -> EpisodeDataset:
    rng = np.random.default_rng(0)
    episodes = [
        Episode(
            observations=rng.normal(size=(num + 1, 6)).astype(np.float32),
            actions=rng.normal(size=(num, 2)).astype(np.float32),
            rewards=rng.normal(size=num).astype(np.float32),
            terminated=num == 7,
            truncated=num != 7,
            extras={"goal": rng.normal(size=(num, 3)), "count": rng.integers(0, 9, num)},
        )
        for num in LENGTHS
    ]
    return EpisodeDataset.from_episodes(episodes)


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no memory, and work in pieces of a few rows."""
    monkeypatch.setattr(free_memory, "free_memory", lambda: 100)
    monkeypatch.setattr(array_storage, "PIECE", 256)
    monkeypatch.setattr(statistics, "_AT_ONCE", 256)


def d4rl(path: Path, data: EpisodeDataset) -> Path:
    write_d4rl(path / "a.hdf5", data)
    return path / "a.hdf5"


def d4rl_of_doubles(path: Path, data: EpisodeDataset) -> Path:
    """Nothing says where episodes end but successors; numbers are stored as others store them."""
    with h5py.File(path / "b.hdf5", "w") as file:
        for key in ("observations", "actions", "next_observations"):
            file.create_dataset(key, data=getattr(data, key).double().numpy(), compression="gzip")
        file["rewards"], file["terminals"] = data.rewards.numpy()[:, None], data.terminated.numpy()
        file["infos/qpos"] = data.extras["goal"].numpy()
    return path / "b.hdf5"


def robomimic(path: Path, data: EpisodeDataset) -> Path:
    write_robomimic(path / "c.hdf5", data)
    return path / "c.hdf5"


def minari(path: Path, data: EpisodeDataset) -> Path:
    write_minari(path / "d-v0", data)
    return path / "d-v0"


def ogbench(path: Path, data: EpisodeDataset, save: Callable[..., None] = np.savez) -> Path:
    ends = np.zeros(data.num_frames, bool)
    ends[data.episode_start[1:].numpy() - 1] = True
    numbers = {"observations": data.observations.double().numpy(), "actions": data.actions.numpy()}
    save(path / "e.npz", terminals=ends, qpos=data.extras["goal"].numpy(), **numbers)
    return path / "e.npz"


def dppo(path: Path, data: EpisodeDataset) -> Path:
    arrays = {"states": data.observations.numpy(), "actions": data.actions.double().numpy()}
    np.savez(path / "g.npz", traj_lengths=data.lengths.numpy(), rewards=data.rewards.numpy(), **arrays)
    limits = {"obs_min": -2 * np.ones(6), "obs_max": 3 * np.ones(6)}
    limits |= {"action_min": -np.ones(2), "action_max": 2 * np.ones(2)}
    np.savez(path / "normalization.npz", **limits)
    return path / "g.npz"


def compressed_ogbench(path: Path, data: EpisodeDataset) -> Path:
    return ogbench(path, data, np.savez_compressed)


def lerobot(path: Path, data: EpisodeDataset) -> Path:
    pa = pytest.importorskip("pyarrow", reason="needs the extra 'lerobot'")
    parquet = pytest.importorskip("pyarrow.parquet")
    vectors = {"observation.state": data.observations, "observation.environment_state": data.extras["goal"]}
    vectors |= {"action": data.actions}
    features = {key: {"dtype": "float64", "shape": [value.shape[1]]} for key, value in vectors.items()}
    info = {"codebase_version": "v3.0", "features": features}
    info |= {"total_episodes": data.num_episodes, "total_frames": data.num_frames}
    (path / "f/meta").mkdir(parents=True)
    (path / "f/data/chunk-000").mkdir(parents=True)
    (path / "f/meta/info.json").write_text(json.dumps(info))
    columns = {key: pa.array(value.tolist()) for key, value in vectors.items()}
    columns["index"] = pa.array(range(data.num_frames))
    columns["episode_index"] = pa.array(np.repeat(range(data.num_episodes), data.lengths.numpy()))
    table = pa.table(columns)
    for number, part in enumerate((table.slice(50), table.slice(0, 50))):  # not in the order of the frames
        place = path / f"f/data/chunk-000/file-{number:03d}.parquet"
        parquet.write_table(part, place, row_group_size=16)
    return path / "f"


FORMATS = (d4rl, d4rl_of_doubles, robomimic, minari, ogbench, compressed_ogbench, dppo, lerobot)


def is_mapped(values: torch.Tensor) -> bool:
    """Tell by the system's list of mapped files whether a tensor is in one that has no name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= values.data_ptr() < last:
            return "(deleted)" in line
    return False


@pytest.mark.parametrize("write", FORMATS)
def test_a_file_that_does_not_fit_gives_the_same_dataset(
    tmp_path: Path, data: EpisodeDataset, write: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    path = write(tmp_path, data)
    inside = read_dataset(path)
    request.getfixturevalue("crowded")
    outside = read_dataset(path, cache=str(tmp_path / "cache"))
    assert outside.storage.on_disk and not inside.storage.on_disk
    assert is_mapped(outside.observations) and is_mapped(outside.actions)
    assert outside.digest() == inside.digest() and outside.meta == inside.meta
    assert list((tmp_path / "cache").iterdir()) == []  # files without a name
    for ours, theirs in zip(outside.split(0.4, seed=1), inside.split(0.4, seed=1), strict=True):
        assert is_mapped(ours.observations) and ours.digest() == theirs.digest()


def test_official_transitions_are_the_same(
    tmp_path: Path, data: EpisodeDataset, request: pytest.FixtureRequest
) -> None:
    path = d4rl(tmp_path, data)
    inside = read_dataset(path, d4rl_compat=True)
    request.getfixturevalue("crowded")
    assert read_dataset(path, d4rl_compat=True).digest() == inside.digest()


@pytest.mark.parametrize("pad_end", [True, False])
@pytest.mark.parametrize(("obs_steps", "start"), [(1, 0), (3, 0), (3, 2)])
def test_windows_of_a_mapped_dataset_are_those_in_memory(
    tmp_path: Path,
    data: EpisodeDataset,
    pad_end: bool,
    obs_steps: int,
    start: int,
    request: pytest.FixtureRequest,
) -> None:
    chunk = ChunkSpec(2, horizon=5, act_steps=2, obs_steps=obs_steps, action_start=start)
    inside = Windows(data, chunk, pad_end=pad_end)
    request.getfixturevalue("crowded")
    outside = Windows(read_dataset(robomimic(tmp_path, data)), chunk, pad_end=pad_end)
    beside = Windows(data, chunk, pad_end=pad_end)  # in memory, without room for a second array
    index = torch.randperm(len(inside), generator=torch.Generator().manual_seed(0))
    theirs = inside.gather(index)
    for ours in (outside.gather(index), beside.gather(index)):
        for key in ("obs", "action", "mask"):
            assert torch.equal(getattr(ours, key), getattr(theirs, key)), key


def test_rows_are_laid_out_a_second_time_where_there_is_room_for_them(
    data: EpisodeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []
    for free in (None, 1000):
        monkeypatch.setattr(free_memory, "free_memory", lambda free=free: free)
        for obs_steps in (1, 2):  # rows of single observations are those of the dataset
            kinds.append(type(Windows(data, ChunkSpec(2, 3, 1, obs_steps))._obs).__name__)
    assert kinds == ["_ContiguousWindows", "_ContiguousWindows", "_ContiguousWindows", "_GatheredWindows"]


@pytest.mark.parametrize("validation", [0.0, 0.4])
def test_cloning_from_files_is_cloning_from_memory(
    tmp_path: Path, data: EpisodeDataset, validation: float, request: pytest.FixtureRequest
) -> None:
    inside, weights = replace(data, extras={}), []
    for where in ("memory", "files"):
        if where == "files":
            request.getfixturevalue("crowded")
        source = inside if where == "memory" else read_dataset(d4rl(tmp_path, inside))
        config = BcConfig(
            steps=5, batch_size=16, warmup_steps=1, validation_fraction=validation, validation_windows=8
        )
        shape = PolicyConfig(horizon=4, act_steps=2, obs_steps=2)
        run = config.build(Setup(policy=shape, dataset=source, seed=3))
        metrics = run.advance()
        weights.append((run.snapshot().state_dict(), metrics["policy/loss"]))
    (ours, loss), (theirs, other) = weights
    assert torch.equal(loss, other)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_table_of_transitions_that_does_not_fit_is_refused(
    tmp_path: Path, data: EpisodeDataset, crowded: None
) -> None:
    outside = read_dataset(d4rl(tmp_path, replace(data, extras={})))
    policy = build_policy(PolicyConfig(), obs_dim=6, action_dim=2, statistics=outside.statistics())
    with pytest.raises(DatasetError, match=mentions("a.hdf5 table memory")):
        tabulate(outside, policy, Rewarding())
    with pytest.raises(DatasetError, match=mentions("a.hdf5 transitions memory")):
        outside.transitions()


def test_statistics_do_not_depend_on_where_arrays_are_and_are_those_of_all_rows(
    tmp_path: Path, data: EpisodeDataset, crowded: None
) -> None:
    inside, outside = data.statistics(), read_dataset(robomimic(tmp_path, data)).statistics()
    for key, values in {"state": data.observations, "action": data.actions}.items():
        for name, value in inside[key].items():
            assert torch.equal(value, outside[key][name])
        wide = values.double()
        for name, exact in {"mean": wide.mean(0), "std": wide.std(0)}.items():
            torch.testing.assert_close(inside[key][name].double(), exact, rtol=1e-6, atol=1e-9)
        assert torch.equal(inside[key]["min"], values.min(0).values)


def test_it_is_said_where_arrays_are(
    tmp_path: Path, data: EpisodeDataset, crowded: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        read_dataset(d4rl(tmp_path, data), cache=str(tmp_path))
    assert f"its arrays are kept in files in {tmp_path}" in caplog.text


@pytest.mark.parametrize("write", FORMATS)
def test_what_fits_on_no_disk_is_refused(
    tmp_path: Path,
    data: EpisodeDataset,
    write: Callable[..., Path],
    crowded: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write(tmp_path, data)
    monkeypatch.setattr(array_storage, "free_disk", lambda folder: 1000)
    with pytest.raises(DatasetError, match=mentions("GiB 0.00 reader.cache=")):
        read_dataset(path)


def test_a_disk_that_is_full_is_an_error_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(array_storage.os, "posix_fallocate", full)
    with pytest.raises(DatasetError, match=mentions("No space left reader.cache=")):
        Disk(tmp_path).empty((10, 2), np.float32)


@pytest.mark.parametrize("where", [ArrayStorage, Disk])
def test_a_column_is_the_concatenation_of_its_parts(
    tmp_path: Path, where: Callable[..., ArrayStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_storage, "PIECE", 64)
    rng = np.random.default_rng(0)
    parts = [
        rng.normal(size=(num, 3)).astype(kind) for num, kind in ((4, "f4"), (0, "f4"), (5, "f8"), (9, "i4"))
    ]
    for expected in (0, 5, 18, 30):
        column = Column(where(*([tmp_path] if where is Disk else [])), expected)
        for part in parts:
            column.add(part)
        joined = np.concatenate(parts)
        assert column.joined().dtype == joined.dtype
        np.testing.assert_array_equal(column.joined(), joined)
