"""Kept statistics: found by content only, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from envs.datasets import statistics_cache
from envs.datasets.catalogue import FOLDER_VARIABLE
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.moments import moments
from envs.datasets.statistics_cache import Statistics, statistics_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep everything, here."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(statistics_cache, "LARGE", 0)
    return tmp_path / "statistics"


def arrays(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "state": torch.randn(50, 4, generator=generator),
        "action": torch.rand(50, 2, generator=generator),
    }


def assert_right(found: Statistics, rows: dict[str, Tensor]) -> None:
    for key, value in rows.items():
        for name, number in moments(value).items():
            assert torch.equal(found[key][name], number)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every array whose statistics are taken."""
    calls: list[int] = []

    def count(rows: Tensor) -> dict[str, Tensor]:
        calls.append(len(rows))
        return moments(rows)

    monkeypatch.setattr(statistics_cache, "moments", count)
    return calls


def test_a_second_pass_is_a_look_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    for _ in range(2):
        assert_right(statistics_of(arrays()), arrays())
    assert len(calls) == 2 and len(list(folder.iterdir())) == 1


def test_other_content_names_and_shapes_have_statistics_of_their_own(folder: Path) -> None:
    changed = arrays()
    changed["state"][7, 1] += 1e-3
    renamed = {"state": arrays()["state"], "goal": arrays()["action"]}
    shaped = {"state": arrays()["state"].view(100, 2), "action": arrays()["action"]}
    for rows in (arrays(), changed, renamed, shaped):
        assert_right(statistics_of(rows), rows)
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("content", [b"", b"no statistics at all"])
def test_a_broken_file_is_replaced(folder: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    statistics_of(arrays())
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(content)
    assert_right(statistics_of(arrays()), arrays())
    assert "taken anew" in caplog.text and path.read_bytes() == whole


def test_a_file_of_other_arrays_is_not_believed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    statistics_of({"state": arrays()["state"]})
    (other,) = folder.iterdir()
    statistics_of(arrays())
    (path,) = set(folder.iterdir()) - {other}
    path.write_bytes(other.read_bytes())
    assert_right(statistics_of(arrays()), arrays())
    assert "other names or shapes" in caplog.text


def test_where_nothing_can_be_kept_statistics_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    assert_right(statistics_of(arrays()), arrays())


def test_small_arrays_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_cache, "LARGE", 10_000)
    statistics_of(arrays())
    assert not folder.exists()


def test_a_dataset_uses_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, over = arrays(), torch.zeros(50, dtype=torch.bool)
    over[-1] = True
    data = EpisodeDataset(
        observations=rows["state"], actions=rows["action"], rewards=torch.zeros(50), terminated=over,
        truncated=torch.zeros_like(over), episode_start=torch.tensor([0, 50]), meta={"source": "made"},
    )  # fmt: skip
    assert_right(data.statistics(), rows)
    calls = counted(monkeypatch)
    assert_right(data.statistics(), rows)
    assert not calls
