"""Adroit: a Shadow hand opens a door, hammers a nail, turns a pen or moves a ball (24 to 30 joints).

Every number equals gymnasium-robotics' `AdroitHand*-v1` bit for bit: its environment runs on one `MjData` per
row. Resets modify the shared model (positions of door, nail, ball or its target, orientation of the pen);
each row stores its values and writes them to the model before stepping.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from envs.engine.physics import MujocoStepper
from envs.engine.pixels import HasCameras
from envs.evaluation.scores import reference
from envs.spec import Array, EnvSpec, StepResult, symmetric_spec
from envs.tasks.adroit.initial_states import DoorState, read_initial_states
from policies.bounds import bounded
from policies.extras import require
from policies.paths import path_field
from policies.registry import register

CONTROL_HZ = 100.0
REWARDS = ("dense", "sparse")
_MODULE = "gymnasium_robotics.envs.adroit_hand"
_FINGERS = {"FF": ("first finger", 4), "MF": ("middle finger", 4), "RF": ("ring finger", 4)}
_HAND = (
    *(f"wrist joint {i}" for i in (1, 0)),
    *(f"{name} joint {i}" for name, count in _FINGERS.values() for i in reversed(range(count))),
    *(f"little finger joint {i}" for i in reversed(range(5))),
    *(f"thumb joint {i}" for i in reversed(range(5))),
)


def _xyz(name: str, unit: str = "m") -> tuple[str, ...]:
    return tuple(f"{name} {axis} [{unit}]" for axis in "xyz")


def _angles(joints: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{joint} [m]" if "slide" in joint else f"{joint} angle [rad]" for joint in joints)


@dataclass(frozen=True)
class Scene:
    """Locations of a task's reset values.

    Attributes:
        module: Module of gymnasium-robotics, below `adroit_hand`.
        made: Its class.
        placed: Model fields, each with the environment's attribute that holds the object's row index.
        measured: Attributes computed by a reset.
    """

    module: str
    made: str
    placed: tuple[tuple[str, str], ...]
    measured: tuple[str, ...] = ()


class AdroitStepper(MujocoStepper):
    """Step N copies of one task; episodes start from `starts[seed % len(starts)]`, or as drawn."""

    def __init__(self, scene: Scene, reward: str, num_envs: int, starts: tuple[DoorState, ...] = ()) -> None:
        self._env = load_adroit(scene, reward)
        super().__init__(self._env.model, num_envs)
        self._starts = starts
        # Views into the model, and each row's values for them.
        self._placed = [(name, getattr(self._env, at)) for name, at in scene.placed]
        self._views = [getattr(self.model, name)[at] for name, at in self._placed]
        self._places = [np.tile(view, (num_envs, 1)) for view in self._views]
        self._measured = {name: np.ones(num_envs) for name in scene.measured}

    def reset(self, row: int, seed: int) -> Array:
        """Start an episode as gymnasium-robotics for this seed, or from a demonstration's state; (Do,)."""
        env = self._bind(row)
        obs, _ = env.reset(seed=seed)
        if self._starts:
            obs = self._starts[seed % len(self._starts)].apply(env)
        for places, view in zip(self._places, self._views, strict=True):
            places[row] = view
        for name, values in self._measured.items():
            values[row] = getattr(env, name)
        return np.asarray(obs, np.float64)

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, Da) for one control step (5 physics steps)."""
        obs, reward, success = [], np.empty(len(rows)), np.zeros(len(rows), bool)
        for i, row in enumerate(rows.tolist()):
            seen, reward[i], _, _, info = self._bind(row).step(actions[i])
            obs.append(seen)
            success[i] = bool(info["success"])
        no = np.zeros(len(rows), bool)
        return StepResult(np.stack(obs), reward, no, no, success)

    def get_appearance(self, row: int) -> dict[str, Array]:
        return {str(i): places[row].copy() for i, places in enumerate(self._places)}

    def set_appearance(self, model: Any, appearance: Mapping[str, Array]) -> None:
        for i, (name, at) in enumerate(self._placed):
            getattr(model, name)[at] = appearance[str(i)]

    def get_state(self) -> dict[str, Any]:
        return {
            **super().get_state(),
            "places": [places.copy() for places in self._places],
            "measured": {name: values.copy() for name, values in self._measured.items()},
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self._places = [np.array(places, np.float64) for places in state["places"]]
        self._measured = {name: np.array(values, np.float64) for name, values in state["measured"].items()}

    def _bind(self, row: int) -> Any:
        self._env.data = self.datas[row]
        for view, places in zip(self._views, self._places, strict=True):
            view[:] = places[row]
        for name, values in self._measured.items():
            setattr(self._env, name, values[row])
        return self._env


@lru_cache(maxsize=8)
def load_adroit(scene: Scene, reward: str) -> Any:
    """Build gymnasium-robotics' environment of a task once per process."""
    with contextlib.redirect_stderr(io.StringIO()):  # the import prints notices about the rewards
        module = require(f"{_MODULE}.{scene.module}", extra="adroit")
    env = getattr(module, scene.made)(reward_type=reward)
    view, model = env.mujoco_renderer.default_cam_config, env.model
    # MuJoCo's free camera, at gymnasium-robotics' position, aimed at the hand instead of below the table.
    model.stat.center, model.stat.extent = (0.0, 0.0, 0.2), view["distance"] / 1.5
    model.vis.global_.azimuth = view["azimuth"]
    return env


@dataclass(frozen=True)
class _Adroit(HasCameras):
    """Common options of the four tasks."""

    max_episode_steps: int = bounded(200, ge=1)  # time limit in control steps
    terminate_on_success: bool = False  # whether success terminates the episode
    reward: str = bounded("dense", choices=REWARDS)  # sparse: 10 while solved, -0.1 otherwise

    name = ""
    scene = Scene("", "", ())
    success_rule = ""
    arm: ClassVar[tuple[str, ...]] = ()
    objects: ClassVar[tuple[str, ...]] = ()
    hidden = 0  # number of leading unobserved joints

    @property
    def spec(self) -> EnvSpec:
        joints = (*self.arm, *_HAND)
        obs_names = (*_angles(joints[self.hidden :]), *self.objects)
        scores = reference(f"{self.name.removeprefix('adroit-')}-human-v1").returns
        as_recorded = self.reward == "dense" and not self.terminate_on_success  # what the scores are of
        return symmetric_spec(
            obs_names,
            tuple(f"{joint} target [of its range]" for joint in joints),
            name=self.name,
            family="adroit",
            max_episode_steps=self.max_episode_steps,
            control_hz=CONTROL_HZ,
            success_rule=self.success_rule,
            terminate_on_success=self.terminate_on_success,
            reference_scores=scores if as_recorded else None,
            packages=("gymnasium-robotics",),
            extra="adroit",
        )

    def stepper(self, num_envs: int) -> AdroitStepper:
        return AdroitStepper(self.scene, self.reward, num_envs)


_TURNS = tuple(f"arm rotation {axis}" for axis in "xyz")


@register("env", "adroit-door")
@dataclass(frozen=True)
class AdroitDoor(_Adroit):
    """Undo the latch and open a door (`AdroitHandDoor-v1`)."""

    starts: str | None = path_field()  # D4RL file with initial states, taken by seed; null: drawn

    name = "adroit-door"
    scene = Scene("adroit_door", "AdroitHandDoorEnv", (("body_pos", "door_body_id"),))
    success_rule = "the door is open by 1.35 rad"
    arm = ("arm slide z", *_TURNS)
    hidden = 1
    objects = (
        *("latch angle [rad]", "door hinge angle [rad]", *_xyz("palm"), *_xyz("handle")),
        *(*_xyz("palm - handle"), "door open beyond 1 rad [-1 or 1]"),
    )

    def stepper(self, num_envs: int) -> AdroitStepper:
        starts = read_initial_states(self.starts) if self.starts is not None else ()
        return AdroitStepper(self.scene, self.reward, num_envs, starts)


@register("env", "adroit-hammer")
@dataclass(frozen=True)
class AdroitHammer(_Adroit):
    """Pick up a hammer and drive a nail into a board (`AdroitHandHammer-v1`)."""

    name = "adroit-hammer"
    scene = Scene("adroit_hammer", "AdroitHandHammerEnv", (("body_pos", "target_body_id"),))
    success_rule = "the nail is within 1 cm of its goal"
    arm = _TURNS[:2]
    objects = (
        *("nail slide [m]", *_xyz("hammer speed", "m/s, clipped to 1"), *_xyz("hammer spin", "rad/s, to 1")),
        *(*_xyz("palm"), *_xyz("hammer"), *_xyz("hammer Euler angle", "rad"), *_xyz("nail")),
        "force on the nail [N, clipped to 1]",
    )


@register("env", "adroit-pen")
@dataclass(frozen=True)
class AdroitPen(_Adroit):
    """Rotate a pen in the hand to a target orientation (`AdroitHandPen-v1`)."""

    name = "adroit-pen"
    scene = Scene(
        "adroit_pen",
        "AdroitHandPenEnv",
        (("body_quat", "target_obj_body_id"),),
        measured=("pen_length", "tar_length"),
    )
    success_rule = "the pen is within 7.5 cm of its place and its axis within 18 degrees of the wanted one"
    objects = (
        *(*_xyz("pen"), *_xyz("pen speed", "m/s"), *_xyz("pen spin", "rad/s"), *_xyz("pen axis", "1")),
        *(*_xyz("wanted axis", "1"), *_xyz("pen - wanted"), *_xyz("axis - wanted", "1")),
    )


@register("env", "adroit-relocate")
@dataclass(frozen=True)
class AdroitRelocate(_Adroit):
    """Move a ball to a target position in the air (`AdroitHandRelocate-v1`)."""

    name = "adroit-relocate"
    scene = Scene(
        "adroit_relocate",
        "AdroitHandRelocateEnv",
        (("body_pos", "obj_body_id"), ("site_pos", "target_obj_site_id")),
    )
    success_rule = "the ball is within 10 cm of its target"
    arm = (*(f"arm slide {axis}" for axis in "xyz"), *_TURNS)
    objects = (*_xyz("palm - ball"), *_xyz("palm - target"), *_xyz("ball - target"))
