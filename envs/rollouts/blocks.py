"""Blocks of rows in which a policy decides, so that a decision depends on its own row alone.

The number of rows of a matrix, and the place of a row among them, affect rounding. So a policy is called with
BLOCK_ROWS rows, and every episode keeps one of them, its lane. Blocks of other sizes, with rows as they come,
cost less per decision. They replace lanes where they give the same numbers to the last bit: the first blocks
of each size are computed both ways. Policies that compare candidates stay in lanes, for their actions show
another rounding only where two candidates are nearly alike.

Legend: M rows to decide, Ta executed steps, Da width of actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from envs.engine.lanes import distinct_groups

BLOCK_ROWS = 8
SIZES = (4, 8, 16, 32)
ENOUGH = 100  # different numbers that have to agree: of other orders of summation most would differ


class Blocks:
    """Calls of a policy for any number of rows; each row gets the numbers of its lane in a block of its own.

    Args:
        act: Maps observations and noise of some rows to their actions (rows, Ta, Da).
        sizes: Of blocks, beside lanes.
    """

    def __init__(
        self, act: Callable[[Mapping[str, Tensor], Tensor], Tensor], sizes: Sequence[int] = SIZES
    ) -> None:
        self._act = act
        self._unproven = dict.fromkeys(sizes, ENOUGH)  # numbers that are still to agree; refused sizes go

    @property
    def sizes(self) -> list[int]:
        """Sizes beside lanes that may serve."""
        return list(self._unproven)

    def actions(self, obs: Mapping[str, Tensor], noise: Tensor, lanes: Sequence[int]) -> Tensor:
        """Return actions (M, Ta, Da) for observations, noise and lanes of M rows."""
        blocks, start = [], 0
        while start < len(lanes):
            size = self._size_for(len(lanes) - start)
            rows = slice(start, None if size is None else start + size)
            part = {name: values[rows] for name, values in obs.items()}
            blocks.append(self._block(part, noise[rows], lanes[rows], size))
            start += len(blocks[-1])
        return torch.cat(blocks)

    def _size_for(self, rows: int) -> int | None:
        """Return the least size for these rows, or a smaller one if much would be empty; None: lanes."""
        fitting = [size for size in self._unproven if size >= rows]
        smaller = [size for size in self._unproven if size < rows]
        if smaller and not (fitting and 2 * fitting[0] <= 3 * rows):
            return smaller[-1]
        return fitting[0] if fitting else None

    def _block(
        self, obs: Mapping[str, Tensor], noise: Tensor, lanes: Sequence[int], size: int | None
    ) -> Tensor:
        """Return the actions of at most `size` rows; a size that is not proven yet is compared with lanes."""
        if size is None:
            return self._in_lanes(obs, noise, lanes)
        rows = torch.arange(size) % len(lanes)  # empty rows repeat the others
        actions = self._act({name: values[rows] for name, values in obs.items()}, noise[rows])
        if self._unproven[size] > 0:
            expected = self._in_lanes(obs, noise, lanes)
            if torch.equal(actions, expected[rows]):
                self._unproven[size] -= expected.unique().numel()
            else:
                del self._unproven[size]
            return expected
        return actions[: len(lanes)]

    def _in_lanes(self, obs: Mapping[str, Tensor], noise: Tensor, lanes: Sequence[int]) -> Tensor:
        chunks: list[Tensor | None] = [None] * len(lanes)
        for members in distinct_groups(lanes):
            rows = [lanes[member] for member in members]
            block = {name: scattered(values[members], rows) for name, values in obs.items()}
            actions = self._act(block, scattered(noise[members], rows))
            for member, row in zip(members, rows, strict=True):
                chunks[member] = actions[row]
        return torch.stack([chunk for chunk in chunks if chunk is not None])


def scattered(values: Tensor, lanes: Sequence[int]) -> Tensor:
    """Return values (M, ...) at their lanes in a block of zeros (BLOCK_ROWS, ...)."""
    block = values.new_zeros(BLOCK_ROWS, *values.shape[1:])
    block[list(lanes)] = values
    return block
