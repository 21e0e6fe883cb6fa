"""What a reading takes is known before it begins, and what is not used is not read."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from messages import mentions

from envs.datasets import Episode, EpisodeDataset, array_storage, free_memory, read_dataset, write_d4rl
from envs.datasets.files.npz import read_npz_into
from envs.datasets.formats.d4rl import load_d4rl
from policies.errors import DatasetError

STEPS = 1000


@pytest.fixture
def data() -> EpisodeDataset:
    rng = np.random.default_rng(0)
    episode = Episode(
        observations=rng.normal(size=(STEPS + 1, 6)).astype(np.float32),
        actions=rng.normal(size=(STEPS, 2)).astype(np.float32),
        rewards=np.zeros(STEPS, np.float32),
        terminated=False,
        truncated=True,
        extras={"states": rng.normal(size=(STEPS, 50))},
    )
    return EpisodeDataset.from_episodes([episode])


def leave(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    """Let so many bytes of memory be free."""
    monkeypatch.setattr(free_memory, "free_memory", lambda: free)


def test_what_is_refused_says_what_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: EpisodeDataset
) -> None:
    monkeypatch.setattr(array_storage, "free_disk", lambda folder: 0)
    write_d4rl(tmp_path / "a.hdf5", data)
    states, rest = STEPS * 50 * 8, STEPS * (6 + 6 + 2 + 1) * 4
    leave(monkeypatch, int((states + rest + 10_000) / free_memory.SHARE))
    assert read_dataset(tmp_path / "a.hdf5").digest() == data.digest()
    leave(monkeypatch, int(states / free_memory.SHARE))
    with pytest.raises(DatasetError, match=mentions("a.hdf5 GiB reader.infos=false")):
        read_dataset(tmp_path / "a.hdf5")
    assert "states" not in read_dataset(tmp_path / "a.hdf5", infos=False).extras
    leave(monkeypatch, None)  # a system that does not tell
    assert read_dataset(tmp_path / "a.hdf5").num_frames == STEPS


def test_what_an_archive_takes_is_its_size_after_unpacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "c.npz", zeros=np.zeros(10_000), more=np.zeros(10_000))
    assert (tmp_path / "c.npz").stat().st_size < 10_000
    leave(monkeypatch, 220_000)
    assert not read_npz_into(tmp_path / "c.npz", ["zeros"])[1].on_disk
    arrays, place = read_npz_into(tmp_path / "c.npz", ["zeros"], ["more"])
    assert place.on_disk and len(arrays["more"]) == 10_000


def test_one_array_that_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from envs.datasets.files import hdf5

    monkeypatch.setattr(hdf5, "_LARGE", 1000)
    leave(monkeypatch, 1500)
    with h5py.File(tmp_path / "d.hdf5", "w") as file:
        file["small"], file["large"] = np.zeros(100), np.zeros(1000)
        assert len(hdf5.read_value(file["small"], "d", "small")) == 100
        with pytest.raises(DatasetError, match=mentions("large")):
            hdf5.read_value(file["large"], "d", "large")


def test_arrays_that_no_dataset_is_made_of_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: EpisodeDataset
) -> None:
    write_d4rl(tmp_path / "a.hdf5", data)
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        file["metadata/policy/weight"] = np.zeros((1000, 1000))
        file["metadata/algorithm"] = np.bytes_("SAC")
    assert "metadata/policy/weight" in load_d4rl(tmp_path / "a.hdf5")
    leave(monkeypatch, 1_000_000)
    read = read_dataset(tmp_path / "a.hdf5")
    assert not read.storage.on_disk and "states" in read.extras
    assert read.meta["metadata/algorithm"] == "SAC"


def test_a_container_has_less_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tmp_path / "meminfo"
    facts.write_text("MemTotal: 900 kB\nMemAvailable:   500 kB\n", encoding="ascii")
    monkeypatch.setattr(free_memory, "_FACTS", facts)
    monkeypatch.setattr(free_memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(free_memory, "_OWN_GROUPS", tmp_path / "none")
    assert free_memory.free_memory() == 512_000
    for name, text in (("max", "300000"), ("current", "200000"), ("stat", "anon 1\ninactive_file 50000\n")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert free_memory.free_memory() == 150_000
    (tmp_path / "memory.max").write_text("max\n")  # no limit
    assert free_memory.free_memory() == 512_000
    facts.unlink()
    assert free_memory.free_memory() is None


V2 = ("max", "current", "inactive_file")
V1 = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(
    ("groups", "top", "names"),
    [
        ("0::/user/job/step\n", "", V2),
        ("5:cpu,cpuacct:/else\n4:memory:/user/job/step\n0::/user/job/x\n", "memory", V1),
    ],
)
def test_the_narrowest_group_of_a_process_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, top: str, names: tuple[str, str, str]
) -> None:
    limit, used, caches = names
    left = {"": None, "user": 400_000, "user/job": 90_000, "user/job/step": 2**63, "else": 1, "user/job/x": 2}
    for group, most in left.items():
        folder = tmp_path / top / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"memory.{limit}").write_text("max\n" if most is None else f"{most}\n")
        (folder / f"memory.{used}").write_text("50000\n")
        own = "inactive_file 7\n" if top else ""  # without that of the groups below
        (folder / "memory.stat").write_text(f"anon 1\n{own}{caches} 20000\n")
    (tmp_path / "own").write_text(groups)
    monkeypatch.setattr(free_memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(free_memory, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(free_memory, "_FACTS", tmp_path / "none")
    assert free_memory.free_memory() == 90_000 - 50_000 + 20_000
