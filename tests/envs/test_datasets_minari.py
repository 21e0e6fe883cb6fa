"""Minari datasets: what Minari writes is read, and what is written Minari reads."""

import json
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from messages import mentions

from envs.datasets import Episode, EpisodeDataset, dataset_format, read_dataset, write_minari
from policies.errors import DatasetError

LENGTHS = (3, 1, 4)


def episode(length, seed, **extras):
    rng = np.random.default_rng(seed)
    return Episode(
        observations=rng.normal(size=(length + 1, 5)).astype(np.float32),
        actions=rng.normal(size=(length, 2)).astype(np.float32),
        rewards=rng.normal(size=length).astype(np.float32),
        terminated=seed != 1,
        truncated=seed == 1,
        success=seed != 1,
        seed=seed,
        extras={"states": rng.normal(size=(length, 7))} | {k: v(rng, length) for k, v in extras.items()},
    )


@pytest.fixture
def dataset():
    episodes = [episode(length, seed) for seed, length in enumerate(LENGTHS)]
    return EpisodeDataset.from_episodes(episodes, meta={"source": "here", "attempts": 15})


@pytest.fixture
def goals():
    def position(rng, length):
        return rng.normal(size=(length, 2))

    episodes = [episode(n, seed, goal=position, achieved_goal=position) for seed, n in enumerate(LENGTHS)]
    return EpisodeDataset.from_episodes(episodes)


# -- written here ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dataset", "goals"])
def test_reading_what_was_written_gives_the_same_dataset(tmp_path, request, kind):
    data = request.getfixturevalue(kind)
    write_minari(tmp_path / "demos-v0", data)
    for place in ("", "data", "data/main_data.hdf5"):
        back = read_dataset(tmp_path / "demos-v0" / place)
        assert back.digest() == data.digest()
    assert dataset_format(tmp_path / "demos-v0") == "minari"
    assert back.meta.get("attempts") == data.meta.get("attempts")


def test_the_last_step_of_a_cut_episode_is_a_transition_to_its_true_successor(tmp_path, dataset):
    """D4RL's conversion drops it."""
    write_minari(tmp_path / "demos-v0", dataset)
    steps, cut = read_dataset(tmp_path / "demos-v0").transitions(), int(dataset.truncated.nonzero()[0, 0])
    assert len(steps.frames) == sum(LENGTHS) and not bool(steps.terminated[cut])
    torch.testing.assert_close(steps.next_observations[cut], torch.from_numpy(episode(1, 1).observations[1]))


def test_unknown_successors_stay_unknown(tmp_path, dataset):
    bare = replace(dataset, next_observations=None, episode_extras={})
    write_minari(tmp_path / "demos-v0", bare)
    assert read_dataset(tmp_path / "demos-v0").digest() == bare.digest()


def test_successors_that_are_not_the_next_observation_cannot_be_written(tmp_path, dataset):
    odd = replace(dataset, next_observations=dataset.next_observations + 1)
    with pytest.raises(DatasetError, match=mentions("next_observations 0 5")):
        write_minari(tmp_path / "demos-v0", odd)
    assert list(tmp_path.iterdir()) == []


def test_a_new_dataset_replaces_an_old_one_and_nothing_else(tmp_path, dataset):
    write_minari(tmp_path / "demos-v0", dataset)
    write_minari(tmp_path / "demos-v0", dataset.select([0]))
    assert read_dataset(tmp_path / "demos-v0").num_episodes == 1
    (tmp_path / "mine-v0").mkdir()
    (tmp_path / "mine-v0" / "thesis.txt").touch()
    with pytest.raises(DatasetError, match=mentions("Minari another")):
        write_minari(tmp_path / "mine-v0", dataset)
    with pytest.raises(DatasetError, match=mentions("demos demos-v0")):
        write_minari(tmp_path / "demos", dataset)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["demos-v0", "mine-v0"]


@pytest.mark.parametrize("kind", ["dataset", "goals"])
def test_minari_itself_reads_what_was_written(tmp_path, request, monkeypatch, kind):
    minari = pytest.importorskip("minari", reason="needs the package 'minari'")
    data = request.getfixturevalue(kind)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    write_minari(tmp_path / "ours" / "demos-v0", data, dataset_id="ours/demos-v0")
    theirs = minari.load_dataset("ours/demos-v0")
    assert "ours/demos-v0" in minari.list_local_datasets()
    assert (theirs.total_episodes, theirs.total_steps) == (data.num_episodes, data.num_frames)
    for number, one in enumerate(theirs.iterate_episodes()):
        ours = data.select([number])
        seen = one.observations["observation"] if kind == "goals" else one.observations
        assert theirs.observation_space.contains(
            {key: value[0] for key, value in one.observations.items()} if kind == "goals" else seen[0]
        )
        assert theirs.action_space.contains(one.actions[0])
        np.testing.assert_array_equal(seen[:-1], ours.observations)
        np.testing.assert_array_equal(seen[1:], ours.next_observations)
        np.testing.assert_array_equal(one.actions, ours.actions)
        np.testing.assert_array_equal(one.rewards, ours.rewards)
        np.testing.assert_array_equal(one.terminations, ours.terminated)
        np.testing.assert_array_equal(one.truncations, ours.truncated)
        if kind == "goals":
            np.testing.assert_array_equal(one.observations["desired_goal"][:-1], ours.extras["goal"])
    assert [int(one["seed"]) for one in theirs.storage.get_episode_metadata(range(3))] == [0, 1, 2]


# -- written by Minari ----------------------------------------------------------------------------------


def write_theirs(monkeypatch, tmp_path, space, observe, form):
    """Let Minari write three episodes of observations from a space."""
    minari = pytest.importorskip("minari", reason="needs the package 'minari'")
    spaces = pytest.importorskip("gymnasium.spaces")
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    rng = np.random.default_rng(0)
    buffers = [
        EpisodeBuffer(
            seed=40 + number,
            observations=observe(rng, length + 1),
            actions=rng.uniform(-1, 1, (length, 2)).astype(np.float32),
            rewards=rng.normal(size=length),
            terminations=np.arange(length) == (length - 1 if number else -1),
            truncations=np.zeros(length, bool),
            infos={
                "success": np.arange(length + 1) >= 2,
                "more": {"qpos": rng.normal(size=(length + 1, 3))},
            },
        )
        for number, length in enumerate(LENGTHS)
    ]
    minari.create_dataset_from_buffers(
        "theirs/toy-v1", buffers, observation_space=space, data_format=form,
        action_space=spaces.Box(-1, 1, (2,), np.float32), description="toy", author="ada",
    )  # fmt: skip
    return tmp_path / "theirs" / "toy-v1", buffers


FORMS = pytest.mark.parametrize("form", ["hdf5", "arrow", "parquet"])


def box(*shape):
    spaces = pytest.importorskip("gymnasium.spaces")
    return spaces.Box(-np.inf, np.inf, shape, np.float64)


@FORMS
def test_vectors_are_read_as_minari_gives_them(tmp_path, monkeypatch, form):
    path, buffers = write_theirs(monkeypatch, tmp_path, box(4), lambda rng, n: rng.normal(size=(n, 4)), form)
    data = read_dataset(path)
    assert data.lengths.tolist() == list(LENGTHS)
    for number, one in enumerate(buffers):
        ours = data.select([number])
        np.testing.assert_array_equal(ours.observations, one.observations[:-1].astype(np.float32))
        np.testing.assert_array_equal(ours.next_observations, one.observations[1:].astype(np.float32))
        np.testing.assert_array_equal(ours.actions, one.actions)
        np.testing.assert_array_equal(ours.rewards, one.rewards.astype(np.float32))
        np.testing.assert_array_equal(ours.extras["infos/more/qpos"], one.infos["more"]["qpos"][:-1])
    last = data.episode_start[1:] - 1
    assert data.terminated[last].tolist() == [False, True, True]
    assert data.truncated[last].tolist() == [True, False, False], "an episode without an end was cut"
    assert data.episode_extras["seed"].tolist() == [40, 41, 42]
    assert data.success.tolist() == [True, False, True]
    for number, one in enumerate(buffers):
        flags = data.select([number]).extras["infos/success"].flatten()  # Arrow's are columns of width 1
        assert flags.tolist() == one.infos["success"][1:].tolist()
    assert data.meta["dataset_id"] == "theirs/toy-v1"


def nested_space():
    spaces = pytest.importorskip("gymnasium.spaces")
    return spaces.Dict(
        {
            "observation": box(3),
            "desired_goal": spaces.Dict({"kettle": box(2), "door": box(1)}),
            "achieved_goal": spaces.Dict({"kettle": box(2), "door": box(1)}),
        }
    )


def nested_observations(rng, n):
    def goal():
        return {"door": rng.normal(size=(n, 1)), "kettle": rng.normal(size=(n, 2))}

    return {"achieved_goal": goal(), "desired_goal": goal(), "observation": rng.normal(size=(n, 3))}


@FORMS
def test_the_desired_goal_becomes_the_goal(tmp_path, monkeypatch, form):
    spaces = pytest.importorskip("gymnasium.spaces")
    path, buffers = write_theirs(monkeypatch, tmp_path, nested_space(), nested_observations, form)
    data = read_dataset(path)
    for number, one in enumerate(buffers):
        ours, space = data.select([number]), nested_space()
        np.testing.assert_array_equal(
            ours.observations, one.observations["observation"][:-1].astype(np.float32)
        )
        for part, key in (("desired_goal", "goal"), ("achieved_goal", "achieved_goal")):
            for t, row in enumerate(ours.extras[key]):
                step = {name: value[t] for name, value in one.observations[part].items()}
                np.testing.assert_array_equal(row, spaces.flatten(space[part], step))
    assert data.statistics()["goal"]["mean"].shape == (3,)
    chosen = read_dataset(path, obs_keys=["desired_goal/kettle", "observation"])
    assert chosen.obs_dim == 5 and torch.equal(chosen.observations[:, 2:], data.observations)
    with pytest.raises(DatasetError, match=mentions("['camera']")):
        read_dataset(path, obs_keys=["camera"])


@FORMS
@pytest.mark.parametrize("size", [8, 40])  # Minari stores images from 32 pixels on as JPEG
def test_images_become_those_of_a_camera_and_what_is_left_out_is_named(
    tmp_path, monkeypatch, caplog, form, size
):
    spaces = pytest.importorskip("gymnasium.spaces")
    space = spaces.Dict(
        {"pos": box(2), "cam": spaces.Box(0, 255, (size, size, 3), np.uint8), "mission": spaces.Text(9)}
    )

    def observe(rng, n):
        shades = rng.integers(0, 255, (n, 1, 1, 1)).astype(np.uint8)
        pictures = np.broadcast_to(shades, (n, size, size, 3)).copy()
        return {"cam": pictures, "mission": ["go"] * n, "pos": rng.normal(size=(n, 2))}

    path, buffers = write_theirs(monkeypatch, tmp_path, space, observe, form)
    data = read_dataset(path)
    assert data.obs_dim == 2 and "mission (texts)" in caplog.text
    assert data.meta["not_read"] == ["mission"] and data.image_shapes == {"cam": (size, size, 3)}
    seen = data.images["cam"][torch.arange(data.num_frames)].int().numpy()
    shown = np.concatenate([one.observations["cam"][:-1] for one in buffers]).astype(int)
    assert np.abs(seen - shown).max() <= (2 if size >= 32 else 0)
    order = torch.arange(data.num_frames).flip(0)
    np.testing.assert_array_equal(data.images["cam"][order].numpy(), seen[::-1])


@pytest.mark.parametrize("infos", [True, False])
def test_success_in_the_last_step_makes_an_episode_a_success(tmp_path, infos):
    """Minari's collector puts the reset's info first, so that row t+1 belongs to step t."""
    folder = write_raw(tmp_path / "late-v0")
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        for number, rows in enumerate(([0, 0, 0, 0, 1], [0, 0, 0, 0, 0])):
            file[f"episode_{number}/infos/success"] = np.array(rows, bool)
            file[f"episode_{number}/infos/clock"] = np.arange(5)
    data = read_dataset(folder, infos=infos)
    assert data.success.tolist() == [True, False]
    assert ("infos/success" in data.extras) == infos
    if infos:
        assert data.extras["infos/success"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
        assert data.extras["infos/clock"].tolist() == [0, 1, 2, 3] * 2, (
            "other numbers are those before the step"
        )


def test_success_that_some_episodes_do_not_tell_is_left_open(tmp_path):
    folder = write_raw(tmp_path / "some-v0")
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        file["episode_0/infos/success"] = np.ones(5, bool)
    assert read_dataset(folder).success is None


def test_success_per_frame_of_our_own_stays_where_it_was(tmp_path, dataset):
    flags = torch.arange(dataset.num_frames) % 2 == 0
    ours = replace(dataset, extras=dict(dataset.extras) | {"success": flags})
    write_minari(tmp_path / "demos-v0", ours)
    back = read_dataset(tmp_path / "demos-v0")
    assert back.digest() == ours.digest() and back.extras["success"].tolist() == flags.tolist()


# -- bad content ----------------------------------------------------------------------------------------


def write_raw(folder, metadata=None, **changes):
    """Write two episodes in Minari's layout; a change is for the second episode."""
    (folder / "data").mkdir(parents=True)
    content = {"total_episodes": 2, "data_format": "hdf5", "dataset_id": folder.name} | (metadata or {})
    (folder / "data" / "metadata.json").write_text(json.dumps(content))
    rng = np.random.default_rng(0)
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for number in range(2):
            arrays = {
                "observations": rng.normal(size=(5, 3)),
                "actions": rng.normal(size=(4, 2)),
                "rewards": np.zeros(4),
                "terminations": np.array([0, 0, 0, 1], bool),
                "truncations": np.zeros(4, bool),
            } | (changes if number else {})
            group = file.create_group(f"episode_{number}")
            for key, value in arrays.items():
                if value is not None:
                    group.create_dataset(key, data=value)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observations": None}, "episode_1 observations 5"),
        ({"observations": np.zeros((4, 3))}, "5 observation"),
        ({"observations": np.zeros((5, 4))}, "episode_1 observations shape (4, 3)"),
        ({"observations": np.full((5, 3), np.nan)}, "observations finite"),
        (
            {"actions": np.zeros(4, int)},
            "actions shape (4,)",
        ),
        ({"rewards": None}, "rewards 4"),
        ({"rewards": np.zeros(5)}, "rewards 4 shape (5,)"),
        (
            {"terminations": np.array([0, 1, 0, 1])},
            "terminations 1 4",
        ),
        ({"truncations": np.full(4, 3)}, "truncations 0 1 3"),
    ],
)
def test_bad_content_names_file_episode_and_key(tmp_path, changes, message):
    with pytest.raises(DatasetError, match=mentions(message)) as error:
        read_dataset(write_raw(tmp_path / "bad-v0", **changes))
    assert "bad-v0" in str(error.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"total_episodes": 3}, "3 missing ['episode_2']"),
        ({"total_episodes": 0}, "total_episodes 1 0"),
        ({"total_episodes": None}, "data_format total_episodes"),
        ({"data_format": "zarr"}, "data_format hdf5 zarr arrow parquet"),
        ({"observation_space": "{no"}, "data_format total_episodes"),
    ],
)
def test_bad_metadata_is_one_clear_error(tmp_path, metadata, message):
    with pytest.raises(DatasetError, match=mentions(message)):
        read_dataset(write_raw(tmp_path / "bad-v0", metadata))


def test_a_dataset_without_metadata_names_what_is_there(tmp_path):
    folder = write_raw(tmp_path / "bare-v0")
    (folder / "data" / "metadata.json").unlink()
    with pytest.raises(DatasetError, match=mentions("['data']")):
        read_dataset(folder)
