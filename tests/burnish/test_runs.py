"""The table of runs, and the page of a folder of runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import burnish
from algos.training.run_directory import RunDirectory
from burnish.commands import runs as runs_command
from burnish.commands.report import ReportConfig
from burnish.commands.runs import differing_keys, readable_runs, tabulate
from burnish.lab.runs import RunFolder
from burnish.reports.results import evaluations_while_training, stored_evaluation
from burnish.runs.best_evaluation import best_evaluation
from burnish.runs.locate import runs_below
from policies.errors import CheckpointError

DATA = (np.zeros((9, 4)), np.linspace(-1, 1, 18).reshape(9, 2))
TINY: dict[str, Any] = {"algo.steps": 2, "algo.warmup_steps": 0, "algo.batch_size": 8, "backbone.width": 8}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    for number, rate in enumerate((1e-3, 1e-4)):
        burnish.clone(
            DATA,
            directory=folder / str(number),
            evaluation={"episodes": 1},
            env="avoid",
            num_workers=0,
            progress=False,
            **{**TINY, "algo.lr": rate},
        )
    (folder / "damaged" / "checkpoints").mkdir(parents=True)
    (folder / "damaged" / "config.yaml").write_text("- no mapping")
    return folder


def test_runs_are_found_at_any_depth_and_damaged_ones_left_out(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = readable_runs(runs_below(sweep.parent))
    assert [run.path for run in found] == [sweep / "0", sweep / "1"]
    assert differing_keys(found) == ["algo.lr"]
    other: Any = SimpleNamespace(config={**found[0].config, "algo": {"name": "td3_bc", "alpha": 2.5}})
    assert differing_keys([found[0], other]) == [], "algo.alpha is no key of bc"
    wide = {**found[0].config, "backbone": {"name": "mlp", "width": 512}}
    for init, keys in ((None, ["backbone.width"]), ("clone", [])):
        other = SimpleNamespace(config={**wide, "init": init})
        assert differing_keys([found[0], other]) == keys, "a run with init trains the network of init"
    columns, rows = tabulate(found, sweep)
    line = dict(zip(columns, map(str, rows[1]), strict=True))
    assert (line["run"], line["algo"], line["task"], line["step"], line["budget"]) == (
        *("1", "bc", "avoid", "2", "2"),
    )
    assert line["last"].endswith("%") and line["best"].endswith("%") and line["algo.lr"] == "0.0001"
    assert runs_command.main([str(sweep)]) == 0
    assert "algo.lr" in capsys.readouterr().out
    with monkeypatch.context() as narrow:
        narrow.setattr("burnish.console.PLAIN_WIDTH", 40)
        assert runs_command.main([str(sweep)]) == 0
        assert "wider window: algo.lr" in capsys.readouterr().out
    assert runs_command.main([str(sweep / "0" / "eval")]) == 0
    assert "no runs" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", '{"rows": [', "[]", "{}", "7"])
def test_a_damaged_evaluation_is_left_out(
    content: str, sweep: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory.open(shutil.copytree(sweep / "0", tmp_path / "run"))
    assert stored_evaluation(run) is not None and best_evaluation(run) is not None
    for file in run.evals():
        file.path.write_text(content)
    assert stored_evaluation(run) is None and best_evaluation(run) is None
    assert not evaluations_while_training(run)
    assert f"{file.path} is damaged" in caplog.text


@pytest.mark.parametrize("damage", ["a folder", "another task", "no values", "no task"])
def test_one_damaged_evaluation_takes_no_other_run_from_a_table_or_a_report(
    damage: str, sweep: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("0", "1"):
        shutil.copytree(sweep / name, tmp_path / "runs" / name)
    hurt = RunDirectory.open(tmp_path / "runs" / "0")
    for file in hurt.evals():
        content = json.loads(file.path.read_text())
        if damage == "another task":
            content["protocol"]["env"]["name"] = "lift"  # edited: its hash is another
        elif damage == "no values":
            content["summary"] = {}
        elif damage == "no task":
            content = {"protocol": {}, "summary": {}, "rows": []}
        file.path.unlink()
        if damage == "a folder":
            file.path.mkdir()
        else:
            file.path.write_text(json.dumps(content))
    runs = [RunDirectory.open(tmp_path / "runs" / name) for name in ("0", "1")]
    columns, rows = tabulate(runs, tmp_path / "runs")
    last = columns.index("last")
    assert rows[0][last] == "" and str(rows[1][last]).endswith("%")
    assert burnish.report(tmp_path / "runs", episodes=0).is_file()
    assert f"{file.path} is damaged" in caplog.text


@pytest.mark.parametrize("damage", ["packages", "elapsed", "step", "hash", "name"])
def test_a_run_edited_by_hand_has_its_row_and_its_page(damage: str, sweep: Path, tmp_path: Path) -> None:
    place = tmp_path / "runs" / (os.fsdecode(b"r\xff") if damage == "name" else "run")
    run = RunDirectory.open(shutil.copytree(sweep / "0", place))
    if damage == "packages":
        (place / "environment.json").write_text(json.dumps({"packages": ["torch"], "python": "3.11"}))
    elif damage == "hash":
        for file in run.evals():
            content = json.loads(file.path.read_text())
            del content["summary"]["protocol_hash"]
            file.path.write_text(json.dumps(content))
    elif damage != "name":
        odd = {"elapsed": {"time/elapsed_s": "12 s"}, "step": {"step": "two"}}[damage]
        with run.metrics_path.open("a") as file:
            file.write(json.dumps({"step": 3, **odd}) + "\n")
    assert len(tabulate([run], tmp_path)[1]) == 1
    page = burnish.report(place, episodes=0, out=tmp_path / "page").read_text(encoding="utf-8")
    assert "bc on avoid" in page


def test_the_budget_of_a_run_on_data_and_in_the_task_is_both(tmp_path: Path) -> None:
    algo = {"name": "qc", "steps": 40, "online_steps": 100}
    run = RunDirectory.create_at(tmp_path / "qc", {"algo": algo, "env": {"name": "avoid"}}, [])
    columns, rows = tabulate([run], tmp_path)
    assert rows[0][columns.index("budget")] == 140


def test_a_folder_of_runs_is_one_page_with_the_swept_key(sweep: Path, tmp_path: Path) -> None:
    page = burnish.report(sweep, episodes=0, out=tmp_path / "page").read_text()
    assert "2 runs: sweep" in page and "<th>algo.lr</th>" in page and "<td>0.0001</td>" in page
    both = burnish.report([sweep / "0", sweep / "1"], episodes=0, out=tmp_path / "both").read_text()
    assert "2 runs: 0, 1" in both
    copy = Path(shutil.copytree(sweep / "0", tmp_path / "again" / "0"))
    clash = burnish.report([sweep / "0", copy], episodes=0, out=tmp_path / "clash").read_text()
    assert "2 runs: sweep-0, again-0" in clash
    assert RunDirectory.open(sweep / "0").latest() == 2


@pytest.mark.parametrize("file", ["config.yaml", "overrides.txt", "checkpoints/2/policy/config.json"])
def test_one_damaged_run_takes_no_other_from_a_report(
    file: str, sweep: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("0", "1"):
        shutil.copytree(sweep / name, tmp_path / "runs" / name, symlinks=True)
    (tmp_path / "runs" / "0" / file).write_bytes(b"\xff")
    found = ReportConfig(run=str(tmp_path / "runs")).runs()
    assert [one.path.name for one in found] == ["1"]
    assert f"{tmp_path / 'runs' / '0'} is left out" in caplog.text and file in caplog.text
    burnish.report(tmp_path / "runs", episodes=0, out=tmp_path / "page")
    (tmp_path / "runs" / "1" / file).write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=file):
        burnish.report(tmp_path / "runs", episodes=0, out=tmp_path / "none")


def test_a_folder_in_the_place_of_a_configuration_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").mkdir()
    assert RunFolder(tmp_path).listed() == []


def test_a_run_that_is_given_twice_is_not_pooled_with_itself(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(sweep / "0")
    given = [str(path) for path in (sweep / "0", tmp_path / "link", sweep / "1", sweep / "0")]
    assert [one.path.resolve() for one in ReportConfig(run=given).runs()] == [sweep / "0", sweep / "1"]


def test_a_run_of_damaged_sections_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RunDirectory.create_at(tmp_path / "whole", {"algo": {"name": "bc"}, "env": None}, [])
    RunDirectory.create_at(tmp_path / "damaged", {"algo": "bc"}, [])
    assert [run.path.name for run in readable_runs(runs_below(tmp_path))] == ["whole"]
    assert "damaged is left out" in caplog.text


def test_a_run_that_may_not_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("own", "theirs"):
        RunDirectory.create_at(tmp_path / name, {"algo": {"name": "bc"}, "env": None}, [])
    found = RunDirectory.checkpoints

    def checkpoints(run: RunDirectory) -> list[int]:
        if run.path.name == "theirs":
            raise PermissionError(13, "Permission denied", str(run.path / "checkpoints"))
        return found(run)

    monkeypatch.setattr(RunDirectory, "checkpoints", checkpoints)
    assert [run.path.name for run in readable_runs(runs_below(tmp_path))] == ["own"]
    assert "theirs is left out" in caplog.text and "Permission denied" in caplog.text
