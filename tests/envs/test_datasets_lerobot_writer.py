"""LeRobot v3 folders that we write: read back here, and by LeRobot itself where it is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataset_files import made
from messages import mentions

import burnish
from burnish.commands import data_inspect
from burnish.config.schema import compose_config
from envs.datasets import Episode, EpisodeDataset, read_dataset, write_dataset, write_lerobot, writers
from envs.datasets.inspect import describe_file
from envs.datasets.writers import lerobot
from envs.tasks.avoid.task import Avoid
from policies.errors import ConfigError, DatasetError

parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'lerobot'")

JOINTS = ["shoulder_pan.pos", "elbow_flex.pos"]
FACTS = {"action_names": [f"{name} [deg]" for name in JOINTS], "control_hz": 25.0, "robot": "so101_follower"}
FACTS |= {"action_low": [-90.0, -90.0], "action_high": [90.0, 80.0], "instructions": ["put it there"]}
SHAPE = (16, 24, 3)
has_lerobot = importlib.util.find_spec("lerobot") is not None


def filmed() -> EpisodeDataset:
    """Episodes that terminate with and without success, and are cut with and without it."""
    rng = np.random.default_rng(0)
    ramp = np.linspace(0, 200, SHAPE[1], dtype=np.uint8)[None, None, :, None]

    def pictures(length: int, shift: int) -> np.ndarray:
        moved = [np.roll(ramp, 3 * t + shift, axis=2) for t in range(length)]
        return np.broadcast_to(np.concatenate(moved), (length, *SHAPE)).copy()

    episodes = [
        Episode(
            observations=rng.normal(size=(length + 1, 3)).astype(np.float32),
            actions=rng.normal(size=(length, 2)).astype(np.float32),
            rewards=rng.normal(size=length).astype(np.float32),
            terminated=terminated,
            truncated=not terminated,
            success=success,
            extras={"goal": rng.normal(size=(length, 2)).astype(np.float32)},
            images={"top": pictures(length, 0), "wrist": pictures(length, 9)},
        )
        for length, terminated, success in (
            (6, True, True),
            (4, True, False),
            (7, False, True),
            (2, False, False),
        )
    ]
    return EpisodeDataset.from_episodes(episodes, meta={"interface": dict(FACTS)})


def pixels(data: EpisodeDataset, camera: str) -> np.ndarray:
    return data.images[camera][torch.arange(data.num_frames)].numpy()


def equal_numbers(one: EpisodeDataset, other: EpisodeDataset) -> None:
    for key in ("observations", "actions", "rewards", "terminated", "truncated", "episode_start"):
        assert torch.equal(getattr(one, key), getattr(other, key)), key
    assert one.success is not None and other.success is not None
    assert torch.equal(one.success, other.success)
    assert torch.equal(one.extras["goal"], other.extras["goal"])


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    data = filmed()
    write_lerobot(tmp_path / "demos", data)
    found = read_dataset(tmp_path / "demos")
    equal_numbers(data, found)
    assert list(found.images) == ["top", "wrist"]
    for camera in data.images:
        np.testing.assert_array_equal(pixels(found, camera), pixels(data, camera))
    expected = FACTS | {"obs_names": [f"observation.state {i}" for i in range(3)]}
    assert found.meta["interface"] == expected and found.meta["not_read"] == []
    again = tmp_path / "again"
    write_lerobot(again, found)
    for file in ("meta/stats.json", "meta/info.json", "data/chunk-000/file-000.parquet"):
        assert (again / file).read_bytes() == (tmp_path / "demos" / file).read_bytes(), file


def test_info_says_what_lerobot_asks_for(tmp_path: Path) -> None:
    write_lerobot(tmp_path / "demos", filmed())
    info = json.loads((tmp_path / "demos/meta/info.json").read_text())
    facts = {"robot_type": "so101_follower", "fps": 25, "total_episodes": 4, "total_frames": 19}
    assert {key: info[key] for key in facts} == facts and info["video_path"] is None
    assert info["features"]["action"] == {"dtype": "float32", "shape": [2], "names": JOINTS}
    assert info["features"]["observation.images.top"]["dtype"] == "image"
    tasks = parquet.read_table(tmp_path / "demos/meta/tasks.parquet").to_pydict()
    assert tasks == {"task_index": [0], "__index_level_0__": ["put it there"]}
    described = {one.key for one in describe_file(tmp_path / "demos")}
    assert "chunk-000/action" in described and not any("stats/" in key for key in described)


def test_statistics_are_those_of_all_frames(tmp_path: Path) -> None:
    data = filmed()
    write_lerobot(tmp_path / "demos", data)
    stats = json.loads((tmp_path / "demos/meta/stats.json").read_text())
    actions = data.actions.double().numpy()
    for name, value in (("min", actions.min(0)), ("mean", actions.mean(0)), ("std", actions.std(0))):
        np.testing.assert_allclose(stats["action"][name], value, rtol=1e-12)
    np.testing.assert_allclose(stats["action"]["q10"], np.quantile(actions, 0.1, axis=0), rtol=1e-12)
    seen = pixels(data, "wrist").reshape(-1, 3) / 255.0
    image = {name: np.reshape(value, -1) for name, value in stats["observation.images.wrist"].items()}
    expected = {"min": seen.min(0), "max": seen.max(0), "mean": seen.mean(0), "std": seen.std(0)}
    expected["q50"] = np.quantile(seen, 0.5, axis=0, method="inverted_cdf")
    for name, value in expected.items():
        np.testing.assert_allclose(image[name], value, rtol=1e-9, err_msg=name)
    assert image["count"] == [data.num_frames]
    rows = parquet.read_table(tmp_path / "demos/meta/episodes/chunk-000/file-000.parquet").to_pydict()
    first = data.actions[:6].double().numpy()
    np.testing.assert_allclose(rows["stats/action/max"][0], first.max(0), rtol=1e-12)
    assert rows["dataset_from_index"] == [0, 6, 10, 17] and rows["tasks"][0] == ["put it there"]


def test_a_full_file_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot, "DATA_BYTES", 1)
    monkeypatch.setattr(lerobot, "VIDEO_BYTES", 1)
    monkeypatch.setattr(lerobot, "FILES_PER_FOLDER", 3)
    data = filmed()
    write_lerobot(tmp_path / "demos", data)
    files = sorted(
        str(file.relative_to(tmp_path / "demos")) for file in (tmp_path / "demos/data").rglob("*.*")
    )
    assert files == [
        *(f"data/chunk-000/file-{i:03d}.parquet" for i in range(3)),
        "data/chunk-001/file-000.parquet",
    ]
    equal_numbers(data, read_dataset(tmp_path / "demos"))


@pytest.mark.parametrize("limit", [1, 2**30])
def test_videos_hold_the_images_of_their_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    pytest.importorskip("av", reason="needs the extra 'video'")
    monkeypatch.setattr(lerobot, "VIDEO_BYTES", limit)
    data = filmed()
    write_lerobot(tmp_path / "demos", data, video=True)
    found = read_dataset(tmp_path / "demos")
    equal_numbers(data, found)
    for camera in data.images:
        wrong = np.abs(pixels(found, camera).astype(float) - pixels(data, camera)).mean(axis=(1, 2, 3))
        moved = np.abs(np.roll(pixels(data, camera), 1, axis=0).astype(float) - pixels(data, camera))
        assert (wrong < 0.5 * moved.mean(axis=(1, 2, 3))).all(), "another frame would be further away"


def test_a_goal_of_another_program_is_not_taken_for_one(tmp_path: Path) -> None:
    write_lerobot(tmp_path / "demos", filmed())
    (tmp_path / "demos/meta/burnish.json").unlink()
    found = read_dataset(tmp_path / "demos")
    assert "goal" not in found.extras and found.meta["not_read"] == ["observation.goal"]


def test_a_rate_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=mentions("rate control_hz")):
        write_lerobot(tmp_path / "demos", made())
    assert not (tmp_path / "demos").exists()


def test_another_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(DatasetError, match=mentions("notes LeRobot")):
        write_lerobot(tmp_path / "notes", filmed())


def test_videos_belong_to_this_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=mentions("video=true format=lerobot robomimic")):
        write_dataset(tmp_path / "demos.hdf5", filmed(), video=True)
    with pytest.raises(ConfigError, match=mentions("valid_fraction lerobot")):
        write_dataset(tmp_path / "demos", filmed(), format="lerobot", valid_fraction=0.5)
    assert set(writers.FOLDERS) | set(writers.WITH_IMAGES) <= set(writers.WRITERS)


def test_a_recorded_task_is_converted_with_names_rate_and_limits(tmp_path: Path) -> None:
    """From the demonstrator's file to LeRobot and back to robomimic's, by the commands."""
    demos = burnish.collect(env="avoid", episodes=2, out=tmp_path / "demos.hdf5")
    folder = burnish.convert_data(demos, tmp_path / "demos", format="lerobot", instruction="drive through")
    back = burnish.convert_data(folder, tmp_path / "back.hdf5")
    first, last = read_dataset(demos), read_dataset(back)
    for key in ("observations", "actions", "rewards", "terminated", "truncated"):
        assert torch.equal(getattr(first, key), getattr(last, key)), key
    spec = Avoid().spec
    facts = {
        "control_hz": spec.control_hz,
        "action_low": list(spec.action_low),
        "obs_names": list(spec.obs_names),
    }
    found = read_dataset(folder).meta
    assert {key: found["interface"][key] for key in facts} == facts
    assert found["interface"]["instructions"] == ["drive through"] and found["env"]["name"] == "avoid"
    assert last.meta["interface"] == found["interface"]
    shown = data_inspect.inspect(
        compose_config("data inspect", [f"dataset={folder}", f"out={tmp_path}/facts", "measures=false"])
    )
    assert shown["env"] == "env=avoid" and shown["interface"]["control_hz"] == 20


def test_a_dataset_without_rate_is_converted_with_a_given_one(tmp_path: Path) -> None:
    write_dataset(tmp_path / "demos.hdf5", made())
    options: dict[str, Any] = {"format": "lerobot", "robot": "so101_follower", "action_low": -1}
    with pytest.raises(DatasetError, match=mentions("control_hz")):
        burnish.convert_data(tmp_path / "demos.hdf5", tmp_path / "one", format="lerobot")
    with pytest.raises(ConfigError, match=mentions("action_high")):
        burnish.convert_data(tmp_path / "demos.hdf5", tmp_path / "two", control_hz=12.5, **options)
    folder = burnish.convert_data(
        tmp_path / "demos.hdf5", tmp_path / "three", control_hz=12.5, action_high=[2, 3], **options
    )
    interface = read_dataset(folder).meta["interface"]
    assert interface["control_hz"] == 12.5 and interface["action_high"] == [2.0, 3.0]
    assert interface["robot"] == "so101_follower"


@pytest.mark.skipif(not has_lerobot, reason="needs lerobot")
@pytest.mark.parametrize("video", [False, True])
def test_lerobot_reads_what_is_written(tmp_path: Path, video: bool) -> None:
    import torchvision
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    if (
        video
        and not hasattr(torchvision.io, "VideoReader")
        and importlib.util.find_spec("torchcodec") is None
    ):
        from lerobot.datasets import video_utils

        if not hasattr(video_utils, "decode_video_frames_pyav"):
            pytest.skip("this LeRobot has no decoder of videos here")
    data = filmed()
    write_lerobot(tmp_path / "demos", data, video=video)
    steps = {"action": [0.0, 0.04], "observation.state": [-0.04, 0.0]}
    theirs = LeRobotDataset(
        "ours/demos", root=tmp_path / "demos", delta_timestamps=steps, video_backend="pyav"
    )
    assert (theirs.num_frames, theirs.num_episodes, theirs.fps) == (19, 4, 25)
    assert theirs.meta.robot_type == "so101_follower" and list(theirs.meta.tasks.index) == ["put it there"]
    assert theirs.meta.camera_keys == ["observation.images.top", "observation.images.wrist"]
    np.testing.assert_allclose(theirs.meta.stats["action"]["max"], data.actions.max(0).values, rtol=1e-6)
    last = {int(frame) - 1 for frame in data.episode_start[1:]}
    for frame in range(data.num_frames):
        row = theirs[frame]
        assert torch.equal(row["observation.state"][1], data.observations[frame])
        assert torch.equal(row["action"][0], data.actions[frame])
        following = frame if frame in last else frame + 1
        assert torch.equal(row["action"][1], data.actions[following])
        assert bool(row["action_is_pad"][1]) == (frame in last) == bool(row["next.done"])
        assert row["task"] == "put it there"
        for camera in data.images:
            seen = 255 * row[f"observation.images.{camera}"].permute(1, 2, 0).double()
            wrong = (seen - data.images[camera][torch.tensor([frame])][0]).abs()
            assert float(wrong.mean() if video else wrong.max()) < (12 if video else 1e-4)
