"""Scripted experts of `lift`, `can` and `square`.

An expert program is a generator: it reads the current poses and yields one action per step. All movements are
closed-loop: a dropped object is grasped again, and a nut that jams on its peg is raised, realigned and
lowered again. Each episode draws grasp and placement offsets; noise on the executed actions widens the state
distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from envs.rollouts.recording import Recording, expert_rng
from envs.spec import Array
from envs.tasks.robosuite.expert_arm import CLOSED, OPEN, ArmObservation, Target, heading
from policies.bounds import Checked, bounded

if TYPE_CHECKING:
    from envs.datasets.episode import Episode
    from envs.spec import EnvSpec
    from envs.tasks.robosuite.fast_stepper import FastStepper
    from envs.tasks.robosuite.reference_stepper import RobosuiteStepper

Moves = Iterator[Array]
"""Actions (7,) of a program."""

_LINGER = 5  # control steps recorded after the success


@dataclass(frozen=True)
class ArmExpert(Checked):
    """Options of the expert, `env.expert.*`."""

    key: ClassVar = "env.expert"

    noise: float = bounded(0.05, ge=0)  # std of Gaussian noise on the arm's action entries, box is [-1, 1]
    pace: float = bounded(1.0, gt=0, le=1)  # largest translation command
    spread: float = bounded(1.0, ge=0)  # scale of the random offsets of grasps and places


def demonstrate(
    stepper: FastStepper | RobosuiteStepper, seed: int, options: ArmExpert, *, spec: EnvSpec
) -> Episode:
    """Record the episode of a seed in row 0 of a stepper.

    The episode ends a few steps after success, or with the success if it terminates. Recorded are the
    executed actions, noise included, and the physics state before each (`states`: time, positions,
    velocities).
    """
    rng = expert_rng(seed)
    record = Recording(stepper, seed, terminate_on_success=spec.terminate_on_success)
    arm = ArmObservation(stepper.named_env(0), stepper.datas[0], pace=options.pace)
    moves = PROGRAMS[spec.name](arm, rng, options.spread)
    solved = 0
    while not record.ended and solved < _LINGER and len(record) < spec.max_episode_steps:
        action = next(moves)
        action[:6] += options.noise * rng.standard_normal(6)
        record.step(np.clip(action, -1, 1), states=arm.physics_state())
        solved = solved + 1 if record.is_solved else 0
    return record.episode(truncated=not record.ended, success=record.ended or solved >= _LINGER)


# -- movements ------------------------------------------------------------------------------------------


def go(
    arm: ArmObservation, target: Callable[[], Target], *, grip: float, within: float, limit: int = 80
) -> Moves:
    """Move towards a possibly moving target, until nearer than `within` [m] and almost at rest."""
    for _ in range(limit):
        goal, before = target(), arm.hand
        distance, turn = arm.distance(goal)
        yield arm.toward(goal, grip)
        if distance < within and turn < 0.05 and np.linalg.norm(arm.hand - before) < within / 2:
            return


def above(height: float) -> Array:
    """Return an offset (3,) upwards [m]."""
    return np.array([0.0, 0.0, height])


def wait(arm: ArmObservation, steps: int, *, grip: float) -> Moves:
    """Keep the gripper in place for some control steps."""
    target = Target(arm.hand, arm.heading)
    for _ in range(steps):
        yield arm.toward(target, grip)


def fetch(arm: ArmObservation, point: Callable[[], Array], yaw: float, *, up: float) -> Moves:
    """Grasp an object at a point (3,) from above with a gripper heading [rad], and raise it by `up` [m]."""
    if arm.hand[2] < point()[2] + 0.08:  # avoid sweeping over the table
        high = np.array([*arm.hand[:2], point()[2] + 0.1])
        yield from go(arm, lambda: Target(high, arm.heading), grip=OPEN, within=0.02)
    yield from go(arm, lambda: Target(point() + above(0.1), yaw), grip=OPEN, within=0.02)
    yield from go(arm, lambda: Target(point(), yaw), grip=OPEN, within=0.01, limit=40)
    yield from wait(arm, 8, grip=CLOSED)
    top = arm.hand + above(up)
    yield from go(arm, lambda: Target(top, yaw), grip=CLOSED, within=0.02, limit=40)


# -- programs -------------------------------------------------------------------------------------------


def lift(arm: ArmObservation, rng: np.random.Generator, spread: float) -> Moves:
    """Grasp the cube by two of its sides and raise it, with retries."""
    while True:
        offset = spread * np.array([*rng.uniform(-0.01, 0.01, 2), rng.uniform(-0.005, 0.01)])
        yaw = arm.nearest_heading(heading(arm.frame_of_object), turn=math.pi / 2)
        yield from fetch(arm, lambda: arm.object + offset, yaw, up=0.15)  # noqa: B023
        while arm.is_held():
            yield from wait(arm, 5, grip=CLOSED)


def can(arm: ArmObservation, rng: np.random.Generator, spread: float) -> Moves:
    """Carry the can over its bin, lower it, and release it."""
    while True:
        offset = spread * np.array([*rng.uniform(-0.01, 0.01, 2), rng.uniform(0.0, 0.02)])
        place = arm.bin + spread * np.array([*rng.uniform(-0.03, 0.03, 2), 0.0])
        yaw = arm.natural_heading(arm.object)
        yield from fetch(arm, lambda: arm.object + offset, yaw, up=0.25)  # noqa: B023
        if arm.is_held():
            lead = arm.hand - arm.object
            yaw = arm.natural_heading(place)
            over, down = place + lead + above(0.28), place + lead + above(0.09)
            yield from go(arm, lambda: Target(over, yaw), grip=CLOSED, within=0.03)  # noqa: B023
            yield from go(arm, lambda: Target(down, yaw), grip=CLOSED, within=0.02, limit=40)  # noqa: B023
            yield from wait(arm, 8, grip=OPEN)
        away = arm.hand + above(0.2)
        yield from go(arm, lambda: Target(away, yaw), grip=OPEN, within=0.03, limit=30)  # noqa: B023


def square(arm: ArmObservation, rng: np.random.Generator, spread: float) -> Moves:
    """Grasp the nut by its handle and place it over the peg; retry on failure."""
    while True:
        along = spread * rng.uniform(-0.008, 0.008)
        across = heading(arm.frame_of_object) + math.pi / 2  # the fingers close across the handle
        yaw = arm.nearest_heading(across, turn=math.pi)
        yield from fetch(arm, lambda: arm.handle + along * arm.frame_of_object[:, 0], yaw, up=0.2)  # noqa: B023
        while arm.is_held() and not arm.is_on_peg():
            aim = arm.peg + spread * np.array([*rng.uniform(-0.002, 0.002, 2), 0.0])
            yield from _align(arm, aim)
            yield from _lower(arm, aim)
        yield from wait(arm, 8, grip=OPEN)
        away = arm.hand + above(0.12)
        yield from go(arm, lambda: Target(away, arm.heading), grip=OPEN, within=0.03, limit=30)  # noqa: B023


def _align(arm: ArmObservation, aim: Array) -> Moves:
    """Move the held nut over the peg, with its sides parallel to the peg's."""
    if arm.object[2] < aim[2] + 0.02:
        high = arm.hand + above(aim[2] + 0.04 - arm.object[2])
        yield from go(arm, lambda: Target(high, arm.heading), grip=CLOSED, within=0.01, limit=30)
    yield from go(arm, lambda: arm.carrying(aim + above(0.04)), grip=CLOSED, within=0.004)


def _lower(arm: ArmObservation, aim: Array) -> Moves:
    """Lower the held nut while keeping it centred; stop when it no longer sinks."""
    lowest, still = arm.object[2], 0
    while arm.is_held() and not arm.is_on_peg() and still < 10:
        yield arm.toward(arm.carrying(np.array([*aim[:2], arm.object[2] - 0.03])), CLOSED)
        still = 0 if arm.object[2] < lowest - 0.001 else still + 1
        lowest = min(lowest, arm.object[2])


PROGRAMS: dict[str, Callable[[ArmObservation, np.random.Generator, float], Moves]] = {
    "lift": lift,
    "can": can,
    "square": square,
}
