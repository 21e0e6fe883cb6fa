"""Commands refuse exported folders that lie, and open what can execute code only where they are told to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from messages import mentions

from burnish import cli
from burnish.runs.locate import locate_actor
from policies.build import build_policy
from policies.errors import ExportError
from policies.export.export import export_policy
from policies.policy import PolicyConfig
from policies.processes.gaussian import GaussianProcess


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


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy for `avoid`, exported as a program of torch.export."""
    folder = tmp_path_factory.mktemp("exports") / "program"
    config = PolicyConfig(process=GaussianProcess(), horizon=1, act_steps=1)
    policy = build_policy(config, obs_dim=4, action_dim=2, seed=0)
    export_policy(policy, folder, format="torch", compiled=False, latency_batches=(), batch_sizes=(1,))
    return folder


@pytest.mark.parametrize("command", [["eval", "env=avoid"], ["serve"]])
def test_a_program_is_opened_by_commands_that_are_told_to_trust_it(
    command: list[str],
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = {"monkeypatch": monkeypatch, "capsys": capsys, "cwd": tmp_path}
    assert "Say trust=true" in refusal(*command, f"policy={program}", **where)


def test_a_trusted_program_is_played(program: Path) -> None:
    assert locate_actor(program, trust=True).load().act([[[0.0] * 4]] * 3).shape == (3, 1, 2)
    with pytest.raises(ExportError, match=mentions("trust=false")):
        locate_actor(program).load()


@pytest.mark.parametrize("command", [["eval", "env=avoid"], ["eval"], ["serve"]])
@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"inputs": 1})])
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
