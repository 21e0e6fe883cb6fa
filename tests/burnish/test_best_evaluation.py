"""The last evaluation is the result; the best one is said beside it, with what it was chosen among."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from random_walk import tiny_policy

from algos.training.run_directory import RunDirectory
from burnish.commands.report import ReportConfig, report
from burnish.commands.train import facts_of_data
from burnish.reports.beside_data import STILL_RISING, beside_data
from burnish.runs.best_evaluation import best_evaluation
from envs.evaluation.evaluate import Evaluation
from envs.rollouts.episodes import EpisodeRow


def evaluation(value: float, *, rule: str = "", scores: Any = (0.0, 200.0), episodes: int = 20) -> Evaluation:
    task = {"name": "task", "options": {}, "success_rule": rule, "reference_scores": scores}
    rows = [
        EpisodeRow(seed, 0, value + seed - (episodes - 1) / 2, 10, seed < value, False, True)
        for seed in range(episodes)
    ]
    return Evaluation(tuple(rows), {"env": task, "episodes": episodes})


def run_of(path: Path, values: dict[str, Evaluation]) -> RunDirectory:
    run = RunDirectory.create_at(path, {"algo": {"name": "td3_bc"}, "env": {"name": "task"}, "seed": 0}, [])
    for name, one in values.items():
        run.write_eval(name, json.loads(one.to_json()))
    return run


def test_both_are_found_in_the_order_of_steps(tmp_path: Path) -> None:
    values = {"step-5": evaluation(10), "step-1000": evaluation(50), "step-20": evaluation(70)}
    found = best_evaluation(run_of(tmp_path / "run", values))
    assert found is not None and (found.last.step, found.best.step, found.count) == (1000, 20, 3)
    assert (found.last.value, found.best.value) == (50.0, 70.0)
    assert str(found) == "last 50 at step 1000; best of 3 on the way 70 at step 20 (20 episodes each)"


def test_success_decides_where_the_task_has_it(tmp_path: Path) -> None:
    values = {f"step-{k}": evaluation(k, rule="there", scores=None) for k in (4, 12, 9)}
    found = best_evaluation(run_of(tmp_path / "run", values))
    assert found is not None and found.last.quantity == "success" and found.best.step == 12
    assert "best of 3 on the way 60 % at step 12" in str(found)


def test_evaluations_by_hand_and_by_other_protocols_do_not_count(tmp_path: Path) -> None:
    values = {
        "step-5": evaluation(99, episodes=10),
        "step-7": evaluation(30),
        "step-7-abcdef012345": evaluation(80),
    }
    found = best_evaluation(run_of(tmp_path / "run", values))
    assert found is not None and (found.best.value, found.count) == (30.0, 1)
    assert best_evaluation(run_of(tmp_path / "bare", {})) is None


def test_a_report_has_both_the_score_and_the_worst_tenth_of_every_run_and_of_all(tmp_path: Path) -> None:
    runs = {
        name: run_of(tmp_path / name, {"step-5": evaluation(60), "step-9": evaluation(last)})
        for name, last in (("a", 40), ("b", 42))
    }
    for one in runs.values():
        one.log({"eval/return": 1.0}, 9)
    config = ReportConfig(
        run=[str(one.path) for one in runs.values()], out=str(tmp_path / "page"), episodes=0
    )
    text = report(config).read_text()
    assert text.count("return_value_at_risk") == text.count("return_cvar") == text.count("d4rl_score") == 3
    assert "a, return while training: last 40 at step 9; best of 2 on the way 60 at step 5" in text


@pytest.mark.parametrize(("rule", "scores"), [("", None), ("there", None), ("there", (0, 1))])
def test_the_worst_tenth_is_stated_of_every_task(rule: str, scores: Any) -> None:
    summary = evaluation(40, rule=rule, scores=scores).summary()
    assert (summary["return_value_at_risk"]["value"], summary["return_cvar"]["value"]) == (31.5, 31.0)
    assert summary["return_value_at_risk"]["share"] == summary["return_cvar"]["share"] == 0.1


@pytest.mark.parametrize(
    ("half", "data", "said"),
    [
        (40, {"return": 90.0}, "return of the data 90.0 (mean of 7 episodes), of the policy 50.0"),
        (49, {"return": 90.0}, "return of the data 90.0 (mean of 7 episodes), of the policy 50.0"),
        (40, {"success": 1.0}, ""),
        (40, {}, ""),
    ],
)
def test_a_clone_is_told_beside_its_data_and_rises_beyond_the_noise_of_both(
    tmp_path: Path, half: float, data: dict[str, float], said: str
) -> None:
    values = {"step-90": evaluation(0), "step-100": evaluation(50), "step-40": evaluation(half)}
    run = run_of(tmp_path / "run", {**values, "step-45": evaluation(0, episodes=3)})
    run.save_checkpoint(100, tiny_policy(), {}, provenance={"data": {"episodes": 7, **data}})
    found = beside_data(run) or ""
    assert found.startswith(said) and bool(found) == bool(said)
    assert found.endswith(STILL_RISING) == (bool(said) and half == 40)


def test_an_algorithm_may_keep_its_dataset_under_any_name() -> None:
    own: Any = SimpleNamespace(data=object())
    assert facts_of_data(own) == {}
    own.data_quality = {"episodes": 3, "success": 0.5}
    assert facts_of_data(own) == {"data": own.data_quality}
