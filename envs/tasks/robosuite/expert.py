"""Scripted experts of `lift`, `can` and `square`.

An expert program is a generator: it reads the current poses and yields one action per step. All movements are
closed-loop, so perturbations are corrected: a dropped object is grasped again, and a nut that jams on its peg
is raised, realigned and lowered again. Each episode draws grasp and placement offsets, and noise on the
executed actions widens the state distribution for cloning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from envs.rollouts.recording import Recording
from envs.tasks.robosuite.expert_arm import CLOSED, OPEN, ArmObservation, Target, heading
from policies.bounds import Checked, bounded

if TYPE_CHECKING:
    from envs.datasets.episode import Episode
    from envs.tasks.robosuite.fast_stepper import FastStepper
    from envs.tasks.robosuite.reference_stepper import RobosuiteStepper

Array = np.ndarray
Moves = Iterator[Array]
"""Actions (7,) of a program."""

_NOISE_STREAM = 1  # separates the expert's random numbers from those of the task
_LINGER = 5  # control steps recorded after the success


@dataclass(frozen=True)
class ArmExpert(Checked):
    """Options of the expert, `env.expert.*`."""

    key: ClassVar = "env.expert"

    noise: float = bounded(0.05, ge=0)  # std of Gaussian noise on the arm's action entries, box is [-1, 1]
    pace: float = bounded(1.0, gt=0, le=1)  # largest translation command
    spread: float = bounded(1.0, ge=0)  # scale of the random offsets of grasps and places


def demonstrate(
    stepper: FastStepper | RobosuiteStepper,
    seed: int,
    options: ArmExpert,
    *,
    program: str,
    max_steps: int,
    terminate_on_success: bool = False,
) -> Episode:
    """Record the episode of a seed in row 0 of a stepper.

    The episode ends a few steps after success, or with the success if it terminates. Recorded are the
    executed actions, noise included, and the physics state before each (`states`: time, positions,
    velocities).
    """
    rng = np.random.default_rng((seed, _NOISE_STREAM))
    record = Recording(stepper, seed, terminate_on_success=terminate_on_success)
    sight = ArmObservation(stepper.names(0), stepper.datas[0], pace=options.pace)
    moves = PROGRAMS[program](sight, rng, options.spread)
    solved = 0
    while not record.ended and solved < _LINGER and len(record) < max_steps:
        action = next(moves)
        action[:6] += options.noise * rng.standard_normal(6)
        record.step(np.clip(action, -1, 1), states=sight.physics_state())
        solved = solved + 1 if record.is_solved else 0
    return record.episode(truncated=not record.ended, success=record.ended or solved >= _LINGER)


# -- movements ------------------------------------------------------------------------------------------


def go(
    sight: ArmObservation, target: Callable[[], Target], *, grip: float, within: float, limit: int = 80
) -> Moves:
    """Move towards a possibly moving target, until nearer than `within` [m] and almost at rest."""
    for _ in range(limit):
        goal, before = target(), sight.hand
        distance, turn = sight.distance(goal)
        yield sight.toward(goal, grip)
        if distance < within and turn < 0.05 and np.linalg.norm(sight.hand - before) < within / 2:
            return


def above(height: float) -> Array:
    """Return an offset (3,) upwards [m]."""
    return np.array([0.0, 0.0, height])


def wait(sight: ArmObservation, steps: int, *, grip: float) -> Moves:
    """Keep the gripper in place for some control steps."""
    target = Target(sight.hand, sight.heading)
    for _ in range(steps):
        yield sight.toward(target, grip)


def fetch(sight: ArmObservation, point: Callable[[], Array], yaw: float, *, up: float) -> Moves:
    """Grasp an object at a point (3,) from above with a gripper heading [rad], and raise it by `up` [m]."""
    if sight.hand[2] < point()[2] + 0.08:  # avoid sweeping over the table
        high = np.array([*sight.hand[:2], point()[2] + 0.1])
        yield from go(sight, lambda: Target(high, sight.heading), grip=OPEN, within=0.02)
    yield from go(sight, lambda: Target(point() + above(0.1), yaw), grip=OPEN, within=0.02)
    yield from go(sight, lambda: Target(point(), yaw), grip=OPEN, within=0.01, limit=40)
    yield from wait(sight, 8, grip=CLOSED)
    top = sight.hand + above(up)
    yield from go(sight, lambda: Target(top, yaw), grip=CLOSED, within=0.02, limit=40)


# -- programs -------------------------------------------------------------------------------------------


def lift(sight: ArmObservation, rng: np.random.Generator, spread: float) -> Moves:
    """Grasp the cube by two of its sides and raise it, with retries."""
    while True:
        offset = spread * np.array([*rng.uniform(-0.01, 0.01, 2), rng.uniform(-0.005, 0.01)])
        yaw = sight.nearest_heading(heading(sight.frame_of_object), turn=math.pi / 2)
        yield from fetch(sight, lambda: sight.object + offset, yaw, up=0.15)  # noqa: B023
        while sight.is_held():
            yield from wait(sight, 5, grip=CLOSED)


def can(sight: ArmObservation, rng: np.random.Generator, spread: float) -> Moves:
    """Carry the can over its bin, lower it, and release it."""
    while True:
        offset = spread * np.array([*rng.uniform(-0.01, 0.01, 2), rng.uniform(0.0, 0.02)])
        place = sight.bin + spread * np.array([*rng.uniform(-0.03, 0.03, 2), 0.0])
        yaw = sight.natural_heading(sight.object)
        yield from fetch(sight, lambda: sight.object + offset, yaw, up=0.25)  # noqa: B023
        if sight.is_held():
            lead = sight.hand - sight.object
            yaw = sight.natural_heading(place)
            over, down = place + lead + above(0.28), place + lead + above(0.09)
            yield from go(sight, lambda: Target(over, yaw), grip=CLOSED, within=0.03)  # noqa: B023
            yield from go(sight, lambda: Target(down, yaw), grip=CLOSED, within=0.02, limit=40)  # noqa: B023
            yield from wait(sight, 8, grip=OPEN)
        away = sight.hand + above(0.2)
        yield from go(sight, lambda: Target(away, yaw), grip=OPEN, within=0.03, limit=30)  # noqa: B023


def square(sight: ArmObservation, rng: np.random.Generator, spread: float) -> Moves:
    """Grasp the nut by its handle and place it over the peg; retry on failure."""
    while True:
        along = spread * rng.uniform(-0.008, 0.008)
        across = heading(sight.frame_of_object) + math.pi / 2  # the fingers close across the handle
        yaw = sight.nearest_heading(across, turn=math.pi)
        yield from fetch(sight, lambda: sight.handle + along * sight.frame_of_object[:, 0], yaw, up=0.2)  # noqa: B023
        while sight.is_held() and not sight.is_on_peg():
            aim = sight.peg + spread * np.array([*rng.uniform(-0.002, 0.002, 2), 0.0])
            yield from _align(sight, aim)
            yield from _lower(sight, aim)
        yield from wait(sight, 8, grip=OPEN)
        away = sight.hand + above(0.12)
        yield from go(sight, lambda: Target(away, sight.heading), grip=OPEN, within=0.03, limit=30)  # noqa: B023


def _align(sight: ArmObservation, aim: Array) -> Moves:
    """Move the held nut over the peg, with its sides parallel to the peg's."""
    if sight.object[2] < aim[2] + 0.02:
        high = sight.hand + above(aim[2] + 0.04 - sight.object[2])
        yield from go(sight, lambda: Target(high, sight.heading), grip=CLOSED, within=0.01, limit=30)
    yield from go(sight, lambda: sight.carrying(aim + above(0.04)), grip=CLOSED, within=0.004)


def _lower(sight: ArmObservation, aim: Array) -> Moves:
    """Lower the held nut while keeping it centred; stop when it no longer sinks."""
    lowest, still = sight.object[2], 0
    while sight.is_held() and not sight.is_on_peg() and still < 10:
        yield sight.toward(sight.carrying(np.array([*aim[:2], sight.object[2] - 0.03])), CLOSED)
        still = 0 if sight.object[2] < lowest - 0.001 else still + 1
        lowest = min(lowest, sight.object[2])


PROGRAMS: dict[str, Callable[[ArmObservation, np.random.Generator, float], Moves]] = {
    "lift": lift,
    "can": can,
    "square": square,
}
