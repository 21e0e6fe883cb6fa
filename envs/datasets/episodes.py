"""Demonstrations and logged experience as flat tensors with an episode index.

Legend: N frames of E episodes, Do and Da observation and action widths, T frames of one episode. A frame is
(observation, action, reward, end flags). The next observation is that of the next frame, or
`next_observations` where the source has it (always for data of `burnish collect`).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from envs.datasets.array_storage import MEMORY, ArrayStorage, Frames
from envs.datasets.checks import check_dataset, check_episode
from envs.datasets.episode import Episode, EpisodeColumns, Transitions, last_frames
from envs.datasets.free_memory import require_memory
from envs.datasets.images import Images
from envs.datasets.statistics import statistics_of
from policies.encoders import ImageShape
from policies.errors import DatasetError

_NUMPY = {torch.float32: np.float32, torch.int64: np.int64, torch.bool: np.bool_}


@dataclass(frozen=True, eq=False, repr=False)
class EpisodeDataset(EpisodeColumns):
    """Flat float32 tensors of N frames, cut into E episodes.

    Validated at construction: shapes agree, floats are finite, episodes are non-empty, and end flags are set
    on last frames only.

    Shapes:
        observations: (N, Do) float32, physical units.
        actions: (N, Da) float32, physical units.
        rewards: (N,) float32, the reward of the frame's action.
        terminated: (N,) bool, the task ended with this action.
        truncated: (N,) bool, recording or time limit ended the episode here.
        episode_start: (E+1,) int64, first frame of every episode and, last, N.
        next_observations: (N, Do) float32, true successors, or None where the source has none.
        extras: per-frame values, each (N, ...); `goal` (N, Dg) is the input of goal-conditioned policies,
            `masks` (N,) is 0 where values do not bootstrap although the recording continues, `decision` (N,)
            where the recording policy went on with a chunk, so that no window of training begins.
        episode_extras: per-episode values, each (E, ...), e.g. `success` and `seed`.

    Args:
        images: Camera images of every frame, by camera; on the CPU, read on access.
        meta: Plain values about the source; `source` names the file in error messages.
        storage: Storage of large tensors and of CPU tensors derived from them.

    Raises:
        DatasetError: If the data are inconsistent; names source, key, expected and found.
    """

    def __post_init__(self) -> None:
        check_dataset(self)

    def __repr__(self) -> str:
        cameras = f", cameras {', '.join(self.images)}" if self.images else ""
        return (
            f"EpisodeDataset({self.source}: {self.num_episodes} episodes, {self.num_frames} frames, "
            f"observations {self.obs_dim} and actions {self.action_dim} wide{cameras})"
        )

    @classmethod
    def from_arrays(
        cls,
        observations: ArrayLike,
        actions: ArrayLike,
        rewards: ArrayLike,
        terminated: ArrayLike,
        truncated: ArrayLike | None,
        episode_start: ArrayLike,
        *,
        next_observations: ArrayLike | None = None,
        extras: Mapping[str, ArrayLike] | None = None,
        episode_extras: Mapping[str, ArrayLike] | None = None,
        images: Mapping[str, ArrayLike | Images] | None = None,
        meta: Mapping[str, Any] | None = None,
        storage: ArrayStorage = MEMORY,
    ) -> EpisodeDataset:
        """Build a dataset from arrays, converting the main keys to float32 and bool (see the class).

        Without `truncated`, every episode that did not terminate is truncated.
        """
        done, start = _tensor(terminated, torch.bool), _tensor(episode_start, torch.int64)
        return cls(
            observations=_tensor(observations, torch.float32, storage),
            actions=_tensor(actions, torch.float32, storage),
            rewards=_tensor(rewards, torch.float32),
            terminated=done,
            truncated=last_frames(start) & ~done if truncated is None else _tensor(truncated, torch.bool),
            episode_start=start,
            next_observations=None
            if next_observations is None
            else _tensor(next_observations, torch.float32, storage),
            extras={key: _tensor(value) for key, value in (extras or {}).items()},
            meta=dict(meta or {}),
            episode_extras={key: _tensor(value) for key, value in (episode_extras or {}).items()},
            images={camera: Images.of(value) for camera, value in (images or {}).items()},
            storage=storage,
        )

    @classmethod
    def from_episodes(
        cls, episodes: Iterable[Episode], *, meta: Mapping[str, Any] | None = None
    ) -> EpisodeDataset:
        """Concatenate episodes, released one by one; `success` and `seed` become per-episode values."""
        source = str((meta or {}).get("source", "dataset"))
        collector, first = EpisodeCollector(source), None
        for number, episode in enumerate(episodes):
            name, first = f"{source}, episode {number}", first or episode
            check_episode(episode, first, name)
            values = {"success": np.bool_(episode.success), "seed": np.int64(episode.seed)}
            collector.add(name, rows_of(episode), (episode.terminated, episode.truncated), values)
        return collector.dataset(meta or {})

    @property
    def obs_dim(self) -> int:
        return self.observations.shape[1]

    @property
    def action_dim(self) -> int:
        return self.actions.shape[1]

    @property
    def image_shapes(self) -> dict[str, ImageShape]:
        return {camera: (*images.shape[1:],) for camera, images in self.images.items()}  # type: ignore[misc]

    @property
    def lengths(self) -> Tensor:
        """Frames per episode, (E,) int64."""
        return self.episode_start.diff()

    @property
    def returns(self) -> Tensor:
        """Undiscounted return of every episode, (E,) float64."""
        total = torch.cat([self.rewards.new_zeros(1, dtype=torch.float64), self.rewards.double().cumsum(0)])
        return total[self.episode_start].diff()

    @property
    def success(self) -> Tensor | None:
        """Whether each episode succeeded, (E,) bool, or None if not recorded."""
        return self.episode_extras.get("success")

    @property
    def over(self) -> Tensor:
        """Frames without bootstrapping: termination, or `masks` = 0, (N,) bool."""
        if "masks" in self.extras:
            return self.terminated | (self.extras["masks"] == 0)
        return self.terminated

    def __len__(self) -> int:
        return self.num_frames

    def digest(self) -> str:
        """Return the SHA-256 of all tensors and images with names, dtypes and shapes, without `meta`."""
        tensors = [f.name for f in fields(self) if f.name not in ("meta", "images", "storage")]
        named = {name: getattr(self, name) for name in tensors}
        for group in ("extras", "episode_extras"):
            named |= {f"{group}/{key}": value for key, value in sorted(named.pop(group).items())}
        seen = hashlib.sha256()
        for name, value in named.items():
            if value is not None:
                seen.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                seen.update(value.cpu().contiguous().numpy().data)
        for camera, images in sorted(self.images.items()):
            seen.update(f"images/{camera} {images.shape}".encode())
            for block in images.blocks():
                seen.update(block.data)
        return seen.hexdigest()

    def with_cameras(self, cameras: Iterable[str]) -> EpisodeDataset:
        """Return the dataset with these cameras only, images in memory if they fit."""
        chosen = tuple(cameras)
        missing = sorted(set(chosen) - set(self.images))
        if missing:
            raise DatasetError(
                f"{self.source}: expected images of the cameras {missing}; there are some of "
                f"{sorted(self.images) or 'none'}."
            )
        images = {camera: self.images[camera].loaded() for camera in chosen}
        if list(images.items()) == list(self.images.items()):
            return self
        return self._derived(images=images)

    def to(self, device: torch.device | str) -> EpisodeDataset:
        """Return the dataset on another device; images stay where they are."""
        if torch.device(device) == self.observations.device:
            return self
        return self._apply(
            lambda value: value.to(device),
            lambda value: value.to(device),
            self.episode_start.to(device),
            storage=MEMORY,
        )

    def select(self, episodes: Sequence[int] | Tensor) -> EpisodeDataset:
        """Return the selected episodes, at least one, in the given order."""
        rows = torch.as_tensor(episodes, dtype=torch.int64, device=self.episode_start.device)
        if rows.numel() == 0 or bool(((rows < 0) | (rows >= self.num_episodes)).any()):
            raise DatasetError(
                f"{self.source}: expected episode numbers in 0..{self.num_episodes - 1}; got {rows.tolist()}."
            )
        lengths = self.lengths[rows]
        start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        offset = torch.repeat_interleave(self.episode_start[rows] - start[:-1], lengths)
        frames = torch.arange(int(start[-1]), device=rows.device) + offset
        images = {camera: one.select(frames) for camera, one in self.images.items()}
        return self._apply(
            lambda value: self.storage.take(value, frames), lambda value: value[rows], start, images=images
        )

    def split(self, valid_fraction: float = 0.1, *, seed: int = 0) -> tuple[EpisodeDataset, EpisodeDataset]:
        """Split at least two episodes into a training and a validation set.

        Args:
            valid_fraction: Fraction of validation episodes, in (0, 1); at least one episode per side.
            seed: Seed of the split.
        """
        if not 0 < valid_fraction < 1 or self.num_episodes < 2:
            raise DatasetError(
                f"{self.source}: a split needs at least 2 episodes and a fraction in (0, 1); got "
                f"{self.num_episodes} episodes and {valid_fraction}."
            )
        train, valid = split_episodes(self.num_episodes, valid_fraction, seed)
        return self.select(train), self.select(valid)

    def statistics(self) -> dict[str, dict[str, Tensor]]:
        """Return `min`, `max`, `mean` and `std` of `state` (Do,), `action` (Da,) and, where recorded, `goal`.

        Computed over recorded frames in float64 and returned as float32; `std` is unbiased.
        """
        keys = {"state": self.observations, "action": self.actions}
        if "goal" in self.extras:
            keys["goal"] = self.extras["goal"]
        return {key: statistics_of(rows) for key, rows in keys.items()}

    def returns_to_go(self, discount: float = 1.0) -> Tensor:
        """Return the discounted sum of rewards from every frame to the end of its episode, (N,) float32."""
        value = torch.zeros(self.num_episodes, dtype=torch.float64)
        rewards, total = self.rewards.double().cpu(), torch.empty(self.num_frames, dtype=torch.float64)
        start, lengths = self.episode_start.cpu()[:-1], self.lengths.cpu()
        for step in range(int(lengths.max()) - 1, -1, -1):
            alive = lengths > step
            frame = start[alive] + step
            value[alive] = rewards[frame] + discount * value[alive]
            total[frame] = value[alive]
        return total.float().to(self.rewards.device)

    @property
    def transition_frames(self) -> Tensor:
        """Frames with a known successor or a terminated task, (M,) int64.

        A mask of 0 is no termination: the last frame of a recording may have no action.
        """
        if self.next_observations is not None:
            return torch.arange(self.num_frames, device=self.terminated.device)
        return (~self.is_last | self.terminated).nonzero().squeeze(1)

    def require_transitions(self) -> Tensor:
        """Return `transition_frames`.

        Raises:
            DatasetError: If there are none.
        """
        frames = self.transition_frames
        if not len(frames):
            raise DatasetError(
                f"{self.source}: expected frames with a known successor or a termination; all "
                f"{self.num_frames} are the last of truncated episodes. Record successors."
            )
        return frames

    def transitions(self) -> Transitions:
        """Return the transitions: `transition_frames` and their successors.

        The successor is `next_observations` where available, else the next frame of the episode; that of a
        terminated last frame without a recorded one, unused, is its own observation. Frames with `masks` = 0
        count as terminated although the recording continues.
        """
        frames = self.require_transitions()
        if self.storage.on_disk:
            width = 2 * self.obs_dim + self.action_dim + 4
            require_memory(4 * len(frames) * width, f"{self.source}, as transitions")
        if self.next_observations is not None:
            successor = self.next_observations[frames]
        else:
            successor = self.observations[(frames + 1).where(~self.is_last[frames], frames)]
        return Transitions(
            observations=self.observations[frames],
            actions=self.actions[frames],
            rewards=self.rewards[frames],
            next_observations=successor,
            terminated=self.over[frames],
            frames=frames,
        )

    def _apply(
        self,
        frames: Callable[[Tensor], Tensor],
        episodes: Callable[[Tensor], Tensor],
        start: Tensor,
        **others: Any,
    ) -> EpisodeDataset:
        """Return the dataset with mapped per-frame and per-episode tensors and other fields replaced."""
        return self._derived(
            observations=frames(self.observations),
            actions=frames(self.actions),
            rewards=frames(self.rewards),
            terminated=frames(self.terminated),
            truncated=frames(self.truncated),
            episode_start=start,
            next_observations=None if self.next_observations is None else frames(self.next_observations),
            extras={key: frames(value) for key, value in self.extras.items()},
            episode_extras={key: episodes(value) for key, value in self.episode_extras.items()},
            **others,
        )

    def _derived(self, **changes: Any) -> EpisodeDataset:
        """Return the dataset with derived fields, without a second validation."""
        made = copy.copy(self)
        made.__dict__.update(changes)
        return made


def split_episodes(num_episodes: int, valid_fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the sorted numbers of training and validation episodes, at least one of each."""
    order = torch.randperm(num_episodes, generator=torch.Generator().manual_seed(seed))
    num_valid = min(max(round(valid_fraction * num_episodes), 1), num_episodes - 1)
    return order[num_valid:].sort().values, order[:num_valid].sort().values


class EpisodeCollector:
    """Collect a dataset episode by episode; optional keys are kept if every episode has them.

    Args:
        source: Name of the data in messages.
        frames: Empty collector of frames, with their storage.
        drop_unequal: Drop extra keys whose shapes differ between episodes, instead of refusing them.
    """

    def __init__(self, source: str, frames: Frames | None = None, *, drop_unequal: bool = False) -> None:
        self._source, self._drop_unequal = source, drop_unequal
        self._frames, self._per_episode = frames or Frames(MEMORY), Frames(MEMORY)
        self._names: list[str] = []
        self._lengths: list[int] = []
        self._ends: list[tuple[bool, bool]] = []

    @property
    def start(self) -> np.ndarray:
        """(E+1,) first frame of every episode so far and, last, N."""
        return np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])

    def add(
        self,
        name: str,
        rows: Mapping[str, np.ndarray],
        ends: tuple[bool, bool],
        per_episode: Mapping[str, Any],
    ) -> None:
        """Append an episode of T steps, terminated and truncated by `ends`, named for messages.

        `rows` are `observations`, `actions`, `rewards` and, optionally, `next_observations`, `extras/<key>`
        and `images/<camera>`, each (T, ...).
        """
        if not len(rows["actions"]):
            raise DatasetError(f"{name}: expected at least one action; the episode is empty.")
        values = {key: np.asarray(value)[None] for key, value in per_episode.items()}
        rows = {key: value for key, value in rows.items() if self._fits(name, key, value, self._frames)}
        for key, value in values.items():
            self._fits(name, key, value, self._per_episode)
        self._frames.add(rows)
        self._per_episode.add(values)
        self._names.append(name)
        self._lengths.append(len(rows["actions"]))
        self._ends.append(ends)

    def _fits(self, name: str, key: str, value: np.ndarray, known: Frames) -> bool:
        shape, got = known.shapes.get(key), np.shape(value)
        if shape is None or got[1:] == shape:
            return True
        if self._drop_unequal and key.startswith("extras/"):
            return False
        raise DatasetError(
            f"{name}: key '{key.removeprefix('extras/')}' must have shape {(got[0], *shape)}, as in "
            f"{self._names[0]}; got {got}. Leave this episode out, or record it again."
        )

    def dataset(
        self,
        meta: Mapping[str, Any],
        images: Mapping[str, Images] | None = None,
        *,
        has_successors: bool = True,
    ) -> EpisodeDataset:
        """Return all episodes; without `has_successors` their `next_observations` are dropped."""
        if not self._lengths:
            raise DatasetError(f"{self._source}: expected at least one episode; got none.")
        rows, start = self._frames.joined(), self.start
        ends = np.zeros((2, start[-1]), dtype=bool)
        ends[:, start[1:] - 1] = np.transpose(self._ends)
        return EpisodeDataset.from_arrays(
            rows["observations"],
            rows["actions"],
            rows["rewards"],
            ends[0],
            ends[1],
            start,
            next_observations=rows.get("next_observations") if has_successors else None,
            extras=_below("extras/", rows),
            episode_extras=self._per_episode.joined(),
            images={**_below("images/", rows), **(images or {})},
            meta=meta,
            storage=self._frames.storage,
        )


def _below(prefix: str, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): value for key, value in rows.items() if key.startswith(prefix)}


def rows_of(episode: Episode) -> dict[str, np.ndarray]:
    """Return the rows of an episode as `EpisodeCollector.add` takes them."""
    rows = {
        "observations": episode.observations[:-1],
        "actions": episode.actions,
        "rewards": episode.rewards,
        "next_observations": episode.observations[1:],
    }
    rows |= {f"extras/{key}": value for key, value in episode.extras.items()}
    return rows | {f"images/{camera}": value for camera, value in episode.images.items()}


def _tensor(values: ArrayLike, dtype: torch.dtype | None = None, storage: ArrayStorage = MEMORY) -> Tensor:
    """Convert to a tensor without copy where possible."""
    if isinstance(values, Tensor):
        return values.to(dtype) if dtype is not None else values
    array = np.ascontiguousarray(values)
    if dtype is not None:
        array = storage.converted(array, _NUMPY[dtype])
    return torch.from_numpy(array if array.flags.writeable else array.copy())
