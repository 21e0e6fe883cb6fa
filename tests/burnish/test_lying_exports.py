"""Commands refuse exported folders whose metadata is invalid."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from messages import mentions
from pairwise import each_value

import burnish
from burnish import cli
from burnish.commands import export as export_command
from burnish.runs.locate import locate
from envs.tasks.avoid.task import Avoid
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import ConfigError
from policies.policy_config import PolicyConfig
from policies.storage.policy_folder import save_policy


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


@pytest.mark.parametrize("name", ["config.json", "config.yaml"])
def test_no_policy_is_hidden_by_an_export_in_its_place(name: str, tmp_path: Path) -> None:
    place, parts = tmp_path / "it", PolicyConfig(backbone=MlpConfig(width=8))
    save_policy(build_policy(parts, obs_dim=2, action_dim=2), tmp_path / "policy")
    place.mkdir()
    (place / name).write_text("{}")
    with pytest.raises(ConfigError, match=mentions("out= run")):
        burnish.export(tmp_path / "policy", out=place, overwrite=True)
    assert [item.name for item in place.iterdir()] == [name]


def test_an_export_has_no_limits_of_a_task_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """JSON has no infinity; a signature that holds one is refused."""
    parts = PolicyConfig(backbone=MlpConfig(width=8))
    found = locate(save_policy(build_policy(parts, obs_dim=4, action_dim=2), tmp_path / "policy"))
    spec = replace(Avoid().spec, action_low=(-math.inf, -math.inf), action_high=(math.inf, math.inf))
    monkeypatch.setattr(export_command, "task_of", lambda _: SimpleNamespace(spec=spec))
    facts = export_command.surroundings_of(found, found.load())
    assert (facts.task, facts.control_hz) == ("avoid", 20.0)
    assert facts.action_low is None and facts.action_high is None
    assert "its task has none" in caplog.text
