"""`avoid`: drive a disc through staggered rows of pillars to a finish line, without touching anything.

A planar end effector on two slide joints with velocity servos; the action is the target velocity. There are
many equally good paths, one gap per row, so demonstrations are multi-modal and a policy that averages them
hits a pillar. Any contact ends the episode as a failure, at the physics step where it happens; crossing the
finish line ends it as a success with reward 1, every other step has 0. Metric `mode`: the chosen path, an
index into `AvoidScene.modes`; -1 while rows are left to cross.

With `rows=moved` every row of pillars is shifted sideways per episode, by up to 5 cm; with
`observation=position` the state is the disc's position alone, so that the gaps are known by sight only.

Legend: N environments, M of them addressed, R rows of pillars, G gaps of the widest row. Positions are
(x, y) in metres; y grows from start to finish.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.engine.engines import HasEngines, exactly
from envs.engine.physics import MujocoStepper
from envs.spec import Array, EnvSpec, StepResult, symmetric_spec
from envs.tasks.avoid.expert import AvoidExpert, demonstrate_avoid, take_over_avoid
from envs.tasks.avoid.rules import CONTROL_HZ, MAX_SPEED, AvoidRules, row_shifts, start_position
from envs.tasks.avoid.scene import (
    FINISH_HALF_M,
    SHIFT_M,
    AvoidScene,
    load_model,
    load_movable_model,
    load_scene,
)
from envs.tasks.plane import Plane
from policies.bounds import bounded
from policies.registry import register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from envs.datasets.episode import Episode

ROWS = ("fixed", "moved")
OBSERVATIONS = ("motion", "position")
_NUM_ROWS = 4  # R, of the scene; a specification does not load the model


class AvoidStepper(MujocoStepper):
    """Steps N discs, each in its own simulator state of one shared model; exact.

    Args:
        num_envs: N.
        moves_rows: Shift the rows per episode.
        keeps_speed: Observe the disc's speed beside its position.
    """

    def __init__(self, num_envs: int, *, moves_rows: bool = False, keeps_speed: bool = True) -> None:
        import mujoco

        super().__init__(load_movable_model() if moves_rows else load_model(), num_envs)
        self.rules = AvoidRules(num_envs, keeps_speed=keeps_speed)
        self.scene, self._moves_rows = self.rules.scene, moves_rows
        # Views into the simulators' memory, made once: each attribute access would build a new one.
        self._qpos = [data.qpos for data in self.datas]
        self._qvel = [data.qvel for data in self.datas]
        self._ctrl = [data.ctrl for data in self.datas]
        self._mj_step = mujoco.mj_step
        self._substeps = range(round(1.0 / CONTROL_HZ / self.model.opt.timestep))

    def reset(self, row: int, seed: int) -> Array:
        """Put the disc of one row at the seed's start, at rest; returns (Do,)."""
        import mujoco

        mujoco.mj_resetData(self.model, self.datas[row])
        start, shift = start_position(seed), None
        if self._moves_rows:
            shift = row_shifts(seed, len(self.scene.row_y))
            self.datas[row].mocap_pos[:, 0] = shift
        self._qpos[row][:] = start
        mujoco.mj_forward(self.model, self.datas[row])
        return self.rules.begin(row, start, shift)

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, 2) for one control step, or until contact."""
        index = rows.tolist()
        speeds = MAX_SPEED * np.asarray(actions, np.float64)
        hit = np.array([self._drive(i, speed) for i, speed in zip(index, speeds, strict=True)])
        position = np.concatenate([self._qpos[i] for i in index]).reshape(-1, 2)
        velocity = np.concatenate([self._qvel[i] for i in index]).reshape(-1, 2)
        return self.rules.results(rows, hit, position, velocity)

    def motion(self, row: int) -> tuple[Array, Array]:
        """Return position [m] and velocity [m/s] of a disc, (2,) each."""
        return self._qpos[row].copy(), self._qvel[row].copy()

    def scene_of(self, row: int) -> AvoidScene:
        """Return the scene of a running episode."""
        return self.scene.moved(self.rules.shift[row].tolist()) if self._moves_rows else self.scene

    def plane(self, row: int) -> Plane:
        """Return the scene of a running episode from above; the pace is that of the expert."""
        scene, reach = self.scene_of(row), MAX_SPEED / CONTROL_HZ
        return Plane(
            low=(-scene.half_width, scene.back_y),
            high=(scene.half_width, scene.finish_y + 2 * FINISH_HALF_M),
            pillars=tuple((x, y, scene.pillar_radius) for x, y in scene.obstacles),
            walls=(),
            finish=(0.0, scene.finish_y + FINISH_HALF_M, scene.half_width, FINISH_HALF_M),
            goal=None,
            radius=scene.disc_radius,
            pace=AvoidExpert.pace * reach,
            reach=reach,
            slides=self._moves_rows,
        )

    def place(self, row: int, position: Array) -> Array:
        """Put a disc at a position (2,) [m] within the walls, with the speed that it has; returns (Do,)."""
        import mujoco

        scene, room = self.scene, self.scene.disc_radius
        low = (room - scene.half_width, scene.back_y + room)
        high = (scene.half_width - room, scene.finish_y)
        self.rules.position[row] = self._qpos[row][:] = np.clip(position, low, high)
        mujoco.mj_forward(self.model, self.datas[row])
        return np.concatenate(self.motion(row))[: self.rules.width]

    def slide(self, row: int, pillar: int, x: float) -> Array:
        """Shift the row of pillars that holds one of `AvoidScene.obstacles`; returns (Do,)."""
        import mujoco

        at_rest, y = self.scene.obstacles[pillar]
        number = self.scene.row_y.index(y)
        self.rules.shift[row, number] = np.clip(x - at_rest, -SHIFT_M, SHIFT_M)
        self.datas[row].mocap_pos[number, 0] = self.rules.shift[row, number]
        mujoco.mj_forward(self.model, self.datas[row])
        return np.concatenate(self.motion(row))[: self.rules.width]

    def simulator(self) -> Array:
        """Return position, velocity and shifts of the rows, (N, 4 + R), scaled to about [-1, 1]."""
        position, velocity = np.stack(self._qpos), np.stack(self._qvel)
        scales = (self.scene.half_width, MAX_SPEED, SHIFT_M)
        parts = (position, velocity, self.rules.shift)
        return np.concatenate([part / scale for part, scale in zip(parts, scales, strict=True)], axis=1)

    def metrics(self) -> dict[str, Array]:
        return self.rules.metrics()

    def get_state(self) -> dict[str, Array]:
        return {**super().get_state(), "gaps": self.rules.gaps.copy()}

    def set_state(self, state: Mapping[str, Array]) -> None:
        super().set_state(state)
        for row in range(self.num_envs):
            self.rules.position[row] = self._qpos[row]
            if self._moves_rows:
                self.rules.shift[row] = self.datas[row].mocap_pos[:, 0]
        self.rules.gaps = np.array(state["gaps"])

    def close(self) -> None:
        self.datas, self._qpos, self._qvel, self._ctrl = [], [], [], []

    def _drive(self, row: int, speed: Array) -> bool:
        """Advance one simulator until a contact; returns whether the disc touched something."""
        model, data, mj_step = self.model, self.datas[row], self._mj_step
        self._ctrl[row][:] = speed
        for _ in self._substeps:
            mj_step(model, data)
            if data.ncon:
                return True
        return False


@register("env", "avoid")
@dataclass(frozen=True)
class Avoid(HasEngines):
    """Drive a disc through rows of pillars to the finish line; many paths lead through."""

    max_episode_steps: int = bounded(100, ge=1)  # time limit in control steps of 50 ms
    rows: str = bounded("fixed", choices=ROWS)  # moved: every row of pillars is shifted per episode
    observation: str = bounded("motion", choices=OBSERVATIONS)  # position: without the disc's speed
    image_shadows: bool = False  # render shadows, several times slower without a GPU
    expert: AvoidExpert = bounded(AvoidExpert(), was="demonstrator")  # options of the expert

    camera = "tilted"

    def __post_init__(self) -> None:
        super().__post_init__()
        is_shown = self.engine == "exact" or not self.hides_something
        self.require("engine", is_shown, "exact with env.rows=moved or env.observation=position")

    @property
    def spec(self) -> EnvSpec:
        names = ("disc x [m]", "disc y [m]", "disc x speed [m/s]", "disc y speed [m/s]")
        return symmetric_spec(
            names if self.observation == "motion" else names[:2],
            (f"x speed [{MAX_SPEED} m/s]", f"y speed [{MAX_SPEED} m/s]"),
            name="avoid",
            family="avoid",
            max_episode_steps=self.max_episode_steps,
            control_hz=CONTROL_HZ,
            success_rule="the disc crosses the finish line without having touched a pillar or a wall",
            episode_metrics=("mode",),
            simulator_dim=4 + _NUM_ROWS if self.hides_something else 0,
        )

    @property
    def hides_something(self) -> bool:
        """Whether the state leaves out something that changes."""
        return self.rows == "moved" or self.observation == "position"

    def stepper(self, num_envs: int) -> Any:
        if self.engine == "warp":
            from envs.tasks.avoid.warp_stepper import WarpAvoidStepper

            return WarpAvoidStepper(num_envs)
        keeps_speed = self.observation == "motion"
        return AvoidStepper(num_envs, moves_rows=self.rows == "moved", keeps_speed=keeps_speed)

    def judge(self, states: Array, actions: Array, reached: Array) -> tuple[Array, Array, Array]:
        """Return reward, termination and success (M,) of straight moves between states (M, Do).

        The simulator tests contacts at its own, finer steps, which need not lie on a straight line. Rows of
        pillars must be fixed.
        """
        hit = load_scene().is_hit(states[:, :2], reached[:, :2])
        success = ~hit & (reached[:, 1] >= load_scene().finish_y)
        return success.astype(np.float64), hit | success, success

    def demonstrate(self, seed: int) -> Episode:
        return demonstrate_avoid(
            exactly(self).stepper(1), seed, self.expert, max_steps=self.max_episode_steps
        )

    def take_over(self, stepper: AvoidStepper, seed: int) -> Callable[[], Array]:
        """See `envs.rollouts.supervised.HasTakeover`."""
        return take_over_avoid(stepper, seed, self.expert)

    def mode_names(self) -> tuple[str, ...]:
        """Return the names of all values of the metric `mode`; direct modes come first."""
        scene = load_scene()
        return tuple(scene.mode_name(mode) for mode in range(len(scene.modes)))

    def figure(self, panels: Mapping[str, tuple[Sequence[Array], Sequence[bool]]]) -> Figure:
        """Draw one panel of trajectories per title; see `envs.tasks.avoid.figures`."""
        from envs.tasks.avoid.figures import avoid_figure

        return avoid_figure(panels, has_pillars=self.rows == "fixed")
