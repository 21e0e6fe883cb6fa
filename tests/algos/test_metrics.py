"""Numbers on their way to the disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import mentions

from algos.training.metrics import (
    append_jsonl,
    broken,
    read_jsonl,
    read_out,
    truncate_jsonl,
)
from policies.errors import ConfigError


def test_read_out_keeps_names_order_and_values() -> None:
    metrics = {"b/x": torch.tensor([2.0]), "a/y": 1, "c/z": torch.tensor(3), "d/w": torch.tensor(True)}
    assert list(read_out(metrics).items()) == [("b/x", 2.0), ("a/y", 1.0), ("c/z", 3.0), ("d/w", 1.0)]


def test_read_out_refuses_vectors_by_name() -> None:
    with pytest.raises(ConfigError, match=mentions("a/b shape (2,)")):
        read_out({"a/b": torch.zeros(2)})


def test_only_losses_and_norms_can_break_a_run() -> None:
    nan = math.nan
    values = {
        "policy/loss": nan,
        "critic/value_loss": math.inf,
        "policy/weight_norm": nan,
        "rollout/return": nan,
    }
    assert broken(values) == ["policy/loss", "critic/value_loss", "policy/weight_norm"]
    assert broken({"policy/loss": 1.0, "policy/lossless": nan, "normal/x": nan}) == []


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows") / "metrics.jsonl"


LETTERS = "az/_09 .'\"\\{}\n\r\t\0\x1f\x85\u2028é\U0001f916"  # ends of lines and texts, and no ASCII


@settings(max_examples=30)
@given(
    values=st.dictionaries(st.text(LETTERS, min_size=1), st.floats(), max_size=5), step=st.integers(0, 10**12)
)
def test_rows_return_and_are_valid_json(rows: Path, values: dict[str, float], step: int) -> None:
    rows.unlink(missing_ok=True)
    values.pop("step", None)
    append_jsonl(rows, values, step)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in rows.read_text().split("\n")[:-1]:
        json.loads(line, parse_constant=refuse)
    expected = {name: value if math.isfinite(value) else None for name, value in values.items()}
    assert read_jsonl(rows) == [{"step": step, **expected}]


def test_row_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        append_jsonl(path, {"a/b": 1.0}, step)
    path.write_bytes(path.read_bytes()[:-1])
    assert [row["step"] for row in read_jsonl(path)] == [1]


@pytest.mark.parametrize("damage", [b"\0\0\0", b'{"step": 2, "a', b"\xff\xfe", b"3", b""])
def test_only_a_damaged_line_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3, 4):
        append_jsonl(path, {"a/b": 1.0}, step)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], damage, *lines[2:4], lines[0][:5]]))
    assert [row["step"] for row in read_jsonl(path)] == [1, 3, 4]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{path}: line 2" in caplog.text


def test_truncation_cuts_at_the_size_and_drops_partial_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"a/b": 1.0}, 1)
    size = path.stat().st_size
    append_jsonl(path, {"a/b": 1.0}, 2)
    truncate_jsonl(path, size)
    assert [row["step"] for row in read_jsonl(path)] == [1]
    with path.open("a") as file:
        file.write('{"step"')
    truncate_jsonl(path, 10_000)
    assert path.stat().st_size == size


def test_missing_file_is_empty(tmp_path: Path) -> None:
    truncate_jsonl(tmp_path / "none", 0)
    assert read_jsonl(tmp_path / "none") == []


def test_what_is_no_number_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "time/elapsed_s": "12 s", "a/b": None},
        {"step": "two", "time/elapsed_s": [3.0]},
        {"step": 10**400, "a/b": 2},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_jsonl(path) == [{"step": 1, "a/b": None}, {}, {"a/b": 2}]
    assert f"{path}: 'time/elapsed_s' of line 1 is no number" in caplog.text
    truncate_jsonl(path, 0, through=1)
    assert read_jsonl(path) == [{"step": 1, "a/b": None}]


def test_a_file_that_cannot_be_read_has_no_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    assert read_jsonl(tmp_path / "metrics.jsonl") == []
    assert f"{tmp_path / 'metrics.jsonl'} cannot be read" in caplog.text
