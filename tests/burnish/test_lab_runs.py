"""Runs as they grow: what a run writes is shown, only runs of the folder are, and nothing is changed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from entry import exit_code
from forked import started
from messages import mentions

from algos.training.provenance import processor_name
from algos.training.run_directory import RunDirectory
from burnish.lab.run_control import LOG, RunControl
from burnish.lab.runs import RunFolder
from envs.evaluation.evaluate import Evaluation
from envs.rollouts.episodes import EpisodeRow
from policies.errors import ConfigError
from policies.storage.policy_folder import load_policy

DATA = "tests/fixtures/version_0_1/demonstrations.h5"
OLD = "tests/fixtures/version_0_1/policies/cloned"


class Clock:
    """Time that a test sets [s]."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def made(path: Path, *rows: tuple[int, float]) -> RunDirectory:
    run = RunDirectory.create_at(path, {"algo": {"name": "bc"}, "env": {"name": "avoid"}}, [])
    with run.claim():
        for step, loss in rows:
            run.log({"policy/loss": loss}, step)
    return run


def evaluated(run: RunDirectory, step: int, ends: list[bool], rule: str = "arrives") -> None:
    rows = tuple(EpisodeRow(i, i, 1234.5 + won, 9, won, True, False) for i, won in enumerate(ends))
    env = {"name": "avoid", "options": {}, "success_rule": rule, "reference_scores": None}
    run.write_eval(f"step-{step}", json.loads(Evaluation(rows, {"env": env}).to_json()))


def shown(folder: RunFolder, name: str, version: str = "") -> Any:
    return folder.shown(name, version)


def test_runs_are_listed_youngest_first(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "sweep/new")):
        os.utime(made(tmp_path / name, (1, 0.5)).metrics_path, (1000 + number, 1000 + number))
    listed = RunFolder(tmp_path, clock=Clock(1010.0)).listed()
    assert [(row["name"], row["age_s"]) for row in listed] == [("sweep/new", 9), ("old", 10)]
    assert {(row["algo"], row["task"], row["step"]) for row in listed} == {("bc", "avoid", None)}


def test_a_run_whose_name_is_no_text_is_asked_for_by_text(tmp_path: Path) -> None:
    made(tmp_path / os.fsdecode(b"r\xff"), (1, 0.5), (2, 0.7))
    folder = RunFolder(tmp_path)
    (row,) = folder.listed()
    assert row["name"].encode("utf-8") == rb"r\udcff" and shown(folder, row["name"])["html"].encode()


def test_a_run_that_begins_is_found_and_one_that_goes_is_forgotten(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    folder = RunFolder(tmp_path, clock=clock)
    assert not folder.listed()
    run = made(tmp_path / "run")
    clock.now += 60
    assert [row["name"] for row in folder.listed()] == ["run"]
    run.path.rename(tmp_path.parent / f"{tmp_path.name}-gone")
    clock.now += 60
    assert not folder.listed()


def test_new_numbers_are_another_version_and_longer_curves(tmp_path: Path) -> None:
    run, folder = made(tmp_path / "run", (1, 0.5), (2, 0.4)), RunFolder(tmp_path)
    before = shown(folder, "run")
    assert "<svg" in before["html"] and before["html"].count("<circle") == 2
    assert processor_name() in before["html"] and "Load of this machine" in before["html"]
    assert shown(folder, "run", before["version"]) == {"version": before["version"]}
    with run.claim():
        run.log({"policy/loss": 0.3}, 3)
    after = shown(folder, "run", before["version"])
    assert after["version"] != before["version"] and after["html"].count("<circle") == 3


def test_the_newest_episodes_are_shown(tmp_path: Path) -> None:
    run, folder = made(tmp_path / "run", (1, 0.5)), RunFolder(tmp_path)
    policy = load_policy(OLD)
    with run.claim():
        run.save_checkpoint(2, policy, {}, provenance=dict(policy.provenance))
    evaluated(run, 1, [False] * 4)
    evaluated(run, 2, [True, False, True])
    html = shown(folder, "run")["html"]
    assert "step 2: 2 of 3 succeeded" in html
    assert html.count('class="success"') == 2 and html.count('class="failure"') == 1


def test_episodes_without_success_have_returns(tmp_path: Path) -> None:
    run, policy = made(tmp_path / "run", (1, 0.5)), load_policy(OLD)
    with run.claim():
        run.save_checkpoint(2, policy, {}, provenance=dict(policy.provenance))
    evaluated(run, 2, [False] * 4, rule="")
    html = shown(RunFolder(tmp_path), "run")["html"]
    assert "step 2: mean return 1,234 of 4." in html and "succeeded" not in html
    assert html.count('return 1,234"') == 4


@pytest.mark.parametrize(
    "name", ["..", "../other", "/etc", "run/../../other", "", "other", "run/checkpoints"]
)
def test_only_runs_of_the_folder_are_shown(tmp_path: Path, name: str) -> None:
    made(tmp_path / "other", (1, 0.5))
    made(tmp_path / "runs" / "run", (1, 0.5))
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "other")
    folder = RunFolder(tmp_path / "runs")
    assert shown(folder, name) is None and shown(folder, "link") is None
    assert shown(folder, "run") is not None


def test_files_that_lead_elsewhere_are_left_out(tmp_path: Path) -> None:
    secret = made(tmp_path / "other", (1, 0.5), (2, 0.25))
    run = made(tmp_path / "runs" / "run")
    run.metrics_path.unlink(missing_ok=True)
    run.metrics_path.symlink_to(secret.metrics_path)
    assert "<svg" not in shown(RunFolder(tmp_path / "runs"), "run")["html"]


@pytest.mark.parametrize(
    "lines",
    [
        b"\x00\xff\n", b"[1]\n{}\n", b'{"step": "<script>", "policy/loss": 1}\n' * 2,
        b'{"step": 1, "policy/loss": "<b>"}\n' * 2, b'{"policy/loss": 1}\n' * 2,
        b'{"step": 1e999, "policy/loss": 1}\n' * 2,
    ],
)  # fmt: skip
def test_a_damaged_run_is_shown_as_such_and_never_as_markup(tmp_path: Path, lines: bytes) -> None:
    run = made(tmp_path / "run")
    run.metrics_path.write_bytes(lines)
    (run.path / "eval" / "step-1.json").write_text('{"rows": "<script>"}')
    html = shown(RunFolder(tmp_path), "run")["html"]
    assert "<script>" not in html and "<b>" not in html


class Copy:
    """What `subprocess.Popen` would start, in a copy of this process."""

    def __init__(self, command: list[str], *, stdout: int, **_: Any) -> None:
        assert command[:3] == [sys.executable, "-m", "burnish"]
        self._words, self._stdout = command[3:], stdout
        self._process = started(self._run)

    def _run(self) -> None:
        for stream in (1, 2):
            os.dup2(self._stdout, stream)
        sys.exit(exit_code(*self._words))

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode


def test_a_run_is_continued_and_stopped_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.lab.run_control.subprocess", SimpleNamespace(Popen=Copy, DEVNULL=None))
    path, data = tmp_path / "runs" / "run", Path(DATA).resolve()
    sizes = ["algo.steps=1000000", "algo.batch_size=8", "backbone.width=8", "evaluation.episodes=0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "log", lambda *_: signal.raise_signal(signal.SIGTERM))
        ended = exit_code("train", "algo=bc", f"dataset={data}", *sizes, f"hydra.run.dir={path}")
    run, control = RunDirectory.open(path), RunControl(RunFolder(path.parent))
    saved = run.latest()
    assert ended == 128 + signal.SIGTERM and saved
    with pytest.raises(ConfigError, match=mentions("run running")):
        control.change("run", "stop")
    control.change("run", "continue")
    end = time.monotonic() + 60
    while time.monotonic() < end and not run.metrics_path.exists():
        time.sleep(0.02)
    assert control.state("run") == {"is_running": True, "problem": ""}
    with pytest.raises(ConfigError, match=mentions("run running")):
        control.change("run", "continue")
    control.change("run", "stop")
    assert control._started["run"].wait(60) == 128 + signal.SIGTERM
    assert not control.state("run")["is_running"] and run.latest() > saved


def test_only_runs_of_the_folder_are_changed_and_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path / "runs" / "run", (1, 0.5))
    (tmp_path / "log").write_text("kept")
    control = RunControl(RunFolder(tmp_path / "runs"))
    for name, do in (("..", "stop"), ("", "continue"), ("run", "delete"), ("run", "stop")):
        with pytest.raises(ConfigError):
            control.change(name, do)
    (run.path / LOG).symlink_to(tmp_path / "log")
    with pytest.raises(ConfigError, match=mentions("run")):
        control.change("run", "continue")
    assert (tmp_path / "log").read_text() == "kept"
    (run.path / LOG).unlink()
    monkeypatch.setattr(sys, "executable", "/bin/cat")  # complains of its options and ends
    control.change("run", "continue")
    control._started["run"].wait(60)
    assert "cat" in control.state("run")["problem"]


def test_nothing_is_written(tmp_path: Path) -> None:
    made(tmp_path / "run", (1, 0.5), (2, 0.4))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    folder = RunFolder(tmp_path)
    assert folder.listed() and shown(folder, "run")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
