"""OGBench's mazes as grids, in OGBench's frame: cells are 4 m wide, cell (1, 1) lies at the origin.

Other than in `envs.tasks.mazes.layouts`, y grows with the row, so that the first row is drawn at the bottom.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from envs.tasks.mazes.layouts import Cell, Layout, layout

_GRIDS = {
    "giant": """
        ################
        #.#......##....#
        #.#.##.#.#..##.#
        #...#..#...#...#
        #.###.######.#.#
        #...#...#....#.#
        ###.#.#..#.#.###
        #...#..#...#...#
        #.#.#.######.#.#
        #.###...#...##.#
        #.....#...#....#
        ################""",
    "teleport": """
        ############
        #.....#.#..#
        ##.#...#..##
        ##.###.....#
        #....#.#.#.#
        #.##.#.#.#.#
        #.##.#.#.#.#
        #....#...#.#
        ############""",
}


@dataclass(frozen=True)
class OgbenchLayout(Layout):
    """One maze; arguments as in `Layout`."""

    cell_m: float = 4.0
    height_m: float = 0.5

    @cached_property
    def middle(self) -> np.ndarray:
        return self.half_size - 1.5 * self.cell_m

    def center(self, cell: Cell) -> np.ndarray:
        return np.array([cell[1] - 1, cell[0] - 1]) * self.cell_m


@cache
def ogbench_layout(name: str) -> OgbenchLayout:
    """Return one of the mazes `medium`, `large`, `giant` and `teleport`."""
    return OgbenchLayout(tuple(_GRIDS[name].split()) if name in _GRIDS else layout(name).rows)
