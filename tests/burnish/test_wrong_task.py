"""A command never runs on another task than the one that its data and policies were made for, unasked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from messages import mentions

import burnish
from burnish.api import Run
from burnish.runs.locate import locate
from burnish.runs.tasks import require_task_of, task_of
from policies.errors import ConfigError

QUIET = {"num_workers": 0, "progress": False, "num_threads": 1, "evaluation": {"episodes": 0}}
TINY = {"algo.steps": 2, "algo.warmup_steps": 0, "algo.batch_size": 8, "backbone.width": 8}
TASK = {"env": "hopper", "env.version": "v4", "env.max_episode_steps": 8}
BOTH = mentions("env.version=v4 env.version=v5 allow_other_task=true")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return burnish.collect(episodes=2, out=tmp_path_factory.mktemp("data") / "v4.hdf5", **TASK)


@pytest.fixture(scope="module")
def run(recording: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return clone(recording, tmp_path_factory.mktemp("runs") / "v4", **TASK)


def clone(dataset: Path, directory: Path, **values: Any) -> Run:
    return burnish.clone(dataset, directory=directory, **TINY, **QUIET, **values)


def test_a_forgotten_option_is_an_error_in_training(recording: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=BOTH):
        clone(recording, tmp_path / "run", env="hopper")
    assert not (tmp_path / "run").exists()
    clone(recording, tmp_path / "run", env="hopper", allow_other_task=True)


def test_training_from_a_policy_takes_its_task(run: Run, recording: Path, tmp_path: Path) -> None:
    more = {key: value for key, value in TINY.items() if key.startswith("algo")} | QUIET
    tuned = burnish.clone(recording, init=run, directory=tmp_path / "tuned", **more)
    assert tuned.directory.section("env") == run.directory.section("env")
    with pytest.raises(ConfigError, match=BOTH):
        burnish.clone(recording, init=run, env="hopper", directory=tmp_path / "other", **more)


def test_recorded_episodes_are_of_the_task_of_policy_and_baseline(
    run: Run, recording: Path, tmp_path: Path
) -> None:
    other = clone(recording, tmp_path / "v5", env="hopper", allow_other_task=True)
    assert burnish.open_loop(run, recording, episodes=1).errors.squared.shape == (1, 3)
    for policy, baseline in ((other, None), (run, other)):
        with pytest.raises(ConfigError, match=BOTH):
            burnish.open_loop(policy, recording, baseline=baseline, episodes=1)
    assert burnish.open_loop(other, recording, episodes=1, allow_other_task=True).label.startswith("v5")


def test_policy_baseline_and_members_belong_to_the_evaluated_task(
    run: Run, recording: Path, tmp_path: Path
) -> None:
    other = clone(recording, tmp_path / "v5", env="hopper", allow_other_task=True)
    quick: dict[str, Any] = {"episodes": 1, "num_workers": 0, "env.max_episode_steps": 4}
    with pytest.raises(ConfigError, match=BOTH):
        burnish.evaluate(run, "env=hopper", **quick)
    with pytest.raises(ConfigError, match=mentions("baseline=v5@2")):
        burnish.evaluate(run, baseline=other, episodes=1, num_workers=0)
    with pytest.raises(ConfigError, match=BOTH):
        burnish.compose([run, other], weights=[0.5, 0.5], episodes=1, num_workers=0)
    result = burnish.evaluate(run, "env=hopper", allow_other_task=True, out=tmp_path / "eval.json", **quick)
    assert result.evaluation.protocol["env"]["options"]["version"] == "v5"


def test_a_resumed_run_keeps_its_task(run: Run) -> None:
    with pytest.raises(ConfigError, match=BOTH):
        burnish.train("env.version=v5", resume=run)


def test_a_report_names_the_variant(run: Run, tmp_path: Path) -> None:
    page = burnish.report(run, episodes=0, out=tmp_path / "page").read_text()
    assert "hopper env.version=v4" in page


def test_cameras_that_follow_from_the_policy_are_no_other_options(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    found = locate(run)
    shown = {"cameras": ("track",), "image_size": (32, 32), "image_samples": 0}
    require_task_of(found, replace(task_of(found), **shown), "policy", allow_other_task=False)
    assert "image_samples" in caplog.text and not any(name in caplog.text for name in ("image_size", "track"))
