"""Multi-modal expert of `avoid`: draws a path through the pillars and tracks it with noise.

Each episode draws a mode (uniformly), an aim in each gap, a pace, and two Ornstein-Uhlenbeck processes: one
varies the pace, the other pushes the disc sideways, less near the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from envs.rollouts.recording import Recording, expert_rng
from envs.spec import Array, Stepper
from envs.tasks.avoid.scene import AvoidScene
from policies.bounds import Checked, bounded
from policies.errors import ConfigError

if TYPE_CHECKING:
    from envs.datasets.episode import Episode

WOBBLE_M = 0.01  # standard deviation of the sideways wobble far from the rows, at noise = 1
AIM_M = 0.004  # standard deviation of the aim inside a gap [m], at noise = 1, truncated at two of them
PACE_SPREAD = 0.15  # relative spread of the pace, between episodes and within one, at noise = 1
WOBBLE_STEPS = 8.0  # correlation time of wobble and pace [control steps]
STEADY_M = 0.0078  # largest wobble near a row [m]
NEAR_M = 0.05  # distance to a row that counts as near [m]
RESPONSE_S = 0.05  # prediction horizon of the disc's motion [s]
LOOK_M = 0.03  # look-ahead distance on the path [m]


@dataclass(frozen=True)
class AvoidExpert(Checked):
    """Options of the expert, `env.expert.*`."""

    key: ClassVar = "env.expert"

    noise: float = bounded(1.0, ge=0)  # scale of aim error, wobble and pace variation; 0: deterministic
    pace: float = bounded(0.75, gt=0, le=1)  # mean speed as a fraction of the largest step
    num_modes: int | None = bounded(None, ge=1)  # use only the first modes of `AvoidScene.modes`
    modes: tuple[int, ...] = bounded((), ge=0)  # ids of the modes to use; (): see num_modes

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("modes", self.num_modes is None or not self.modes, "left out beside num_modes")

    def selected_modes(self, num_direct: int) -> tuple[int, ...]:
        """Return the ids of the selected modes, or refuse ids beyond the `num_direct` direct modes."""
        count = num_direct if self.num_modes is None else self.num_modes
        chosen = self.modes or tuple(range(count))
        if not chosen or min(chosen) < 0 or max(chosen) >= num_direct:
            raise ConfigError(
                f"env.expert.modes must be from 0 to {num_direct - 1}; "
                f"got num_modes={self.num_modes}, modes={self.modes}."
            )
        return chosen


def plan(
    scene: AvoidScene, gaps: tuple[int, ...], start: np.ndarray, *, noise: float, rng: np.random.Generator
) -> Callable[[float], float]:
    """Draw a smooth path x(y) [m] from a place (2,) through a gap of every row ahead and the finish line.

    `gaps` is the gap of every row, `noise` the scale of the aim error inside each gap.
    """
    from scipy.interpolate import PchipInterpolator

    ys, xs = [start[1]], [start[0]]
    for row_y, centers, gap in zip(scene.row_y, scene.gap_x, gaps, strict=True):
        aim = centers[gap] + noise * AIM_M * np.clip(rng.standard_normal(), -2, 2)
        ahead = [y for y in (row_y - 0.02, row_y + 0.02) if y > start[1]]
        ys += ahead
        xs += [aim] * len(ahead)
    ys.append(scene.finish_y + 0.1)
    xs.append(xs[-1] + noise * WOBBLE_M * rng.standard_normal())
    return PchipInterpolator(ys, xs, extrapolate=True)


class PathFollower:
    """Path-tracking controller of one demonstration, on a path x(y) [m]."""

    def __init__(
        self,
        scene: AvoidScene,
        path: Callable[[float], float],
        *,
        options: AvoidExpert,
        rng: np.random.Generator,
    ) -> None:
        self._path, self._noise, self._rng = path, options.noise, rng
        self._rows = np.asarray(scene.row_y)
        spread = options.noise * PACE_SPREAD * np.clip(rng.standard_normal(), -2, 2)
        self._pace = options.pace * np.exp(spread)
        self._drift = np.zeros(2)  # Ornstein-Uhlenbeck processes of unit variance: pace, sideways push

    def act(self, position: np.ndarray, velocity: np.ndarray) -> np.ndarray:
        """Return the next action (2,) in [-1, 1] for the disc's position [m] and velocity [m/s]."""
        keep = np.exp(-1.0 / WOBBLE_STEPS)
        self._drift = keep * self._drift + np.sqrt(1 - keep**2) * self._rng.standard_normal(2)
        pace = np.clip(self._pace * (1 + 2 * self._noise * PACE_SPREAD * self._drift[0]), 0.25, 1.0)
        soon = position + velocity * RESPONSE_S
        y = soon[1] + LOOK_M
        offset = np.array([float(self._path(y)) + self._wobble(y), y]) - soon
        return np.clip(pace * offset / np.hypot(*offset), -1.0, 1.0)

    def _wobble(self, y: float) -> float:
        """Sideways push [m] at height y: unrestricted far from the rows, small near them."""
        push = self._noise * WOBBLE_M * self._drift[1]
        distance = np.min(np.abs(self._rows - y))
        limit = STEADY_M + max(0.0, distance - NEAR_M)
        return float(limit * np.tanh(push / limit))


class DiscStepper(Stepper, Protocol):
    """What a demonstration needs of the simulator."""

    def physics_state(self, row: int) -> Array: ...

    def motion(self, row: int) -> tuple[Array, Array]:
        """Return position [m] and velocity [m/s] of a disc, (2,) each."""
        ...

    def scene_of(self, row: int) -> AvoidScene:
        """Return the scene of a running episode."""
        ...


def demonstrate_avoid(stepper: DiscStepper, seed: int, options: AvoidExpert, *, max_steps: int) -> Episode:
    """Record the episode of a seed in row 0 of a stepper.

    Extras are the physics state before each action (`states`: time, positions, velocities) and the mode
    (`mode`, constant over the episode, -1 if the disc did not pass all rows).
    """
    rng = expert_rng(seed)
    record = Recording(stepper, seed)
    scene = stepper.scene_of(0)
    modes = options.selected_modes(scene.num_direct)
    gaps = scene.modes[modes[int(rng.integers(len(modes)))]]
    path = plan(scene, gaps, stepper.motion(0)[0], noise=options.noise, rng=rng)
    follower = PathFollower(scene, path, options=options, rng=rng)
    while not record.ended and len(record) < max_steps:
        action = follower.act(*stepper.motion(0))
        record.step(action, states=stepper.physics_state(0))
    mode = np.full(len(record), stepper.metrics()["mode"][0])
    return record.episode(truncated=len(record) >= max_steps, success=record.is_solved, mode=mode)


def take_over_avoid(stepper: DiscStepper, seed: int, options: AvoidExpert) -> Callable[[], Array]:
    """Return the expert of the running episode in row 0 of a stepper, which returns its next action (2,).

    It drives through the nearest gap of the next row; the others are drawn among the direct modes.
    """
    rng = expert_rng(seed)
    scene, (position, _) = stepper.scene_of(0), stepper.motion(0)
    row = int(np.searchsorted(scene.row_y, position[1]))
    modes = [scene.modes[mode] for mode in options.selected_modes(scene.num_direct)]
    if row < len(scene.row_y):
        away = [abs(scene.gap_x[row][gaps[row]] - position[0]) for gaps in modes]
        modes = [gaps for gaps, distance in zip(modes, away, strict=True) if distance <= min(away) + 1e-9]
    path = plan(scene, modes[int(rng.integers(len(modes)))], position, noise=options.noise, rng=rng)
    follower = PathFollower(scene, path, options=options, rng=rng)
    return lambda: follower.act(*stepper.motion(0))
