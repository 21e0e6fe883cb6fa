"""Tasks from above: scenes, paths of plans, sketches, and robots that are moved by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envs.engine.vector import ChunkVector
from envs.tasks.avoid.scene import load_scene
from envs.tasks.avoid.task import Avoid
from envs.tasks.mazes.d4rl import PointmazeLarge, PointmazeUmaze
from envs.tasks.mazes.layouts import layout
from envs.tasks.plane import Plane, PlaneStepper
from policies.wrappers.sketches import PositionSketch, WaypointSketch

TASKS = (Avoid(), Avoid(observation="position"), PointmazeLarge(control="waypoint", hold=10))


def started(task: Any, seed: int = 0) -> tuple[Any, Plane]:
    stepper = task.stepper(2)
    stepper.reset(1, seed)
    return stepper, stepper.plane(1)


@pytest.mark.parametrize("task", TASKS)
def test_a_robot_is_put_where_it_is_wanted_and_observed_there(task: Any) -> None:
    stepper, plane = started(task)
    assert isinstance(stepper, PlaneStepper)
    wanted = np.array([0.05, 0.3]) if isinstance(task, Avoid) else layout("large").centers[7] + 0.2
    observed = stepper.place(1, wanted)
    assert observed.shape == (task.spec.obs_dim,)
    assert np.allclose(observed[list(plane.observed)], wanted)
    step = stepper.step(np.array([1]), np.zeros((1, 2)) if plane.reach else wanted[None])
    assert np.abs(step.obs[0, list(plane.observed)] - wanted).max() < 0.05


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("far", [(99.0, 0.0), (-99.0, -99.0), (0.0, 99.0)])
def test_a_robot_stays_within_the_walls(task: Any, far: tuple[float, float]) -> None:
    stepper, plane = started(task)
    at = stepper.place(1, np.array(far))[list(plane.observed)]
    assert (np.array(plane.low) + plane.radius <= at).all() and (at <= np.array(plane.high)).all()
    room = plane.radius - 1e-9
    for x, y, half_x, half_y in plane.walls:
        assert abs(at[0] - x) >= half_x + room or abs(at[1] - y) >= half_y + room


def test_a_disc_that_was_moved_passes_the_gaps_of_where_it_is_now() -> None:
    """The metric `mode` sees a row that the disc crosses after the move."""
    stepper, _ = started(Avoid())
    scene = load_scene()
    stepper.place(1, np.array([scene.gap_x[0][1], scene.row_y[0] - 0.005]))
    stepper.step(np.array([1]), np.array([[0.0, 1.0]]))
    stepper.step(np.array([1]), np.array([[0.0, 1.0]]))
    assert stepper.rules.gaps[1].tolist() == [1, -1, -1, -1]


def test_changes_of_position_are_summed_and_places_are_themselves() -> None:
    here, actions = np.array([1.0, 2.0]), np.array([[[1.0, 0.0], [0.0, -1.0]]])
    facts: dict[str, Any] = {
        "low": (0, 0), "high": (1, 1), "pillars": (), "walls": (), "finish": None, "goal": None,
        "radius": 0.1, "pace": 0.2,
    }  # fmt: skip
    changes, places = Plane(**facts, reach=0.5), Plane(**facts, reach=None)
    assert changes.paths(here, actions).tolist() == [[[1, 2], [1.5, 2], [1.5, 1.5]]]
    assert places.paths(here, actions).tolist() == [[[1, 2], [1, 0], [0, -1]]]
    line = ((0.0, 0.0), (1.0, 0.0))
    assert changes.sketch(line) == PositionSketch(line, 0.2, 0.5)
    assert places.sketch(line) == WaypointSketch(line, 0.2)


@pytest.mark.parametrize("task", TASKS)
def test_a_plan_leads_where_the_robot_goes(task: Any) -> None:
    """Within half of the way: it follows with a delay, or overshoots."""
    vector = ChunkVector(task.spec, task.stepper(1))
    vector.reset([3])
    plane = vector.stepper.plane(0)  # type: ignore[attr-defined]
    here = vector.state_dict()["history"][0, -1, :2]
    toward = (np.array(plane.goal[:2]) - here) if plane.goal else np.array([0.0, 1.0])
    step = toward / np.linalg.norm(toward) * (plane.pace if plane.reach is None else plane.pace / plane.reach)
    actions = np.array([[here + 2 * step] * 4]) if plane.reach is None else np.array([[step] * 4])
    aimed = plane.paths(here, actions)[0, -1] - here
    gone = vector.step_chunk(actions).obs[0, -1, :2] - here
    assert np.linalg.norm(gone - aimed) < 0.5 * np.linalg.norm(aimed)


def test_a_maze_is_drawn_with_its_walls_and_goal() -> None:
    stepper, plane = started(PointmazeLarge(control="waypoint", hold=10), seed=4)
    maze = layout("large")
    assert [wall[:2] for wall in plane.walls] == [tuple(maze.center(cell)) for cell in maze.walls]
    assert plane.goal is not None and list(plane.goal[:2]) == stepper.start_and_goal(1)[1].tolist()


def test_points_that_are_driven_by_forces_are_not_drawn() -> None:
    """A plan of forces is no line."""
    assert not isinstance(PointmazeUmaze().stepper(1), PlaneStepper)
