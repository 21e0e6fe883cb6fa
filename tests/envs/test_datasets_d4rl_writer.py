"""What is written in D4RL's layout, and writing in any format."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from entry import exit_code
from messages import mentions

import burnish
from envs.datasets import (
    Episode,
    EpisodeDataset,
    dataset_format,
    read_d4rl,
    read_dataset,
    write_d4rl,
    write_dataset,
    write_minari,
)
from envs.datasets.formats import d4rl as d4rl_format
from envs.datasets.formats.d4rl import load_d4rl
from envs.datasets.images import Images
from envs.datasets.writers import WRITERS, format_to_write
from policies.errors import ConfigError, DatasetError

LENGTHS = (4, 1, 6, 3)


@pytest.fixture
def dataset():
    rng = np.random.default_rng(0)
    episodes = [
        Episode(
            observations=rng.normal(size=(n + 1, 5)).astype(np.float32),
            actions=rng.normal(size=(n, 2)).astype(np.float32),
            rewards=rng.normal(size=n).astype(np.float32),
            terminated=seed != 2,
            truncated=seed == 2,
            success=seed % 2 == 0,
            seed=seed,
            extras={"states": rng.normal(size=(n, 7)), "infos/goal": rng.normal(size=(n, 2))},
        )
        for seed, n in enumerate(LENGTHS)
    ]
    return EpisodeDataset.from_episodes(episodes, meta={"source": "here", "attempts": 15})


def test_a_file_is_opened_once_for_arrays_and_names(tmp_path, dataset, monkeypatch):
    write_d4rl(tmp_path / "demos.hdf5", dataset)
    opened = []
    real = d4rl_format.read_hdf5
    monkeypatch.setattr(d4rl_format, "read_hdf5", lambda path: opened.append(path) or real(path))
    assert read_d4rl(tmp_path / "demos.hdf5").digest() == dataset.digest()
    assert len(opened) == 1


@pytest.mark.parametrize("successors", [True, False])
def test_reading_what_was_written_gives_the_same_dataset(tmp_path, dataset, successors):
    if not successors:
        dataset = replace(dataset, next_observations=None)
    write_d4rl(tmp_path / "demos.hdf5", dataset)
    back = read_dataset(tmp_path / "demos.hdf5")
    assert back.digest() == dataset.digest()
    assert dataset_format(tmp_path / "demos.hdf5") == "d4rl" and back.meta["attempts"] == 15


def test_successors_that_are_not_the_next_row_cut_no_own_episode(tmp_path, dataset):
    far = replace(dataset, next_observations=dataset.next_observations + 9)
    write_d4rl(tmp_path / "demos.hdf5", far)
    assert read_dataset(tmp_path / "demos.hdf5").digest() == far.digest()


def test_extra_keys_of_nearly_one_name_are_all_kept(tmp_path, dataset):
    per_frame = torch.arange(float(dataset.num_frames))
    names = ("infos/goal_", "infos/episodes/seed", "infos", "infos/states/x")
    extras = {"goal": per_frame, **dataset.extras} | {name: i * per_frame for i, name in enumerate(names)}
    dense = replace(dataset, extras=extras)
    write_d4rl(tmp_path / "demos.hdf5", dense)
    back = read_dataset(tmp_path / "demos.hdf5")
    assert back.digest() == dense.digest()
    with h5py.File(tmp_path / "demos.hdf5") as file:
        np.testing.assert_array_equal(file["infos/goal"], dataset.extras["infos/goal"])


@pytest.mark.parametrize("write", [write_d4rl, write_minari, partial(write_dataset, format="d4rl")])
def test_images_are_refused_where_there_is_no_place_for_them(tmp_path, dataset, write):
    seen = Images.of(np.zeros((dataset.num_frames, 2, 2, 3), np.uint8))
    with pytest.raises(ConfigError, match=mentions("format=robomimic format=")):
        write(tmp_path / "demos-v0", replace(dataset, images={"top": seen}))
    assert not list(tmp_path.iterdir())


def test_a_recording_that_was_merely_cut_is_a_time_out(tmp_path, dataset):
    cut = replace(
        dataset, terminated=torch.zeros_like(dataset.terminated), truncated=dataset.truncated & False
    )
    write_d4rl(tmp_path / "demos.hdf5", cut)
    back = read_dataset(tmp_path / "demos.hdf5")
    assert torch.equal(back.episode_start, cut.episode_start)
    assert int(back.truncated.sum()) == len(LENGTHS) and not bool(back.terminated.any())


def test_the_layout_is_d4rl_s(tmp_path, dataset):
    write_d4rl(tmp_path / "demos.hdf5", dataset)
    with h5py.File(tmp_path / "demos.hdf5") as file:
        num = dataset.num_frames
        shapes = {key: file[key].shape for key in file if isinstance(file[key], h5py.Dataset)}
        assert shapes == {
            "observations": (num, 5), "next_observations": (num, 5), "actions": (num, 2),
            "rewards": (num,), "terminals": (num,), "timeouts": (num,),
        }  # fmt: skip
        assert file["terminals"].dtype == bool and file["observations"].dtype == np.float32
        assert file["infos/states"].shape == (num, 7)


@pytest.fixture
def d4rl(tmp_path, monkeypatch):
    monkeypatch.setenv("D4RL_SUPPRESS_IMPORT_ERROR", "1")
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
    return pytest.importorskip("d4rl", reason="needs the packages of the extra 'd4rl' and its --no-deps step")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("terminate_on_end", [False, True])
def test_d4rl_itself_converts_the_file_as_compat_does(tmp_path, dataset, d4rl, terminate_on_end):
    from envs.datasets.formats.d4rl import qlearning_dataset

    write_d4rl(tmp_path / "demos.hdf5", dataset)
    arrays = load_d4rl(tmp_path / "demos.hdf5")

    class Env:
        _max_episode_steps = 1000

    expected = d4rl.qlearning_dataset(Env(), dataset=arrays, terminate_on_end=terminate_on_end)
    got = qlearning_dataset(arrays, terminate_on_end=terminate_on_end)
    for key, value in got.items():
        assert value.dtype == expected[key].dtype
        np.testing.assert_array_equal(value, expected[key])
    if not terminate_on_end:
        ours = read_d4rl(tmp_path / "demos.hdf5", d4rl_compat=True).transitions()
        np.testing.assert_array_equal(ours.observations, expected["observations"])
        np.testing.assert_array_equal(ours.next_observations, expected["next_observations"])
        np.testing.assert_array_equal(ours.terminated, expected["terminals"])


def test_damaged_names_are_one_clear_error(tmp_path, dataset):
    write_d4rl(tmp_path / "demos.hdf5", dataset)
    for text in ("{no", "3", json.dumps({"extras": [3]}), json.dumps({"meta": 4})):
        with h5py.File(tmp_path / "demos.hdf5", "a") as file:
            file.attrs["burnish"] = text
        with pytest.raises(DatasetError, match=mentions("demos.hdf5 burnish JSON")):
            read_dataset(tmp_path / "demos.hdf5")


def test_the_format_follows_from_the_name_unless_told():
    assert format_to_write("demos.hdf5") == format_to_write("demos") == "robomimic"
    assert format_to_write("here/demos-v0") == "minari"
    assert format_to_write("demos-v0", "d4rl") == "d4rl"
    with pytest.raises(ConfigError, match=mentions("d4rl robomimic minari zarr")):
        format_to_write("x", "zarr")


@pytest.mark.parametrize("name", ["x.npz", "x.NPY", "x.pkl", "a/x.zarr", "x.parquet", "x.csv"])
@pytest.mark.parametrize("form", [None, "d4rl"])
def test_hdf5_is_not_written_under_the_name_of_another_format(
    name: str, form: str | None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=mentions(f"HDF5 {Path(name).suffix} x.hdf5")):
        format_to_write(tmp_path / name, form)
    assert exit_code("collect", "env=avoid", f"out={tmp_path / name}", f"format={form or 'null'}") == 2
    for fine in ("x.h5", "x.hdf5", "x", "x.v1.5"):
        assert format_to_write(fine, form) == (form or "robomimic")
    assert format_to_write("x.zarr", "lerobot") == "lerobot"


def test_only_robomimic_has_masks(tmp_path, dataset):
    with pytest.raises(ConfigError, match=mentions("valid_fraction format=robomimic format=d4rl")):
        write_dataset(tmp_path / "demos.hdf5", dataset, format="d4rl", valid_fraction=0.5)


def test_what_is_collected_is_the_same_in_every_format(tmp_path):
    """LeRobot's format holds less (test_datasets_lerobot_writer.py)."""
    digests = set()
    for name in sorted({*WRITERS} - {"lerobot"}):
        path = burnish.collect(env="avoid", episodes=2, out=tmp_path / f"{name}-v0", format=name)
        data = read_dataset(path)
        assert dataset_format(path) == name and data.meta["env" if name != "robomimic" else "env_args"]
        digests.add(data.digest())
    assert len(digests) == 1
    with pytest.raises(ConfigError, match=mentions("valid_fraction format=robomimic")):
        burnish.collect(env="avoid", episodes=2, out=tmp_path / "x.hdf5", format="d4rl", valid_fraction=0.5)
    with pytest.raises(DatasetError, match=mentions("exists")):
        burnish.collect(env="avoid", episodes=2, out=tmp_path / "minari-v0")
    burnish.collect(env="avoid", episodes=1, out=tmp_path / "minari-v0", overwrite=True)
    assert read_dataset(tmp_path / "minari-v0").num_episodes == 1
