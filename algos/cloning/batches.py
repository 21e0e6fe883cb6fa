"""Batches for behaviour cloning: (observations, chunk, mask), shuffled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from algos.training.serialization import capture_generator, restore_generator
from envs.datasets.curation import SAMPLING_WEIGHT, WeightedRows
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.windows import Windows
from policies.errors import CheckpointError
from policies.policy_config import ChunkSpec
from policies.protocols import Observation


@dataclass(frozen=True)
class CloningBatch:
    """A batch of windows, physical units.

    Shapes:
        obs: `state` (B, To, Do), for goal-conditioned policies `goal` (B, Dg), and images
            (B, To, H, W, 3) uint8 by camera.
        action: (B, Th, Da).
        mask: (B, Th) bool, True where the action was recorded.
    """

    obs: Observation
    action: Tensor
    mask: Tensor


class WindowSampler:
    """Windows of a dataset, with goals and images if the policy uses them.

    Args:
        dataset: Dataset on the training device.
        chunk: Horizons.
        pad_end: Whether windows may extend past the end of an episode (masked).
        goal_dim: Dg; above 0 the dataset's extra key `goal` (N, Dg) is used.
        cameras: Cameras used by the policy.

    Attributes:
        weight: (num,), proportional to how often a window is drawn; None: all alike.

    Raises:
        DatasetError: If the dataset does not fit or has no window.
    """

    def __init__(
        self,
        dataset: EpisodeDataset,
        chunk: ChunkSpec,
        *,
        pad_end: bool,
        goal_dim: int = 0,
        cameras: Iterable[str] = (),
    ) -> None:
        self._windows = Windows(dataset, chunk, pad_end=pad_end, cameras=tuple(cameras))
        frames = self._windows.frames
        weight = dataset.extras.get(SAMPLING_WEIGHT)
        self.weight = None if weight is None else dataset.storage.take(weight, frames)
        self._goal = dataset.storage.take(dataset.extras["goal"], frames) if goal_dim else None

    @property
    def num(self) -> int:
        return self._windows.num

    @property
    def frames(self) -> Tensor:
        """Frame of the newest observation per window, (num,)."""
        return self._windows.frames

    @property
    def device(self) -> torch.device:
        return self._windows.device

    def gather(self, index: Tensor) -> CloningBatch:
        """Return the windows `index` (B,)."""
        batch = self._windows.gather(index)
        obs = {"state": batch.obs, **batch.images}
        if self._goal is not None:
            obs["goal"] = self._goal.index_select(0, index).float()
        return CloningBatch(obs, batch.action, batch.mask)


class Shuffle:
    """Endless stream of indices 0..num-1 on the generator's device: a new permutation per epoch."""

    def __init__(self, num: int, generator: torch.Generator) -> None:
        self.num, self._generator = num, generator
        self._start = capture_generator(generator)
        self._order: Tensor | None = None
        self._cursor = 0

    def take(self, size: int) -> Tensor:
        """Return the next `size` indices (size,)."""
        pieces = []
        while size > 0:
            if self._order is None or self._cursor == self.num:
                self._reorder()
            piece = self._order[self._cursor : self._cursor + size]  # type: ignore[index]
            self._cursor += len(piece)
            size -= len(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _reorder(self) -> None:
        self._start = capture_generator(self._generator)
        self._order = torch.randperm(self.num, generator=self._generator, device=self._generator.device)
        self._cursor = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the generator state at the start of this epoch and the position in it."""
        return {"num": self.num, "start": self._start, "cursor": self._cursor, "fresh": self._order is None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            CheckpointError: If the number of windows changed.
        """
        _require_as_many(state["num"], self.num)
        restore_generator(self._generator, state["start"])
        self._order, self._start = None, state["start"]
        if not state["fresh"]:
            self._reorder()
            self._cursor = state["cursor"]


class WeightedStream:
    """Endless stream of indices, drawn by weights (num,) with replacement; used as `Shuffle` is."""

    def __init__(self, weight: Tensor, generator: torch.Generator) -> None:
        self.num, self._rows, self._generator = len(weight), WeightedRows(weight), generator

    def take(self, size: int) -> Tensor:
        """Return the next `size` indices (size,)."""
        return self._rows.draw(size, self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num, "generator": capture_generator(self._generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; errors as `Shuffle`."""
        _require_as_many(state.get("num", self.num), self.num)
        restore_generator(self._generator, state["generator"])


def _require_as_many(saved: int, present: int) -> None:
    if saved != present:
        raise CheckpointError(
            f"the checkpoint was trained on {saved} windows; this dataset gives {present}. "
            f"Resume with the same dataset, horizons and validation_fraction."
        )
