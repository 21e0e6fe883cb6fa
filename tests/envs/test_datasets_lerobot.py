"""LeRobot v3 folders, written here as its documentation lays them out."""

import json
import re

import numpy as np
import pytest
import torch
from messages import mentions

from envs.datasets import dataset_format, read_dataset
from envs.datasets.images import camera_of
from envs.datasets.windows import Windows
from policies.errors import DatasetError, MissingExtraError

pa = pytest.importorskip("pyarrow", reason="needs the extra 'lerobot'")
parquet = pytest.importorskip("pyarrow.parquet")

LENGTHS = (3, 2, 4, 3)
NUM = sum(LENGTHS)
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": [3], "names": ["a", "b", "c"]},
    "observation.environment_state": {"dtype": "float32", "shape": [2], "names": None},
    "observation.effort": {"dtype": "float32", "shape": [3], "names": None},
    "observation.images.top": {"dtype": "video", "shape": [96, 96, 3], "names": None},
    "action": {"dtype": "float32", "shape": [2], "names": None},
    "next.reward": {"dtype": "float32", "shape": [1], "names": None},
    "next.done": {"dtype": "bool", "shape": [1], "names": None},
    "next.success": {"dtype": "bool", "shape": [1], "names": None},
    **{
        key: {"dtype": "int64", "shape": [1]}
        for key in ("frame_index", "episode_index", "index", "task_index")
    },
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
}
CAMERA = {"observation.images.top": FEATURES["observation.images.top"]}


def frames():
    rng = np.random.default_rng(0)
    ends = np.cumsum(LENGTHS) - 1
    done = np.zeros(NUM, bool)
    done[ends[[0, 2]]] = True
    return {
        "observation.state": rng.normal(size=(NUM, 3)).astype(np.float32),
        "observation.environment_state": rng.normal(size=(NUM, 2)).astype(np.float32),
        "observation.effort": rng.normal(size=(NUM, 3)).astype(np.float32),
        "action": rng.normal(size=(NUM, 2)).astype(np.float32),
        "next.reward": rng.normal(size=NUM).astype(np.float32),
        "next.done": done,
        "next.success": done,
        "timestamp": np.concatenate([np.arange(n) / 10 for n in LENGTHS]).astype(np.float32),
        "frame_index": np.concatenate([np.arange(n) for n in LENGTHS]),
        "episode_index": np.repeat(np.arange(len(LENGTHS)), LENGTHS),
        "index": np.arange(NUM),
        "task_index": np.repeat([0, 1, 0, 0], LENGTHS),
    }


def table(rows, *, fixed):
    columns = {}
    for key, value in rows.items():
        if value.ndim == 2:
            flat = pa.array(value.flatten())
            offsets = np.arange(0, value.size + 1, value.shape[1], dtype=np.int32)
            columns[key] = (
                pa.FixedSizeListArray.from_arrays(flat, value.shape[1])
                if fixed
                else pa.ListArray.from_arrays(pa.array(offsets), flat)
            )
        else:
            columns[key] = pa.array(value)
    return pa.table(columns)


def write(folder, *, info=None, features=None, fixed=True, parts=((0, 5), (5, NUM)), **changes):
    rows = {key: value for key, value in (frames() | changes).items() if value is not None}
    (folder / "meta").mkdir(parents=True)
    known = {key: value for key, value in (FEATURES | (features or {})).items() if value is not None}
    content = {
        "codebase_version": "v3.0", "robot_type": "so100", "fps": 10, "features": known,
        "total_episodes": len(LENGTHS), "total_frames": NUM, "total_tasks": 2, "chunks_size": 1000,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    } | (info or {})  # fmt: skip
    (folder / "meta" / "info.json").write_text(json.dumps(content))
    tasks = pa.table({"task_index": [1, 0], "__index_level_0__": ["pull", "push"]})
    parquet.write_table(tasks, folder / "meta" / "tasks.parquet")
    for number, (first, end) in enumerate(parts):
        place = folder / "data" / "chunk-000" / f"file-{number:03d}.parquet"
        place.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table({k: v[first:end] for k, v in rows.items()}, fixed=fixed), place)
    return folder


@pytest.mark.parametrize("fixed", [True, False])
def test_vectors_of_all_files_become_episodes(tmp_path, caplog, fixed):
    data, rows = read_dataset(write(tmp_path / "so100", fixed=fixed)), frames()
    assert dataset_format(tmp_path / "so100") == "lerobot"
    assert data.lengths.tolist() == list(LENGTHS)
    both = np.concatenate([rows["observation.state"], rows["observation.environment_state"]], axis=1)
    np.testing.assert_array_equal(data.observations, both)
    np.testing.assert_array_equal(data.actions, rows["action"])
    np.testing.assert_array_equal(data.rewards, rows["next.reward"])
    last = data.episode_start[1:] - 1
    assert data.terminated[last].tolist() == [True, False, True, False]
    assert data.truncated[last].tolist() == [False, True, False, True]
    assert data.success.tolist() == [True, False, True, False]
    assert data.extras["task_index"].tolist() == rows["task_index"].tolist()
    assert data.meta["tasks"] == ["push", "pull"] and data.meta["fps"] == 10
    assert data.next_observations is None and json.dumps(data.meta)


def test_what_is_left_out_is_named(tmp_path, caplog):
    data = read_dataset(write(tmp_path / "so100"))
    assert data.meta["not_read"] == ["observation.effort", "observation.images.top"]
    assert "observation.images.top (videos without times" in caplog.text
    assert "observation.effort (choose it by obs_keys)" in caplog.text


def test_cameras_have_the_names_that_imported_policies_give_them():
    names = {"observation.images.top": "top", "observation.image": "image", "observation.images.a.b": "a_b"}
    assert {key: camera_of(key) for key in names} == names


def test_the_state_can_be_chosen(tmp_path):
    keys = ["observation.effort", "observation.state"]
    data = read_dataset(write(tmp_path / "so100"), obs_keys=keys)
    np.testing.assert_array_equal(data.observations, np.concatenate([frames()[k] for k in keys], axis=1))


def test_the_order_of_the_files_does_not_matter(tmp_path):
    one = read_dataset(write(tmp_path / "one", parts=((0, 5), (5, NUM))))
    two = read_dataset(write(tmp_path / "two", parts=((5, NUM), (0, 5))))
    assert one.digest() == two.digest()


def test_data_without_rewards_has_none(tmp_path):
    gone = dict.fromkeys(("next.reward", "next.done", "next.success"))
    data = read_dataset(write(tmp_path / "real", features=gone, **gone))
    assert not bool(data.rewards.any()) and data.success is None
    assert not bool(data.terminated.any()) and int(data.truncated.sum()) == len(LENGTHS)
    assert len(data.transitions().frames) == NUM - len(LENGTHS)


def ends_of(data):
    last = data.episode_start[1:] - 1
    assert torch.equal(data.truncated[last], ~data.terminated[last])
    assert int((data.terminated | data.truncated).sum()) == len(LENGTHS)
    return data.terminated[last].tolist()


def at_ends(*flags):
    """Set a flag on the last frames of the episodes, one per episode."""
    values = np.zeros(NUM, bool)
    values[np.cumsum(LENGTHS) - 1] = flags
    return values


def test_done_without_success_is_the_end_of_the_recording(tmp_path, caplog):
    """Recorders set `next.done` on every last frame, whatever the reason."""
    success = at_ends(True, False, False, True)
    success[sum(LENGTHS[:2])] = True  # the third succeeds on the way, and is not in that state at its end
    every = {"next.done": at_ends(True, True, True, True), "next.success": success}
    folder = write(tmp_path / "sim", **every)
    data = read_dataset(folder)
    assert ends_of(data) == [True, False, False, True]
    assert data.success.tolist() == [True, False, True, True]
    assert len(data.transitions().frames) == NUM - 2, "a cut episode has no last transition"
    assert "next.done" not in caplog.text
    assert ends_of(read_dataset(folder, done_is_terminal=True)) == [True] * 4


def test_done_in_data_without_success_is_told_and_a_truncation(tmp_path, caplog):
    gone = {"next.success": None}
    folder = write(tmp_path / "real", features=gone, **gone)
    assert ends_of(read_dataset(folder)) == [False] * 4
    told = [record.getMessage() for record in caplog.records if "next.done" in record.getMessage()]
    assert len(told) == 1 and "2 of 4 episodes" in told[0] and "reader.done_is_terminal=true" in told[0]
    caplog.clear()
    assert ends_of(read_dataset(folder, done_is_terminal=True)) == [True, False, True, False]
    assert "next.done" not in caplog.text


def test_one_number_is_a_vector_too(tmp_path):
    action = {"action": {"dtype": "float32", "shape": [1], "names": None}}
    data = read_dataset(write(tmp_path / "one", features=action, action=np.arange(NUM, dtype=np.float32)))
    assert data.actions.squeeze(1).tolist() == list(range(NUM))


DATA = "data/chunk-*/file-*.parquet"
EPISODES = "meta/episodes/chunk-*/file-*.parquet"
FIRST = "data/chunk-000/file-000.parquet"


def without(row, **more):
    """Return all columns without a row."""
    return {key: np.delete(value, row, axis=0) for key, value in frames().items()} | more


def refusal(folder):
    """Return the message with which a dataset is refused."""
    with pytest.raises(DatasetError) as refused:
        read_dataset(folder)
    return str(refused.value)


LESS = {"info": {"total_frames": NUM - 1}, "parts": ((0, NUM - 1),)}
TWICE = np.arange(NUM) - (np.arange(NUM) >= 7)  # number 6 in two rows, and one less in all
ALL = [key for key, one in FEATURES.items() if len(one["shape"]) == 1]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"info": {"codebase_version": "v2.1"}}, "meta/info.json codebase_version v3.x v2.1"),
        ({"info": {"features": None}}, "meta/info.json NoneType"),
        ({"info": {"total_frames": 99}}, "total_frames meta/info.json 99 12"),
        ({"info": {"total_frames": 10**15}}, "total_frames meta/info.json 1000000000000000 12"),
        ({"info": {"total_frames": 0}}, "meta/info.json total_frames 1 0"),
        ({"info": {"total_episodes": 9}}, "total_episodes meta/info.json 9 4"),
        ({"parts": ((0, 5),)}, "total_frames meta/info.json 12 5"),
        ({"parts": ()}, f"{DATA} no such file"),
        ({"action": None}, f"{FIRST} columns missing ['action']"),
        (
            {"features": {"action": None}},
            f"meta/info.json ['action'] {[key for key in ALL if key != 'action']}",
        ),
        (
            {"features": dict.fromkeys(key for key in FEATURES if key.startswith("observation.")) | CAMERA},
            f"meta/info.json observation.state {[key for key in ALL if not key.startswith('observation.')]}",
        ),
        (
            {"features": {"next.reward": {"dtype": "float32", "shape": [2]}}},
            "meta/info.json next.reward [1] [2]",
        ),
        ({"action": np.zeros((NUM, 3), np.float32)}, f"{FIRST} action 2 5 [3]"),
        ({"next.reward": np.array(["a"] * NUM)}, f"{FIRST} next.reward string"),
        ({"next.done": np.full(NUM, 2)}, "next.done 0 1 2 12"),
        ({"episode_index": np.arange(NUM) % 4}, "total_episodes meta/info.json 4 12"),
        ({"episode_index": np.repeat([0, 1, 2, 0], LENGTHS)}, f"episode_index {DATA} several"),
        (without(6) | LESS, f"'index' {DATA} 7 6 2"),
        (without(0) | LESS, f"'index' {DATA} 1 0"),
        (without(6, index=np.arange(NUM - 1)) | LESS, f"'frame_index' {DATA} 2 1"),
        ({"index": TWICE}, f"'index' {DATA} 6 7 2"),
        ({"index": np.zeros(NUM, int)}, f"'index' {DATA} 0 1"),
        ({"frame_index": np.zeros(NUM, int)}, f"'frame_index' {DATA} 0 1"),
        ({"frame_index": np.arange(NUM)}, f"'frame_index' {DATA} 3 0 1"),
    ],
)
def test_bad_content_names_file_and_key(tmp_path, changes, parts):
    message, folder = refusal(write(tmp_path / "bad", **changes)), str(tmp_path / "bad")
    assert message.startswith(folder) and re.search(mentions(parts), message.removeprefix(folder))


def test_one_wrong_row_among_lists_is_refused(tmp_path):
    """Its neighbour has as many too many, so that all numbers together are as many as they should be."""
    folder = write(tmp_path / "bad", parts=((0, NUM),))
    rows = table(frames(), fixed=False)
    lists = [[0.0, 1.0]] * (NUM - 2) + [[0.0], [0.0, 1.0, 2.0]]
    rows = rows.set_column(rows.column_names.index("action"), "action", pa.array(lists))
    parquet.write_table(rows, folder / FIRST)
    assert re.search(mentions(f"{folder / FIRST} action 2 12 [1, 2, 3]"), refusal(folder))


def test_missing_values_are_refused(tmp_path):
    folder = write(tmp_path / "bad", parts=((0, NUM),))
    rows = table(frames(), fixed=True)
    holes = pa.array([None, *frames()["next.reward"][1:].tolist()], pa.float32())
    rows = rows.set_column(rows.column_names.index("next.reward"), "next.reward", holes)
    parquet.write_table(rows, folder / FIRST)
    assert re.search(mentions(f"{folder / FIRST} next.reward 12 1 missing"), refusal(folder))


def test_rows_in_any_order_are_sorted_by_their_index(tmp_path):
    order = np.random.default_rng(0).permutation(NUM)
    mixed = {key: value[order] for key, value in frames().items()}
    one, two = read_dataset(write(tmp_path / "one")), read_dataset(write(tmp_path / "two", **mixed))
    assert one.digest() == two.digest()


def listed(folder, **columns):
    """Write the table of episodes."""
    place = folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    place.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), place)
    return folder


def test_episodes_are_those_of_their_table(tmp_path):
    folder = write(tmp_path / "so100")
    plain = read_dataset(folder).digest()
    assert read_dataset(listed(folder, episode_index=[3, 0, 2, 1], length=[3, 3, 4, 2])).digest() == plain
    named = f"{folder} length {EPISODES} {DATA}"
    listed(folder, episode_index=[0, 1, 2, 3], length=[3, 2, 4, 4])
    assert re.search(mentions(f"{named} 4 3"), refusal(folder))
    listed(folder, episode_index=[0, 1, 2, 3], length=[3, 0, 4, 3])
    assert re.search(mentions(f"{named} 0 1 2"), refusal(folder))
    for numbers, got in (([0, 1, 2], "3 3"), ([0, 1, 2, 2], "4 3")):
        listed(folder, episode_index=numbers)
        assert re.search(mentions(f"{folder} episode_index {EPISODES} {DATA} 4 {got}"), refusal(folder))


READABLE = {
    "data/chunk-000/file-001.parquet": "readable Parquet",
    "meta/info.json": "LeRobot description",
    "meta/tasks.parquet": "readable tasks",
}


@pytest.mark.parametrize("keep", [0.02, 0.5, 0.95])
@pytest.mark.parametrize("name", READABLE)
def test_a_truncated_file_is_one_clear_error(tmp_path, name, keep):
    path = write(tmp_path / "cut") / name
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    message = refusal(tmp_path / "cut")
    assert message.startswith(f"{path}: ") and re.search(mentions(READABLE[name]), message)


def test_a_missing_pyarrow_names_the_extra(tmp_path, monkeypatch):
    def without(name, *, extra):
        raise MissingExtraError(f"{name}: pip install 'burnish[{extra}]'.")

    folder = write(tmp_path / "so100")
    monkeypatch.setattr("envs.datasets.files.lerobot.require", without)
    with pytest.raises(MissingExtraError, match=r"burnish\[lerobot\]"):
        read_dataset(folder)


def test_windows_never_reach_over_two_episodes(tmp_path):
    from policies.policy_config import ChunkSpec

    data = read_dataset(write(tmp_path / "so100"))
    windows = Windows(data, ChunkSpec(2, 3, 1), pad_end=False)
    assert windows.num == sum(max(n - 2, 0) for n in LENGTHS)
    assert torch.isfinite(windows.gather(torch.arange(windows.num)).action).all()
