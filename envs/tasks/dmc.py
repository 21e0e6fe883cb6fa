"""The DeepMind Control Suite: bodies from a pendulum to a dog, rewards in [0, 1] at each of 1,000 steps.

Physics, observations and rewards are those of `dm_control.suite`; the parts of an observation are joined in
its order. Each row has a model of its own, as starts write targets and sizes into it. An episode follows from
its seed, which seeds the random numbers of the suite's task. There is no success: policies are judged by
their return. Left out are `lqr`, whose actions have no bounds, and `quadruped-escape`, whose terrain differs
from episode to episode and could not be drawn.

Source:
    Tassa et al., DeepMind Control Suite (arXiv 1801.00690).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np

from envs.engine.physics import MujocoStepper
from envs.engine.pixels import HasAppearance, HasCameras
from envs.engine.rendering import gl_for_others, replay_frames
from envs.spec import Array, EnvSpec, StepResult
from policies.bounds import bounded
from policies.errors import ConfigError
from policies.extras import require
from policies.registry import register

TASKS = (
    *("acrobot-swingup", "acrobot-swingup_sparse", "ball_in_cup-catch", "cartpole-balance"),
    *("cartpole-balance_sparse", "cartpole-swingup", "cartpole-swingup_sparse", "cartpole-two_poles"),
    *("cartpole-three_poles", "cheetah-run", "dog-stand", "dog-walk", "dog-trot", "dog-run", "dog-fetch"),
    *("finger-spin", "finger-turn_easy", "finger-turn_hard", "fish-upright", "fish-swim", "hopper-stand"),
    *("hopper-hop", "humanoid-stand", "humanoid-walk", "humanoid-run", "humanoid-run_pure_state"),
    *("humanoid_CMU-stand", "humanoid_CMU-walk", "humanoid_CMU-run", "manipulator-bring_ball"),
    *("manipulator-bring_peg", "manipulator-insert_ball", "manipulator-insert_peg", "pendulum-swingup"),
    *("point_mass-easy", "point_mass-hard", "quadruped-walk", "quadruped-run", "quadruped-fetch"),
    *("reacher-easy", "reacher-hard", "stacker-stack_2", "stacker-stack_4", "swimmer-swimmer6"),
    *("swimmer-swimmer15", "walker-stand", "walker-walk", "walker-run"),
)
_IN_MODEL = ("body_pos", "body_quat", "geom_pos", "geom_size", "geom_rgba", "site_pos")  # set by starts


class SuiteStepper(MujocoStepper, HasAppearance):
    """Step N environments of one of `TASKS`, each with a model of its own."""

    def __init__(self, task: str, num_envs: int) -> None:
        made = load_suite(task)
        super().__init__(made.physics.model.ptr, num_envs)
        self._task = copy.deepcopy(made.task)
        self._physics = [made.physics.copy() for _ in range(num_envs)]
        self._substeps = made._n_sub_steps
        self._seeds = [0] * num_envs
        self.model, self.datas = self._physics[0].model.ptr, [one.data.ptr for one in self._physics]

    def reset(self, row: int, seed: int) -> Array:
        physics, self._seeds[row] = self._physics[row], seed
        self._task.random.seed(seed)
        with physics.reset_context():
            self._task.initialize_episode(physics)
        return self._observe(row)

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, Da) for one control step."""
        obs, reward, end = [], [], []
        for row, action in zip(rows.tolist(), actions, strict=True):
            physics = self._physics[row]
            self._task.before_step(action, physics)
            physics.step(self._substeps)
            self._task.after_step(physics)
            reward.append(float(self._task.get_reward(physics)))
            end.append(self._task.get_termination(physics) is not None)
            obs.append(self._observe(row))
        no = np.zeros(len(obs), bool)
        return StepResult(np.stack(obs), np.array(reward), np.array(end, bool), no, no)

    def get_appearance(self, row: int) -> dict[str, Array]:
        model = self._physics[row].model.ptr
        return {name: getattr(model, name).copy() for name in _IN_MODEL}

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "seeds": list(self._seeds)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; what a start has written into a model follows from its seed."""
        import mujoco

        for row, seed in enumerate(state["seeds"]):
            self.reset(row, seed)
        super().set_state(state)
        for one in self._physics:  # the suite's steps begin with positions and velocities computed
            mujoco.mj_step1(one.model.ptr, one.data.ptr)

    def _observe(self, row: int) -> Array:
        seen = self._task.get_observation(self._physics[row])
        return np.concatenate([np.asarray(part, np.float64).reshape(-1) for part in seen.values()])


@cache
def load_suite(task: str) -> Any:
    """Build the suite's environment of a task once per process."""
    with gl_for_others(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the viewer warns about a missing display on import
        suite = require("dm_control.suite", extra=ControlSuite.extra, what=f"env=dmc env.task={task}")
        return suite.load(*task.split("-"), task_kwargs={"random": 0})


@register("env", "dmc")
@dataclass(frozen=True)
class ControlSuite(HasCameras):
    """One of 48 tasks of the DeepMind Control Suite, `env.task=hopper-stand` for instance."""

    needs: ClassVar[str] = "task"  # the option without which there is no task
    packages: ClassVar[tuple[str, ...]] = ("dm_control",)
    extra: ClassVar[str] = "dmc"  # installs `packages`

    task: str = ""  # body and task, e.g. cheetah-run or cartpole-swingup_sparse
    max_episode_steps: int = bounded(1000, ge=1)  # time limit in control steps

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task and self.task not in TASKS:
            near = get_close_matches(self.task, TASKS, 5, 0.4)
            close = f"; near it: {', '.join(near)}" if near else ""
            raise ConfigError(f"env.task must be one of {len(TASKS)} of the suite; got '{self.task}'{close}.")

    @cached_property
    def spec(self) -> EnvSpec:
        if not self.task:
            raise ConfigError("env=dmc needs env.task=<body>-<task>, e.g. env.task=cheetah-run.")
        made = load_suite(self.task)
        actions, model = made.action_spec(), made.physics.model
        seen = made.observation_spec().items()
        names = tuple(f"{key} {i}" for key, part in seen for i in range(int(np.prod(part.shape))))
        return EnvSpec(
            name=self.task,
            family="dmc",
            obs_dim=len(names),
            action_dim=len(actions.minimum),
            action_low=tuple(actions.minimum.tolist()),
            action_high=tuple(actions.maximum.tolist()),
            max_episode_steps=self.max_episode_steps,
            control_hz=1.0 / made.control_timestep(),
            obs_names=names,
            action_names=tuple(model.id2name(i, "actuator") or f"actuator {i}" for i in range(model.nu)),
            packages=self.packages,
            extra=self.extra,
        )

    def stepper(self, num_envs: int) -> SuiteStepper:
        return SuiteStepper(self.task, num_envs)

    def render_frames(self, seed: int, actions: Array, **options: Any) -> Array:
        vector = self.make_vector(1)
        camera = load_suite(self.task).physics.model.id2name(0, "camera")
        return replay_frames(vector, seed, actions, camera=camera, **options)
