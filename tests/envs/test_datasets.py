import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from messages import mentions

from envs import datasets
from envs.datasets import (
    Episode,
    EpisodeDataset,
    dataset_format,
    normalized_score,
    read_d4rl,
    read_dataset,
    write_robomimic,
)
from envs.datasets.files.hdf5 import read_hdf5
from envs.datasets.formats.d4rl import load_d4rl, qlearning_dataset
from envs.evaluation.scores import reference
from policies.errors import DatasetError


def episode(length, seed=0, *, terminated=True, obs_dim=3, action_dim=2):
    rng = np.random.default_rng(seed)
    return Episode(
        observations=rng.normal(size=(length + 1, obs_dim)).astype(np.float32),
        actions=rng.normal(size=(length, action_dim)).astype(np.float32),
        rewards=rng.normal(size=length).astype(np.float32),
        terminated=terminated,
        truncated=not terminated,
        success=terminated,
        seed=seed,
    )


@pytest.fixture
def dataset():
    episodes = [episode(n, seed, terminated=seed != 1) for seed, n in enumerate((4, 1, 6, 3))]
    return EpisodeDataset.from_episodes(episodes)


def arrays(num=10):
    rng = np.random.default_rng(0)
    ends = np.zeros(num, bool)
    ends[[3, 9]] = True
    return {
        "observations": rng.normal(size=(num, 3)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (num, 2)).astype(np.float32),
        "rewards": rng.normal(size=num).astype(np.float32),
        "terminated": ends & (np.arange(num) == 3),
        "truncated": ends & (np.arange(num) == 9),
        "episode_start": np.array([0, 4, 10]),
    }


def write_d4rl(path: Path, **changes):
    data = arrays()
    content = {
        "observations": data["observations"],
        "actions": data["actions"],
        "rewards": data["rewards"],
        "terminals": data["terminated"],
        "timeouts": data["truncated"],
    } | changes
    with h5py.File(path, "w") as file:
        for key, value in content.items():
            if value is not None:
                file.create_dataset(key, data=value)
    return path


def test_episodes_are_concatenated_with_their_ends_and_successors(dataset):
    assert dataset.lengths.tolist() == [4, 1, 6, 3]
    assert dataset.terminated.nonzero().squeeze(1).tolist() == [3, 10, 13]
    assert dataset.truncated.nonzero().squeeze(1).tolist() == [4]
    assert dataset.success.tolist() == [True, False, True, True]
    inside = ~(dataset.terminated | dataset.truncated)
    torch.testing.assert_close(
        dataset.next_observations[inside], dataset.observations[inside.nonzero().squeeze(1) + 1]
    )
    assert dataset.observations.dtype == torch.float32


def test_a_dataset_is_shown_by_its_sizes(dataset):
    named = replace(dataset, meta={"source": "demos.hdf5"})
    assert repr(named) == (
        "EpisodeDataset(demos.hdf5: 4 episodes, 14 frames, observations 3 and actions 2 wide)"
    )


def test_statistics_are_those_of_the_frames(dataset):
    stats = dataset.statistics()
    for key, values in (("state", dataset.observations), ("action", dataset.actions)):
        values = values.numpy().astype(np.float64)
        np.testing.assert_array_equal(stats[key]["min"], values.min(0).astype(np.float32))
        np.testing.assert_array_equal(stats[key]["max"], values.max(0).astype(np.float32))
        np.testing.assert_allclose(stats[key]["mean"], values.mean(0), rtol=1e-6)
        np.testing.assert_allclose(stats[key]["std"], values.std(0, ddof=1), rtol=1e-6)


def test_statistics_do_not_lose_small_spreads_on_large_offsets():
    values = 1e4 + np.array([[0.0], [1.0], [2.0], [3.0]])
    data = EpisodeDataset.from_arrays(values, values, np.zeros(4), [0, 0, 0, 1], np.zeros(4), [0, 4])
    assert data.statistics()["state"]["std"].item() == pytest.approx(values.std(ddof=1), rel=1e-6)


def test_returns_are_summed_per_episode_and_to_go_per_frame(dataset):
    gamma, rewards = 0.9, dataset.rewards.double().numpy()
    starts = dataset.episode_start.tolist()
    to_go = np.zeros(len(rewards))
    for first, end in pairwise(starts):
        for t in range(first, end):
            to_go[t] = sum(gamma ** (j - t) * rewards[j] for j in range(t, end))
    np.testing.assert_allclose(dataset.returns_to_go(gamma), to_go, rtol=1e-6)
    expected = [rewards[a:b].sum() for a, b in pairwise(starts)]
    np.testing.assert_allclose(dataset.returns, expected, rtol=1e-12)


def test_a_mask_ends_values_but_makes_no_transition(dataset):
    assert dataset.over is dataset.terminated
    masks = torch.ones(dataset.num_frames)
    masks[[2, 4]] = 0  # inside an episode, and on the last frame of one that was cut
    masked = replace(dataset, extras={"masks": masks}, next_observations=None)
    assert torch.equal(masked.over, dataset.terminated | (masks == 0))
    steps = masked.transitions()
    assert 4 not in steps.frames.tolist() and torch.equal(steps.terminated, masked.over[steps.frames])


def test_selected_episodes_keep_everything_that_belongs_to_them(dataset):
    part = dataset.select([2, 0])
    assert part.lengths.tolist() == [6, 4]
    assert part.episode_extras["seed"].tolist() == [2, 0]
    torch.testing.assert_close(part.actions[:6], dataset.actions[5:11])
    torch.testing.assert_close(part.next_observations[6:], dataset.next_observations[:4])
    with pytest.raises(DatasetError, match=mentions("0 3 [4]")):
        dataset.select([4])


def test_splits_are_disjoint_complete_and_decided_by_the_seed(dataset):
    def seeds(part):
        return part.episode_extras["seed"].tolist()

    train, valid = dataset.split(0.3, seed=5)
    assert len(seeds(valid)) == 1
    assert sorted(seeds(train) + seeds(valid)) == [0, 1, 2, 3]
    again = dataset.split(0.3, seed=5)
    assert seeds(again[1]) == seeds(valid)
    assert len({tuple(seeds(dataset.split(0.3, seed=s)[1])) for s in range(20)}) == 4
    with pytest.raises(DatasetError, match=mentions("2 episodes")):
        dataset.select([0]).split()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "observations",
            np.full((10, 3), np.nan),
            "observations finite nan [0, 0]",
        ),
        ("actions", np.full((10, 2), np.inf), "actions finite inf"),
        ("rewards", np.r_[np.zeros(9), np.nan], "rewards finite nan 9 1"),
        ("actions", np.zeros((9, 2)), "actions shape 10 (9, 2)"),
        ("rewards", np.zeros((10, 1)), "rewards shape (10) (10, 1)"),
        ("observations", np.zeros((0, 3)), "observations empty"),
        ("episode_start", [0, 4, 4, 10], "episode_start 4 2"),
        ("episode_start", [0, 6, 4, 10], "episode_start 4 6"),
        ("episode_start", [0, 4, 9], "episode_start 0 10"),
        ("truncated", np.r_[True, np.zeros(9, bool)], "truncated 0"),
    ],
)
def test_bad_arrays_are_refused_with_key_expected_and_got(key, value, message):
    with pytest.raises(DatasetError, match=mentions(message)) as error:
        EpisodeDataset.from_arrays(**arrays() | {key: value}, meta={"source": "demo.hdf5"})
    assert str(error.value).startswith("demo.hdf5: ")


def test_bad_extras_are_refused():
    with pytest.raises(DatasetError, match=mentions("states 10")):
        EpisodeDataset.from_arrays(**arrays(), extras={"states": np.zeros((9, 2))})
    with pytest.raises(DatasetError, match=mentions("goal finite")):
        EpisodeDataset.from_arrays(**arrays(), extras={"goal": np.full((10, 2), np.nan)})


def test_bad_episodes_are_refused():
    with pytest.raises(DatasetError, match=mentions("episode")):
        EpisodeDataset.from_episodes([])
    with pytest.raises(DatasetError, match=mentions("1 actions shape (3, 2) (3, 4)")):
        EpisodeDataset.from_episodes([episode(3), episode(3, action_dim=4)])


def test_d4rl_file_gives_true_episodes_and_keeps_the_end_of_the_file(tmp_path):
    timeouts = np.zeros(10, bool)
    path = write_d4rl(tmp_path / "a.hdf5", timeouts=timeouts, rewards=arrays()["rewards"][:, None])
    data = read_dataset(path)
    assert data.lengths.tolist() == [4, 6]
    assert data.terminated.nonzero().squeeze(1).tolist() == [3]
    assert data.truncated.nonzero().squeeze(1).tolist() == [9]
    # No successor is known for the last row: it did not terminate, so it is no transition.
    assert data.transitions().frames.tolist() == list(range(9))


def test_a_terminal_on_a_timeout_step_stays_terminal(tmp_path):
    timeouts = arrays()["terminated"] | arrays()["truncated"]
    data = read_d4rl(write_d4rl(tmp_path / "a.hdf5", timeouts=timeouts))
    assert bool(data.terminated[3])
    assert 3 in data.transitions().frames.tolist()
    official = read_d4rl(tmp_path / "a.hdf5", d4rl_compat=True)
    assert not bool(official.terminated.any())


def test_time_limit_cuts_files_without_timeouts_at_every_multiple(tmp_path):
    path = write_d4rl(tmp_path / "a.hdf5", timeouts=None)
    data = read_d4rl(path, max_episode_steps=3)
    assert data.lengths.tolist() == [3, 1, 3, 3]
    assert read_d4rl(path).lengths.tolist() == [4, 6]
    missed = write_d4rl(tmp_path / "b.hdf5", timeouts=np.zeros(10, bool))
    assert read_d4rl(missed, max_episode_steps=3).lengths.tolist() == [3, 1, 3, 3]
    with pytest.raises(DatasetError, match=mentions("a.hdf5 timeouts reader.max_episode_steps=")):
        read_d4rl(path, d4rl_compat=True)


@pytest.mark.parametrize(
    ("changes", "options", "facts"),
    [
        ({"timeouts": None}, {}, ["1 terminals of 10 steps", "cut there alone", "max_episode_steps=<steps>"]),
        (
            {"timeouts": None},
            {"max_episode_steps": 3},
            ["of 4 ends of episodes 1 are terminals", "found by reader.max_episode_steps=3 and"],
        ),
        (
            {
                "timeouts": None,
                "next_observations": np.roll(arrays()["observations"], -1, axis=0) + np.eye(10)[:, [6]],
            },
            {},
            ["of 3 ends of episodes 1 are terminals", "found by successors that are not the next row"],
        ),
    ],
)
def test_missing_timeouts_are_warned_of_with_what_is_taken_for_them(
    tmp_path, caplog, changes, options, facts
):
    read_d4rl(write_d4rl(tmp_path / "a.hdf5", **changes), **options)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "'timeouts'" in record.message and "a.hdf5" in record.message
    assert all(fact in record.message for fact in facts), record.message


def successors(rows, *, jumps=()):
    """Return the next rows (N, D), far away at jumps and behind the last row."""
    following = np.roll(rows, -1, axis=0)
    following[[*jumps, len(rows) - 1]] += 1.0
    return following


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("timeouts", [True, False])
def test_successors_of_another_precision_end_no_episode(tmp_path, size, timeouts):
    rows = size * (7.0 + arrays()["observations"].astype(np.float64) / 3)
    following = successors(rows)
    following[6] += 1e-3 * size
    changes = {} if timeouts else {"timeouts": None}
    path = write_d4rl(
        tmp_path / "a.hdf5", observations=rows.astype(np.float32), next_observations=following, **changes
    )
    found = read_d4rl(path)
    assert found.lengths.tolist() == [4, 3, 3], "a terminal, a seam, and the end of the file"
    assert found.truncated.nonzero().flatten().tolist() == [6, 9]


def test_a_seam_that_no_flag_tells_of_is_cut_and_counted(tmp_path, caplog):
    rows, never = arrays()["observations"], np.zeros(10, bool)
    changes = {"timeouts": never, "next_observations": successors(rows, jumps=[3, 5, 7])}
    data = read_d4rl(write_d4rl(tmp_path / "joined.hdf5", **changes))
    assert data.lengths.tolist() == [4, 2, 2, 2]
    assert data.truncated.nonzero().flatten().tolist() == [5, 7, 9]
    (record,) = caplog.records
    assert "joined.hdf5: seams between episodes without a flag: 2, the first behind row 5" in record.message


@pytest.mark.parametrize("timeouts", [True, False])
def test_successors_that_are_hardly_ever_the_next_row_are_told(tmp_path, caplog, timeouts):
    changes = {} if timeouts else {"timeouts": None}
    path = write_d4rl(tmp_path / "mixed.hdf5", next_observations=arrays()["observations"] + 3.0, **changes)
    assert read_d4rl(path).num_episodes == 10
    assert "mixed.hdf5: in 8 of 10 rows" in caplog.text, "the terminal and the last row may jump"
    assert "same units and precision" in caplog.text


def test_what_is_not_finite_under_infos_is_refused_with_the_way_to_leave_it_out(tmp_path):
    path = write_d4rl(tmp_path / "a.hdf5", **{"infos/qvel": np.full((10, 2), np.nan)})
    with pytest.raises(DatasetError, match=mentions("infos/qvel finite reader.infos=false")):
        read_d4rl(path)
    assert read_d4rl(path, infos=False).num_frames == 10


def test_numbers_beyond_float32_are_one_error_and_no_warning_of_numpy(tmp_path):
    large = arrays()["observations"].astype(np.float64)
    large[4, 1] = 1e300
    for key in ("observations", "next_observations"):
        path = write_d4rl(tmp_path / "a.hdf5", **{key: large})
        with pytest.raises(DatasetError, match=mentions(f"{key} finite inf 4 1")):
            read_d4rl(path)


def test_timeouts_that_are_there_need_no_warning(tmp_path, caplog):
    read_d4rl(write_d4rl(tmp_path / "a.hdf5"))
    assert not caplog.records


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("terminate_on_end", [False, True])
def test_official_counter_equals_a_row_by_row_loop(seed, terminate_on_end):
    rng, num, limit = np.random.default_rng(seed), 60, 5
    data = {
        "observations": rng.normal(size=(num, 2)).astype(np.float32),
        "actions": rng.normal(size=(num, 1)).astype(np.float32),
        "rewards": rng.normal(size=num).astype(np.float32),
        "terminals": rng.random(num) < 0.25,
    }
    kept, counter = [], 0
    for i in range(num - 1):
        final = counter == limit - 1
        if final and not terminate_on_end:
            counter = 0
            continue
        if data["terminals"][i] or final:
            counter = 0
        kept.append(i)
        counter += 1
    got = qlearning_dataset(data, terminate_on_end=terminate_on_end, max_episode_steps=limit)
    np.testing.assert_array_equal(got["observations"], data["observations"][kept])


def test_infos_are_kept_by_frame_and_by_episode(tmp_path):
    path = write_d4rl(
        tmp_path / "a.hdf5",
        **{
            "infos/qpos": np.arange(20.0).reshape(10, 2),
            "infos/init_qpos": np.ones((2, 4)),
            "metadata/algorithm": np.bytes_("SAC"),
        },
    )
    data = read_d4rl(path)
    assert data.extras["infos/qpos"].dtype == torch.float64
    assert data.episode_extras["infos/init_qpos"].shape == (2, 4)
    assert data.meta["metadata/algorithm"] == "SAC"
    assert json.dumps(data.meta)


def test_the_goals_of_mazes_are_goals_where_they_are_one_vector_per_frame(tmp_path):
    goals = np.arange(20.0).reshape(10, 2)
    data = read_d4rl(write_d4rl(tmp_path / "a.hdf5", **{"infos/goal": goals}))
    np.testing.assert_array_equal(data.extras["goal"], goals)
    assert "infos/goal" not in data.extras and data.statistics()["goal"]["max"].tolist() == [18, 19]
    other = read_d4rl(write_d4rl(tmp_path / "b.hdf5", **{"infos/goal": goals[:, 0]}))
    assert "goal" not in other.extras and "infos/goal" in other.extras


def test_a_damaged_chunk_is_one_clear_error(tmp_path):
    path = tmp_path / "bad.hdf5"
    write_d4rl(path, observations=None)
    with h5py.File(path, "a") as file:
        values = np.random.default_rng(0).normal(size=(10, 500))
        file.create_dataset("observations", data=values, compression="gzip")
        offset = file["observations"].id.get_chunk_info(0).byte_offset
    content = bytearray(path.read_bytes())
    content[offset : offset + 200] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=mentions("bad.hdf5")):
        read_dataset(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observations": np.zeros((10, 3, 2))}, "observations shape 10"),
        ({"observations": np.zeros(())}, "observations 1"),
        ({"rewards": np.array([b"a"] * 10)}, "rewards 10 |S1"),
        ({"next_observations": np.zeros((10, 4))}, "next_observations shape (10, 3)"),
        ({"timeouts": np.zeros((10, 2), bool)}, "timeouts shape (10,) (10, 2)"),
        ({"terminals": np.full(10, np.nan)}, "terminals 0 1 nan"),
        ({"timeouts": np.arange(10)}, "timeouts 0 1 2 8"),
        ({"observations": h5py.Empty("f")}, "observations 1"),
        (
            {key: np.zeros((0, 2)) for key in ("observations", "actions")}
            | {key: np.zeros(0) for key in ("rewards", "terminals", "timeouts")},
            "observations",
        ),
    ],
)
def test_bad_d4rl_content_names_file_and_key(tmp_path, changes, message):
    with pytest.raises(DatasetError, match=mentions(message)) as error:
        read_dataset(write_d4rl(tmp_path / "bad.hdf5", **changes))
    assert "bad.hdf5" in str(error.value)


def test_the_byte_order_of_the_file_does_not_matter(tmp_path):
    data, swapped = arrays(), {"infos/x": np.arange(10.0).astype(">f8")}
    for key in ("observations", "actions", "rewards"):
        swapped[key] = data[key].astype(data[key].dtype.newbyteorder())
    got = read_dataset(write_d4rl(tmp_path / "swapped.hdf5", **swapped))
    plain = read_dataset(write_d4rl(tmp_path / "plain.hdf5", **{"infos/x": np.arange(10.0)}))
    assert got.digest() == plain.digest()


@pytest.mark.parametrize("error", [ValueError, TypeError, AttributeError, IndexError, KeyError])
def test_what_fails_while_reading_is_one_clear_error(tmp_path, error):
    path = write_d4rl(tmp_path / "a.hdf5")
    with pytest.raises(DatasetError, match=mentions("a.hdf5")), read_hdf5(path):
        raise error("odd")


def test_scores_are_zero_at_random_and_hundred_at_expert():
    np.testing.assert_allclose(normalized_score("hopper-medium-v2", [-20.272305, 3234.3]), [0, 100])
    assert reference("hopper") == reference("hopper-expert-v0")
    assert reference("door") == reference("door-human-v0"), "episodes of other lengths share their returns"
    with pytest.raises(DatasetError, match=mentions("hopper-medium-v2")):
        normalized_score("hopper-medum-v2", 1.0)
    with pytest.raises(DatasetError, match=mentions("maze2d-umaze-")):
        reference("maze2d-umaze")


def test_equal_datasets_load_the_same_twice(tmp_path):
    path = write_d4rl(tmp_path / "a.hdf5")
    one, two = load_d4rl(path), load_d4rl(path)
    for key in one:
        np.testing.assert_array_equal(one[key], two[key])


def test_a_digest_follows_every_tensor_and_nothing_else(dataset):
    other = EpisodeDataset.from_episodes(
        [episode(n, seed, terminated=seed != 1) for seed, n in enumerate((4, 1, 6, 3))], meta={"source": "x"}
    )
    assert other.digest() == dataset.digest() != dataset.select([0, 1, 2]).digest()
    changed = [
        replace(dataset, rewards=dataset.rewards + 1),
        replace(dataset, next_observations=None),
        replace(dataset, extras={"goal": dataset.observations}),
        replace(dataset, extras={"goals": dataset.observations}),
        replace(dataset, episode_extras=dataset.episode_extras | {"seed": torch.zeros(4)}),
    ]
    assert len({dataset.digest(), *(one.digest() for one in changed)}) == 6


TOY = """
from pathlib import Path
from envs.datasets.episodes import EpisodeDataset

def matches(path):
    return Path(path).suffix == ".toy"

def read(path, *, scale=1.0):
    rows = [[scale]] * 3
    return EpisodeDataset.from_arrays(rows, rows, [0.0] * 3, [False] * 3, [False, False, True], [0, 3])
"""


def test_a_format_is_a_module_that_matches_and_reads(tmp_path, dataset, monkeypatch):
    (tmp_path / "toy_format.py").write_text(TOY)
    (tmp_path / "data.toy").write_text("not HDF5")
    monkeypatch.setattr(datasets.formats, "__path__", [*datasets.formats.__path__, str(tmp_path)])
    datasets.readers.cache_clear()
    try:
        assert {"d4rl", "dppo", "ogbench", "robomimic", "toy_format"} <= set(datasets.readers())
        assert dataset_format(tmp_path / "data.toy") == "toy_format"
        assert read_dataset(tmp_path / "data.toy", scale=2.0).observations[0, 0] == 2.0
        write_robomimic(tmp_path / "other.hdf5", dataset)
        assert dataset_format(tmp_path / "other.hdf5") == "robomimic"
    finally:
        datasets.readers.cache_clear()
        sys.modules.pop("envs.datasets.formats.toy_format", None)


def test_formats_exclude_each_other(tmp_path, dataset):
    write_robomimic(tmp_path / "robomimic.hdf5", dataset)
    write_d4rl(tmp_path / "d4rl.hdf5")
    for path in (tmp_path / "robomimic.hdf5", tmp_path / "d4rl.hdf5"):
        assert [name for name, reader in datasets.readers().items() if reader.matches(path)] == [path.stem]
