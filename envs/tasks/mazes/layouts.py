"""Maze grids: walls, sampling of starts and goals, cell neighbours, and the MuJoCo model.

The grids are those of D4RL's and gymnasium-robotics' mazes. A cell is (row, column), counted from the upper
left corner; positions are (x, y) in metres, the origin lies in the middle of the maze, and y grows upwards.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from envs.spec import Array

if TYPE_CHECKING:
    import mujoco

Cell = tuple[int, int]

NOISE = 0.25  # half-width of the uniform noise on starts and goals, in cells
NEAREST = 0.5  # minimum distance between start and goal, in cells
_SIDES = ((-1, 0), (0, -1), (1, 0), (0, 1))
_GRIDS = {
    "umaze": """
        #####
        #...#
        ###.#
        #...#
        #####""",
    "medium": """
        ########
        #..##..#
        #..#...#
        ##...###
        #..#...#
        #.#..#.#
        #...#..#
        ########""",
    "large": """
        ############
        #....#.....#
        #.##.#.#.#.#
        #......#...#
        #.####.###.#
        #..#.#.....#
        ##.#.#.#.###
        #..#...#...#
        ############""",
}


@dataclass(frozen=True)
class Layout:
    """One maze; `#` is a wall in the grid, cells and walls are `cell_m` wide and `height_m` high [m]."""

    rows: tuple[str, ...]
    cell_m: float = 1.0
    height_m: float = 0.4

    @cached_property
    def half_size(self) -> Array:
        """Half of the maze's extent in x and y, walls included [m]."""
        return np.array([len(self.rows[0]), len(self.rows)]) / 2 * self.cell_m

    @cached_property
    def middle(self) -> Array:
        return np.zeros(2)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Free cells, row by row."""
        return tuple(cell for cell in self._all_cells if not self.is_wall(cell))

    @cached_property
    def walls(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self._all_cells if self.is_wall(cell))

    @cached_property
    def centers(self) -> Array:
        """Centres of the free cells (C, 2) [m]."""
        return np.array([self.center(cell) for cell in self.cells])

    @property
    def _all_cells(self) -> list[Cell]:
        return [(i, j) for i in range(len(self.rows)) for j in range(len(self.rows[0]))]

    def is_wall(self, cell: Cell) -> bool:
        return self.rows[cell[0]][cell[1]] == "#"

    def center(self, cell: Cell) -> Array:
        half_x, half_y = self.half_size
        return np.array([(cell[1] + 0.5) * self.cell_m - half_x, half_y - (cell[0] + 0.5) * self.cell_m])

    def is_free(self, positions: Array) -> Array:
        """Return which positions (n, 2) [m] lie in free cells, (n,) bool."""
        offset = np.abs(positions[:, None] - self.centers)  # (n, C, 2)
        free: Array = (offset <= self.cell_m / 2).all(axis=2).any(axis=1)
        return free

    def cell(self, position: Array) -> Cell:
        """Return the free cell whose centre is nearest to a position (2,) [m]."""
        return self.cells[int(np.square(self.centers - position).sum(axis=1).argmin())]

    def neighbours(self, cell: Cell) -> list[Cell]:
        beside = [(cell[0] + down, cell[1] + right) for down, right in _SIDES]
        return [other for other in beside if not self.is_wall(other)]

    def cells_along(self, positions: Array) -> tuple[Cell, ...]:
        """Return the cells along a path (n, 2) [m], without loops."""
        between = np.linspace(0.0, 1.0, 8, endpoint=False)[:, None, None]  # so that no cell is missed
        fine = positions[:-1] + between * np.diff(positions, axis=0)  # (8, n - 1, 2)
        cells: list[Cell] = []
        for position in [*fine.transpose(1, 0, 2).reshape(-1, 2), positions[-1]]:
            cell = self.cell(position)
            if cell in cells:
                del cells[cells.index(cell) + 1 :]
            else:
                cells.append(cell)
        return tuple(cells)

    def draw(
        self, rng: np.random.Generator, start_cell: Cell | None = None, goal_cell: Cell | None = None
    ) -> tuple[Array, Array]:
        """Draw start and goal (2,) [m], with the draws of gymnasium-robotics; cells fix either of them."""
        goal = self._with_noise(self.center(goal_cell) if goal_cell else self._any_center(rng), rng)
        start = self.center(start_cell) if start_cell else goal
        while not start_cell and np.linalg.norm(start - goal) <= NEAREST * self.cell_m:
            start = self._any_center(rng)
        return self._with_noise(start, rng), goal

    def _any_center(self, rng: np.random.Generator) -> Array:
        center: Array = self.centers[rng.integers(low=0, high=len(self.cells))]
        return center

    def _with_noise(self, position: Array, rng: np.random.Generator) -> Array:
        return np.array([value + rng.uniform(low=-NOISE, high=NOISE) * self.cell_m for value in position])


@cache
def layout(name: str, cell_m: float = 1.0, height_m: float = 0.4) -> Layout:
    """Return one of the mazes `umaze`, `medium` and `large`."""
    return Layout(tuple(_GRIDS[name].split()), cell_m, height_m)


def model_xml(agent: str, maze: Layout) -> str:
    """Return the MJCF of an agent with the walls of a maze, and a site `target` to mark a goal."""
    tree = ET.fromstring(agent)
    world = tree.find("worldbody")
    assert world is not None
    height = maze.height_m / 2 * maze.cell_m
    for cell in maze.walls:
        x, y = maze.center(cell).tolist()
        half = 0.5 * maze.cell_m
        geom = {"type": "box", "contype": "1", "conaffinity": "1", "rgba": "0.7 0.5 0.3 1"}
        geom |= {"name": f"block_{cell[0]}_{cell[1]}"}
        ET.SubElement(world, "geom", geom, pos=f"{x} {y} {height}", size=f"{half} {half} {height}")
    site = {"name": "target", "type": "sphere", "rgba": "1 0 0 0.7"}
    ET.SubElement(world, "site", site, pos=f"0 0 {height}", size=f"{0.2 * maze.cell_m}")
    return ET.tostring(tree, encoding="unicode")


@cache
def load_model(agent_file: str, maze: Layout) -> mujoco.MjModel:
    """Compile an agent in a maze once per process; the model is shared and never modified."""
    import mujoco

    with open(agent_file, encoding="utf-8") as file:
        return mujoco.MjModel.from_xml_string(model_xml(file.read(), maze))
