"""What a file holds is described for every file that can be read, and for those that cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from messages import mentions

from envs.datasets.inspect import KeyFacts, describe_file
from policies.errors import DatasetError


def described(path: Path) -> dict[str, KeyFacts]:
    return {one.key: one for one in describe_file(path)}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_is_described_in_pieces_beside_what_is_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: object
) -> None:
    values = np.random.default_rng(0).normal(size=(100, 3))
    values[7, 1], values[8, 2] = np.nan, np.inf
    arrays = {"x": values, "turned": np.asfortranarray(values).astype(">f4"), "one": np.float64(3.5)}
    arrays |= {
        "who": np.array("somebody"),
        "empty": np.zeros((0, 2)),
        "objects": np.array([{}], dtype=object),
    }
    save(tmp_path / "x.npz", **arrays)  # type: ignore[operator]
    monkeypatch.setattr("envs.datasets.inspect._PIECE", 100)
    seen: list[int] = []
    describe_file(tmp_path / "x.npz", seen.append)
    assert len(seen) > 20
    found = described(tmp_path / "x.npz")
    assert list(found) == list(arrays)
    for key in ("x", "turned"):
        one, finite = found[key], arrays[key][np.isfinite(arrays[key])]
        assert (one.rows, one.shapes, one.nan, one.infinite) == (100, [(3,)], 1, 1)
        assert (one.low, one.high) == (finite.min(), finite.max())
    assert (found["one"].low, found["one"].rows) == (3.5, 1)
    assert found["who"].dtype == "<U8" and found["objects"].dtype == "object"
    assert all(found[key].low is None for key in ("who", "empty", "objects"))


@pytest.mark.parametrize("where", [0.3, 0.6])
def test_a_damaged_archive_is_one_clear_error(tmp_path: Path, where: float) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=5000))
    content = bytearray((tmp_path / "x.npz").read_bytes())
    place = int(where * len(content))
    content[place : place + 50] = bytes(50)
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(DatasetError, match=mentions("x.npz readable")):
        describe_file(tmp_path / "x.npz")


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_folders_of_episodes_are_put_together(tmp_path: Path, form: str) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs the extra 'lerobot'")
    tables = pytest.importorskip("pyarrow.dataset")
    for number in range(12):
        table = pa.table({"rewards": np.full(3, float(number)), "actions": [[0.0, 1.0]] * 3})
        tables.write_dataset(table, tmp_path / "data" / str(number), format=form)
    found = described(tmp_path)
    assert set(found) == {"*/rewards", "*/actions"}
    one = found["*/rewards"]
    assert (one.arrays, one.rows, one.low, one.high) == (12, 36, 0.0, 11.0)
