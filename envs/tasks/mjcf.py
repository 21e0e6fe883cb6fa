"""A task of your own in one Python file: a MuJoCo model and the functions `reset`, `observe` and `reward`.

The file defines

    MODEL                          MJCF as text, or the path of an MJCF file, relative to the file
    reset(model, data, rng)        set the first state of an episode, which has the model to itself; draw
                                   everything from `rng`
    observe(model, data)           the observation: an array (Do,), or a dict of arrays by name
    reward(model, data, action)    the reward of a control step

and may define

    success(model, data)           whether the task is done; ends the episode
    failure(model, data)           whether the episode is lost; ends it too
    act(model, data, action)       apply an action; default: actions in [-1, 1] span `ctrlrange`
    expert(model, data, rng)       the action of a demonstrator, for `burnish collect`
    CONTROL_HZ = 20.0              control rate [Hz]
    MAX_EPISODE_STEPS = 200        time limit in control steps
    ACTIONS, OBSERVATIONS          names with units in brackets; default: the actuators', numbered parts

An action is clipped to [-1, 1] per entry. Legend: N environments, M of them addressed, Do and Da widths.
"""

from __future__ import annotations

import copy
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from envs.engine.physics import MujocoStepper
from envs.engine.pixels import HasAppearance, HasCameras, cameras_of, check_camera_names
from envs.engine.vector import named_errors
from envs.rollouts.recording import Recording, expert_rng
from envs.spec import Array, EnvSpec, StepResult, symmetric_spec
from policies.bounds import bounded
from policies.errors import CapabilityError, ConfigError
from policies.paths import path_field
from policies.registry import register

if TYPE_CHECKING:
    import mujoco

    from envs.datasets.episode import Episode

REQUIRED = ("MODEL", "reset", "observe", "reward")
_DEFAULTS = {"CONTROL_HZ": 20.0, "MAX_EPISODE_STEPS": 200, "ACTIONS": (), "OBSERVATIONS": ()}
_OPTIONAL = ("success", "failure", "act", "expert")
_DRAWN = (  # what a reset may write into the model that is seen
    *("body_pos", "body_quat", "geom_pos", "geom_quat", "geom_size", "geom_rgba", "mat_rgba"),
    *("site_pos", "site_quat", "site_size", "site_rgba", "cam_pos", "cam_quat", "light_pos", "light_dir"),
)


@lru_cache(maxsize=8)
def load_task(file: str, changed_ns: int) -> SimpleNamespace:
    """Run a task file and return its definitions, with defaults for what it leaves out.

    `changed_ns` is when the file was written, so that one that changed is run again.

    Raises:
        ConfigError: If the file cannot be run, or lacks a definition.
    """
    try:
        found = runpy.run_path(file)
    except Exception as error:  # the user's code
        raise ConfigError(f"env.file={file} cannot be run: {type(error).__name__}: {error}") from error
    if missing := [name for name in REQUIRED if name not in found]:
        raise ConfigError(f"env.file={file} must define {', '.join(REQUIRED)}; {missing} are missing.")
    known = {name: found.get(name) for name in (*REQUIRED, *_OPTIONAL)}
    return SimpleNamespace(**known, **{name: found.get(name, value) for name, value in _DEFAULTS.items()})


def compile_model(file: Path, model: Any) -> mujoco.MjModel:
    """Compile the `MODEL` of a task file.

    Raises:
        ConfigError: If MuJoCo refuses it; names its reason.
    """
    import mujoco

    text = str(model)
    try:
        if text.lstrip().startswith("<"):
            return mujoco.MjModel.from_xml_string(text)
        return mujoco.MjModel.from_xml_path(str(file.parent / text))
    except ValueError as error:
        raise ConfigError(f"MODEL of env.file={file} is no valid MJCF: {str(error)[:300]}") from error


class MjcfStepper(MujocoStepper, HasAppearance):
    """Step N states of the model of a task file; each episode has a model of its own."""

    def __init__(self, task: Mjcf, num_envs: int) -> None:
        super().__init__(compile_model(Path(task.file), task.code.MODEL), num_envs)
        self._code = task.code
        self._substeps = task.substeps(self.model)
        self._fresh, self._models, self._seeds = self.model, [self.model] * num_envs, [0] * num_envs

    def reset(self, row: int, seed: int) -> Array:
        import mujoco

        model, data = copy.copy(self._fresh), self.datas[row]
        self._models[row], self._seeds[row] = model, seed
        self.model = self._models[0]  # what is drawn of row 0
        mujoco.mj_resetData(model, data)
        self._code.reset(model, data, np.random.default_rng(seed))
        mujoco.mj_forward(model, data)
        return self._observe(row)

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, Da) in [-1, 1] for one control step."""
        import mujoco

        obs, reward, failure, success = [], [], [], []
        for row, action in zip(rows.tolist(), np.asarray(actions, np.float64), strict=True):
            model, data = self._models[row], self.datas[row]
            self._act(model, data, action)
            mujoco.mj_step(model, data, self._substeps)
            mujoco.mj_forward(model, data)  # poses and sensors of the state that was reached
            obs.append(self._observe(row))
            reward.append(float(self._code.reward(model, data, action)))
            failure.append(self._holds("failure", row))
            success.append(self._holds("success", row))
        done = np.array(success, bool)
        return StepResult(
            np.stack(obs), np.array(reward), np.array(failure) | done, np.zeros_like(done), done
        )

    def get_appearance(self, row: int) -> dict[str, Array]:
        return {name: getattr(self._models[row], name).copy() for name in _DRAWN}

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "seeds": list(self._seeds)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; what a reset has written into a model follows from its seed."""
        import mujoco

        for row, seed in enumerate(state.get("seeds", ())):  # states of former versions have none
            self.reset(row, seed)
        super().set_state(state)
        for model, data in zip(self._models, self.datas, strict=True):
            mujoco.mj_forward(model, data)

    def _act(self, model: Any, data: Any, action: Array) -> None:
        if self._code.act is not None:
            self._code.act(model, data, action)
            return
        low, high = model.actuator_ctrlrange.T
        limited = model.actuator_ctrllimited.astype(bool)
        data.ctrl[:] = np.where(limited, (low + high) / 2 + action * (high - low) / 2, action)

    def _holds(self, name: str, row: int) -> bool:
        rule = getattr(self._code, name)
        return rule is not None and bool(rule(self._models[row], self.datas[row]))

    def _observe(self, row: int) -> Array:
        return _flat(self._code.observe(self._models[row], self.datas[row]))


@register("env", "mjcf")
@dataclass(frozen=True)
class Mjcf(HasCameras):
    """A task of your own: one Python file with a MuJoCo model and three functions, `env.file=reach.py`."""

    needs: ClassVar[str] = "file"  # the option without which there is no task
    runs_code: ClassVar[bool] = True  # options name code that is run

    file: str = path_field("")  # the Python file
    max_episode_steps: int | None = bounded(None, ge=1)  # control steps; null: MAX_EPISODE_STEPS of the file

    @property
    def code(self) -> SimpleNamespace:
        """Definitions of the file."""
        place = Path(self.file).expanduser()
        if not self.file or not place.is_file():
            raise ConfigError(f"env=mjcf needs env.file=<Python file>; got '{self.file}'.")
        return load_task(str(place.resolve()), place.stat().st_mtime_ns)

    @cached_property
    def spec(self) -> EnvSpec:
        code, place = self.code, Path(self.file)
        model = compile_model(place, code.MODEL)
        check_camera_names(self.cameras, cameras_of(model, self.image_renderer))
        return symmetric_spec(
            tuple(code.OBSERVATIONS) or self._observation_names(model),
            tuple(code.ACTIONS) or tuple(f"{_actuator(model, i)} [of full]" for i in range(model.nu)),
            name=place.stem,
            family="mjcf",
            max_episode_steps=self.max_episode_steps or int(code.MAX_EPISODE_STEPS),
            control_hz=1.0 / (self.substeps(model) * model.opt.timestep),
            success_rule="" if code.success is None else _summary(code.success, place),
        )

    def substeps(self, model: Any) -> int:
        """Return the physics steps per action."""
        return max(round(1.0 / float(self.code.CONTROL_HZ) / model.opt.timestep), 1)

    def stepper(self, num_envs: int) -> MjcfStepper:
        return MjcfStepper(self, num_envs)

    def demonstrate(self, seed: int) -> Episode:
        """Record the file's `expert`.

        Raises:
            CapabilityError: If there is none.
        """
        code, stepper = self.code, self.stepper(1)
        if code.expert is None:
            raise CapabilityError(f"env.file={self.file} has no expert(model, data, rng) to record.")
        rng, limit = expert_rng(seed), self.spec.max_episode_steps
        with named_errors(self.spec.name, "a demonstration"):
            record = Recording(stepper, seed)
            while not record.ended and len(record) < limit:
                action = np.asarray(code.expert(stepper.model, stepper.datas[0], rng), np.float64)
                record.step(np.clip(action, -1, 1))
        return record.episode(truncated=len(record) >= limit, success=record.was_solved)

    def _observation_names(self, model: Any) -> tuple[str, ...]:
        import mujoco

        data, name = mujoco.MjData(model), Path(self.file).stem
        with named_errors(name, "reset"):
            self.code.reset(model, data, np.random.default_rng(0))
        mujoco.mj_forward(model, data)
        with named_errors(name, "observe"):
            seen = self.code.observe(model, data)
        parts = seen if isinstance(seen, Mapping) else {"observation": seen}
        return tuple(f"{key} {i}" for key, value in parts.items() for i in range(np.size(value)))


def _flat(seen: Any) -> Array:
    parts = list(seen.values()) if isinstance(seen, Mapping) else [seen]
    return np.concatenate([np.asarray(part, np.float64).reshape(-1) for part in parts])


def _actuator(model: Any, i: int) -> str:
    return model.actuator(i).name or f"actuator {i}"


def _summary(rule: Any, place: Path) -> str:
    text = (rule.__doc__ or "").strip().splitlines()
    return text[0].rstrip(".") if text else f"success() of {place.name}"
