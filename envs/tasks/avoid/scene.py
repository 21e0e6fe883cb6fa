"""The scene of `avoid`: model, obstacles, start and goal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np

from assets import path as asset_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mujoco

    from envs.spec import Array


START_SPREAD_M = (0.02, 0.01)  # half-width of the uniform start box around the origin, x and y [m]
SHIFT_M = 0.05  # half-width of the uniform sideways shift of a row; no gap opens beside the walls
FINISH_HALF_M = 0.012  # half-width of the finish line where rows move; it is more than a pixel of 48


@dataclass(frozen=True)
class AvoidScene:
    """Scene geometry, read from the MuJoCo model (metres)."""

    row_y: tuple[float, ...]  # one per row, from start to finish
    pillar_x: tuple[tuple[float, ...], ...]  # pillar centres of every row, left to right
    bumps: tuple[tuple[float, float], ...]  # centres of the half pillars that close rows beside the walls
    pillar_radius: float
    disc_radius: float
    half_width: float  # inner faces of the side walls are at x = +-half_width
    back_y: float  # inner face of the wall behind the start
    finish_y: float

    def moved(self, shift: Sequence[float]) -> AvoidScene:
        """Return the scene with rows moved sideways by `shift` (R,) [m]."""
        place = dict(zip(self.row_y, shift, strict=True))
        return replace(
            self,
            pillar_x=tuple(tuple(x + dx for x in row) for row, dx in zip(self.pillar_x, shift, strict=True)),
            bumps=tuple((x + place[y], y) for x, y in self.bumps),
        )

    @cached_property
    def obstacles(self) -> tuple[tuple[float, float], ...]:
        pillars = tuple((x, y) for y, row in zip(self.row_y, self.pillar_x, strict=True) for x in row)
        return pillars + self.bumps

    def is_hit(self, before: Array, after: Array) -> Array:
        """Return (M,) whether straight moves of the disc between places (M, 2) touch a pillar or a wall."""
        way = after - before
        aside = np.array(self.obstacles) - before[:, None]  # (M, P, 2)
        length = np.maximum((way**2).sum(axis=1), 1e-12)[:, None]
        share = np.clip((aside * way[:, None]).sum(axis=2) / length, 0.0, 1.0)  # nearest point of the way
        near = np.linalg.norm(aside - share[:, :, None] * way[:, None], axis=2)
        touches = (near < self.pillar_radius + self.disc_radius).any(axis=1)
        outside = np.abs(after[:, 0]) > self.half_width - self.disc_radius
        return touches | outside | (after[:, 1] < self.back_y + self.disc_radius)

    @cached_property
    def gap_x(self) -> tuple[tuple[float, ...], ...]:
        """Centres of the gaps between neighbouring pillars of every row, left to right."""
        return tuple(tuple((a + b) / 2 for a, b in pairwise(row)) for row in self.pillar_x)

    @cached_property
    def modes(self) -> tuple[tuple[int, ...], ...]:
        """All paths through the rows, as the gap of each row; a mode's id is its index.

        The first `num_direct` are direct: from each gap only to the nearest gaps of the next row. Detours,
        which move sideways between two rows, follow.
        """
        return tuple(sorted(product(*(range(len(row)) for row in self.gap_x)), key=self._detour))

    @cached_property
    def num_direct(self) -> int:
        return sum(not self._detour(gaps)[0] for gaps in self.modes)

    def mode_name(self, mode: int) -> str:
        """Return the gaps of a mode from the left, e.g. `1-0-1`; `none` for an unfinished path."""
        return "none" if mode < 0 else "-".join(str(gap) for gap in self.modes[mode])

    def _detour(self, gaps: tuple[int, ...]) -> tuple[bool, tuple[int, ...]]:
        xs = [row[gap] for row, gap in zip(self.gap_x, gaps, strict=True)]
        spacing = self.pillar_x[0][1] - self.pillar_x[0][0]
        return any(abs(b - a) > spacing for a, b in pairwise(xs)), gaps


@cache
def load_model() -> mujoco.MjModel:
    """Compile the task's MuJoCo model once per process; it is shared and never modified."""
    import mujoco

    return mujoco.MjModel.from_xml_path(str(asset_path("avoid.xml")))


@cache
def load_movable_model() -> mujoco.MjModel:
    """Compile the model with every row of pillars in a mocap body of its own, whose position is its shift."""
    import mujoco

    spec, built = mujoco.MjSpec.from_file(str(asset_path("avoid.xml"))), load_model()
    rows: dict[str, list[Any]] = {}
    for geom in spec.geoms:
        if geom.name.startswith(("row_", "bump_")):
            rows.setdefault(geom.name.split("_")[1], []).append(geom)
    for number, geoms in sorted(rows.items()):
        body = spec.worldbody.add_body(name=f"row_{number}", mocap=True)
        for geom in geoms:
            kept = {name: np.array(getattr(geom, name)) for name in ("size", "rgba")}
            name, place = geom.name, built.geom(geom.name).pos.copy()
            kind = geom.type
            spec.delete(geom)
            body.add_geom(name=name, type=kind, pos=place, **kept)
    spec.geom("finish").size[1] = FINISH_HALF_M
    return spec.compile()


@cache
def load_scene() -> AvoidScene:
    """Read the scene from the model."""
    return read_scene(load_model())


def read_scene(model: mujoco.MjModel) -> AvoidScene:
    """Read the scene from a model whose pillars are named `row_<row>_<number>` and `bump_<row>_<number>`."""
    geoms = [model.geom(i) for i in range(model.ngeom)]
    rows: dict[str, list[Any]] = {}
    for geom in (geom for geom in geoms if geom.name.startswith("row_")):
        rows.setdefault(geom.name.rsplit("_", 1)[0], []).append(geom)
    ordered = sorted(rows.values(), key=lambda row: row[0].pos[1])
    right, back = model.geom("wall_right"), model.geom("wall_back")
    return AvoidScene(
        row_y=tuple(float(row[0].pos[1]) for row in ordered),
        pillar_x=tuple(tuple(sorted(round(float(geom.pos[0]), 9) for geom in row)) for row in ordered),
        bumps=tuple(tuple(geom.pos[:2].tolist()) for geom in geoms if geom.name.startswith("bump_")),
        pillar_radius=float(ordered[0][0].size[0]),
        disc_radius=float(model.geom("disc").size[0]),
        half_width=float(right.pos[0] - right.size[0]),
        back_y=float(back.pos[1] + back.size[1]),
        finish_y=float(model.geom("finish").pos[1]),
    )
