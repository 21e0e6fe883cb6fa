import json
from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from messages import mentions

from envs.datasets import (
    Episode,
    EpisodeDataset,
    dataset_format,
    read_dataset,
    read_robomimic,
    write_robomimic,
)
from envs.datasets.formats.robomimic import read_models
from envs.datasets.interface import interface_of
from envs.datasets.windows import Windows
from envs.fit import require_fit
from policies.errors import ConfigError, DatasetError
from policies.policy_config import ChunkSpec

MASKS = ("train", "valid")


def episode(length, seed, *, terminated=True):
    rng = np.random.default_rng(seed)
    return Episode(
        observations=rng.normal(size=(length + 1, 5)).astype(np.float32),
        actions=rng.normal(size=(length, 2)).astype(np.float32),
        rewards=rng.normal(size=length).astype(np.float32),
        terminated=terminated,
        truncated=not terminated,
        success=seed % 2 == 0,
        seed=seed,
        extras={"states": rng.normal(size=(length, 7)), "goal": rng.normal(size=(length, 2))},
    )


@pytest.fixture
def dataset():
    # More than ten episodes: demo_10 must not come before demo_2.
    return EpisodeDataset.from_episodes(
        [episode(2 + seed % 3, seed, terminated=seed != 4) for seed in range(12)],
        meta={"source": "here", "attempts": 15},
    )


def assert_same(one, two):
    for key in ("observations", "actions", "rewards", "terminated", "truncated", "episode_start"):
        assert torch.equal(getattr(one, key), getattr(two, key)), key
    assert (one.next_observations is None) == (two.next_observations is None)
    if one.next_observations is not None:
        assert torch.equal(one.next_observations, two.next_observations)
    for kind in ("extras", "episode_extras"):
        first, second = getattr(one, kind), getattr(two, kind)
        assert set(first) == set(second)
        for key, value in first.items():
            assert value.dtype == second[key].dtype
            assert torch.equal(value, second[key]), key


@pytest.mark.parametrize("layout", [None, {"robot0_eef_pos": 3, "object": 2}, {"z": 1, "a": 4}])
def test_reading_what_was_written_gives_the_same_dataset(tmp_path, dataset, layout):
    write_robomimic(tmp_path / "demo.hdf5", dataset, layout=layout)
    back = read_dataset(tmp_path / "demo.hdf5")
    assert_same(dataset, back)
    assert back.meta["attempts"] == 15
    assert back.meta["obs_layout"] == (layout or {"flat": 5})


def test_keys_with_slashes_are_read_as_they_were_written(tmp_path, dataset):
    frames, episodes = torch.arange(dataset.num_frames), torch.arange(dataset.num_episodes)
    extras = dataset.extras | {"infos/qpos": frames.double(), "infos/deep/er": frames}
    nested = replace(dataset, extras=extras, episode_extras=dataset.episode_extras | {"infos/a": episodes})
    write_robomimic(tmp_path / "demo.hdf5", nested)
    assert_same(nested, read_dataset(tmp_path / "demo.hdf5"))


@pytest.mark.parametrize("share", [-0.2, 1.0, 1.5, float("nan")])
def test_a_share_for_validation_outside_its_range_is_refused_before_anything_is_written(
    tmp_path, dataset, share
):
    with pytest.raises(ConfigError, match=mentions("valid_fraction 0 1")):
        write_robomimic(tmp_path / "demo.hdf5", dataset, valid_fraction=share)
    with pytest.raises(ConfigError, match=mentions("valid_fraction=0.5 2")):
        write_robomimic(tmp_path / "demo.hdf5", dataset.select([0]), valid_fraction=0.5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("share", "valid"), [(0.01, 1), (0.99, 11)])
def test_a_share_for_validation_leaves_an_episode_on_each_side(tmp_path, dataset, share, valid):
    write_robomimic(tmp_path / "demo.hdf5", dataset, valid_fraction=share)
    sizes = {mask: read_robomimic(tmp_path / "demo.hdf5", mask=mask).num_episodes for mask in MASKS}
    assert sizes == {"train": 12 - valid, "valid": valid}


def test_unknown_successors_stay_unknown(tmp_path, dataset):
    bare = EpisodeDataset.from_arrays(
        dataset.observations,
        dataset.actions,
        dataset.rewards,
        dataset.terminated,
        dataset.truncated,
        dataset.episode_start,
    )
    write_robomimic(tmp_path / "demo.hdf5", bare)
    assert_same(bare, read_dataset(tmp_path / "demo.hdf5"))


def test_file_has_the_schema_other_readers_expect(tmp_path, dataset):
    write_robomimic(tmp_path / "demo.hdf5", dataset, valid_fraction=0.25)
    with h5py.File(tmp_path / "demo.hdf5") as file:
        data = file["data"]
        assert data.attrs["total"] == dataset.num_frames
        assert {"env_name", "type", "env_kwargs"} <= set(json.loads(data.attrs["env_args"]))
        assert len(data) == 12
        for number, length in enumerate(dataset.lengths.tolist()):
            demo = data[f"demo_{number}"]
            assert demo.attrs["num_samples"] == length
            assert demo["actions"].shape == (length, 2)
            assert demo["obs/flat"].shape == demo["next_obs/flat"].shape == (length, 5)
            assert demo["dones"][()].tolist() == [0] * (length - 1) + [1]
            assert demo["states"].shape == (length, 7)
        names = {key: {name.decode() for name in file[f"mask/{key}"][()]} for key in ("train", "valid")}
    assert len(names["valid"]) == 3
    assert names["train"] | names["valid"] == {f"demo_{i}" for i in range(12)}
    assert not names["train"] & names["valid"]


def test_masks_select_demonstrations(tmp_path, dataset):
    write_robomimic(tmp_path / "demo.hdf5", dataset, valid_fraction=0.25, seed=3)
    train = read_dataset(tmp_path / "demo.hdf5", mask="train")
    valid = read_dataset(tmp_path / "demo.hdf5", mask="valid")
    seeds = train.episode_extras["seed"].tolist()
    assert seeds == sorted(seeds)
    assert sorted(seeds + valid.episode_extras["seed"].tolist()) == list(range(12))
    with pytest.raises(DatasetError, match=mentions("mask/test ['train', 'valid']")):
        read_dataset(tmp_path / "demo.hdf5", mask="test")


def write_foreign(path, **changes):
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number, length in ((2, 4), (10, 3)):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = length
            content = {
                "actions": rng.normal(size=(length, 7)),
                "rewards": np.zeros(length),
                "dones": np.r_[np.zeros(length - 1, int), int(number == 2)],
                "obs/object": np.full((length, 2), number, float),
                "obs/robot0_eef_pos": np.full((length, 3), 0.5),
                "obs/robot0_joint_pos": np.zeros((length, 7)),
                "obs/agentview_image": np.zeros((length, 4, 4, 3), np.uint8),
            } | changes
            for key, value in content.items():
                if value is not None:
                    demo.create_dataset(key, data=value)
    return path


def test_foreign_files_give_proprioception_then_object_in_numeric_order(tmp_path):
    data = read_dataset(write_foreign(tmp_path / "foreign.hdf5"))
    assert dataset_format(tmp_path / "foreign.hdf5") == "robomimic"
    assert data.lengths.tolist() == [4, 3]
    assert data.observations[0].tolist() == [0.5, 0.5, 0.5, 2.0, 2.0]
    assert data.terminated.nonzero().squeeze(1).tolist() == [3]
    assert data.truncated.nonzero().squeeze(1).tolist() == [6]
    assert data.next_observations is None
    assert data.meta["not_read"] == [] and data.image_shapes == {"agentview": (4, 4, 3)}
    chosen = read_robomimic(tmp_path / "foreign.hdf5", obs_keys=["object", "robot0_joint_pos"])
    assert chosen.obs_dim == 9
    with pytest.raises(DatasetError, match=mentions("['agentview_image']")):
        read_robomimic(tmp_path / "foreign.hdf5", obs_keys=["agentview_image"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": np.zeros(9)}, "demo_2 rewards 4 9"),
        (
            {"obs/object": np.zeros((9, 2))},
            "demo_2/obs object shape (4, 2) (9, 2)",
        ),
        ({"actions": np.full((4, 7), 1j)}, "demo_2 actions"),
        ({"actions": 3.0}, "demo_2 actions"),
        ({"rewards": 3.0}, "demo_2 rewards 4"),
        ({"rewards": h5py.Empty("f")}, "demo_2 rewards"),
        ({"dones": 1}, "demo_2 dones shape (4,)"),
        ({"dones": np.zeros(0)}, "demo_2 dones shape (4,) (0,)"),
        ({"extras/s": np.array([b"a"] * 4)}, "demo_2/extras"),
    ],
)
def test_bad_content_names_file_demonstration_and_key(tmp_path, changes, message):
    path = write_foreign(tmp_path / "bad.hdf5", **changes)
    with pytest.raises(DatasetError, match=mentions(message)) as error:
        read_dataset(path)
    assert "bad.hdf5" in str(error.value)


def test_absolute_actions_are_told_and_refused_by_a_task_that_takes_changes(tmp_path):
    path = write_foreign(tmp_path / "absolute.hdf5")
    task = {"env_name": "Lift", "env_kwargs": {"controller_configs": {"control_delta": False}}}
    with h5py.File(path, "a") as file:
        file["data"].attrs["env_args"] = json.dumps(task)
    data = read_dataset(path)
    assert interface_of(data.meta, data.obs_dim, data.action_dim)["actions"] == "absolute poses"
    with pytest.raises(ConfigError, match=mentions("changes poses absolute poses")):
        require_fit("env=lift", SimpleNamespace(family="robosuite"), "absolute.hdf5", data, advice="")


def replaced_by_numbers(key):
    def spoil(file):
        del file[key]
        file[key] = np.zeros(3)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file["data"].attrs.update(obs_layout="{no"), "obs_layout JSON"),
        (lambda file: file["data"].attrs.update(obs_layout="[1, 2]"), "obs_layout pairs"),
        (lambda file: file["data"].attrs.update(meta="{no"), "meta JSON"),
        (lambda file: file["data"].attrs.update(env_args=3), "env_args JSON"),
        (lambda file: file["data/demo_1"].attrs.update(terminated="no"), "terminated true"),
        (lambda file: file.copy("data/demo_1", "data/demo_foo"), "['demo_foo']"),
        (replaced_by_numbers("data/demo_0"), "demo_0 group"),
        (replaced_by_numbers("data/demo_1"), "demo_1 group"),
        (replaced_by_numbers("data/demo_0/obs"), "demo_0 obs group"),
        (replaced_by_numbers("data/demo_1/next_obs"), "demo_1 next_obs group"),
    ],
)
def test_a_damaged_structure_names_what_it_should_be(tmp_path, dataset, spoil, message):
    write_robomimic(tmp_path / "bad.hdf5", dataset)
    with h5py.File(tmp_path / "bad.hdf5", "a") as file:
        spoil(file)
    with pytest.raises(DatasetError, match=mentions(f"bad.hdf5 {message}")):
        read_dataset(tmp_path / "bad.hdf5")


def test_models_of_demonstrations_are_read_in_the_order_of_the_data(tmp_path, dataset):
    path = tmp_path / "demo.hdf5"
    write_robomimic(path, dataset, valid_fraction=0.5)
    assert read_models(path) == [None] * dataset.num_episodes
    texts = [f'<mujoco model="{number}"/>' for number in range(dataset.num_episodes)]
    with h5py.File(path, "a") as file:
        for number, text in enumerate(texts):
            file[f"data/demo_{number}"].attrs["model_file"] = text
        chosen = sorted(int(name.decode().removeprefix("demo_")) for name in file["mask/valid"])
    assert read_models(path) == texts
    assert read_models(path, mask="valid") == [texts[number] for number in chosen]
    with h5py.File(path, "a") as file:
        file["data/demo_1"].attrs["model_file"] = 3
    with pytest.raises(DatasetError, match=mentions("demo_1 model_file MJCF 3")):
        read_models(path)


def test_a_group_among_the_observations_is_passed_over(tmp_path, dataset):
    write_robomimic(tmp_path / "demo.hdf5", dataset)
    with h5py.File(tmp_path / "demo.hdf5", "a") as file:
        file.create_group("data/demo_0/obs/more")
    assert_same(read_dataset(tmp_path / "demo.hdf5"), dataset)


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path, dataset):
    path = tmp_path / "demo.hdf5"
    write_robomimic(path, dataset)
    before = path.read_bytes()
    with pytest.raises(DatasetError, match=mentions("layout 5")):
        write_robomimic(path, dataset, layout={"a": 4})
    broken = EpisodeDataset.from_episodes([episode(3, 0)])
    broken.extras["states"] = torch.zeros(3, 2, dtype=torch.bfloat16)  # HDF5 has no such type
    with pytest.raises(TypeError):
        write_robomimic(path, broken)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["demo.hdf5"]


def test_the_file_is_as_readable_as_any_other_new_file(tmp_path, dataset):
    write_robomimic(tmp_path / "demo.hdf5", dataset)
    (tmp_path / "plain").touch()
    assert (tmp_path / "demo.hdf5").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_robomimic_itself_reads_the_file(tmp_path, dataset):
    robomimic = pytest.importorskip("robomimic", reason="needs the extra 'robomimic' and its --no-deps step")
    try:
        obs_utils = pytest.importorskip("robomimic.utils.obs_utils")
        sequences = pytest.importorskip("robomimic.utils.dataset")
    except RuntimeError as error:  # a torchvision that does not match torch
        pytest.skip(f"robomimic {robomimic.__version__} does not import here: {error}")
    path = tmp_path / "demo.hdf5"
    write_robomimic(path, dataset, layout={"robot0_eef_pos": 3, "object": 2}, valid_fraction=0.25)
    keys = ["robot0_eef_pos", "object"]
    obs_utils.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": keys, "rgb": []}})
    loaded = sequences.SequenceDataset(
        hdf5_path=str(path),
        obs_keys=keys,
        dataset_keys=["actions", "rewards", "dones"],
        frame_stack=2,
        seq_length=4,
        hdf5_cache_mode=None,
        filter_by_attribute="train",
        load_next_obs=True,
    )
    train = read_dataset(path, mask="train")
    assert len(loaded) == train.num_frames
    windows = Windows(train, ChunkSpec(2, 4, 4, 2))
    batch = windows.gather(torch.arange(windows.num))
    for index in range(len(loaded)):
        item = loaded[index]
        obs = np.concatenate([item["obs"][key][:2] for key in keys], axis=1)
        np.testing.assert_array_equal(obs, batch.obs[index])
        np.testing.assert_array_equal(item["actions"][1:], batch.action[index])
