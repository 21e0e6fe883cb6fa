"""Sketches: paths as guides in a policy's action space.

Legend: B batch, To observation history, Th horizon, D and Da widths, n points of a polyline, k row of a plan,
0 the one that is executed first; s length along the polyline.

An action sketch is a whole plan, resampled to the horizon by truncation, point floor(k (n - 1) / (Th - 1)).
A position sketch is a path in the world for policies whose actions are velocities or displacements; a
waypoint sketch is the same for policies whose actions are positions. A planner follows either in the states
of its plan (`policies.wrappers.planned_sketch`). Their guides lead from the observed position to the nearest
point of the path, s(0), and along it::

    p_k = path(s(0) + (k + 1) pace) + (p_-1 - path(s(0))) max(1 - (k + 1) / Th, 0)
    guide_k = (p_k - p_(k-1)) / reach        position sketch
    guide_k = p_k                            waypoint sketch

Source: arXiv 2411.16627 (ITPS) for action sketches. Position sketches are ours: there plans are positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from policies.errors import ConfigError
from policies.policy_config import ChunkSpec
from policies.protocols import Observation

Points = tuple[tuple[float, ...], ...]  # a polyline: n points of one width, in physical units


class Sketch(Protocol):
    """Guide for the plan of an observation."""

    def guide(self, obs: Observation, chunk: ChunkSpec) -> Tensor:
        """Return the guide (B, Th, Da) for observations of B rows, physical; Th and Da are the chunk's."""
        ...


@dataclass(frozen=True)
class ActionSketch:
    """A plan in action space, the same for every observation."""

    actions: Points  # the polyline (n, Da)

    def __post_init__(self) -> None:
        _check_points("actions", self.actions, at_least=1)

    def guide(self, obs: Observation, chunk: ChunkSpec) -> Tensor:
        state = obs["state"]
        _check_width("actions", len(self.actions[0]), chunk.action_dim)
        rows = resampled(state.new_tensor(self.actions), chunk.horizon)
        return rows + torch.zeros_like(state[:, :1, :1])


@dataclass(frozen=True)
class PositionSketch:
    """A path in the world, followed from the observed position; actions are displacements."""

    positions: Points  # the polyline (n, Da)
    pace: float  # path length per action
    reach: float  # displacement of an action of 1
    observed: tuple[int, ...] = (0, 1)  # position entries of the observation

    def __post_init__(self) -> None:
        _check_points("positions", self.positions, at_least=2)
        if not (self.pace > 0 and self.reach > 0):
            raise ConfigError(
                f"pace and reach of a sketch must be above 0; got {self.pace} and {self.reach}."
            )
        _check_width("observed", len(self.observed), len(self.positions[0]))

    def guide(self, obs: Observation, chunk: ChunkSpec) -> Tensor:
        _check_width("positions", len(self.observed), chunk.action_dim)
        return self.targets(obs, chunk).diff(dim=1) / self.reach

    def targets(self, obs: Observation, chunk: ChunkSpec) -> Tensor:
        """Return the target positions of the actions (B, Th + 1, D), starting from the initial one."""
        here = obs["state"][:, -1, list(self.observed)]
        step = torch.arange(chunk.horizon + 1, device=here.device) - chunk.action_start
        along = self.nearest(here)[:, None] + self.pace * step
        offset = here - self.place(self.nearest(here))
        fade = (1 - step.clamp(min=0) / chunk.horizon).to(here)
        return self.place(along) + offset[:, None, :] * fade[:, None]

    def nearest(self, position: Tensor) -> Tensor:
        """Return the arc length (...) of the path point nearest to positions (..., D)."""
        start, side, length, before = self._segments(position)
        share = (((position[..., None, :] - start) * side).sum(-1) / length.square()).clamp(0, 1)
        distance = (position[..., None, :] - start - share[..., None] * side).norm(dim=-1)
        index = distance.argmin(dim=-1, keepdim=True)
        return (before + share * length).gather(-1, index)[..., 0]

    def place(self, along: Tensor) -> Tensor:
        """Return the points (..., D) at arc lengths (...), clamped to the path."""
        start, side, length, before = self._segments(along)
        index = ((before <= along[..., None]).sum(-1) - 1).clamp(min=0)  # ONNX has no binary search
        share = ((along - before[index]) / length[index]).clamp(0, 1)
        return start[index] + share[..., None] * side[index]

    def distance(self, position: Tensor) -> Tensor:
        """Return the distance (...) of positions (..., D) from the path."""
        return (position - self.place(self.nearest(position))).norm(dim=-1)

    def _segments(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return starts and sides (n-1, D) of the segments, their lengths and the lengths before them."""
        points = like.new_tensor(self._corners)
        side = points.diff(dim=0)
        length = side.norm(dim=-1)
        return points[:-1], side, length, length.cumsum(0) - length

    @cached_property
    def _corners(self) -> list[tuple[float, ...]]:
        """The points without consecutive duplicates."""
        return [self.positions[0], *(b for a, b in pairwise(self.positions) if a != b)]


@dataclass(frozen=True)
class WaypointSketch:
    """A path in the world; actions are target positions."""

    waypoints: Points  # the polyline (n, Da)
    pace: float  # path length per action
    observed: tuple[int, ...] = (0, 1)  # position entries of the observation

    def __post_init__(self) -> None:
        _check_points("waypoints", self.waypoints, at_least=2)
        _ = self.path  # checks the numbers

    @cached_property
    def path(self) -> PositionSketch:
        return PositionSketch(self.waypoints, self.pace, reach=1.0, observed=self.observed)

    def guide(self, obs: Observation, chunk: ChunkSpec) -> Tensor:
        _check_width("waypoints", len(self.observed), chunk.action_dim)
        return self.path.targets(obs, chunk)[:, 1:]

    def distance(self, position: Tensor) -> Tensor:
        return self.path.distance(position)


def resampled(points: Tensor, horizon: int) -> Tensor:
    """Take `horizon` of n points (n, D): those at linspace(0, n - 1, horizon), rounded down; (Th, D)."""
    index = np.linspace(0, len(points) - 1, horizon).astype(int)  # float64, as published
    return points[torch.from_numpy(index).to(points.device)]


AnySketch = ActionSketch | PositionSketch | WaypointSketch
KINDS: dict[str, type[AnySketch]] = {
    "actions": ActionSketch,
    "positions": PositionSketch,
    "waypoints": WaypointSketch,
}


def read_sketch(path: Path | str) -> AnySketch:
    """Read a sketch from JSON or NPZ, whose entries are the fields of one of `KINDS`."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"steer.sketch must be a JSON or NPZ file; there is no file {path}.")
    try:
        content = _read_npz(path) if path.suffix == ".npz" else json.loads(path.read_text())
        cls = next(KINDS[name] for name in KINDS if name in content)
        known = {field.name for field in fields(cls)}
        if not set(content) <= known:
            raise ConfigError(f"its keys must be {sorted(known)}; got {sorted(set(content) - known)} too.")
        return cls(**{name: _as_tuple(value) for name, value in content.items()})
    except StopIteration:
        raise ConfigError(f"steer.sketch={path} is no sketch: it has no {' or '.join(KINDS)}.") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"steer.sketch={path} is no sketch: {error}") from error


def _read_npz(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name].tolist() for name in file.files}


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _check_points(name: str, points: Sequence[Sequence[float]], *, at_least: int) -> None:
    widths = {len(point) for point in points}
    if len(set(map(tuple, points))) < at_least or len(widths) != 1 or 0 in widths:
        raise ConfigError(
            f"{name} of a sketch must be {at_least} or more different points of one width; got {points}."
        )
    if not np.isfinite(np.array(points)).all():
        raise ConfigError(f"{name} of a sketch must be finite; got {points}.")


def _check_width(name: str, width: int, expected: int) -> None:
    if width != expected:
        raise ConfigError(f"{name} of this sketch must be {expected} wide; got {width}.")
