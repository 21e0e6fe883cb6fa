"""Training windows, resident on the device: one strided view and one gather per batch.

Legend: N frames, E episodes, W windows, B batch, To observation history, Th horizon, Do and Da widths.
A window belongs to a frame i, the newest observation of the policy. Its observations are frames
i-To+1 … i and its actions frames i-s … i-s+Th-1, where s is `ChunkSpec.action_start`: 0 for chunks from the
newest observation (DPPO), To-1 for chunks from the oldest (Diffusion Policy). Where the data say at which
frames the recording policy decided (extra key `decision`), only these have a window: a chunk across decisions
joins parts of two plans, as one that is longer than the executed part of a plan still does.

Every episode is stored with copies of its first and last rows, so that each window is contiguous in memory:
row r of `as_strided(x, (M-T+1, T*d), (d, 1))` is the window starting at r, without a copy until a batch is
gathered (`_ContiguousWindows`). Arrays that are mapped from files (`envs.datasets.array_storage`), or too
large for a second copy in memory, are indexed row by row (`_GatheredWindows`), with the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from envs.datasets import free_memory
from envs.datasets.episodes import EpisodeDataset
from policies.errors import DatasetError
from policies.policy_config import ChunkSpec

DECISION = "decision"
"""Extra key (N,): whether the recording policy decided at this frame, or went on with a chunk."""
_INDEX_BYTES = 48  # bytes per row of the index computation
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Windows of a batch, in physical units.

    Shapes:
        obs: (B, To, Do), oldest first.
        action: (B, Th, Da).
        mask: (B, Th) bool, True for recorded actions, False for padding.
        images: (B, To, H, W, 3) uint8 by camera, of the same frames as `obs`.
    """

    obs: Tensor
    action: Tensor
    mask: Tensor
    images: dict[str, Tensor] = field(default_factory=dict)


class Windows:
    """All windows of a dataset, on the dataset's device.

    Args:
        dataset: Episodes; move it to the device first.
        chunk: Horizons.
        pad_end: True: every frame may have a window; past the end of the episode the last action is repeated
            (masked). False (DPPO): only windows whose actions end inside the episode.
        cameras: Cameras of the batch images, which are moved to the windows' device per batch.

    Attributes:
        num: W.
        frames: (W,) int64, frame of the newest observation of every window.
        steps: (W,) int64, index of that frame in its episode.
        short_episodes: Indices of episodes too short for a window (`pad_end=False` only).

    Raises:
        DatasetError: If the action widths differ, there is no window, or a camera has no images.
    """

    def __init__(
        self,
        dataset: EpisodeDataset,
        chunk: ChunkSpec,
        *,
        pad_end: bool = True,
        cameras: Sequence[str] = (),
    ) -> None:
        if chunk.action_dim != dataset.action_dim:
            raise DatasetError(
                f"{dataset.source}: key 'actions' must be {chunk.action_dim} wide for this task; got "
                f"{dataset.action_dim}. Use a dataset of the same task."
            )
        self.chunk = chunk
        self.obs_dim = dataset.obs_dim
        self._images = dataset.with_cameras(cameras).images
        self._index(dataset, pad_end)
        behind = chunk.horizon - 1 if pad_end else 0
        frames = (dataset, self.frames, self._episode[self.frames])
        seen = _WindowSpec(*frames, dataset.observations, chunk.obs_steps, chunk.obs_steps - 1, 0)
        done = _WindowSpec(*frames, dataset.actions, chunk.horizon, chunk.action_start, behind)
        self._obs, self._action = _rows_of(seen), _rows_of(done)
        del self._episode

    @property
    def num(self) -> int:
        return self.frames.shape[0]

    @property
    def device(self) -> torch.device:
        return self.frames.device

    def __len__(self) -> int:
        return self.num

    def gather(self, index: Tensor) -> Batch:
        """Return the windows `index` (B,), integers in 0..W-1 on the windows' device."""
        return Batch(
            obs=self._obs.rows(index),
            action=self._action.rows(index),
            mask=self._action.real(index),
            images=self._gather_images(index),
        )

    def _gather_images(self, index: Tensor) -> dict[str, Tensor]:
        """Return the images (B, To, H, W, 3) of windows; an episode's first image fills the history."""
        if not self._images:
            return {}
        ago = torch.arange(self.chunk.obs_steps - 1, -1, -1, device=index.device)
        newest, step = self.frames[index, None], self.steps[index, None]
        frames = (newest - torch.minimum(ago, step)).flatten().cpu()
        return {
            camera: images[frames].unflatten(0, (len(index), -1)).to(self.device)
            for camera, images in self._images.items()
        }

    def sample(self, size: int, *, generator: torch.Generator | None = None) -> Batch:
        """Draw windows uniformly with replacement; the generator lives on the windows' device."""
        return self.gather(torch.randint(self.num, (size,), generator=generator, device=self.device))

    def _index(self, dataset: EpisodeDataset, pad_end: bool) -> None:
        frames = torch.arange(dataset.num_frames, device=dataset.episode_start.device)
        episodes = torch.arange(dataset.num_episodes, device=frames.device)
        self._episode = torch.repeat_interleave(episodes, dataset.lengths)
        step = frames - dataset.episode_start[self._episode]
        end = step - self.chunk.action_start + self.chunk.horizon
        valid = (
            torch.ones_like(frames, dtype=torch.bool) if pad_end else end <= dataset.lengths[self._episode]
        )
        if DECISION in dataset.extras:
            decided = dataset.storage.take(dataset.extras[DECISION], frames).to(valid)
            if decided.ndim != 1 or not bool(decided.any()):
                raise DatasetError(f"{dataset.source}: '{DECISION}' must be (N,) and true at some frame.")
            valid = valid & decided
        self.frames, self.steps = frames[valid], step[valid]
        counts = torch.bincount(self._episode[valid], minlength=dataset.num_episodes)
        self.short_episodes: list[int] = (counts == 0).nonzero().squeeze(1).tolist()
        if len(self.short_episodes) == dataset.num_episodes:
            raise DatasetError(
                f"{dataset.source}: no episode holds a whole chunk of {self.chunk.horizon} actions (longest: "
                f"{int(dataset.lengths.max())}). Lower the horizon or pad the end."
            )
        if self.short_episodes:
            _log.warning(
                "%s: %d of %d episodes are too short for a chunk of %d actions and give no window.",
                dataset.source, len(self.short_episodes), dataset.num_episodes, self.chunk.horizon,
            )  # fmt: skip


class _WindowSpec(NamedTuple):
    """Row ranges of an array, one per window.

    Attributes:
        frames: (W,) frame of every window.
        episode: (W,) its episode.
        values: (N, d).
        steps: T, rows of a window.
        before: Rows before the window's frame.
        behind: Padded rows after an episode.
    """

    dataset: EpisodeDataset
    frames: Tensor
    episode: Tensor
    values: Tensor
    steps: int
    before: int
    behind: int


class _ContiguousWindows:
    """Windows stored so that each is contiguous.

    `rows` returns the rows (B, T, d) of windows (B,); `real` which of them are recorded, not padding (B, T).
    """

    def __init__(self, spec: _WindowSpec) -> None:
        self._shape = (spec.steps, spec.values.shape[1])
        rows, real = _padded(spec.dataset, spec.values, spec.before, spec.behind)
        self._rows = _rows(rows, spec.steps)
        self._real = None if real is None else _rows(real.unsqueeze(1), spec.steps)
        self._all_real = torch.ones(1, spec.steps, dtype=torch.bool, device=rows.device)
        # Frame i of episode e is row i + e*(copies per episode) + (copies before) of a padded store; a
        # window starts as many rows earlier as there are copies before the episode.
        self._row = (spec.frames + spec.episode * (spec.before + spec.behind)).int()

    def rows(self, index: Tensor) -> Tensor:
        return self._rows.index_select(0, self._row.index_select(0, index)).view(-1, *self._shape)

    def real(self, index: Tensor) -> Tensor:
        if self._real is None:
            return self._all_real.expand(len(index), -1)
        return self._real.index_select(0, self._row.index_select(0, index))


class _GatheredWindows:
    """The same windows, gathered row by row."""

    def __init__(self, spec: _WindowSpec) -> None:
        self._values, self._frames, self._episode = spec.values, spec.frames, spec.episode
        self._start = spec.dataset.episode_start
        self._offset = torch.arange(spec.steps, device=spec.frames.device) - spec.before

    def rows(self, index: Tensor) -> Tensor:
        return self._values[self._frame(index)[0]]

    def real(self, index: Tensor) -> Tensor:
        inside, unclipped = self._frame(index)
        return inside == unclipped

    def _frame(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the frames (B, T) of windows, clamped to episodes and unclamped."""
        episode = self._episode[index]
        first, last = self._start[episode, None], self._start[episode + 1, None] - 1
        unclipped = self._frames[index, None] + self._offset
        return torch.minimum(torch.maximum(unclipped, first), last), unclipped


def _rows_of(spec: _WindowSpec) -> _ContiguousWindows | _GatheredWindows:
    dataset, values, copies = spec.dataset, spec.values, spec.before + spec.behind
    num = (len(values) + dataset.num_episodes * copies) if copies else 0
    needed = num * (values.shape[1] * values.element_size() + _INDEX_BYTES)
    in_memory = values.device.type == "cpu"
    is_looked_up = dataset.storage.on_disk or (in_memory and not free_memory.fits(needed))
    return _GatheredWindows(spec) if is_looked_up else _ContiguousWindows(spec)


def _padded(
    dataset: EpisodeDataset, values: Tensor, before: int, behind: int
) -> tuple[Tensor, Tensor | None]:
    """Repeat the first and last row of every episode; also return a mask of real rows (M,), if any."""
    if before == behind == 0:
        return values.contiguous(), None
    lengths, start = dataset.lengths, dataset.episode_start[:-1]
    sizes = lengths + before + behind
    offset = sizes.cumsum(0) - sizes + before
    local = torch.arange(int(sizes.sum()), device=start.device) - offset.repeat_interleave(sizes)
    last = (lengths - 1).repeat_interleave(sizes)
    frame = torch.minimum(local.clamp(min=0), last) + start.repeat_interleave(sizes)
    return values.index_select(0, frame), (local >= 0) & (local <= last)


def _rows(values: Tensor, steps: int) -> Tensor:
    """View a contiguous store (M, d) as all windows of `steps` rows, (M-steps+1, steps*d)."""
    num, width = values.shape
    return values.as_strided((num - steps + 1, steps * width), (width, 1))
