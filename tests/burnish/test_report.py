"""Reports: who is drawn in which colour, who is averaged with whom, and in what words."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chromium import browser
from messages import mentions
from small_policies import small_policy

from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from burnish.commands import report as report_module
from burnish.commands.report import ReportConfig, grouped, report
from burnish.reports import rollouts
from burnish.reports.curves import Chart, learning_charts, run_colours
from burnish.reports.facts import facts_of
from burnish.reports.results import Stored, headline, is_same_task
from burnish.reports.rollouts import ReportRollouts, describe_modes, draw_moving
from envs.evaluation.comparison import Comparison, compare
from envs.evaluation.evaluate import Evaluation
from envs.evaluation.intervals import Interval, success_rate
from envs.rollouts.episodes import EpisodeRow
from policies.errors import CapabilityError, TrainingError
from policies.processes.flow import RectifiedFlow


def made(path: Path, algo: str, env: dict[str, Any] | None, seed: int = 0) -> RunDirectory:
    config = {"algo": {"name": algo}, "env": env, "seed": seed}
    return RunDirectory.create_at(path, config, [])


def test_curves_leave_out_what_is_no_number(tmp_path: Path) -> None:
    good: list[dict[str, Any]] = [{"step": 1, "policy/loss": 1.0}, {"step": 2, "policy/loss": 0.5}]
    odd = [{"policy/loss": 3.0}, *({"step": 3, "policy/loss": one} for one in (None, np.nan, np.inf, "1"))]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [*good, *odd]))
    whole, damaged = (learning_charts({"run": rows}, "steps") for rows in (good, read_jsonl(path)))
    assert whole and damaged == whole


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


def evaluation(won: int, episodes: int) -> Evaluation:
    """Return an evaluation in which the first episodes succeed."""
    task = {"name": "avoid", "options": {}, "success_rule": "arrives", "reference_scores": None}
    played = tuple(
        EpisodeRow(i, i, float(i < won), 9, i < won, True, False, actions=np.zeros((9, 1), np.float32))
        for i in range(episodes)
    )
    return Evaluation(played, {"env": task, "episodes": episodes})


def rows(*values: float, name: str = "eval/success") -> list[dict[str, float]]:
    return [{"step": step, name: value} for step, value in enumerate(values)]


def heights(chart: Chart, label: str) -> list[float]:
    """Return the values of a curve of success, read back from where its marks lie."""
    (line,) = (line for line in chart.lines if line.label == label)
    return [(Chart.bottom - mark.y) / (Chart.bottom - Chart.top) for mark in line.marks]


def test_a_run_has_one_colour_and_only_its_group_is_averaged() -> None:
    metrics = {
        "a": rows(0.0, 0.2),
        "b": rows(0.4, 0.6) + rows(0.1, 0.2, name="rollout/success"),
        "c": rows(0.8, 1.0) + rows(0.3, 0.4, name="rollout/success"),
    }
    colours = run_colours(["z", *metrics])
    evaluation, training = learning_charts(
        metrics, "env_steps", colours=colours, means={"one": ["a"], "two": ["b", "c"]}
    )
    assert [line.label for line in evaluation.lines] == ["a", "b", "c", "mean, two"]
    assert heights(evaluation, "mean, two") == pytest.approx([0.6, 0.8], abs=1e-3)
    assert [chart.title for chart in evaluation.multiples] == ["a", "b", "c"]
    for line in (*evaluation.lines, *training.lines):
        assert line.is_mean or line.colour == colours[line.label]


def test_a_curve_has_the_interval_of_its_evaluations_and_the_level_before() -> None:
    steps = {step: success_rate(np.arange(10) < 5 * step) for step in (0, 1)}
    (chart,) = learning_charts(
        {"a": rows(0.0, 0.5)}, "steps", intervals={"a": {"eval/success": steps}}, levels={"success": 0.25}
    )
    low, high = steps[1].low, steps[1].high
    assert chart.lines[0].marks[1].text == f"1: 50 % ({100 * low:.0f} % to {100 * high:.0f} %)"
    corners = [tuple(map(float, corner.split(","))) for corner in chart.lines[0].band[1:-1].split("L")]
    assert len(corners) == 4 and corners[1][1] < chart.lines[0].marks[1].y < corners[2][1]
    assert chart.level is not None and chart.level.text == "25 %"


@pytest.mark.parametrize(
    "values", [(1.0001, 1.0005), (1000.0, 1002.0), (0.0, 0.4), (-2e-6, 3e-6), (99.5, 1e5)]
)
def test_ticks_of_an_axis_differ(values: tuple[float, float]) -> None:
    (chart,) = learning_charts({"a": rows(*values, name="policy/loss")}, "steps")
    texts = [tick.text for tick in chart.y_ticks]
    assert len(set(texts)) == len(texts) > 2
    assert len({mark.text.split(": ")[1] for mark in chart.lines[0].marks}) == 2


@pytest.mark.parametrize(
    ("logged", "titles"),
    [
        (["critic/loss", "actor/loss"], ["critic loss", "actor loss"]),
        (["score/loss", "dynamics/loss"], ["score loss", "loss of the inverse dynamics"]),
        (["critic/loss", "eval/return"], ["mean return, evaluation", "critic loss"]),
        (["critic/loss", "rollout/return"], ["mean return, training episodes"]),
    ],
)
def test_losses_are_drawn_where_nothing_is_explored(logged: list[str], titles: list[str]) -> None:
    metrics = {"a": [row for name in logged for row in rows(1.0, 0.5, name=name)]}
    assert [chart.title for chart in learning_charts(metrics, "gradient_steps")] == titles


def test_a_page_without_curves_says_what_was_not_logged(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "bc", None)
    for step in (1, 2):
        run.log({"time/steps_per_s": 3.0}, step)
    page = report(ReportConfig(run=str(run.path), episodes=0)).read_text()
    assert "none of what is drawn (success, return, held-out error, losses) was logged twice" in page


@pytest.mark.parametrize("number", [3, 10, 25])
def test_colours_of_runs_differ(number: int) -> None:
    colours = run_colours([f"run {index}" for index in range(number)])
    assert len({str(colour) for colour in colours.values()}) == number


def test_runs_together_have_the_interval_of_their_seeds(tmp_path: Path) -> None:
    runs = [made(tmp_path / str(seed), "ppo", {"name": "avoid"}, seed) for seed in range(3)]
    for directory, count in zip(runs, (42, 77, 90), strict=True):
        directory.write_eval("step-1-abc", json.loads(evaluation(count, 100).to_json()))
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
    spec = SimpleNamespace(name="pendulum", success_rule="", action_names=("force [N]",), control_hz=20.0)
    plain, played = SimpleNamespace(spec=spec), {"after": evaluation(3, 5)}
    with pytest.raises(CapabilityError, match=mentions("env=pendulum")):
        draw_moving(plain, played)
    monkeypatch.setattr(ReportRollouts, "play", lambda stage, directory: (plain, played))
    run = made(tmp_path / "run", "bc", {"name": "avoid"})
    text = report(ReportConfig(run=str(run.path))).read_text()
    assert "No pictures: env=pendulum draws nothing" in text
    assert text.count("data-episode=") == 5, "episodes are listed without pictures"


def test_a_policy_that_cannot_be_played_is_reported_without_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stage: ReportRollouts, directory: RunDirectory) -> None:
        raise TrainingError("an action is not finite.")

    monkeypatch.setattr(ReportRollouts, "play", fail)
    run = made(tmp_path / "run", "bc", {"name": "avoid"})
    text = report(ReportConfig(run=str(run.path))).read_text()
    assert "No pictures: an action is not finite." in text and "What was run" in text


def test_policies_are_drawn_as_their_run_evaluates_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = {"episodes": 50, "steps": 3, "start_noise": "zero", "warm_start": {"steps": 2}}
    config = {"algo": {"name": "bc"}, "env": {"name": "avoid"}, "seed": 0, "evaluation": protocol}
    run, used = RunDirectory.create_at(tmp_path / "run", config, []), []

    def play(policy: Any, env: Any, settings: Any, num_workers: int, **_: Any) -> Any:
        used.append(settings)
        return evaluation(0, 1)

    found = SimpleNamespace(path=tmp_path, label="run", load=lambda: None)
    monkeypatch.setattr(rollouts, "locate", lambda path, key: found)
    monkeypatch.setattr(rollouts, "task_of", lambda found: SimpleNamespace(figure=None))
    monkeypatch.setattr(rollouts, "evaluate", play)
    stage = ReportRollouts(7, 100, 0)
    for _ in range(2):  # of which the second is not played again
        stage.play(run)
    (settings,) = used
    assert (settings.episodes, settings.first_seed) == (7, 100)
    assert (settings.steps, settings.start_noise, settings.warm_start.steps) == (3, "zero", 2)


def test_descriptions_of_a_task_are_compared_by_the_options_that_both_know() -> None:
    own = {"name": "avoid", "options": {"max_episode_steps": 100, "newer": 1}}
    assert is_same_task(own, {"name": "avoid", "options": {"max_episode_steps": 100}})
    assert not is_same_task(own, {"name": "avoid", "options": {"max_episode_steps": 7}})
    assert not is_same_task(own, {"name": "hopper", "options": {"max_episode_steps": 100}})


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}'


class Elements(HTMLParser):
    """The elements of a page, their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_what_comes_from_runs_never_becomes_html(tmp_path: Path) -> None:
    """Names of runs, keys, paths, typed overrides, tasks and versions are text, also in scripts."""
    runs = []
    for seed in range(2):
        name = HOSTILE.replace("/", "\u2215")  # no folder can have a slash in its name
        config = {"algo": {"name": HOSTILE}, "env": {"name": HOSTILE}, "seed": seed, "init": HOSTILE}
        run = RunDirectory.create_at(
            tmp_path / f"{name}-{seed}", config | {HOSTILE: seed}, [f"name={HOSTILE}"]
        )
        for step in (1, 2):
            run.log({"eval/success": 0.5}, step)
        task = evaluation(3, 4)
        task.protocol["env"]["success_rule"] = HOSTILE
        content = json.loads(task.to_json())
        versus = asdict(Comparison("success", 0.5, 0.75, Interval(0.25, 0.0, 0.5), 4, True))
        run.write_eval("step-2-abc", content | {"versus": versus | {"policy": HOSTILE}})
        (run.path / "environment.json").write_text(json.dumps({"packages": {HOSTILE: HOSTILE}}))
        runs.append(str(run.path))
    for given in (runs[:1], runs):
        page = report(ReportConfig(run=given, out=str(tmp_path / f"{len(given)}"), episodes=0)).read_text()
        elements = Elements(page)
        tags = [tag for tag, _ in elements.found]
        assert "alert(1)" in elements.text and "{{ 7 * 7 }}" in elements.text
        assert tags.count("script") == 2 and "img" not in tags, "the page's own data and script"
        assert not [key for _, attributes in elements.found for key in attributes if key.startswith("on")]


def test_a_page_is_one_file_that_asks_no_network(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "bc", {"name": "avoid"})
    page = report(ReportConfig(run=str(run.path), episodes=0)).read_text()
    assert "://" not in page and "@import" not in page
    assert not re.search(r"(?:src|href|url\()=?[\"']?(?!data:)[\w/.]", page)
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page


def test_a_page_is_used_without_a_complaint_and_fits_a_narrow_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SimpleNamespace(name="drawn", success_rule="arrives", action_names=("force [N]",), control_hz=20.0)
    frames = np.zeros((10, 16, 16, 3), np.uint8)
    task = SimpleNamespace(spec=spec, render_frames=lambda seed, actions, *, every: frames)
    played = {"before": evaluation(1, 3), "after": evaluation(2, 3)}
    monkeypatch.setattr(ReportRollouts, "play", lambda stage, directory: (task, played))
    run = made(tmp_path / "run", "bc", {"name": "avoid"})
    for step in (1, 2):
        run.log({"eval/success": 0.5 * step}, step)
    page = report(ReportConfig(run=str(run.path)))
    with browser() as tab:
        tab.open(page, width=400)
        assert tab.run("return document.documentElement.scrollWidth") <= 400
        tab.run("document.querySelector('[data-episode]').click()")
        assert tab.run("return document.querySelector('#viewer').open")
        assert tab.run("return document.querySelectorAll('#viewer canvas').length") == 2
        assert "failure" in tab.run("return document.querySelector('#viewer-title').textContent")
        size = "document.querySelector('#viewer-actions text').getBoundingClientRect().height"
        assert tab.run(f"return {size}") > 10, "text keeps its size on a phone"
        move = "new PointerEvent('pointermove', {bubbles: true, clientX: 390, clientY: 300})"
        tab.run(f"document.querySelector('[data-chart] svg').dispatchEvent({move})")
        assert "2: 100 %" in tab.run("return document.querySelector('#tip').textContent")
        assert not tab.complaints()


def test_pictures_of_many_runs_do_not_outgrow_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of noise are as large as frames can be; every episode is listed all the same."""
    spec = SimpleNamespace(name="noise", success_rule="arrives", action_names=("a",), control_hz=20.0)
    frames = np.random.default_rng(0).integers(0, 255, (3, 160, 160, 3), dtype=np.uint8)
    task = SimpleNamespace(spec=spec, render_frames=lambda seed, actions, *, every: frames)
    played = {"before": evaluation(1, 6), "after": evaluation(2, 6)}
    monkeypatch.setattr(ReportRollouts, "play", lambda stage, directory: (task, played))
    monkeypatch.setattr(report_module, "_PICTURE_BYTES", 2**18)
    runs = [str(made(tmp_path / str(seed), "bc", {"name": "avoid"}, seed).path) for seed in range(6)]
    text = report(ReportConfig(run=runs, out=str(tmp_path / "page"))).read_text()
    assert text.count("data:image/webp") >= 3 and len(text) < 2 * 2**18 + 2**17
    assert text.count("No pictures: those of the other runs fill the page.") >= 3
    assert text.count("data-episode=") == 6 * 6


def test_a_result_begins_with_the_best_known_policy_before(tmp_path: Path) -> None:
    """The stored comparison, else the episodes of `init`, else those that were played for the page."""
    run = made(tmp_path / "run", "dppo", {"name": "avoid"})
    played = {"before": evaluation(4, 24), "after": evaluation(20, 24)}
    assert headline(run, None, {}) is None
    own = evaluation(90, 100)
    alone = headline(run, Stored(own, None), {})
    assert alone is not None and alone.before is None and alone.after.mean == "90.0 %"
    shown = headline(run, Stored(own, None), played)
    assert shown is not None and shown.before is not None and shown.comparison is not None
    assert (shown.before.episodes, shown.after.episodes, shown.comparison.episodes) == (24, 100, 24)
    versus = {"policy": "base", **asdict(compare(evaluation(50, 100), own))}
    stored = headline(run, Stored(own, versus), played)
    assert stored is not None and stored.before is not None and stored.comparison is not None
    rate = success_rate(np.arange(100) < 50)
    assert stored.before.around == f"{100 * rate.low:.1f} to {100 * rate.high:.1f} %"
    assert stored.difference.startswith("+40 points (+") and stored.comparison.episodes == 100
    single = headline(run, None, {"before": evaluation(0, 1), "after": evaluation(1, 1)})
    assert single is not None and single.difference == "+100 points", "one episode has no interval"
    labels = {"": ("baseline", "policy"), "a run": ("before", "after")}
    for number, (init, expected) in enumerate(labels.items()):
        config = {"algo": {"name": "dppo"}, "env": {"name": "avoid"}, "seed": 0} | (
            {"init": init} if init else {}
        )
        shown = headline(RunDirectory.create_at(tmp_path / str(number), config, []), Stored(own, versus), {})
        assert shown is not None and shown.before is not None
        assert (shown.before.label, shown.after.label) == expected


def test_the_parts_of_a_tuned_run_are_those_of_its_policy(tmp_path: Path) -> None:
    typed_for_new_ones = {"process": {"name": "diffusion", "prediction": "x0"}, "encoder": {"name": "state"}}
    run = RunDirectory.create_at(tmp_path / "run", {"algo": {"name": "dsrl"}, **typed_for_new_ones}, [])
    run.save_checkpoint(4, small_policy(RectifiedFlow()), {})
    assert dict(facts_of(run).rows)["policy"] == "flow · mlp · state · euler"


def test_the_command_of_a_run_has_the_last_value_of_every_key(tmp_path: Path) -> None:
    typed = ["algo=dppo", "init=a run", "algo.env_steps=100", "resume=x", "algo.env_steps=200"]
    parts = {"process": {"name": "diffusion", "prediction": "x0"}, "backbone": {"name": "mlp"}}
    run = RunDirectory.create_at(tmp_path / "run", {"algo": {"name": "dppo"}, "seed": 3, **parts}, typed)
    run.log({"time/elapsed_s": 90.0}, 1000)
    run.log({"time/elapsed_s": 600.0}, 24000)
    facts = facts_of(run)
    assert facts.command == "burnish train algo=dppo 'init=a run' algo.env_steps=200"
    known = dict(facts.rows)
    assert (known["algorithm"], known["seed"], known["cost"]) == ("dppo", "3", "24,000 steps in 10 min")
    assert known["policy"] == "diffusion (x0) · mlp"
    assert "torch " in known["versions"] and "task" not in known
