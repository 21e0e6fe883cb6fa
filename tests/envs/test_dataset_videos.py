"""Frames of videos: the right one at every time, in any order, and nothing decoded before somebody looks."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import mentions

from envs.datasets import EpisodeDataset, read_dataset
from envs.datasets.windows import Windows
from policies.errors import DatasetError, MissingExtraError
from policies.policy_config import ChunkSpec

pa = pytest.importorskip("pyarrow", reason="needs the extra 'video'")
parquet = pytest.importorskip("pyarrow.parquet")
av = pytest.importorskip("av", reason="needs the extra 'video'")

FPS = 10
SHAPE = (32, 48, 3)
LENGTHS = (23, 9, 14)
NUM = sum(LENGTHS)
KEY = "observation.images.top"


def shade(number: int) -> int:
    """Return the brightness that tells frame `number`."""
    return 5 * number


def write_video(path: Path, numbers: range, codec: str = "libx264", frames_apart: int = 6) -> None:
    """Write frames of one brightness each, with a key frame now and then and frames that look ahead."""
    path.parent.mkdir(parents=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=FPS)
        stream.height, stream.width, stream.pix_fmt = SHAPE[0], SHAPE[1], "yuv420p"
        stream.codec_context.time_base = Fraction(1, FPS)
        stream.gop_size, stream.max_b_frames = frames_apart, 2
        for number in numbers:
            picture = np.full(SHAPE, shade(number), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def write(folder: Path) -> Path:
    """Write a dataset whose first video holds two episodes and whose second one holds the third."""
    write_video(folder / "videos" / KEY / "chunk-000" / "file-000.mp4", range(32))
    write_video(folder / "videos" / KEY / "chunk-001" / "file-000.mp4", range(32, NUM))
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    (folder / "data/chunk-000").mkdir(parents=True)
    features = {
        "observation.state": {"dtype": "float32", "shape": [1]},
        "action": {"dtype": "float32", "shape": [1]},
        "timestamp": {"dtype": "float32", "shape": [1]},
        KEY: {"dtype": "video", "shape": list(SHAPE)},
    }
    info = {"codebase_version": "v3.0", "fps": FPS, "features": features, "total_frames": NUM}
    (folder / "meta/info.json").write_text(json.dumps(info | {"total_episodes": len(LENGTHS)}))
    columns = {
        "observation.state": [[float(number)] for number in range(NUM)],
        "action": [[0.0]] * NUM,
        "timestamp": np.concatenate([np.arange(num) / FPS for num in LENGTHS]).astype(np.float32),
        "episode_index": np.repeat(range(len(LENGTHS)), LENGTHS),
        "index": range(NUM),
    }
    parquet.write_table(pa.table(columns), folder / "data/chunk-000/file-000.parquet")
    places = {
        "episode_index": [0, 1, 2],
        f"videos/{KEY}/chunk_index": [0, 0, 1],
        f"videos/{KEY}/file_index": [0, 0, 0],
        f"videos/{KEY}/from_timestamp": [0.0, LENGTHS[0] / FPS, 0.0],
    }
    parquet.write_table(pa.table(places), folder / "meta/episodes/chunk-000/file-000.parquet")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "filmed")


def numbers_of(images: torch.Tensor) -> list[int]:
    """Return which frames images are, by their brightness."""
    return [round(float(value) / shade(1)) for value in images.float().mean(dim=(1, 2, 3))]


def test_every_frame_is_found_in_any_order(folder: Path) -> None:
    data = read_dataset(folder)
    assert data.image_shapes == {"top": SHAPE} and data.meta["not_read"] == []
    images = data.images["top"]
    everything = torch.arange(NUM)
    assert numbers_of(images[everything]) == everything.tolist()
    order = torch.randint(NUM, (80,), generator=torch.Generator().manual_seed(0))
    assert numbers_of(images[order]) == order.tolist()
    for number in range(NUM - 1, -1, -1):
        assert numbers_of(images[torch.tensor([number])]) == [number]
    assert numbers_of(images.loaded()[order]) == order.tolist()


def test_a_window_has_the_frames_of_its_own_episode(folder: Path) -> None:
    data = read_dataset(folder).select([2, 0])
    windows = Windows(data, ChunkSpec(1, horizon=2, act_steps=1, obs_steps=3), cameras=["top"])
    batch = windows.gather(torch.arange(len(windows)))
    seen = [numbers_of(history) for history in batch.images["top"]]
    assert seen == batch.obs.squeeze(2).int().tolist()


def test_nothing_is_decoded_before_somebody_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    data = read_dataset(folder)
    assert len(Windows(data, ChunkSpec(1, horizon=2, act_steps=1))) == NUM
    with pytest.raises(MissingExtraError, match=r"package 'av'.*pip install 'burnish\[video\]'"):
        data.images["top"][torch.tensor([0])]


def look(data: EpisodeDataset) -> torch.Tensor:
    return data.images["top"][torch.arange(len(data))]


def test_damaged_videos_are_named(folder: Path) -> None:
    data, video = read_dataset(folder), folder / "videos" / KEY / "chunk-001" / "file-000.mp4"
    whole = video.read_bytes()
    video.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=mentions("chunk-001/file-000.mp4 readable")):
        look(data)
    video.unlink()
    write_video(video.parent.parent / "short/short.mp4", range(32, 40))
    (video.parent.parent / "short/short.mp4").rename(video)
    with pytest.raises(DatasetError, match=mentions("chunk-001/file-000.mp4 0.800")):
        look(data)


def test_videos_that_are_not_there_are_left_out_and_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "videos" / KEY / "chunk-001" / "file-000.mp4").unlink()
    data = read_dataset(folder)
    assert data.images == {} and data.meta["not_read"] == [KEY]
    assert f"{KEY} (videos, of which 1 files are missing)" in caplog.text
