"""`seeds=[...]`: several runs at once, each like any other, and the folder that they are continued by."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import mentions

import burnish
from algos.offline.batched_seeds import SeedBatch
from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from burnish import cli
from burnish.api import Run, _composed
from burnish.commands import train as train_command
from burnish.runs.locate import seed_folders
from envs.datasets import Episode, EpisodeDataset, write_d4rl
from policies.errors import CheckpointError, ConfigError, TrainingError

TINY: dict[str, Any] = {
    "algo": {
        "steps": 8, "log_every": 2, "batch_size": 8, "hidden_dims": [8], "critic_dims": [8],
        "autocast": None,
    },
    "trainer": {"eval_every": 2},
    "progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def transitions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes of the widths of Hopper."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "walk.hdf5"
    episodes = [
        Episode(
            observations=rng.normal(size=(13, 11)).astype(np.float32),
            actions=rng.uniform(-1, 1, size=(12, 3)).astype(np.float32),
            rewards=rng.normal(size=12).astype(np.float32),
            terminated=bool(number % 2), truncated=not number % 2, success=False,
        )
        for number in range(6)
    ]  # fmt: skip
    write_d4rl(path, EpisodeDataset.from_episodes(episodes))
    return path


def train(transitions: Path, place: Path, **changes: Any) -> list[Run]:
    return burnish.train_seeds("algo=td3_bc", dataset=transitions, directory=place, **TINY | changes)


@pytest.fixture(scope="module")
def three(transitions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "three"
    found = train(transitions, place, seeds=[2, 0, 1], env="hopper", evaluation={"episodes": 2})
    assert [run.path for run in found] == [place / f"seed-{seed}" for seed in (2, 0, 1)]
    return place


def test_every_seed_is_a_run_like_any_other(three: Path, transitions: Path, tmp_path: Path) -> None:
    alone = burnish.train("algo=td3_bc", dataset=transitions, seed=1, directory=tmp_path / "alone", **TINY)
    run = RunDirectory.open(three / "seed-1")
    assert run.checkpoints() == alone.directory.checkpoints() == list(range(2, 9, 2))
    assert run.config["seed"] == 1 and run.config["seeds"] is None
    assert "seed=1" in run.overrides and not any(text.startswith("seeds=") for text in run.overrides)
    logged, expected = (
        [row for row in read_jsonl(one.metrics_path) if "critic/loss" in row]
        for one in (run, alone.directory)
    )
    for row, other in zip(logged, expected, strict=True):
        assert row.keys() == other.keys()
        assert row["critic/loss"] == pytest.approx(other["critic/loss"], rel=1e-4)
    ours, theirs = Run(run.path).load_policy(), alone.load_policy()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(p.detach(), q.detach(), atol=1e-5)
    assert ours.provenance["seeds_together"] == [0, 1, 2] and ours.provenance["seed"] == 1
    assert len(run.evals()) == 4


def test_seeds_have_results_of_their_own(three: Path) -> None:
    found = [json.loads(path.read_text()) for path in sorted(three.glob("seed-*/eval/step-8.json"))]
    assert len({json.dumps(one["rows"]) for one in found}) == 3


def test_finished_runs_have_the_result_of_their_last_evaluation(three: Path) -> None:
    found = train_command.train_seeds(*_composed((), None, {"resume": three}))
    for one in found:
        summary = json.loads((one.directory.path / "eval" / "step-8.json").read_text())["summary"]
        assert one.last_evaluation["return"] == pytest.approx(summary["return"]["value"])
    assert train_command.main_number(found) is not None


def test_a_folder_of_seeds_is_continued_as_a_whole(transitions: Path, tmp_path: Path) -> None:
    train(transitions, tmp_path / "some", seeds=[0, 3])
    found = burnish.train_seeds(resume=tmp_path / "some", algo={"steps": 12})
    assert [run.directory.latest() for run in found] == [12, 12]
    assert all(run.directory.config["algo"]["steps"] == 12 for run in found)
    one = burnish.train(resume=tmp_path / "some" / "seed-3", algo={"steps": 14})
    assert one.directory.latest() == 14
    with pytest.raises(ConfigError, match=mentions("algo.steps 0 12 3 14")):
        burnish.train_seeds(resume=tmp_path / "some")


def test_a_stopped_folder_says_how_it_is_continued(
    transitions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In whatever order the seeds are given, and with widths at which places in memory matter."""
    odd = {"algo": TINY["algo"] | {"hidden_dims": [13], "critic_dims": [13]}}
    advance = SeedBatch.advance

    def stopping(self: SeedBatch) -> Any:
        if self.runs[0].progress == 4:
            raise KeyboardInterrupt
        return advance(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SeedBatch, "advance", stopping)
        train(transitions, tmp_path / "cut", seeds=[4, 1], **odd)
    assert f"its last checkpoint is 4. Continue with: burnish train resume={tmp_path / 'cut'}" in caplog.text
    train(transitions, tmp_path / "whole", seeds=[4, 1], **odd)
    burnish.train_seeds(resume=tmp_path / "cut")
    weights = [
        (tmp_path / name / "seed-1" / "checkpoints" / "8" / "policy" / "model.safetensors").read_bytes()
        for name in ("cut", "whole")
    ]
    assert weights[0] == weights[1]


def test_what_cannot_be_trained_leaves_nothing(
    transitions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: SeedBatch) -> Any:
        raise ConfigError("no")

    monkeypatch.setattr(SeedBatch, "advance", broken)
    with pytest.raises(ConfigError, match="no"):
        train(transitions, tmp_path / "none", seeds=[0, 1])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seeds=[]"], "0,1,2 seeds"),
        (["seeds=[[0,1]]"], "0 1 seeds"),
        (["seeds=[1,1]"], "1 seeds"),
        (["seeds=[0,-1]"], "0 seeds"),
        (["seeds=[0,1]", "seed=7"], "seeds= 0 1"),
        (["resume={three}/seed-0"], "resume= burnish.train"),
        (["seeds=[0,1]", "algo=bc"], "algo=bc"),
        (["seeds=[0,1]", "resume={three}"], "resume="),
        (["seeds=[0,1]", "init={three}/seed-0"], "algo=td3_bc init="),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(
    transitions: Path, three: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    typed = [text.format(three=three) for text in overrides]
    resumed = any(text.startswith("resume=") for text in typed)
    more: dict[str, Any] = {} if resumed else {"dataset": transitions, "directory": tmp_path / "run"}
    with pytest.raises(ConfigError, match=mentions(message)):
        burnish.train_seeds(*([] if resumed else ["algo=td3_bc"]), *typed, **more)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_has_runs_takes_no_others(transitions: Path, three: Path, tmp_path: Path) -> None:
    for place in (three, three / "seed-0"):
        with pytest.raises(ConfigError, match=mentions("hydra.run.dir= resume=")):
            train(transitions, place, seeds=[7])
        assert not (place / "seed-7").exists()
    (tmp_path / "seed-7").touch()
    with pytest.raises(ConfigError, match=mentions("hydra.run.dir= seed-7")):
        train(transitions, tmp_path, seeds=[6, 7])
    assert not (tmp_path / "seed-6").exists()


def test_a_seed_that_is_missing_is_missed(transitions: Path, three: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(three, tmp_path / "copy", symlinks=True)
    (copy / "seed-1" / "config.yaml").unlink()
    message = "[0, 1, 2] seed-1 config.yaml"
    with pytest.raises(CheckpointError, match=mentions(f"resume= {message}")):
        burnish.train_seeds(resume=copy)
    with pytest.raises(CheckpointError, match=mentions(f"run= {message}")):
        burnish.report(copy, episodes=0)


def test_a_group_that_is_stopped_at_its_first_evaluation_keeps_all_seeds(
    transitions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(self: SeedBatch) -> Any:
        raise KeyboardInterrupt

    place = tmp_path / "early"
    first = {"env": "hopper", "evaluation": {"episodes": 1}, "trainer": {"eval_first": True}}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SeedBatch, "advance", stopping)
        train(transitions, place, seeds=[0, 1], **first)
    assert [folder.name for folder in seed_folders(place)] == ["seed-0", "seed-1"]
    assert [run.directory.latest() for run in burnish.train_seeds(resume=place)] == [8, 8]


def test_a_loss_that_is_not_finite_is_told_of_every_seed_and_costs_none(
    transitions: Path, tmp_path: Path
) -> None:
    wild = {"algo": TINY["algo"] | {"critic_lr": 1e30}}
    with pytest.raises(TrainingError, match=mentions("seed-0 finite seed-1")):
        train(transitions, tmp_path / "wild", seeds=[0, 1], **wild)
    found = burnish.train_seeds(resume=tmp_path / "wild", algo={"critic_lr": 3e-4})
    assert [run.directory.latest() for run in found] == [8, 8]


def test_one_run_is_not_several(transitions: Path, three: Path) -> None:
    with pytest.raises(ConfigError, match=mentions("resume= burnish.train_seeds")):
        burnish.train(resume=three)
    with pytest.raises(ConfigError, match=mentions("seeds= 0 1 burnish.train_seeds")):
        burnish.train("algo=td3_bc", dataset=transitions, seeds=[0, 1])
    with pytest.raises(CheckpointError, match=mentions("3 seed-0")):
        burnish.load_policy(three)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("seeds=3", "seeds=[a,b] int"),
        ("seeds=0,1", "seeds=0,1 seeds=[0,1] --multirun"),
    ],
)
def test_what_is_no_list_is_told_how_to_become_one(
    typed: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["burnish", "train", "algo=td3_bc", typed])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and re.search(mentions(message), error) and error.count("\n") == 1


def test_seeds_are_found_in_their_order(three: Path, tmp_path: Path) -> None:
    assert [folder.name for folder in seed_folders(three)] == ["seed-0", "seed-1", "seed-2"]
    assert seed_folders(three / "seed-0") == seed_folders(tmp_path) == seed_folders(tmp_path / "none") == []


def _main(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command in this process."""
    monkeypatch.setattr(sys, "argv", ["burnish", *arguments])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code


def test_the_command_prints_every_seed_and_reports_all(
    transitions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [f"algo.{key}={str(value).replace(' ', '')}" for key, value in TINY["algo"].items() if value]
    settings = ["algo=td3_bc", f"dataset={transitions}", "env=hopper", "evaluation.episodes=2", *small]
    _main("train", *settings, "seeds=[0,1]", "hydra.run.dir=runs/two", monkeypatch=monkeypatch)
    printed = capsys.readouterr().out.replace("\n", "")  # a long path above the table is wrapped
    assert "runs/two" in printed and "seed-0" in printed and "seed-1" in printed and "return" in printed
    _main("report", "run=runs/two", "episodes=0", monkeypatch=monkeypatch)
    page = (tmp_path / "runs" / "two" / "report" / "index.html").read_text()
    assert "seed-0" in page and "seed-1" in page and "all runs" in page
