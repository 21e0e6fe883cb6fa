"""npz archives of OGBench and of DPPO and ReinFlow."""

import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import everything

from envs.datasets import dataset_format, read_dataset
from envs.datasets.formats.ogbench import compact_dataset, regular_dataset
from policies.errors import DatasetError

LENGTHS = (4, 2, 5)


def ogbench_arrays(nq=21):
    rng = np.random.default_rng(0)
    num = sum(LENGTHS)
    ends = np.zeros(num, bool)
    ends[np.cumsum(LENGTHS) - 1] = True
    return {
        "observations": rng.normal(size=(num, 3)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (num, 2)).astype(np.float32),
        "terminals": ends,
        "qpos": rng.normal(size=(num, nq)).astype(np.float32),
        "qvel": rng.normal(size=(num, nq - 1)).astype(np.float32),
        "button_states": rng.integers(0, 2, (num, 2)),
    }


def write_ogbench(path, **changes):
    content = {key: value for key, value in (ogbench_arrays() | changes).items() if value is not None}
    np.savez_compressed(path, **content)
    return path


def dppo_arrays():
    rng = np.random.default_rng(1)
    num = sum(LENGTHS)
    return {
        "states": rng.uniform(-1, 1, (num, 3)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (num, 2)).astype(np.float32),
        "rewards": rng.normal(size=num).astype(np.float32),
        "terminals": np.isin(np.arange(num), [5]),
        "traj_lengths": np.array(LENGTHS),
    }


LIMITS = {
    "obs_min": np.array([-1.0, 0.0, 5.0]),
    "obs_max": np.array([1.0, 10.0, 5.0]),
    "action_min": np.array([-2.0, -1.0]),
    "action_max": np.array([2.0, 1.0]),
}


def write_dppo(path, *, limits=LIMITS, **changes):
    content = {key: value for key, value in (dppo_arrays() | changes).items() if value is not None}
    np.savez(path, **content)
    if limits is not None:
        np.savez(path.parent / "normalization.npz", **limits)
    return path


# -- OGBench --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
def test_both_conversions_equal_ogbench_s_own(tmp_path, compact):
    official = pytest.importorskip("ogbench.utils", reason="needs the extra 'ogbench'")
    path = write_ogbench(tmp_path / "play.npz")
    expected = official.load_dataset(str(path), compact_dataset=compact, add_info=True)
    got = (compact_dataset if compact else regular_dataset)(dict(np.load(path)))
    assert set(got) == set(expected)
    for key, value in expected.items():
        assert got[key].dtype == value.dtype, key
        np.testing.assert_array_equal(got[key], value, err_msg=key)


def test_a_recording_s_last_state_is_a_successor_and_no_frame(tmp_path):
    path = write_ogbench(tmp_path / "play.npz")
    data, raw = read_dataset(path), ogbench_arrays()
    assert dataset_format(path) == "ogbench"
    assert data.lengths.tolist() == [length - 1 for length in LENGTHS]
    assert not bool(data.terminated.any()) and data.truncated.sum() == len(LENGTHS)
    assert torch.equal(data.next_observations[2], torch.as_tensor(raw["observations"][3]))
    assert len(data.transitions().frames) == data.num_frames
    assert data.extras["qpos"].shape == (data.num_frames, 21)
    assert bool((data.rewards == 0).all()) and "masks" not in data.extras


def test_compact_files_keep_every_state_and_have_no_more_transitions(tmp_path, caplog):
    path = write_ogbench(tmp_path / "play.npz")
    compact = read_dataset(path, compact=True)
    assert f"keeps {len(LENGTHS)} rows that are states only" in caplog.text
    regular = read_dataset(path)
    assert compact.lengths.tolist() == list(LENGTHS)
    one, two = compact.transitions(), regular.transitions()
    for key in ("observations", "actions", "next_observations"):
        assert torch.equal(getattr(one, key), getattr(two, key))
    assert compact.extras["valids"].tolist() == (~ogbench_arrays()["terminals"]).astype(float).tolist()


def test_rewards_and_masks_of_the_file_are_kept_and_other_keys_told(tmp_path, caplog):
    raw = ogbench_arrays()
    num = sum(LENGTHS)
    own = {"rewards": np.arange(num)[:, None], "masks": np.arange(num) % 3 > 0, "weights": np.ones(4)}
    path = write_ogbench(tmp_path / "play.npz", **own)
    kept = np.flatnonzero(~raw["terminals"])
    data, compact = read_dataset(path), read_dataset(path, compact=True)
    assert data.rewards.tolist() == kept.tolist() and compact.rewards.tolist() == list(range(num))
    assert data.extras["masks"].tolist() == (kept % 3 > 0).tolist()
    assert torch.equal(data.over, torch.as_tensor(kept % 3 == 0)), "values do not look further"
    assert data.meta["not_read"] == ["weights"] and "play.npz: not read: weights" in caplog.text
    with pytest.raises(DatasetError, match=mentions("masks 0 1")):
        read_dataset(write_ogbench(tmp_path / "bad.npz", masks=np.full(num, 2)))


def test_a_regular_dataset_that_was_saved_keeps_its_successors_and_last_actions(tmp_path):
    raw = regular_dataset(dict(np.load(write_ogbench(tmp_path / "play.npz"))))
    rewards = np.arange(len(raw["actions"]), dtype=np.float32)
    np.savez(tmp_path / "saved.npz", **raw, rewards=rewards)
    data, original = read_dataset(tmp_path / "saved.npz"), read_dataset(tmp_path / "play.npz")
    assert data.lengths.tolist() == [length - 1 for length in LENGTHS] and data.rewards.tolist() == [*rewards]
    for key in ("observations", "actions", "next_observations", "truncated"):
        assert torch.equal(getattr(data, key), getattr(original, key))
    with pytest.raises(DatasetError, match=mentions("saved.npz reader.compact=true reader.compact")):
        read_dataset(tmp_path / "saved.npz", compact=True)


TASKS = {
    "cube-double-play-singletask-v0": 28,
    "cube-single-play-singletask-task2-v0": 21,
    "scene-play-singletask-task2-v0": 25,
    "puzzle-3x3-play-singletask-task1-v0": 23,
    "pointmaze-medium-navigate-singletask-task1-v0": 2,
    "antsoccer-arena-navigate-singletask-task1-v0": 22,
}
JUDGED = ["scene-play-singletask-task2-v0", "pointmaze-medium-navigate-singletask-task1-v0"]
"""Cubes, buttons, a drawer and a window; a place to be at."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", TASKS if everything else JUDGED)
def test_rewards_of_a_task_equal_ogbench_s_own(tmp_path, task):
    ogbench = pytest.importorskip("ogbench", reason="needs the extra 'ogbench'")
    env = ogbench.make_env_and_datasets(task, env_only=True)
    env.reset(seed=0)
    raw = solved_states(task, env.unwrapped, TASKS[task])
    for name in ("play.npz", "play-val.npz"):
        path = write_ogbench(tmp_path / name, **raw)
    expected, _ = ogbench.make_env_and_datasets(
        task, dataset_path=str(tmp_path / "play.npz"), dataset_only=True, cur_env=env
    )
    data = read_dataset(tmp_path / "play.npz", task=task)
    np.testing.assert_array_equal(data.rewards, expected["rewards"])
    np.testing.assert_array_equal(data.extras["masks"], expected["masks"])
    assert 0 < data.extras["masks"].sum() < data.num_frames, "both solved and unsolved states"
    steps = data.transitions()
    assert torch.equal(steps.terminated, data.extras["masks"] == 0), "values do not look past a solved state"
    assert path.is_file()


def solved_states(task, env, nq):
    """Random simulator states of which every second one solves the task."""
    rng, num = np.random.default_rng(3), sum(LENGTHS)
    qpos = rng.normal(size=(num, nq)) * 3
    qpos, buttons = qpos.astype(np.float32), rng.integers(0, 2, (num, 9))
    solved = np.arange(num) % 2 == 0
    if "maze" in task:
        qpos[solved, :2] = env.cur_goal_xy
    elif "soccer" in task:
        qpos[solved, 15:17] = env.cur_goal_xy
    else:
        cubes = getattr(env, "_num_cubes", 0)
        for number in range(cubes):
            first = 14 + 7 * number
            qpos[solved, first : first + 3] = env._data.mocap_pos[number]
        if "scene" in task:
            first = 14 + 7 * cubes + env._num_buttons
            qpos[solved, first], qpos[solved, first + 1] = env._target_drawer_pos, env._target_window_pos
        if hasattr(env, "_target_button_states"):
            buttons = buttons[:, : env._num_buttons]
            buttons[solved] = env._target_button_states
    return {"qpos": qpos, "button_states": buttons}


@pytest.mark.parametrize("task", ["cube-single", "cube-single-play-v0", "../x-singletask-v0"])
def test_what_is_no_single_task_is_refused(tmp_path, task):
    with pytest.raises(DatasetError, match=mentions("play.npz task")):
        read_dataset(write_ogbench(tmp_path / "play.npz"), task=task)


def test_a_task_needs_the_states_it_is_judged_by(tmp_path):
    pytest.importorskip("ogbench", reason="needs the extra 'ogbench'")
    path = write_ogbench(tmp_path / "play.npz", qpos=None)
    with pytest.raises(DatasetError, match=mentions("qpos 2")):
        read_dataset(path, task="pointmaze-medium-navigate-singletask-task1-v0")


# -- DPPO and ReinFlow ----------------------------------------------------------------------------------


def test_the_scaling_of_states_and_actions_is_undone(tmp_path):
    path = write_dppo(tmp_path / "train.npz")
    data, raw = read_dataset(path), dppo_arrays()
    assert dataset_format(path) == "dppo"
    for key, what, got in (("states", "obs", data.observations), ("actions", "action", data.actions)):
        low, high = LIMITS[f"{what}_min"], LIMITS[f"{what}_max"]
        again = 2 * (got.double().numpy() - low) / (high - low + 1e-6) - 1  # the published scaling
        varying = high > low
        np.testing.assert_allclose(again[:, varying], raw[key][:, varying], atol=2e-6)
    assert data.lengths.tolist() == list(LENGTHS)
    assert data.terminated.nonzero().flatten().tolist() == [5]
    assert data.truncated.nonzero().flatten().tolist() == [3, 10]
    assert data.meta["limits"]["action_max"] == [2.0, 1.0]


def test_scaled_numbers_are_left_alone_on_request(tmp_path):
    path = write_dppo(tmp_path / "train.npz", limits=None)
    with pytest.raises(DatasetError, match=mentions("normalization.npz reader.scaled=true")):
        read_dataset(path)
    data = read_dataset(path, scaled=True)
    np.testing.assert_array_equal(data.observations, dppo_arrays()["states"])


def test_limits_may_lie_elsewhere(tmp_path):
    path = write_dppo(tmp_path / "train.npz", limits=None)
    np.savez(tmp_path / "other.npz", **LIMITS)
    assert read_dataset(path, normalization=tmp_path / "other.npz").actions.abs().max() > 1


def test_images_that_are_left_out_are_named(tmp_path, caplog):
    path = write_dppo(tmp_path / "train.npz", images=np.zeros((sum(LENGTHS), 3, 4, 4), np.uint8))
    assert read_dataset(path).meta["not_read"] == ["images"]
    assert "train.npz: not read: images" in caplog.text


# -- bad files ------------------------------------------------------------------------------------------

BAD_OGBENCH = [
    ({"observations": np.zeros((11, 4, 4, 3), np.uint8)}, "observations shape (N, D)"),
    ({"observations": np.zeros((0, 3))}, "observations"),
    ({"terminals": np.zeros(11)}, "terminals 1"),
    ({"terminals": np.full(11, 2)}, "terminals 0 1 2"),
    ({"terminals": np.ones(11)}, "terminals 0"),
    ({"terminals": np.ones((11, 2))}, "terminals shape (11,) (11, 2)"),
]
BAD_DPPO = [
    ({"traj_lengths": np.array([4, 2])}, "traj_lengths 11 states 6"),
    (
        {"traj_lengths": np.array([4, 0, 7])},
        "traj_lengths 0 [4, 0, 7]",
    ),
    ({"traj_lengths": np.array([4.5, 6.5])}, "traj_lengths 0"),
    ({"states": np.zeros((11, 4))}, "states 3 (11, 4)"),
    ({"rewards": np.zeros((11, 2))}, "rewards shape (11) (11, 2)"),
    ({"states": np.full((11, 3), np.inf)}, "observations finite"),
    ({"terminals": np.ones(11)}, "terminated"),
    ({"limits": {**LIMITS, "obs_min": LIMITS["obs_max"] + 1}}, "obs_min obs_max"),
    ({"limits": {"obs_min": np.zeros(3)}}, "normalization.npz missing obs_max"),
]


@pytest.mark.parametrize(
    ("write", "changes", "message"),
    [(write_ogbench, *case) for case in BAD_OGBENCH] + [(write_dppo, *case) for case in BAD_DPPO],
)
def test_bad_content_names_file_and_key(tmp_path, write, changes, message):
    with pytest.raises(DatasetError, match=mentions(message)) as error:
        read_dataset(write(tmp_path / "bad.npz", **changes))
    assert ".npz: " in str(error.value)


@pytest.mark.parametrize("write", [write_ogbench, write_dppo])
def test_a_damaged_member_is_one_clear_error(tmp_path, write):
    path = write(tmp_path / "bad.npz")
    content = bytearray(path.read_bytes())
    content[60:200] = bytes(140)
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=mentions("bad.npz")):
        read_dataset(path)


def test_objects_are_never_unpickled(tmp_path):
    path = tmp_path / "objects.npz"
    np.savez(path, **ogbench_arrays() | {"actions": np.array([{}] * sum(LENGTHS), dtype=object)})
    with pytest.raises(DatasetError, match=mentions("Python objects")):
        read_dataset(path)


def test_an_archive_of_another_kind_says_what_is_in_it(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(DatasetError, match=mentions("'observations' and 'actions' ['x']")):
        read_dataset(tmp_path / "other.npz")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DatasetError, match=mentions("formats nothing")):
        read_dataset(tmp_path / "folder")


def test_double_precision_becomes_single(tmp_path):
    raw = ogbench_arrays()
    wide = {key: raw[key].astype(np.float64) for key in ("observations", "actions")}
    one, two = (read_dataset(write_ogbench(tmp_path / f"{i}.npz", **c)) for i, c in enumerate(({}, wide)))
    assert two.actions.dtype == torch.float32 and torch.equal(one.actions, two.actions)
