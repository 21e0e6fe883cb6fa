"""Runs that end before they begin leave nothing behind; long ones say so."""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from messages import mentions
from random_walk import RandomWalk

import burnish
from algos.bc import Bc
from algos.training.progress import announced, planned
from algos.training.run_directory import RunDirectory
from algos.training.trainer import train
from burnish.app import NewFolders
from burnish.cli import main
from policies.errors import CheckpointError, ConfigError

TINY = {
    "backbone.width": 8, "algo.steps": 8, "algo.warmup_steps": 0, "algo.batch_size": 4, "algo.log_every": 4,
    "algo.validation_fraction": 0, "num_threads": 1, "progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return burnish.collect(env="avoid", episodes=2, out=tmp_path_factory.mktemp("data") / "avoid.hdf5")


def stop_after(monkeypatch: pytest.MonkeyPatch, iterations: int) -> None:
    """Interrupt cloning after so many iterations."""
    advance, done = Bc.advance, []

    def stopping(self: Bc) -> Any:
        if len(done) == iterations:
            raise KeyboardInterrupt
        done.append(1)
        return advance(self)

    monkeypatch.setattr(Bc, "advance", stopping)


@pytest.mark.parametrize(("iterations", "stays"), [(0, False), (1, True)])
def test_a_run_that_learned_nothing_leaves_no_folder(
    demos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iterations: int, stays: bool
) -> None:
    stop_after(monkeypatch, iterations)
    with pytest.raises(KeyboardInterrupt):
        burnish.clone(demos, directory=tmp_path / "run", **TINY)
    assert (tmp_path / "run").exists() == stays


def test_a_run_whose_initial_policy_was_moved_says_how_it_is_continued(demos: Path, tmp_path: Path) -> None:
    first = burnish.clone(demos, directory=tmp_path / "first", **TINY)
    rest = {name: value for name, value in TINY.items() if not name.startswith("backbone")}
    burnish.clone(demos, directory=tmp_path / "second", init=first.directory.path, **rest)
    (tmp_path / "first").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=mentions("init= resume= init=<its")):
        burnish.train(resume=tmp_path / "second")
    burnish.train(resume=tmp_path / "second", init=tmp_path / "moved")


def test_a_run_that_another_process_begins_is_left_alone(demos: Path, tmp_path: Path) -> None:
    run = burnish.clone(demos, directory=tmp_path / "run", **TINY)
    begun = RunDirectory.create_at(tmp_path / "begun", run.directory.config)
    with begun.claim(), pytest.raises(CheckpointError, match=mentions("process")):
        burnish.train(resume=begun.path)
    assert (begun.path / "config.yaml").is_file()


class OneSecond(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(2025, 1, 2, 3, 4, 5, tzinfo=tz)


def test_runs_that_start_in_the_same_second_have_a_folder_each(
    demos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for clock in ("hydra.core.utils.datetime", "burnish.runs.locate.datetime"):
        monkeypatch.setattr(clock, OneSecond)
    monkeypatch.chdir(tmp_path)
    settings = {"name": "twin", "dataset": str(demos), **TINY}
    typed = ["train", *(f"{key}={value}" for key, value in settings.items())]

    def run(*more: str) -> None:
        monkeypatch.setattr("sys.argv", ["burnish"])
        with pytest.raises(SystemExit) as ended:
            main([*typed, *more])
        assert not ended.value.code

    run()
    run()
    assert burnish.train(**settings).path.name == "03-04-05-twin-3"
    run("seed=1,2", "--multirun")
    day = tmp_path / "runs" / "2025-01-02"
    found = {str(path.parent.relative_to(day)) for path in day.rglob("train.log")}
    found |= {str(path.parent.relative_to(day)) for path in day.rglob("config.yaml")}
    name = "03-04-05-twin"
    jobs = {f"{name}-4/0", f"{name}-4/1"}
    assert found == {name, f"{name}-2", f"{name}-3"} | jobs
    assert all(RunDirectory.open(day / one).latest() == 8 for one in found)
    with pytest.raises(ConfigError, match="nothing here"):
        monkeypatch.setattr("burnish.runs.build.prepare", _refuse)
        burnish.train(**settings)
    assert not (day / f"{name}-5").exists()


def test_a_job_that_is_queued_again_goes_on_in_its_folder(
    demos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"dataset": str(demos), **TINY, "hydra.sweep.dir": str(tmp_path)}

    def code(seed: int) -> object:
        monkeypatch.setattr("sys.argv", ["burnish"])
        with pytest.raises(SystemExit) as ended:
            main(["train", *(f"{key}={value}" for key, value in settings.items()), f"seed={seed}", "-m"])
        return ended.value.code

    assert not code(1)
    job = RunDirectory.open(tmp_path / "0")
    kept, last = job.overrides, job.latest()
    shutil.rmtree(job.checkpoint_path(last))
    assert not code(1)
    assert (job.overrides, job.latest()) == (kept, last)
    assert code(2) == 2
    assert re.search(mentions(f"{job.path} resume={job.path}"), capsys.readouterr().err)


def _refuse(config: Any) -> Any:
    raise ConfigError("nothing here")


def test_a_directory_beside_resume_is_refused(demos: Path, tmp_path: Path) -> None:
    run = burnish.clone(demos, directory=tmp_path / "run", **TINY)
    with pytest.raises(ConfigError, match=mentions("resume= directory= init=")):
        burnish.train(resume=run, directory=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_files_of_others_keep_a_folder(tmp_path: Path) -> None:
    run = RunDirectory.create_at(tmp_path / "run", {"seed": 0})
    (run.path / "notes.txt").write_text("mine")
    assert not run.remove_if_bare() and (run.path / "config.yaml").is_file()
    (run.path / "notes.txt").unlink()
    (run.path / "train.log").write_text("a warning")
    assert run.remove_if_bare() and not run.path.exists()
    assert run.remove_if_bare()  # also where another process was first


@pytest.mark.parametrize(("name", "stays"), [("train.log", False), ("result.json", True)])
def test_a_refused_job_takes_its_folders_and_its_log_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stays: bool
) -> None:
    day, job = tmp_path / "day", tmp_path / "day" / "job"
    job.mkdir(parents=True)
    (job / name).write_text("…")
    monkeypatch.setattr(NewFolders, "noted", [job, day])
    NewFolders.remove_unused()
    assert day.exists() == stays and tmp_path.exists()


def test_a_plan_says_how_much_and_how_long() -> None:
    assert planned(80_000_000, "env_steps", 1000.0, "algo.env_steps") == (
        "80,000,000 env steps are planned, about 22.2 h at 1k/s. To shorten it: a smaller algo.env_steps, "
        "experiment=auto."
    )
    assert planned(20_000, "gradient_steps", 0.08) == (
        "20,000 gradient steps are planned, about 69.4 h at 0.08/s. To shorten it: a smaller "
        "algo.batch_size, network, encoder or image, device=cuda, experiment=auto."
    )


@pytest.mark.parametrize(("long_s", "lines"), [(0.0, 1), (1e9, 0)])
def test_a_long_run_is_announced_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    long_s: float,
    lines: int,
) -> None:
    monkeypatch.setattr("algos.training.trainer.LONG_S", long_s)
    with caplog.at_level(logging.INFO, logger="algos"):
        train(RandomWalk(6), RunDirectory.create_at(tmp_path / "walk", {}), progress=False)
    found = [text for text in caplog.messages if "are planned, about" in text]
    assert len(found) == lines and all(text.startswith("6 ") for text in found)


def test_the_length_that_is_told_is_the_expected_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A budget of control steps ends with a whole iteration."""
    monkeypatch.setattr("algos.training.trainer.LONG_S", 0.0)
    walk: Any = RandomWalk(6)
    walk.expected = 8
    with caplog.at_level(logging.INFO, logger="algos"):
        train(walk, RunDirectory.create_at(tmp_path / "walk", {}), progress=False)
    (line,) = [text for text in caplog.messages if "are planned, about" in text]
    assert line.startswith("8 ")


class SlowWalk(RandomWalk):
    """Its first iteration has a hundred steps, of which each takes 12 s; the second one waits until told."""

    def __init__(self, told: threading.Event) -> None:
        super().__init__(total=20_000, stride=100)
        self.now, self._told = 0.0, told

    def advance(self) -> dict[str, Any]:
        self.progress, self.now = self.progress + 2, self.now + 24.0
        assert self._told.wait(60), "nothing was said of the length of the run"
        self.progress -= 2
        self.total = 100
        return super().advance()


def test_slow_first_steps_tell_the_length_of_a_run_before_its_first_iteration_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()
    walk = SlowWalk(told)

    def soon(what: str, stage: Callable[[], str]) -> AbstractContextManager[None]:
        return announced(what, 0.001, stage=stage)

    def plan(*facts: Any) -> str:
        told.set()
        return planned(*facts)

    monkeypatch.setattr("algos.training.trainer.announced", soon)
    monkeypatch.setattr("algos.training.trainer.planned", plan)
    with caplog.at_level(logging.INFO, logger="algos"):
        train(walk, RunDirectory.create_at(tmp_path / "w", {}), progress=False, clock=lambda: walk.now)
    (line,) = [text for text in caplog.messages if "are planned, about" in text]
    assert line.startswith("20,000 env steps are planned, about 66.7 h at 0.0833/s.")
