"""Every format, every way of being broken: one clear error or a whole dataset, never half of one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from envs.datasets import (
    Episode,
    EpisodeDataset,
    dataset_format,
    read_dataset,
    write_d4rl,
    write_minari,
    write_robomimic,
)
from policies.errors import DatasetError

LENGTHS = (5, 3, 12, 4)


def made() -> EpisodeDataset:
    rng = np.random.default_rng(0)
    return EpisodeDataset.from_episodes(
        [
            Episode(
                observations=rng.normal(size=(length + 1, 3)).astype(np.float32),
                actions=rng.normal(size=(length, 2)).astype(np.float32),
                rewards=rng.normal(size=length).astype(np.float32),
                terminated=number != 1,
                truncated=number == 1,
            )
            for number, length in enumerate(LENGTHS)
        ]
    )


def write_ogbench(path: Path, data: EpisodeDataset) -> None:
    """Write every episode with its last successor as a row without an action."""
    parts = [data.select([number]) for number in range(data.num_episodes)]
    np.savez_compressed(
        path,
        observations=np.concatenate([np.vstack([p.observations, p.next_observations[-1:]]) for p in parts]),
        actions=np.concatenate([np.vstack([p.actions, p.actions[-1:]]) for p in parts]),
        terminals=np.concatenate([np.arange(p.num_frames + 1) == p.num_frames for p in parts]),
    )


def write_dppo(path: Path, data: EpisodeDataset) -> None:
    np.savez(
        path, states=data.observations, actions=data.actions, rewards=data.rewards,
        terminals=data.terminated, traj_lengths=data.lengths,
    )  # fmt: skip
    wide = {f"{what}_{end}": np.full(n, s) for what, n in (("obs", 3), ("action", 2)) for end, s in ENDS}
    np.savez(path.parent / "normalization.npz", **wide)


ENDS = (("min", -1.0), ("max", 1.0 - 1e-6))  # the scaling is then the identity

FORMATS: dict[str, tuple[Callable[..., None], str, str]] = {
    "robomimic": (write_robomimic, "demos.hdf5", ""),
    "d4rl": (write_d4rl, "demos.hdf5", ""),
    "minari": (write_minari, "demos-v0", "data/main_data.hdf5"),
    "ogbench": (write_ogbench, "demos.npz", ""),
    "dppo": (write_dppo, "demos.npz", ""),
}
"""Writer, name, and the file with the numbers below it."""

each = pytest.mark.parametrize("name", FORMATS)


def written(name: str, folder: Path, data: EpisodeDataset | None = None) -> tuple[Path, Path]:
    """Write a dataset; returns what is read and the file with the numbers."""
    write, called, inner = FORMATS[name]
    write(folder / called, made() if data is None else data)
    return folder / called, folder / called / inner if inner else folder / called


@each
def test_what_is_whole_is_read(tmp_path: Path, name: str) -> None:
    path, _ = written(name, tmp_path)
    data = read_dataset(path)
    assert dataset_format(path) == name
    torch.testing.assert_close(data.observations, made().observations, atol=1e-6, rtol=0)
    torch.testing.assert_close(data.actions, made().actions, atol=1e-6, rtol=0)
    assert torch.equal(data.episode_start, made().episode_start)


@each
@pytest.mark.parametrize("share", np.linspace(0.0, 0.99, 12).round(2).tolist())
def test_a_file_cut_anywhere_is_one_clear_error(tmp_path: Path, name: str, share: float) -> None:
    path, file = written(name, tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DatasetError, match=r"demos"):
        read_dataset(path)


@each
def test_a_block_of_zeros_anywhere_gives_a_whole_dataset_or_one_clear_error(
    tmp_path: Path, name: str
) -> None:
    path, file = written(name, tmp_path)
    content, rng = file.read_bytes(), np.random.default_rng(0)
    for start in rng.integers(0, len(content) - 64, 25).tolist():
        file.write_bytes(content[:start] + bytes(64) + content[start + 64 :])
        try:
            data = read_dataset(path)
        except DatasetError as error:
            assert "demos" in str(error)
        else:
            assert data.num_frames == int(data.episode_start[-1]) and data.num_frames <= sum(LENGTHS)


def rewritten(name: str, file: Path, key: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the arrays of one kind in a file: `actions`, `rewards`, …"""
    if file.suffix == ".npz":
        with np.load(file) as old:
            arrays = dict(old)
        np.savez(file, **arrays | {key: change(arrays[key])})
        return
    with h5py.File(file, "a") as opened:
        wanted: list[str] = []
        opened.visit(lambda place: wanted.append(place) if place.rsplit("/", 1)[-1] == key else None)
        assert wanted
        for place in wanted:
            value = change(opened[place][()])
            del opened[place]
            opened[place] = value


@each
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none_are_refused(tmp_path: Path, name: str, value: float) -> None:
    path, file = written(name, tmp_path)
    rewritten(
        name, file, "actions", lambda old: np.where(np.arange(old.size).reshape(old.shape) == 1, value, old)
    )
    with pytest.raises(DatasetError, match=r"demos.*key 'actions' must be finite; got"):
        read_dataset(path)


@each
def test_double_precision_becomes_single(tmp_path: Path, name: str) -> None:
    path, file = written(name, tmp_path)
    before = read_dataset(path)
    rewritten(name, file, "actions", lambda old: old.astype(np.float64))
    after = read_dataset(path)
    assert after.actions.dtype == torch.float32
    torch.testing.assert_close(after.actions, before.actions, atol=1e-7, rtol=0)


@each
@pytest.mark.parametrize(
    "change",
    [lambda old: old[:-1], lambda old: old[:, 0], lambda old: old.astype("S4"), lambda old: old[:0]],
    ids=["a row less", "one axis less", "texts", "no rows"],
)
def test_actions_of_another_shape_or_kind_are_refused(
    tmp_path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    path, file = written(name, tmp_path)
    rewritten(name, file, "actions", change)
    with pytest.raises(DatasetError, match=r"demos"):
        read_dataset(path)


@each
def test_a_missing_key_is_named(tmp_path: Path, name: str) -> None:
    path, file = written(name, tmp_path)
    key = "actions"
    if file.suffix == ".npz":
        with np.load(file) as old:
            arrays = {k: v for k, v in old.items() if k != key}
        np.savez(file, **arrays)
    else:
        with h5py.File(file, "a") as opened:
            places: list[str] = []
            opened.visit(lambda place: places.append(place) if place.endswith(key) else None)
            for place in places:
                del opened[place]
    with pytest.raises(DatasetError, match=r"demos.*(actions|found)"):
        read_dataset(path)


def test_demonstrations_are_sorted_by_number_and_empty_ones_refused(tmp_path: Path) -> None:
    path, _ = written("robomimic", tmp_path)
    with h5py.File(path, "a") as file:
        for old, new in ((0, 100), (1, 20), (2, 40), (3, 101)):
            file.move(f"data/demo_{old}", f"data/demo_{new}")
    assert read_dataset(path).lengths.tolist() == [3, 12, 5, 4]
    with h5py.File(path, "a") as file:
        demo = file["data/demo_20"]
        for key in ("actions", "rewards", "dones", "obs/flat", "next_obs/flat"):
            value = demo[key][:0]
            del demo[key]
            demo[key] = value
    with pytest.raises(DatasetError, match="demonstration number 0 is empty"):
        read_dataset(path)


def test_nothing_is_left_in_memory_or_on_disk_of_a_failed_write(tmp_path: Path) -> None:
    written("minari", tmp_path)
    odd = replace(made(), next_observations=made().next_observations + 1)
    with pytest.raises(DatasetError):
        write_minari(tmp_path / "demos-v0", odd)
    assert [item.name for item in tmp_path.iterdir()] == ["demos-v0"]
    assert read_dataset(tmp_path / "demos-v0").num_frames == sum(LENGTHS)
    shutil.rmtree(tmp_path / "demos-v0")
