"""Images of datasets: the same wherever they are kept, and never read unless somebody looks."""

from __future__ import annotations

import io
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from messages import mentions

from envs.datasets import Episode, EpisodeDataset, free_memory, read_dataset, write_robomimic
from envs.datasets.images import Compressed, Images, InMemory
from envs.datasets.windows import Windows
from policies.errors import DatasetError
from policies.policy_config import ChunkSpec

LENGTHS = (5, 1, 4)
SHAPE = (6, 7, 3)


def filmed(seed: int = 0, cameras: tuple[str, ...] = ("front", "wrist")) -> EpisodeDataset:
    """Episodes whose images tell their frame: every pixel of frame i has a number of its own."""
    rng = np.random.default_rng(seed)
    episodes = [
        Episode(
            observations=rng.normal(size=(n + 1, 2)),
            actions=rng.normal(size=(n, 3)),
            rewards=np.zeros(n),
            terminated=False,
            truncated=True,
            images={camera: rng.integers(0, 256, (n, *SHAPE), dtype=np.uint8) for camera in cameras},
        )
        for n in LENGTHS
    ]
    return EpisodeDataset.from_episodes(episodes)


def all_of(images: Images) -> np.ndarray:
    return images[torch.arange(len(images))].numpy()


def test_a_file_gives_back_the_images_that_were_written(tmp_path: Path) -> None:
    data, path = filmed(), tmp_path / "demo.hdf5"
    write_robomimic(path, data)
    with h5py.File(path) as file:
        stored = file["data/demo_0/obs/front_image"]
        assert stored.chunks == (1, *SHAPE) and stored.compression == "gzip"
    got = read_dataset(path)
    assert got.image_shapes == data.image_shapes == {"front": SHAPE, "wrist": SHAPE}
    assert got.digest() == data.digest() and got.meta["not_read"] == []
    order = torch.tensor([9, 0, 3, 3, 5])
    for camera, images in data.images.items():
        np.testing.assert_array_equal(all_of(got.images[camera]), all_of(images))
        np.testing.assert_array_equal(got.images[camera][order], images[order])


def test_a_choice_of_episodes_has_their_images_from_memory_and_from_a_file(tmp_path: Path) -> None:
    data = filmed()
    write_robomimic(tmp_path / "demo.hdf5", data)
    expected = np.concatenate([all_of(data.images["wrist"])[6:10], all_of(data.images["wrist"])[0:5]])
    for source in (data, read_dataset(tmp_path / "demo.hdf5")):
        chosen = source.select([2, 0])
        np.testing.assert_array_equal(all_of(chosen.images["wrist"]), expected)
        np.testing.assert_array_equal(all_of(chosen.images["wrist"].loaded()), expected)
        np.testing.assert_array_equal(all_of(chosen.select([1]).images["wrist"]), expected[4:])


@pytest.mark.parametrize("pad_end", [True, False])
def test_a_window_has_the_images_of_its_observations(pad_end: bool) -> None:
    data = filmed()
    chunk = ChunkSpec(3, horizon=2, act_steps=1, obs_steps=3)
    windows = Windows(data, chunk, pad_end=pad_end, cameras=("wrist", "front"))
    batch = windows.gather(torch.arange(len(windows)))
    assert list(batch.images) == ["wrist", "front"]
    for w in range(len(windows)):
        for j in range(3):
            same = (data.observations == batch.obs[w, j]).all(dim=1)  # observations tell their frame
            frame = int(same.nonzero().item())
            np.testing.assert_array_equal(batch.images["front"][w, j], all_of(data.images["front"])[frame])
    assert Windows(data, chunk, pad_end=pad_end).gather(torch.arange(2)).images == {}


def test_what_nobody_looks_at_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "demo.hdf5"
    write_robomimic(path, filmed())
    data = read_dataset(path)
    path.unlink()
    blind = data.with_cameras(())
    assert blind.images == {} and len(blind.digest()) == 64
    assert len(Windows(blind, ChunkSpec(3, horizon=2, act_steps=1))) == sum(LENGTHS)
    with pytest.raises(DatasetError, match="no such file"):
        data.with_cameras(["front"])
    with pytest.raises(DatasetError, match=mentions("['top'] ['front', 'wrist']")):
        data.with_cameras(["top"])


def test_images_are_loaded_where_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_robomimic(tmp_path / "demo.hdf5", filmed())
    data = read_dataset(tmp_path / "demo.hdf5")
    size = sum(LENGTHS) * int(np.prod(SHAPE))
    monkeypatch.setattr(free_memory, "free_memory", lambda: size)
    assert data.with_cameras(data.images) is data
    monkeypatch.setattr(free_memory, "free_memory", lambda: 2 * size)
    loaded = data.with_cameras(data.images)
    assert all(isinstance(images.store, InMemory) for images in loaded.images.values())
    assert loaded.digest() == data.digest() and loaded.with_cameras(data.images) is loaded


def test_one_pixel_changes_the_digest() -> None:
    data = filmed()
    before = data.digest()
    data.images["front"].store.pixels[3, 2, 1, 0] ^= 1
    assert data.digest() != before


def test_images_that_do_not_fit_are_refused() -> None:
    data = filmed()
    keys = ("observations", "actions", "rewards", "terminated", "truncated")
    with pytest.raises(DatasetError, match=mentions("front shape 10 3 (9, 6, 7, 3)")):
        EpisodeDataset.from_arrays(
            *(getattr(data, key) for key in keys),
            data.episode_start,
            images={"front": np.zeros((9, *SHAPE), np.uint8)},
        )
    with pytest.raises(DatasetError, match=mentions("images uint8")):
        Images.of(np.zeros((2, *SHAPE)))


def test_a_demonstration_with_other_images_is_named(tmp_path: Path) -> None:
    path = tmp_path / "demo.hdf5"
    write_robomimic(path, filmed())
    with h5py.File(path, "a") as file:
        del file["data/demo_2/obs/front_image"]
        file["data/demo_2/obs/front_image"] = np.zeros((4, 6, 8, 3), np.uint8)
    with pytest.raises(DatasetError, match=mentions("demo_2/obs front_image shape (4, 6, 7, 3)")):
        read_dataset(path)


def png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="png")
    return out.getvalue()


def test_compressed_images_are_decoded_when_they_are_asked_for() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, *SHAPE), dtype=np.uint8)
    images = Images(Compressed([png(pixels[0]), b"torn", png(pixels[2])], SHAPE, "f: column 'c'"))
    np.testing.assert_array_equal(images[torch.tensor([2, 0, 2])], pixels[[2, 0, 2]])
    with pytest.raises(DatasetError, match=mentions("c PNG JPEG 1")):
        images.loaded()
    odd = Images(Compressed([png(pixels[0, :5])], SHAPE, "f"))
    with pytest.raises(DatasetError, match=mentions("shape (6, 7, 3) 0 (5, 7, 3)")):
        odd.loaded()


def test_lerobot_images_are_read_from_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs the extra 'lerobot'")
    parquet = pytest.importorskip("pyarrow.parquet")
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (4, *SHAPE), dtype=np.uint8)
    features = {
        "observation.state": {"dtype": "float32", "shape": [2]},
        "action": {"dtype": "float32", "shape": [1]},
        "observation.images.top": {"dtype": "image", "shape": list(SHAPE)},
    }
    info = {"codebase_version": "v3.0", "features": features, "total_episodes": 2, "total_frames": 4}
    for folder in ("meta", "data/chunk-000"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "meta" / "info.json").write_text(json.dumps(info))
    rows = {
        "observation.state": rng.normal(size=(4, 2)).tolist(),
        "action": rng.normal(size=(4, 1)).tolist(),
        "observation.images.top": [{"bytes": png(one), "path": None} for one in pixels],
        "episode_index": [0, 0, 1, 1],
        "index": [0, 1, 2, 3],
    }
    for number, part in enumerate((slice(2, 4), slice(0, 2))):  # files in another order than the frames
        table = pa.table({key: values[part] for key, values in rows.items()})
        parquet.write_table(table, tmp_path / f"data/chunk-000/file-{number:03d}.parquet")
    data = read_dataset(tmp_path)
    assert data.image_shapes == {"top": SHAPE} and data.meta["not_read"] == []
    np.testing.assert_array_equal(all_of(data.images["top"]), pixels)
