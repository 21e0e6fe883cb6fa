"""LeRobot v3 folders, written here as its documentation lays them out."""

import json

import numpy as np
import pytest
import torch

from envs.datasets import dataset_format, read_dataset
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
    assert "observation.images.top (videos whose times are not told" in caplog.text
    assert "observation.effort (choose it by obs_keys)" in caplog.text


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
    assert len(told) == 1 and "2 of 4 episodes" in told[0] and "data.done_is_terminal=true" in told[0]
    caplog.clear()
    assert ends_of(read_dataset(folder, done_is_terminal=True)) == [True, False, True, False]
    assert "next.done" not in caplog.text


def test_one_number_is_a_vector_too(tmp_path):
    action = {"action": {"dtype": "float32", "shape": [1], "names": None}}
    data = read_dataset(write(tmp_path / "one", features=action, action=np.arange(NUM, dtype=np.float32)))
    assert data.actions.squeeze(1).tolist() == list(range(NUM))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"info": {"codebase_version": "v2.1"}}, "must be v3.x; got 'v2.1'. Convert the dataset"),
        ({"info": {"features": None}}, r"info\.json: expected LeRobot's description of a dataset"),
        ({"info": {"total_frames": 99}}, "key 'total_frames' .* got 99 and 12. Files are missing"),
        ({"info": {"total_episodes": 9}}, "key 'total_episodes' .* got 9 and 4"),
        ({"parts": ((0, 5),)}, "key 'total_frames' .* got 12 and 5"),
        ({"parts": ()}, "expected data/chunk-.* no such file"),
        ({"action": None}, r"file-000\.parquet: expected the columns .* missing \['action'\]"),
        ({"features": {"action": None}}, r"expected the vector-valued features \['action'\]; found"),
        (
            {"features": dict.fromkeys(key for key in FEATURES if key.startswith("observation.")) | CAMERA},
            "expected the vector-valued features observation.state; found .*Images do not make up a state",
        ),
        ({"action": np.zeros((NUM, 3), np.float32)}, "column 'action' must have 2 numbers in each of its 5"),
        ({"action": np.full((NUM, 2), np.nan)}, "'actions' must be finite"),
        ({"next.reward": np.array(["a"] * NUM)}, "column 'next.reward' must hold real numbers; got type"),
        ({"next.done": np.full(NUM, 2)}, "'next.done' must be 0 or 1 in every row"),
        ({"episode_index": np.arange(NUM) % 4}, "key 'total_episodes' .* got 4 and 12.*episodes are mixed"),
    ],
)  # fmt: skip
def test_bad_content_names_file_and_key(tmp_path, changes, message):
    with pytest.raises(DatasetError, match=message) as error:
        read_dataset(write(tmp_path / "bad", **changes))
    assert "bad" in str(error.value)


def test_missing_values_are_refused(tmp_path):
    folder = write(tmp_path / "bad", parts=((0, NUM),))
    rows = table(frames(), fixed=True)
    holes = pa.array([None, *frames()["next.reward"][1:].tolist()], pa.float32())
    rows = rows.set_column(rows.column_names.index("next.reward"), "next.reward", holes)
    parquet.write_table(rows, folder / "data" / "chunk-000" / "file-000.parquet")
    with pytest.raises(
        DatasetError, match=r"'next\.reward' must have 1 numbers in each .* got 1 missing values"
    ):
        read_dataset(folder)


@pytest.mark.parametrize("keep", [0.02, 0.5, 0.95])
@pytest.mark.parametrize("name", ["data/chunk-000/file-001.parquet", "meta/info.json", "meta/tasks.parquet"])
def test_a_truncated_file_is_one_clear_error(tmp_path, name, keep):
    path = write(tmp_path / "cut") / name
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(DatasetError, match="cut"):
        read_dataset(tmp_path / "cut")


def test_a_missing_pyarrow_names_the_extra(tmp_path, monkeypatch):
    def without(name, *, extra):
        raise MissingExtraError(f"{name}: pip install 'burnish[{extra}]'.")

    folder = write(tmp_path / "so100")
    monkeypatch.setattr("envs.datasets.lerobot.require", without)
    with pytest.raises(MissingExtraError, match=r"burnish\[lerobot\]"):
        read_dataset(folder)


def test_windows_never_reach_over_two_episodes(tmp_path):
    from policies.protocols import ChunkSpec

    data = read_dataset(write(tmp_path / "so100"))
    windows = data.windows(ChunkSpec(2, 3, 1), pad=False)
    assert windows.num == sum(max(n - 2, 0) for n in LENGTHS)
    assert torch.isfinite(windows.gather(torch.arange(windows.num)).action).all()
