"""The laboratory without a browser: what is drawn is what the policy plans, and the text reproduces it."""

from __future__ import annotations

import base64
import io
import shlex
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from drawing import require_drawing
from messages import mentions
from pairwise import each_value
from PIL import Image
from small_policies import policy_for

from burnish.commands import lab
from burnish.commands.evaluate import evaluate
from burnish.commands.lab import LabConfig, subject_of
from burnish.config.overrides import RunContext
from burnish.config.schema import compose_config
from burnish.lab.controls import Controls, Subject, strengths
from burnish.lab.session import Session, compared
from envs.tasks.avoid.scene import SHIFT_M, load_scene
from envs.tasks.avoid.task import Avoid
from envs.tasks.gym.task import Gym
from envs.tasks.mazes.d4rl import PointmazeLarge
from policies.errors import CapabilityError, ConfigError
from policies.storage.policy_folder import save_policy
from policies.wrappers.sketch_settings import STRATEGIES

OLD = "tests/fixtures/version_0_1/policies"
LINE = [[0.0, 0.0], [-0.06, 0.12], [0.0, 0.25], [0.0, 0.7]]


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(LabConfig(policy=f"{OLD}/cloned"))


@pytest.fixture(scope="module")
def two() -> Subject:
    return subject_of(LabConfig(compose=[f"{OLD}/cloned", f"{OLD}/base"]))


@pytest.fixture
def session(subject: Subject) -> Session:
    return Session(subject)


def plans(answer: dict[str, Any]) -> np.ndarray:
    return np.array(answer["plans"])


# -- what is drawn --------------------------------------------------------------------------------------


def test_the_scene_is_that_of_the_task(session: Session) -> None:
    scene, drawn = load_scene(), session.reset(3)["scene"]
    assert [(x, y) for x, y, _ in drawn["pillars"]] == list(scene.obstacles)
    assert drawn["low"] == (-scene.half_width, scene.back_y) and drawn["high"][1] > scene.finish_y


def test_pillars_that_differ_between_episodes_are_drawn_where_they_are() -> None:
    task = Avoid(rows="moved")
    stepper = task.stepper(1)
    stepper.reset(0, 5)
    moved = [(x, y) for x, y, _ in stepper.plane(0).pillars]
    assert moved == list(stepper.scene_of(0).obstacles) != list(load_scene().obstacles)


def test_all_plans_begin_where_the_robot_is_and_differ_by_their_noise(session: Session) -> None:
    answer = session.control({"plans": 5})
    assert plans(answer).shape == (5, 1 + session.subject.base.chunk.horizon, 2)
    assert (plans(answer)[:, 0] == answer["at"]).all()
    assert len(np.unique(plans(answer)[:, -1], axis=0)) == 5
    assert len(np.unique(plans(session.control({"plans": 5, "noise": 0}))[:, -1], axis=0)) == 1


def test_the_first_plan_is_executed(session: Session) -> None:
    """The disc follows with a delay."""
    answer = session.control({"plans": 3})
    aimed = plans(answer)[0, answer["executed"]] - answer["at"]
    gone = [session.step()["at"] for _ in range(answer["executed"])][-1] - np.array(answer["at"])
    length, reached = np.linalg.norm(aimed), np.linalg.norm(gone)
    assert 0.6 < reached / length < 1.05 and aimed @ gone > 0.95 * length * reached


def test_a_film_leads_from_noise_to_the_plans(session: Session) -> None:
    answer = session.control({"plans": 4, "film": True})
    assert len(answer["film"]) == 1 + answer["calls"] and np.array(answer["film"][0]).shape[0] == 4
    assert np.abs(np.array(answer["film"][-1]) - plans(answer)).max() < 1e-3
    assert np.abs(np.array(answer["film"][0]) - plans(answer)).max() > 1e-2
    assert session.control({"plans": 4})["film"] == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_a_film_and_keeps_the_controls_in_bounds(session: Session, strategy: str) -> None:
    slider = strengths(session.subject.base.chunk).get(strategy)
    ends = [None] if slider is None else [slider.low, slider.high]
    for strength in ends:
        answer = session.control(
            {"strategy": strategy, "sketch": LINE, "strength": strength, "film": True, "plans": 2}
        )
        assert plans(answer).shape[0] == 2 and len(answer["film"]) > 1
        chosen = session.subject.steering(session.controls)
        assert slider is None or getattr(chosen, slider.key) == strength


def test_a_steered_plan_bends_to_the_sketch(session: Session) -> None:
    left, right = [[0, 0], [-0.1, 0.1]], [[0, 0], [0.1, 0.1]]
    ends = [
        plans(session.control({"strategy": "guided_diffusion", "sketch": line}))[:, -1, 0].mean()
        for line in (left, right)
    ]
    assert ends[0] < ends[1] - 0.02


def test_an_episode_ends_and_the_next_seed_follows(session: Session) -> None:
    session.reset(7)
    frames = [session.step() for _ in range(110)]
    end = next(frame for frame in frames if frame["end"])
    after = frames[frames.index(end) + 1]
    assert end["end"] in ("failure", "time limit", "success") and after["seed"] == 8 and after["step"] == 0


def test_a_moved_robot_goes_on_from_there_and_stays_within_the_walls(session: Session) -> None:
    answer = session.move([0.05, 0.3])
    assert answer["at"] == [0.05, 0.3] and (plans(answer)[:, 0] == [0.05, 0.3]).all()
    assert np.abs(np.array(session.step()["at"]) - [0.05, 0.3]).max() < 0.03
    scene = load_scene()
    assert abs(session.move([9.0, 0.3])["at"][0]) < scene.half_width


def test_a_robot_put_into_a_pillar_fails(session: Session) -> None:
    x, y = load_scene().obstacles[1]
    session.move([x, y])
    assert session.step()["end"] == "failure"
    assert session.move([0.0, 0.0])["end"] == "failure", "an episode that has ended is not gone on with"


# -- controls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([], "controls object"),
        ({"other": 1}, "controls plans"),
        ({"plans": 65}, "plans 64"),
        ({"plans": 2.5}, "plans int"),
        ({"plans": True}, "plans int"),
        ({"noise": -1}, "noise -1"),
        ({"weight": 1.5}, "weight 1.5"),
        ({"strategy": "other"}, "strategy stochastic_sampling"),
        ({"sketch": [[0, 0]] * 257}, "sketch 256"),
        ({"sketch": [[0, 0, 0]]}, "sketch"),
        ({"sketch": "line"}, "sketch"),
        ({"steps": 100000}, "steps 128"),
        ({"sampler": "none"}, "sampler euler"),
        ({"strategy": "guided_diffusion", "sketch": LINE, "strength": -3}, "scale -3"),
        ({"strategy": "post_hoc_ranking", "sketch": LINE, "strength": 1e9}, "candidates 64 1e+09"),
        ({"steps": 21}, "steps"),
    ],
)
def test_controls_that_do_not_fit_are_refused_and_change_nothing(
    session: Session, values: Any, named: str
) -> None:
    before = session.controls
    with pytest.raises((ConfigError, CapabilityError), match=mentions(named)):
        session.control(values)
    assert session.controls is before


@pytest.mark.parametrize("place", [None, [1.0], [0.0, "0"], [0.0, 0.0, 0.0], {}])
def test_a_move_needs_a_place(session: Session, place: Any) -> None:
    with pytest.raises(ConfigError, match=mentions("move")):
        session.move(place)


def test_a_seed_beyond_those_of_simulators_is_refused(session: Session) -> None:
    for seed in (-1, 2**32):
        with pytest.raises(ConfigError, match=mentions("seed")):
            session.reset(seed)


def test_a_policy_or_two_that_are_composed_are_needed() -> None:
    for config in (
        LabConfig(),
        LabConfig(policy=f"{OLD}/cloned", compose=[f"{OLD}/cloned", f"{OLD}/base"]),
        LabConfig(compose=[f"{OLD}/cloned"]),
    ):
        with pytest.raises(ConfigError, match=mentions("[a,b]")):
            subject_of(config)


def test_a_task_that_cannot_be_drawn_is_refused_by_name(subject: Subject) -> None:
    with pytest.raises(CapabilityError, match=mentions("Pendulum-v1 MuJoCo")):
        Session(Subject(subject.found, (policy_for(Gym(id="Pendulum-v1")),), Gym(id="Pendulum-v1")))


def test_a_task_of_mujoco_is_seen_through_a_camera_and_its_plans_are_actions(tmp_path: Path) -> None:
    require_drawing()
    task = Gym(id="Reacher-v5")
    save_policy(policy_for(task), tmp_path / "policy")
    session = Session(subject_of(LabConfig(policy=str(tmp_path / "policy"), env=task)))
    answer = session.reset(1)
    assert answer["scene"]["actions"] == task.spec.action_names and answer["scene"]["lows"] == [-1.0, -1.0]
    pictures = [session.step()["picture"] for _ in range(2)]
    assert pictures[0] != pictures[1]
    image = Image.open(io.BytesIO(base64.b64decode(pictures[1].partition(",")[2])))
    assert image.size == answer["scene"]["picture"][::-1] and np.ptp(np.asarray(image)) > 100
    answer = session.control({"plans": 5, "film": True})
    made: dict[str, Any] = {}
    exec(answer["python"], made)
    chunk = session.subject.base.chunk
    assert np.abs(made["plans"].numpy()[:, chunk.action_start :] - plans(answer)).max() < 1e-4
    assert np.array(answer["film"]).shape[1:] == plans(answer).shape == (5, chunk.horizon, 2)
    for refused in (lambda: session.move([0.0, 0.0]), lambda: session.slide([0, 0.0])):
        with pytest.raises(CapabilityError):
            refused()
    with pytest.raises(CapabilityError, match=mentions("above")):
        session.control({"strategy": "guided_diffusion", "sketch": LINE})
    session.close()


def test_a_row_of_pillars_moves_as_far_as_in_episodes(subject: Subject) -> None:
    task = Avoid(rows="moved")
    session = Session(Subject(subject.found, (policy_for(task),), task))
    before = session.reset(3)["scene"]["pillars"]
    (x, y, _), moved = before[4], session.slide([4, before[4][0] + 0.002])["scene"]["pillars"]
    others = [(a[0] - b[0], a[1] == y) for a, b in zip(moved, before, strict=True)]
    assert all(off == pytest.approx(0.002 if in_row else 0.0, abs=1e-9) for off, in_row in others)
    centre = load_scene().obstacles[4][0]
    assert session.slide([4, 9.0])["scene"]["pillars"][4][0] == pytest.approx(centre + SHIFT_M)
    for pillar in ([len(before), 0.0], [-1, 0.0], [0], ["0", 0.0]):
        with pytest.raises(ConfigError, match=mentions("slide")):
            session.slide(pillar)
    session.move(session.slide([4, x])["scene"]["pillars"][4][:2])
    assert session.step()["end"] == "failure", "the simulator has the pillar where it is drawn"


def test_pillars_that_stay_cannot_be_moved(session: Session) -> None:
    with pytest.raises(CapabilityError, match=mentions("rows=moved")):
        session.slide([0, 0.0])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LabConfig(policy=f"{OLD}/cloned", env=Gym(id="Pendulum-v1"), allow_other_task=True), "Pendulum-v1"),
        (LabConfig(compose=[f"{OLD}/cloned", f"{OLD}/mixture"]), "MixturePolicy"),
        (LabConfig(runs="absent"), "runs=absent"),
        (LabConfig(policy=f"{OLD}/cloned", runs="absent"), "runs=absent"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_a_page_is_offered(
    config: LabConfig, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def offered(*_: Any) -> Any:
        raise AssertionError("a page is offered")

    monkeypatch.setattr(lab, "LabServer", offered)
    with pytest.raises((ConfigError, CapabilityError), match=mentions(named)):
        lab.run(config, RunContext(tmp_path))


def test_policies_without_denoising_act_and_have_no_such_controls() -> None:
    session = Session(subject_of(LabConfig(policy=f"{OLD}/mixture")))
    facts = session.facts()
    assert facts["sampler"] is None and not facts["samplers"] and not facts["strengths"]
    assert len(session.control({"plans": 3, "film": True})["plans"]) == 3
    with pytest.raises(CapabilityError, match=mentions("steer")):
        session.control({"strategy": "guided_diffusion", "sketch": LINE})


def test_plans_of_places_are_drawn_as_they_are_and_follow_a_line_through_a_maze() -> None:
    task = PointmazeLarge(control="waypoint", hold=10)
    session = Session(Subject(subject_of(LabConfig(policy=f"{OLD}/cloned")).found, (policy_for(task),), task))
    scene = session.reset(1)["scene"]
    assert scene["goal"] is not None and len(scene["walls"]) > 20
    x, y = session.plan()["at"]
    line = [[x, y], [x + 1.0, y], [x + 1.0, y + 1.0]]
    answer = session.control({"strategy": "guided_diffusion", "sketch": line, "plans": 3, "film": True})
    ends = plans(answer)[:, -1]
    assert (np.linalg.norm(ends - [x, y], axis=1) < 1.5).all(), "on the line, not anywhere in the maze"
    assert "waypoints" in answer["command"] and "WaypointSketch(" in answer["python"]
    assert session.step()["step"] == 1


def test_a_weight_moves_a_composition_from_one_policy_to_the_other(two: Subject) -> None:
    session = Session(two)
    ends = {weight: plans(session.control({"weight": weight}))[:, -1] for weight in (0.0, 0.5, 1.0)}
    alone = Session(subject_of(LabConfig(policy=f"{OLD}/cloned")))
    assert np.abs(ends[1.0] - plans(alone.control({}))[:, -1]).max() < 2e-4
    assert np.abs(ends[0.0] - ends[1.0]).max() > 1e-3 < np.abs(ends[0.5] - ends[1.0]).max()


# -- text that reproduces it ----------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {},
    {"plans": 3, "noise": 0.5},
    {"steps": 5},
    {"sampler": "heun", "steps": 4},
    *({"strategy": name, "sketch": LINE} for name in STRATEGIES),
    {"strategy": "guided_diffusion", "sketch": LINE, "strength": 7.5, "sampler": "euler"},
]


@pytest.mark.parametrize(("settings", "which"), each_value(SETTINGS, ["subject", "two"]))
def test_the_python_lines_give_the_plans_that_are_shown(
    settings: dict[str, Any], which: str, request: pytest.FixtureRequest
) -> None:
    session = Session(request.getfixturevalue(which))
    session.reset(4)
    for _ in range(3):
        session.step()
    answer = session.control(settings | ({"weight": 0.3} if which == "two" else {}))
    made: dict[str, Any] = {}
    exec(answer["python"], made)
    assert session.plane is not None
    paths = session.plane.paths(np.array(answer["at"]), made["plans"].numpy())
    assert np.abs(paths - plans(answer)).max() < 2e-4


def test_the_python_lines_are_right_in_a_folder_of_any_name(subject: Subject) -> None:
    found = replace(subject.found[0], path=Path('a "b" c'))
    text = Session(replace(subject, found=(found,))).plan()["python"]
    assert "load_policy('a \"b\" c')" in text


@pytest.mark.parametrize(("settings", "which"), each_value(SETTINGS, ["two", "subject"]))
def test_the_command_is_one_that_eval_understands(
    settings: dict[str, Any], which: str, request: pytest.FixtureRequest
) -> None:
    session = Session(request.getfixturevalue(which))
    command = session.control(settings)["command"].splitlines()[-1]
    if "noise" in settings or ("sampler" in settings and which == "subject"):
        assert command.startswith("# ") and "Python" in command
        return
    program, name, *words = shlex.split(command)
    config = compose_config(name, words)
    assert (program, config.episodes, config.steps) == ("burnish", 20, settings.get("steps"))
    assert config.steer.strategy == settings.get("strategy")


def test_starts_are_compared_as_eval_does(
    subject: Subject, session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = session.control({"strategy": "guided_diffusion", "sketch": LINE, "strength": 30})
    sketch, command = answer["command"].splitlines()
    content = shlex.split(sketch)[1]
    (tmp_path / "way.json").write_text(content)
    words = [word.replace("way.json", str(tmp_path / "way.json")) for word in shlex.split(command)[2:]]
    result = evaluate(compose_config("eval", [*words, "num_workers=0", f"out={tmp_path}/out.json"]))
    found = compared(subject, session.plane, session.controls)
    assert set(found) == {"steered", "plain"} and found["steered"]["off_m"] < found["plain"]["off_m"]
    assert found["steered"]["won"] == [row.success for row in result.evaluation.rows]
    assert [len(path) for path in found["steered"]["paths"]] == [
        row.length + 1 for row in result.evaluation.rows
    ]
    left = Event()
    left.set()
    assert compared(subject, session.plane, session.controls, left) == {}, "nobody waits for it"
    with pytest.raises(ConfigError, match=mentions("noise 0.5")):
        compared(subject, session.plane, Controls(noise=0.5))


def test_a_comparison_ends_when_the_visitor_leaves_in_the_middle(subject: Subject, session: Session) -> None:
    class Leaving(Event):
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 3

    left = Leaving()
    assert compared(subject, session.plane, session.controls, left) == {}
    assert left.asked == 4


def test_plans_that_are_not_finite_are_refused_and_the_ones_before_stay(session: Session) -> None:
    before = session.controls
    with pytest.raises(ConfigError, match=mentions("not finite")):
        session.control({"strategy": "guided_diffusion", "sketch": [[0, 0], [0, 1e-320]]})
    assert session.controls == before
    assert np.isfinite(session.step()["at"]).all()
