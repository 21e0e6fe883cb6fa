"""The rules of `avoid`: starts, observations, contacts, the finish line and the gaps that a disc takes.

Legend: N environments, M of them addressed, R rows of pillars, G gaps of the widest row.
"""

from __future__ import annotations

import numpy as np

from envs.spec import Array, StepResult
from envs.tasks.avoid.scene import SHIFT_M, START_SPREAD_M, AvoidScene, load_scene

CONTROL_HZ = 20.0
MAX_SPEED = 0.4  # speed of an action of 1, per axis [m/s]
_SHIFT_STREAM = 2  # separates the random numbers of the rows from those of the start


def start_position(seed: int) -> Array:
    """Draw the (2,) start position of the episode with this seed."""
    return np.random.default_rng(seed).uniform(-1.0, 1.0, 2) * START_SPREAD_M


def row_shifts(seed: int, num_rows: int) -> Array:
    """Draw the sideways shifts (R,) [m] of the rows in the episode with this seed."""
    return np.random.default_rng((seed, _SHIFT_STREAM)).uniform(-SHIFT_M, SHIFT_M, num_rows)


class AvoidRules:
    """What the rules make of N discs, whichever engine moved them.

    Attributes:
        position: (N, 2) after the last step [m].
        gaps: (N, R) gap taken in each row; -1: not crossed.
        shift: (N, R) sideways shift of the rows [m].
        width: Do.
    """

    def __init__(self, num_envs: int, *, keeps_speed: bool) -> None:
        self.scene, self.width = load_scene(), 4 if keeps_speed else 2
        self._row_y = np.array(self.scene.row_y)
        self._gap_x = _padded(self.scene.gap_x)
        self._mode_of = _mode_table(self.scene)
        self.position = np.zeros((num_envs, 2))
        self.gaps = np.full((num_envs, len(self._row_y)), -1)
        self.shift = np.zeros((num_envs, len(self._row_y)))

    def begin(self, row: int, position: Array, shift: Array | None = None) -> Array:
        """Start an episode at rest; returns (Do,)."""
        self.position[row], self.gaps[row] = position, -1
        if shift is not None:
            self.shift[row] = shift
        return np.concatenate([position, np.zeros(2)])[: self.width]

    def results(self, rows: Array, hit: Array, position: Array, velocity: Array) -> StepResult:
        """Return the results of a step of rows (M,) that ends at positions (M, 2), by contact where `hit`."""
        self._note_gaps(rows, self.position[rows], position)
        self.position[rows] = position
        success = ~hit & (position[:, 1] >= self.scene.finish_y)
        obs = np.concatenate([position, velocity], axis=1)[:, : self.width]
        return StepResult(obs, success.astype(np.float64), hit | success, np.zeros_like(hit), success)

    def metrics(self) -> dict[str, Array]:
        """Return the chosen paths; see `AvoidScene.modes`."""
        crossed = (self.gaps >= 0).all(axis=1)
        return {"mode": np.where(crossed, self._mode_of[tuple(np.maximum(self.gaps, 0).T)], -1)}

    def _note_gaps(self, rows: Array, before: Array, after: Array) -> None:
        """Record the gap of every row crossed forwards between `before` and `after` (M, 2)."""
        y0, y1 = before[:, 1:], after[:, 1:]
        crossed = (y0 < self._row_y) & (self._row_y <= y1)  # (M, R)
        if not crossed.any():
            return
        disc, row = np.nonzero(crossed)
        share = (self._row_y[row] - y0[disc, 0]) / (y1[disc, 0] - y0[disc, 0])
        x = before[disc, 0] + share * (after[disc, 0] - before[disc, 0])
        x = x - self.shift[rows[disc], row]
        self.gaps[rows[disc], row] = np.abs(self._gap_x[row] - x[:, None]).argmin(axis=1)


def _padded(gap_x: tuple[tuple[float, ...], ...]) -> Array:
    """Return gap centres as (R, G), infinite where a row has fewer gaps."""
    widest = max(len(row) for row in gap_x)
    return np.array([row + (np.inf,) * (widest - len(row)) for row in gap_x])


def _mode_table(scene: AvoidScene) -> Array:
    table = np.full([len(row) for row in scene.gap_x], -1)
    for mode, gaps in enumerate(scene.modes):
        table[gaps] = mode
    return table
