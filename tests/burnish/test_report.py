"""Reports: who is drawn in which colour, who is averaged with whom, and in what words."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from messages import mentions

from algos.training.run_directory import RunDirectory
from burnish.commands.report import ReportConfig, _is_same, grouped, report
from burnish.reports import figures, rollouts
from burnish.reports.rollouts import ReportRollouts, describe_modes, draw_behaviour
from envs.evaluation.evaluate import Evaluation
from envs.evaluation.intervals import success_rate
from envs.rollouts.episodes import EpisodeRow
from policies.errors import CapabilityError


def made(path: Path, algo: str, env: dict[str, Any] | None, seed: int = 0) -> RunDirectory:
    config = {"algo": {"name": algo}, "env": env, "seed": seed}
    return RunDirectory.create_at(path, config, [])


def test_runs_of_one_algorithm_on_one_task_are_a_group(tmp_path: Path) -> None:
    avoid, first, second = {"name": "avoid"}, *({"name": "cube-single", "task": task} for task in (1, 2))
    kinds = {
        "a": ("bc", avoid),
        "b": ("dppo", avoid),
        "c": ("bc", avoid),
        "d": ("bc", None),
        "e": ("ppo", first),
        "f": ("ppo", second),
    }
    named = {name: made(tmp_path / name, *kind) for name, kind in kinds.items()}
    found = {group.title: list(group.runs) for group in grouped(named)}
    assert found == {
        "bc on avoid": ["a", "c"],
        "dppo on avoid": ["b"],
        "bc": ["d"],
        "ppo on cube-single": ["e"],
        "ppo on cube-single env.task=2": ["f"],
    }


def rows(*values: float, name: str = "eval/success") -> list[dict[str, float]]:
    return [{"step": step, name: value} for step, value in enumerate(values)]


def test_a_run_has_one_colour_and_only_its_group_is_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "to_png", lambda figure: drawn.append(figure) or b"")
    metrics = {
        "a": rows(0.0, 0.2),
        "b": rows(0.4, 0.6) + rows(0.1, 0.2, name="rollout/success"),
        "c": rows(0.8, 1.0) + rows(0.3, 0.4, name="rollout/success"),
    }
    colours = figures.run_colours(["z", *metrics])
    figures.learning_curves(metrics, "env_steps", colours=colours, means={"one": ["a"], "two": ["b", "c"]})
    evaluation, training = drawn[0].axes
    lines = {line.get_label(): line for line in evaluation.lines}
    assert list(lines) == ["a", "b", "c", "mean, two"]
    assert lines["mean, two"].get_ydata() == pytest.approx([0.6, 0.8])
    for line in training.lines[:2]:
        assert line.get_color() == lines[line.get_label()].get_color() == colours[line.get_label()]


@pytest.mark.parametrize(
    ("logged", "titles"),
    [
        (["critic/loss", "actor/loss"], ["critic loss", "actor loss"]),
        (["score/loss", "dynamics/loss"], ["score loss", "loss of the inverse dynamics"]),
        (["critic/loss", "eval/return"], ["mean return, evaluation", "critic loss"]),
        (["critic/loss", "rollout/return"], ["mean return, training episodes"]),
    ],
)
def test_losses_are_drawn_where_nothing_is_explored(
    logged: list[str], titles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "to_png", lambda figure: drawn.append(figure) or b"")
    metrics = {"a": [row for name in logged for row in rows(1.0, 0.5, name=name)]}
    figures.learning_curves(metrics, "gradient_steps")
    assert [axes.get_title() for axes in drawn[0].axes] == titles


def test_a_page_without_curves_says_what_was_not_logged(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "bc", None)
    for step in (1, 2):
        run.log({"time/steps_per_s": 3.0}, step)
    page = report(ReportConfig(run=str(run.path), episodes=0)).read_text()
    assert "none of what is drawn (success, return, held-out error, losses) was logged twice" in page


@pytest.mark.parametrize("number", [3, 10, 25])
def test_colours_of_runs_differ(number: int) -> None:
    colours = figures.run_colours([f"run {index}" for index in range(number)])
    assert len({str(colour) for colour in colours.values()}) == number


def test_runs_together_have_the_interval_of_their_seeds(tmp_path: Path) -> None:
    task = {"name": "avoid", "options": {}, "success_rule": "arrives", "reference_scores": None}
    runs = [made(tmp_path / str(seed), "ppo", {"name": "avoid"}, seed) for seed in range(3)]
    for directory, count in zip(runs, (42, 77, 90), strict=True):
        played = tuple(EpisodeRow(i, i, float(i < count), 9, i < count, True, False) for i in range(100))
        evaluation = Evaluation(played, {"env": task, "episodes": 100})
        directory.write_eval("step-1-abc", json.loads(evaluation.to_json()))
    config = ReportConfig(run=[str(one.path) for one in runs], out=str(tmp_path / "page"), episodes=0)
    page = report(config).read_text()
    rate = success_rate(np.arange(100) < np.array([[42], [77], [90]]))
    assert rate.high - rate.low > 0.4
    assert "all runs" in page and f"{100 * rate.low:.1f} to {100 * rate.high:.1f} %" in page


def test_ways_are_counted_among_successes() -> None:
    task = SimpleNamespace(mode_names=lambda: ("left", "right"))

    def row(mode: int, success: bool) -> Any:
        return SimpleNamespace(metrics={"mode": mode}, success=success)

    assert describe_modes(SimpleNamespace(), []) == ""
    none = describe_modes(task, [row(-1, False), row(0, False)])
    assert none == "none of 2 episodes succeeded, so no way through was found."
    one = describe_modes(task, [row(1, True), row(-1, False)])
    assert one == "1 way in the 1 of 2 episodes that succeeded: right (1)."
    two = describe_modes(task, [row(1, True), row(1, True), row(0, True)])
    assert two == "2 different ways in the 3 of 3 episodes that succeeded: right (2), left (1)."


def test_a_task_that_draws_nothing_is_reported_without_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SimpleNamespace(spec=SimpleNamespace(name="pendulum"))
    with pytest.raises(CapabilityError, match=mentions("env=pendulum")):
        draw_behaviour(plain, {"after": [SimpleNamespace()]})
    monkeypatch.setattr(
        ReportRollouts, "play", lambda stage, directory: (plain, {"after": [SimpleNamespace()]})
    )
    run = made(tmp_path / "run", "bc", {"name": "avoid"})
    page = report(ReportConfig(run=str(run.path)))
    assert "No pictures: env=pendulum draws nothing" in page.read_text()


def test_policies_are_drawn_as_their_run_evaluates_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = {"episodes": 50, "steps": 3, "start_noise": "zero", "warm_start": {"steps": 2}}
    config = {"algo": {"name": "bc"}, "env": {"name": "avoid"}, "seed": 0, "evaluation": protocol}
    run, used = RunDirectory.create_at(tmp_path / "run", config, []), []

    def play(policy: Any, env: Any, settings: Any, num_workers: int, **_: Any) -> Any:
        used.append(settings)
        return SimpleNamespace(rows=())

    found = SimpleNamespace(path=tmp_path, label="run", load=lambda: None)
    monkeypatch.setattr(rollouts, "locate", lambda path, key: found)
    monkeypatch.setattr(rollouts, "task_of", lambda found: SimpleNamespace(figure=None))
    monkeypatch.setattr(rollouts, "evaluate_with", play)
    stage = ReportRollouts(7, 100, 0)
    for _ in range(2):  # of which the second is not played again
        stage.play(run)
    (settings,) = used
    assert (settings.episodes, settings.first_seed) == (7, 100)
    assert (settings.steps, settings.start_noise, settings.warm_start.steps) == (3, "zero", 2)


def test_descriptions_of_a_task_are_compared_by_the_options_that_both_know() -> None:
    own = {"name": "avoid", "options": {"max_episode_steps": 100, "newer": 1}}
    assert _is_same(own, {"name": "avoid", "options": {"max_episode_steps": 100}})
    assert not _is_same(own, {"name": "avoid", "options": {"max_episode_steps": 7}})
    assert not _is_same(own, {"name": "hopper", "options": {"max_episode_steps": 100}})
