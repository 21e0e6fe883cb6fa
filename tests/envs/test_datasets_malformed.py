"""Every format, every way of being broken: one clear error or a whole dataset, never half of one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from dataset_files import FORMATS, LENGTHS, made, read_parquet, write_parquet
from messages import mentions

from envs.datasets import dataset_format, read_dataset, write_minari
from policies.errors import DatasetError

each = pytest.mark.parametrize("name", FORMATS)

UNREADABLE = {
    ".hdf5": "HDF5 truncated damaged",
    ".npz": "npz truncated damaged",
    ".parquet": "Parquet truncated damaged",
}
"""What is mentioned beside the name of a damaged file, by its suffix."""


def refusal(path: Path) -> str:
    """Return the message with which a dataset is refused."""
    with pytest.raises(DatasetError) as refused:
        read_dataset(path)
    return str(refused.value)


def says(message: str, source: Path, parts: str) -> bool:
    """Tell whether a message begins with the name of a source and mentions every part after that."""
    rest = message.removeprefix(f"{source}: ")
    return rest != message and bool(re.search(mentions(parts), rest))


@each
def test_what_is_whole_is_read(tmp_path: Path, name: str) -> None:
    path, _ = FORMATS[name].into(tmp_path)
    data = read_dataset(path)
    assert dataset_format(path) == name
    torch.testing.assert_close(data.observations, made().observations, atol=1e-6, rtol=0)
    torch.testing.assert_close(data.actions, made().actions, atol=1e-6, rtol=0)
    assert torch.equal(data.episode_start, made().episode_start)


@each
def test_a_file_cut_anywhere_is_one_clear_error(tmp_path: Path, name: str) -> None:
    path, file = FORMATS[name].into(tmp_path)
    content = file.read_bytes()
    for share in np.linspace(0.0, 0.99, 12).round(2).tolist():
        file.write_bytes(content[: int(share * len(content))])
        # An empty file is of no kind.
        kind = file.suffix if share > 0 or file.suffix == ".parquet" else ".hdf5"
        assert says(refusal(path), file, UNREADABLE[kind]), share


@each
def test_a_block_of_zeros_anywhere_gives_a_whole_dataset_or_one_clear_error(
    tmp_path: Path, name: str
) -> None:
    path, file = FORMATS[name].into(tmp_path)
    content, rng = file.read_bytes(), np.random.default_rng(0)
    for start in rng.integers(0, len(content) - 64, 25).tolist():
        file.write_bytes(content[:start] + bytes(64) + content[start + 64 :])
        try:
            data = read_dataset(path)
        except DatasetError as error:
            assert says(str(error), file, "")
        else:
            assert data.num_frames == int(data.episode_start[-1]) and data.num_frames <= sum(LENGTHS)


Change = Callable[[np.ndarray], np.ndarray]


def rewritten(file: Path, key: str, change: Change | None) -> None:
    """Change the arrays of one kind in a file (`actions`, `rewards`, …); None takes them out."""
    if file.suffix == ".hdf5":
        _rewritten_groups(file, key, change)
        return
    if file.suffix == ".parquet":
        arrays = read_parquet(file)
    else:
        with np.load(file) as old:
            arrays = dict(old)
    before = arrays.pop(key)
    after = {} if change is None else {key: change(before)}
    if file.suffix == ".npz":
        np.savez(file, **arrays | after)
    else:  # columns are of one length
        rows = min(len(value) for value in (*after.values(), before))
        write_parquet(file, {k: value[:rows] for k, value in (arrays | after).items()})


def _rewritten_groups(file: Path, key: str, change: Change | None) -> None:
    with h5py.File(file, "a") as opened:
        wanted: list[str] = []
        opened.visit(lambda place: wanted.append(place) if place.rsplit("/", 1)[-1] == key else None)
        assert wanted
        for place in wanted:
            value = opened[place][()]
            del opened[place]
            if change is not None:
                opened[place] = change(value)


@each
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none_are_refused(tmp_path: Path, name: str, value: float) -> None:
    path, file = FORMATS[name].into(tmp_path)
    rewritten(
        file,
        FORMATS[name].action,
        lambda old: np.where(np.arange(old.size).reshape(old.shape) == 1, value, old),
    )
    count = len(LENGTHS) if name in ("minari", "robomimic") else 1  # they have an array per episode
    assert says(refusal(path), path, f"actions finite {value} [0, 1] {count}")


@each
def test_double_precision_becomes_single(tmp_path: Path, name: str) -> None:
    path, file = FORMATS[name].into(tmp_path)
    before = read_dataset(path)
    rewritten(file, FORMATS[name].action, lambda old: old.astype(np.float64))
    after = read_dataset(path)
    assert after.actions.dtype == torch.float32
    torch.testing.assert_close(after.actions, before.actions, atol=1e-7, rtol=0)


CHANGES: dict[str, Change] = {
    "a row less": lambda old: old[:-1],
    "one axis less": lambda old: old[:, 0],
    "texts": lambda old: old.astype("S4"),
    "no rows": lambda old: old[:0],
}
REFUSALS = {
    "arrays": ("rewards 23 (24,)", "actions (24, Da) (24,)", "actions S4", "actions empty frame"),
    "d4rl": (
        "actions 24 (23, 2)",
        "actions (24, Da) (24,)",
        "actions 24 (24, 2) S4",
        "actions 24 (0, 2)",
    ),
    "dppo": ("actions 24 (23, 2)", "actions 2 (24,)", "actions S4", "actions 24 (0, 2)"),
    "lerobot": (
        "total_frames meta/info.json 24 23",
        "action 2 24 [1]",
        "action binary",
        "total_frames meta/info.json 24 0",
    ),
    "minari": (
        "episode_0 terminations 4 (5,)",
        "episode_0 actions (T, Da) (5,)",
        "episode_0 actions (T, Da) (5, 2) S4",
        "episode_0 actions empty",
    ),
    "ogbench": ("actions 28 (27, 2)", "actions (N, D) (28,)", "actions S4", "actions 28 (0, 2)"),
    "robomimic": (
        "demo_0/obs flat (4, 3) (5, 3)",
        "actions (24, Da) (24,)",
        "demo_0 actions S4",
        "demo_0/obs flat (0, 3) (5, 3)",
    ),
}
"""What the refusal of each of these changes of the actions mentions."""


@each
@pytest.mark.parametrize("kind", CHANGES)
def test_actions_of_another_shape_or_kind_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    path, file = FORMATS[name].into(tmp_path)
    rewritten(file, FORMATS[name].action, CHANGES[kind])
    message, parts = refusal(path), REFUSALS[name][list(CHANGES).index(kind)]
    assert says(message, path, parts) or says(message, file, parts)


WITHOUT_ACTIONS = {
    "arrays": "formats npz keys",
    "d4rl": "formats keys",
    "dppo": "formats npz keys",
    "lerobot": "missing ['action']",
    "minari": "episode_0 actions keys",
    "ogbench": "formats npz keys",
    "robomimic": "demo_0 keys ['actions']",
}


@each
def test_a_missing_key_is_named(tmp_path: Path, name: str) -> None:
    path, file = FORMATS[name].into(tmp_path)
    rewritten(file, FORMATS[name].action, None)
    assert says(refusal(path), file, WITHOUT_ACTIONS[name])


EMPTY: dict[str, tuple[str, Change, str]] = {
    "dppo": (
        "traj_lengths",
        lambda old: np.insert(old, 1, 0),
        "traj_lengths [5, 0, 3, 12, 4]",
    ),
    "minari": (
        "terminations",
        lambda old: old[:0],
        "episode_0 terminations 5 (0,)",
    ),
    "ogbench": (
        "terminals",
        lambda old: old | (np.arange(len(old)) == 0),
        "terminals rows recording 0",
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_episodes_without_a_step_are_refused(tmp_path: Path, name: str) -> None:
    path, file = FORMATS[name].into(tmp_path)
    key, change, expected = EMPTY[name]
    rewritten(file, key, change)
    assert says(refusal(path), file, expected)


def test_demonstrations_are_sorted_by_number_and_empty_ones_refused(tmp_path: Path) -> None:
    path, _ = FORMATS["robomimic"].into(tmp_path)
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
    assert says(refusal(path), path, "demo_20 empty actions")


def test_nothing_is_left_in_memory_or_on_disk_of_a_failed_write(tmp_path: Path) -> None:
    FORMATS["minari"].into(tmp_path)
    odd = replace(made(), next_observations=made().next_observations + 1)
    with pytest.raises(DatasetError):
        write_minari(tmp_path / "demos-v0", odd)
    assert [item.name for item in tmp_path.iterdir()] == ["demos-v0"]
    assert read_dataset(tmp_path / "demos-v0").num_frames == sum(LENGTHS)
    shutil.rmtree(tmp_path / "demos-v0")
