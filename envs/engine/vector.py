"""Vectors of environments that execute action chunks.

A `Stepper` advances some of one simulator's N environments by one control step. `ChunkVector` adds
observation history, chunks that stop at the end of their episode, time limits, seeds and saving. There is no
automatic reset: an ended episode returns its true last observation.

Legend: N environments, M of them addressed, To observation history, Ta executed steps, Do and Da widths.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from envs.engine.image_history import ImageHistory
from envs.engine.mujoco_warnings import log_warnings
from envs.spec import (
    Array,
    ChunkStep,
    ChunkStepper,
    EnvSpec,
    GoalStepper,
    SimulatorStepper,
    Stepper,
    StepResult,
)
from policies.errors import (
    BurnishError,
    CapabilityError,
    CheckpointError,
    ConfigError,
    EnvironmentFailure,
    TrainingError,
)


@contextmanager
def named_errors(name: str, what: str) -> Iterator[None]:
    """Convert errors of an environment's code to an EnvironmentFailure that names it."""
    try:
        yield
    except BurnishError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split())[:300]
        raise EnvironmentFailure(
            f"environment '{name}' failed in {what}: {type(error).__name__}: {reason} "
            f"({last.filename}:{last.lineno}). Repair the environment; BURNISH_TRACEBACK=1 shows more."
        ) from error


class ChunkVector:
    """Execute chunks on a stepper, with history, limits and saving.

    Args:
        spec: The task; its action box clips, its `max_episode_steps` truncates, and with its
            `terminate_on_success` a success terminates.
        stepper: The simulator.
        obs_steps: Length To of the observation history; a reset repeats the first observation.
        paper_compat: Reproduce published chunk wrappers: a limit reported by the simulator counts as
            terminated *and* truncated, and finished environments may be stepped without a reset.
        image_history: Camera images with a history of equal length; None: no cameras.
    """

    def __init__(
        self,
        spec: EnvSpec,
        stepper: Stepper,
        *,
        obs_steps: int = 1,
        paper_compat: bool = False,
        image_history: ImageHistory[Any] | None = None,
    ) -> None:
        if obs_steps < 1:
            raise ConfigError(f"obs_steps must be at least 1; got {obs_steps}.")
        log_warnings()
        self.spec = spec
        self.stepper = stepper
        self.num_envs = stepper.num_envs
        self.obs_steps = obs_steps
        self.paper_compat = paper_compat
        self._image_history = image_history
        self._low = np.asarray(spec.action_low, np.float32)  # dtype of a gymnasium box
        self._high = np.asarray(spec.action_high, np.float32)
        self._history = np.zeros((self.num_envs, obs_steps, spec.obs_dim))
        self._elapsed = np.zeros(self.num_envs, np.int64)
        self._finished = np.ones(self.num_envs, bool)
        self._seeds: list[int | None] = [None] * self.num_envs  # of the episodes; None: loaded

    @property
    def can_save(self) -> bool:
        return self.stepper.can_save

    def reset(self, seeds: Sequence[int], rows: Sequence[int] | Array | None = None) -> Array:
        """Start one episode per seed in `rows` (indices or an (N,) mask; default: all).

        Returns:
            (n, To, Do) the first observation of each episode, repeated To times.

        Raises:
            ConfigError: If the number of seeds is not the number of rows.
        """
        index = np.arange(self.num_envs) if rows is None else np.asarray(rows)
        index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)
        if len(seeds) != len(index):
            raise ConfigError(f"reset needs one seed per row; got {len(seeds)} seeds for {len(index)} rows.")
        for row, seed in zip(index.tolist(), seeds, strict=True):
            self._seeds[row] = int(seed)
            with named_errors(self.spec.name, "reset"):
                self._history[row] = self.stepper.reset(row, int(seed))
            if self._image_history is not None:
                self._image_history.begin(row)
        self._elapsed[index] = 0
        self._finished[index] = False
        self._require_finite("observation", self._history[index], index)
        return self._history[index]

    def step_chunk(self, actions: Array, active: Array | None = None) -> ChunkStep:
        """Execute chunks (N, Ta, Da), clipped to the action box, where `active` (N,) is true.

        Every environment stops at the end of its episode and drops the rest of its chunk.

        Raises:
            ConfigError: If the shape is wrong or a finished environment was not reset.
            TrainingError: If an action is not finite.
            EnvironmentFailure: If the simulator raises an error, or an observation or reward is not finite.
        """
        running = np.ones(self.num_envs, bool) if active is None else np.array(active, bool)
        actions = self._check_actions(actions, running)
        if isinstance(self.stepper, ChunkStepper) and not self.paper_compat and self._image_history is None:
            return self._step_through(self.stepper, actions, running)
        n, num_steps = actions.shape[:2]
        rewards = np.zeros((n, num_steps))
        path = np.zeros((n, num_steps, self.spec.obs_dim))
        length = np.zeros(n, np.int64)
        terminated, truncated, success = np.zeros((3, n), bool)
        for j in range(num_steps):
            rows = np.flatnonzero(running)
            if rows.size == 0:
                break
            with named_errors(self.spec.name, "step"):
                step = self.stepper.step(rows, actions[rows, j])
            self._append(rows, step.obs)
            path[rows, j] = step.obs
            rewards[rows, j] = step.reward
            length[rows] += 1
            ended = self._terminated(step)
            terminated[rows] = ended | step.truncated if self.paper_compat else ended
            truncated[rows] = step.truncated | (self._elapsed[rows] >= self.spec.max_episode_steps)
            success[rows] |= step.success
            running &= ~(terminated | truncated)
        self._require_finite("observation", path)
        self._require_finite("reward", rewards)
        self._finished |= terminated | truncated
        obs = self._history.copy()
        return ChunkStep(obs, rewards, length, terminated, truncated, success, path, self.stepper.metrics())

    def observe_again(self, row: int, obs: Array) -> Array:
        """Replace the newest observation (Do,) of a row whose simulator was changed between steps.

        Returns:
            (1, To, Do) the history of the row.
        """
        self._history[row, -1] = obs
        if self._image_history is not None:
            self._image_history.renew(row)
        return self._history[[row]]

    def images(self, rows: Sequence[int] | Array | None = None) -> dict[str, Array]:
        """Render the camera images of some rows (default: all) at the steps of the observation history.

        Returns:
            (n, To, H, W, 3) uint8 by camera; empty without cameras.

        Raises:
            MissingExtraError: If no GL context can be made.
        """
        index = range(self.num_envs) if rows is None else np.asarray(rows).tolist()
        return {} if self._image_history is None else self._image_history.images(index)

    def goals(self, rows: Sequence[int] | Array | None = None) -> dict[str, Array]:
        """Return `goal` (n, Dg) float64 of some rows (default: all); empty without separate goals."""
        if not self.spec.goal_dim or not isinstance(self.stepper, GoalStepper):
            return {}
        goals = self.stepper.goals()
        return {"goal": goals.copy() if rows is None else goals[np.asarray(rows, np.int64)]}

    def simulator(self, rows: Sequence[int] | Array | None = None) -> dict[str, Array]:
        """Return `simulator` (n, Ds) float64 of some rows (default: all), if the task gives it."""
        if not self.spec.simulator_dim or not isinstance(self.stepper, SimulatorStepper):
            return {}
        states = self.stepper.simulator()
        return {"simulator": states if rows is None else states[np.asarray(rows, np.int64)]}

    def _step_through(self, stepper: ChunkStepper, actions: Array, running: Array) -> ChunkStep:
        """Execute whole chunks at once and keep the part before the end of each episode."""
        n, num_steps = actions.shape[:2]
        rows = np.flatnonzero(running)
        with named_errors(self.spec.name, "step"):
            step = stepper.step_through(rows, actions[rows])
        count = np.arange(1, num_steps + 1)  # executed steps after each step of the chunk
        limited = step.truncated | (self._elapsed[rows, None] + count >= self.spec.max_episode_steps)
        over = self._terminated(step)  # (M, Ta), as all of these
        ended = over | limited
        executed = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, num_steps)
        is_kept, last = count <= executed[:, None], (np.arange(len(rows)), executed - 1)
        rewards, path = np.zeros((n, num_steps)), np.zeros((n, num_steps, self.spec.obs_dim))
        length, flags = np.zeros(n, np.int64), np.zeros((3, n), bool)
        rewards[rows], length[rows] = np.where(is_kept, step.reward, 0.0), executed
        path[rows] = np.where(is_kept[:, :, None], step.obs, 0.0)
        self._require_finite("observation", path)
        self._require_finite("reward", rewards)
        flags[:, rows] = over[last], limited[last], (step.success & is_kept).any(axis=1)
        terminated, truncated, success = flags
        observed = np.concatenate([self._history[rows], step.obs], axis=1)  # (M, To + Ta, Do)
        window = executed[:, None] + np.arange(self.obs_steps)
        self._history[rows] = observed[np.arange(len(rows))[:, None], window]
        self._elapsed[rows] += executed
        self._finished |= terminated | truncated
        obs = self._history.copy()
        return ChunkStep(obs, rewards, length, terminated, truncated, success, path, self.stepper.metrics())

    def _require_finite(self, what: str, values: Array, rows: Array | None = None) -> None:
        if np.isfinite(values).all():
            return
        bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
        places = self._places((bad if rows is None else rows[bad]).tolist())
        raise EnvironmentFailure(
            f"environment '{self.spec.name}' must give finite numbers; its {what} is not finite in {places}. "
            "Repair the environment."
        )

    def _places(self, rows: Sequence[int]) -> str:
        """Return rows with the seeds of their episodes, for errors."""
        return f"rows {rows}, seeds {[seed for row in rows if (seed := self._seeds[row]) is not None]}"

    def _terminated(self, step: StepResult) -> Array:
        return step.terminated | step.success if self.spec.terminate_on_success else step.terminated

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines all following steps.

        Raises:
            CapabilityError: If the simulator cannot save its state.
        """
        if not self.can_save:
            raise CapabilityError(f"environment '{self.spec.name}' cannot save its state.")
        return {
            "simulator": self.stepper.get_state(),
            "history": self._history.copy(),
            "elapsed": self._elapsed.copy(),
            "finished": self._finished.copy(),
            **({} if self._image_history is None else {"film": self._image_history.get_state()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; raises CheckpointError if the state has other shapes."""
        history = np.asarray(state["history"])
        if history.shape != self._history.shape:
            raise CheckpointError(
                f"saved environments have observations {history.shape} (N, To, Do); "
                f"'{self.spec.name}' now has {self._history.shape}. Use the saved num_envs and obs_steps."
            )
        self._history = history.copy()
        self._elapsed = np.array(state["elapsed"], np.int64)
        self._finished = np.array(state["finished"], bool)
        self._seeds = [None] * self.num_envs
        self.stepper.set_state(state["simulator"])
        if self._image_history is not None:
            self._image_history.set_state(state["film"])

    def close(self) -> None:
        if self._image_history is not None:
            self._image_history.close()
        self.stepper.close()

    def _check_actions(self, actions: Array, active: Array) -> Array:
        actions = np.asarray(actions)
        if actions.ndim != 3 or actions.shape[::2] != (self.num_envs, self.spec.action_dim):
            raise ConfigError(
                f"actions of '{self.spec.name}' must be ({self.num_envs}, Ta, {self.spec.action_dim}) "
                f"= (num_envs, executed steps, action_dim); got {actions.shape}."
            )
        if not np.isfinite(actions).all() and not np.isfinite(actions[active]).all():
            bad = np.flatnonzero(active & ~np.isfinite(actions).all(axis=(1, 2)))
            places = self._places(bad.tolist())
            raise TrainingError(f"actions of '{self.spec.name}' must be finite; they are not in {places}.")
        if not self.paper_compat and (self._finished & active).any():
            rows = np.flatnonzero(self._finished & active).tolist()
            raise ConfigError(f"environments {rows} of '{self.spec.name}' are finished; reset them first.")
        return np.clip(actions, self._low, self._high)

    def _append(self, rows: Array, obs: Array) -> None:
        if self.obs_steps > 1:
            self._history[rows, :-1] = self._history[rows, 1:]
        self._history[rows, -1] = obs
        self._elapsed[rows] += 1
        if self._image_history is not None:
            self._image_history.add(rows.tolist())
