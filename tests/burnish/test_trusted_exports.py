"""Commands refuse exported folders whose metadata is invalid."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pairwise import each_value

from burnish import cli


def refusal(
    *arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cwd: Path
) -> str:
    """Run a command that ends in one line, and return it."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["burnish", *arguments])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("text", "command"),
    each_value(["{", "[]", "{}", json.dumps({"inputs": 1})], [["eval", "env=avoid"], ["eval"], ["serve"]]),
)
def test_a_folder_whose_signature_lies_is_refused_in_one_line(
    text: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "signature.json").write_text(text)
    where = {"monkeypatch": monkeypatch, "capsys": capsys, "cwd": tmp_path}
    error = refusal(*command, f"policy={folder}", **where)
    assert "signature.json" in error and "must describe an exported policy" in error
