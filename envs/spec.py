"""Environment specification, independent of any simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from policies.registry import registered

Array = np.ndarray


@dataclass(frozen=True)
class EnvSpec:
    """Names, sizes, units and rules of a task.

    `obs_names` and `action_names` carry the unit in brackets, e.g. `torso height [m]`.
    """

    name: str
    family: str
    obs_dim: int
    action_dim: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    max_episode_steps: int
    control_hz: float
    obs_names: tuple[str, ...]
    action_names: tuple[str, ...]
    success_rule: str = ""  # description of success; empty for tasks with a return only
    terminate_on_success: bool = False  # whether success terminates the episode of a task that could continue
    reference_scores: tuple[float, float] | None = None  # D4RL (random, expert) returns
    goal_dim: int = 0  # Dg of goals provided beside the observation; 0: none
    state_goal_dim: int = 0  # Dg of goals appended to the observation; 0: none
    simulator_dim: int = 0  # Ds of the state that critics may read, where observations hide some of it
    episode_metrics: tuple[str, ...] = ()  # extra per-episode metrics, e.g. "mode" of `avoid`
    packages: tuple[str, ...] = ()  # packages besides MuJoCo and gymnasium whose versions affect the numbers
    extra: str = ""  # extra of burnish that installs `packages`

    @property
    def quantity(self) -> str:
        return judged_by(self.success_rule)


def symmetric_spec(
    obs_names: tuple[str, ...], action_names: tuple[str, ...], *, limit: float | Array = 1.0, **rest: Any
) -> EnvSpec:
    """Return the specification of a task with actions in [-limit, limit]; `rest` are fields of `EnvSpec`."""
    high = np.broadcast_to(limit, len(action_names))
    return EnvSpec(
        obs_dim=len(obs_names),
        action_dim=len(action_names),
        action_low=tuple((-high).tolist()),
        action_high=tuple(high.tolist()),
        obs_names=obs_names,
        action_names=action_names,
        **rest,
    )


def judged_by(success_rule: str) -> str:
    """Return the evaluation criterion: `success` if there is a success rule, else `return`."""
    return "success" if success_rule else "return"


class EnvConfig(Protocol):
    """Registered configuration (group `env`); `make_vector` imports the simulator."""

    @property
    def spec(self) -> EnvSpec: ...

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> VectorEnv:
        """Build the exact in-process engine.

        Raises:
            MissingExtraError: If the simulator is not installed; names the extra.
        """
        ...


def options_of(env: EnvConfig) -> dict[str, Any]:
    """Return the options of a task; empty unless its configuration is a dataclass."""
    return asdict(env) if is_dataclass(env) and not isinstance(env, type) else {}


def named_options(env: EnvConfig) -> dict[str, Any]:
    """Return a task's registered name (else that of its specification) and options as plain values."""
    return {"name": task_name(env), **options_of(env)}


def task_name(env: EnvConfig) -> str:
    """Return the registered name of a task; that of its specification for a class that is not registered."""
    own = next((name for name, part in registered("env").items() if part is type(env)), None)
    return env.spec.name if own is None else own


@dataclass(frozen=True)
class ChunkStep:
    """Result of executing one chunk.

    Shapes:
        obs: (N, To, Do) float64, history up to the last executed step; the true final one at an end.
        rewards: (N, Ta) float64, per control step, zero past `length`.
        length: (N,) executed control steps; 0 for inactive environments.
        terminated: (N,) the task ended the episode; later values are zero.
        truncated: (N,) a time limit ended the episode; values bootstrap from `obs`. Both flags can be true.
        success: (N,) the success rule held after some executed step.
        path: (N, Ta, Do) float64, newest observation after each executed step, zero past `length`.
        metrics: task-specific quantities of the running episode, (N,) each.
    """

    obs: Array
    rewards: Array
    length: Array
    terminated: Array
    truncated: Array
    success: Array
    path: Array
    metrics: dict[str, Array] = field(default_factory=dict)

    @property
    def done(self) -> Array:
        return self.terminated | self.truncated


class VectorEnv(Protocol):
    """N environments of one task in this process."""

    spec: EnvSpec
    num_envs: int
    obs_steps: int

    @property
    def can_save(self) -> bool:
        """Whether `state_dict` restores bit-exactly."""
        ...

    def reset(self, seeds: Sequence[int], rows: Sequence[int] | Array | None = None) -> Array:
        """Start seeded episodes in the given rows (default: all); returns (n, To, Do)."""
        ...

    def step_chunk(self, actions: Array, active: Array | None = None) -> ChunkStep:
        """Execute chunks (N, Ta, Da), clipped to the action box, where `active` (N,) is true."""
        ...

    def images(self, rows: Sequence[int] | Array | None = None) -> dict[str, Array]:
        """Return camera images of some rows (default: all), (n, To, H, W, 3) uint8 by camera."""
        ...

    def goals(self, rows: Sequence[int] | Array | None = None) -> dict[str, Array]:
        """Return `goal` (n, Dg) of some rows (default: all); empty for tasks without separate goals."""
        ...

    def simulator(self, rows: Sequence[int] | Array | None = None) -> dict[str, Array]:
        """Return the state `simulator` (n, Ds) of some rows (default: all), if the task gives it."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """One control step of M environments.

    Shapes:
        obs: (M, Do) float64. reward: (M,) float64. terminated, truncated, success: (M,) bool, where
        `truncated` is a limit that the simulator itself applies.
    """

    obs: Array
    reward: Array
    terminated: Array
    truncated: Array
    success: Array

    def at(self, j: int) -> StepResult:
        """Return step j of a chunk (M, Ta, ...)."""
        return StepResult(*(getattr(self, f.name)[:, j] for f in fields(self)))


class Stepper(Protocol):
    """One simulator: advances selected environments by one control step."""

    num_envs: int

    @property
    def can_save(self) -> bool:
        """Whether `get_state` and `set_state` restore bit-exactly."""
        ...

    def reset(self, row: int, seed: int) -> Array:
        """Start a seeded episode in one row; returns the observation (Do,)."""
        ...

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, Da) inside the action box."""
        ...

    def metrics(self) -> dict[str, Array]:
        """Return task-specific metrics of the running episodes, (N,) each."""
        ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ChunkStepper(Protocol):
    """A simulator that steps whole chunks faster and may continue past the end of an episode."""

    def step_through(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by chunks (M, Ta, Da); every field of the result is (M, Ta, ...).

        Steps after the end of an episode are discarded, and the row is reset before its next use.
        """
        ...


@runtime_checkable
class GoalStepper(Protocol):
    """A simulator whose goals are provided beside the observation."""

    def goals(self) -> Array:
        """Return the goals of the running episodes, (N, Dg)."""
        ...


@runtime_checkable
class GoalTask(Protocol):
    """A task that judges states under any goal."""

    def achieved_goal(self, states: Array) -> Array:
        """Return the goals (..., Dg) that states (..., Do) reach."""
        ...

    def outcome(self, states: Array, goals: Array) -> tuple[Array, Array]:
        """Return reward and termination (...) of states (..., Do) reached under goals (..., Dg)."""
        ...


@runtime_checkable
class JudgedTask(Protocol):
    """A task whose rewards and ends are functions of a control step."""

    def judge(self, states: Array, actions: Array, reached: Array) -> tuple[Array, Array, Array]:
        """Return reward, termination and success, (M,) each, of steps.

        Shapes:
            states, reached: (M, Do), before and after. actions: (M, Da), inside the action box.
        """
        ...


@runtime_checkable
class SimulatorStepper(Protocol):
    """A simulator that gives its state to critics."""

    def simulator(self) -> Array:
        """Return the states (N, Ds), scaled to about [-1, 1]."""
        ...
