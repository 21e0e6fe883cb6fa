"""Demonstrations and logged experience as flat tensors with an episode index.

Legend: N frames of E episodes, Do and Da observation and action widths, T frames of one episode. A frame is
(observation, action, reward, end flags); the observation after its action is the next frame's observation,
or `next_observations` where the source knows it (it always does for what `burnish collect` records).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from policies.errors import DatasetError
from policies.protocols import ChunkSpec

if TYPE_CHECKING:
    from envs.datasets.windows import Windows


@dataclass(frozen=True)
class Episode:
    """One recorded episode, as demonstrators and rollouts hand it over.

    Shapes:
        observations: (T+1, Do), the last row being the observation after the last action.
        actions: (T, Da).
        rewards: (T,).
        extras: every value (T, ...), e.g. simulator states.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: bool
    truncated: bool
    success: bool = False
    seed: int = 0
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of actions."""
        return len(self.actions)


@dataclass(frozen=True, eq=False)
class EpisodeDataset:
    """Flat float32 tensors of N frames, cut into E episodes.

    Checked when it is made: shapes agree, floating-point values are finite, episodes are not empty, and
    the end flags are set on last frames only.

    Shapes:
        observations: (N, Do) float32, physical units.
        actions: (N, Da) float32, physical units.
        rewards: (N,) float32, the reward of the frame's action.
        terminated: (N,) bool, the task really ended with this action.
        truncated: (N,) bool, recording or time limit ended the episode here.
        episode_start: (E+1,) int64, first frame of every episode and, last, N.
        next_observations: (N, Do) float32, true successors, or None where the source has none.
        extras: per-frame values, each (N, ...).
        episode_extras: per-episode values, each (E, ...), e.g. `success` and `seed`.

    Args:
        meta: Plain values about the source; `source` names the file in error messages.

    Raises:
        DatasetError: If something does not fit; names the source, the key, what was expected and what was
            found.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    episode_start: Tensor
    next_observations: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    episode_extras: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check everything once, before anything is trained."""
        self._check_index()
        self._check_frames()
        self._check_finite()
        self._check_ends()

    @classmethod
    def from_arrays(
        cls,
        observations: ArrayLike,
        actions: ArrayLike,
        rewards: ArrayLike,
        terminated: ArrayLike,
        truncated: ArrayLike,
        episode_start: ArrayLike,
        *,
        next_observations: ArrayLike | None = None,
        extras: Mapping[str, ArrayLike] | None = None,
        episode_extras: Mapping[str, ArrayLike] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> EpisodeDataset:
        """Build a dataset from arrays, converting the main keys to float32 and bool (see the class)."""
        return cls(
            observations=_tensor(observations, torch.float32),
            actions=_tensor(actions, torch.float32),
            rewards=_tensor(rewards, torch.float32),
            terminated=_tensor(terminated, torch.bool),
            truncated=_tensor(truncated, torch.bool),
            episode_start=_tensor(episode_start, torch.int64),
            next_observations=None
            if next_observations is None
            else _tensor(next_observations, torch.float32),
            extras={key: _tensor(value) for key, value in (extras or {}).items()},
            meta=dict(meta or {}),
            episode_extras={key: _tensor(value) for key, value in (episode_extras or {}).items()},
        )

    @classmethod
    def from_episodes(
        cls, episodes: Sequence[Episode], *, meta: Mapping[str, Any] | None = None
    ) -> EpisodeDataset:
        """Concatenate episodes; `success` and `seed` become per-episode values.

        Raises:
            DatasetError: If there is no episode, or if episodes disagree in width or in their extra keys.
        """
        meta = dict(meta or {})
        source = str(meta.get("source", "dataset"))
        if not episodes:
            raise DatasetError(f"{source}: expected at least one episode; got none.")
        for number, episode in enumerate(episodes):
            _check_episode(episode, episodes[0], f"{source}, episode {number}")
        lengths = np.array([len(episode) for episode in episodes])
        start = np.concatenate([[0], np.cumsum(lengths)])
        ends = {key: np.zeros(start[-1], dtype=bool) for key in ("terminated", "truncated")}
        for key, flags in ends.items():
            flags[start[1:] - 1] = [getattr(episode, key) for episode in episodes]
        return cls.from_arrays(
            np.concatenate([episode.observations[:-1] for episode in episodes]),
            np.concatenate([episode.actions for episode in episodes]),
            np.concatenate([episode.rewards for episode in episodes]),
            ends["terminated"],
            ends["truncated"],
            start,
            next_observations=np.concatenate([episode.observations[1:] for episode in episodes]),
            extras={key: np.concatenate([e.extras[key] for e in episodes]) for key in episodes[0].extras},
            episode_extras={
                "success": np.array([episode.success for episode in episodes], dtype=bool),
                "seed": np.array([episode.seed for episode in episodes], dtype=np.int64),
            },
            meta=meta,
        )

    @property
    def source(self) -> str:
        """What error messages call this dataset."""
        return str(self.meta.get("source", "dataset"))

    @property
    def num_frames(self) -> int:
        """N."""
        return self.observations.shape[0]

    @property
    def num_episodes(self) -> int:
        """E."""
        return self.episode_start.shape[0] - 1

    @property
    def obs_dim(self) -> int:
        """Do."""
        return self.observations.shape[1]

    @property
    def action_dim(self) -> int:
        """Da."""
        return self.actions.shape[1]

    @property
    def lengths(self) -> Tensor:
        """Frames per episode, (E,) int64."""
        return self.episode_start.diff()

    @property
    def returns(self) -> Tensor:
        """Undiscounted return of every episode, (E,) float64."""
        return self._sum_by_episode(self.rewards)

    @property
    def success(self) -> Tensor | None:
        """Whether each episode succeeded, (E,) bool, or None where the source does not say."""
        return self.episode_extras.get("success")

    def __len__(self) -> int:
        """Return the number of frames."""
        return self.num_frames

    def to(self, device: torch.device | str) -> EpisodeDataset:
        """Return the dataset on another device."""
        return self._apply(
            lambda value: value.to(device), lambda value: value.to(device), self.episode_start.to(device)
        )

    def select(self, episodes: Sequence[int] | Tensor) -> EpisodeDataset:
        """Return the named episodes, in the order named.

        Raises:
            DatasetError: If the list is empty or names an episode that does not exist.
        """
        rows = torch.as_tensor(episodes, dtype=torch.int64, device=self.episode_start.device)
        if rows.numel() == 0 or bool(((rows < 0) | (rows >= self.num_episodes)).any()):
            raise DatasetError(
                f"{self.source}: expected episode numbers in 0..{self.num_episodes - 1}; got {rows.tolist()}."
            )
        lengths = self.lengths[rows]
        start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        offset = torch.repeat_interleave(self.episode_start[rows] - start[:-1], lengths)
        frames = torch.arange(int(start[-1]), device=rows.device) + offset
        return self._apply(lambda value: value[frames], lambda value: value[rows], start)

    def split(self, valid_fraction: float = 0.1, *, seed: int = 0) -> tuple[EpisodeDataset, EpisodeDataset]:
        """Split by episode into a training and a validation set.

        Args:
            valid_fraction: Share of the episodes in the validation set, in (0, 1); at least one episode goes
                to each side.
            seed: Decides which episodes.

        Raises:
            DatasetError: If there are fewer than two episodes.
        """
        if not 0 < valid_fraction < 1 or self.num_episodes < 2:
            raise DatasetError(
                f"{self.source}: a split needs at least 2 episodes and a fraction in (0, 1); got "
                f"{self.num_episodes} episodes and {valid_fraction}. Train without validation instead."
            )
        order = torch.randperm(self.num_episodes, generator=torch.Generator().manual_seed(seed))
        num_valid = min(max(round(valid_fraction * self.num_episodes), 1), self.num_episodes - 1)
        return self.select(order[num_valid:].sort().values), self.select(order[:num_valid].sort().values)

    def statistics(self) -> dict[str, dict[str, Tensor]]:
        """Return `min`, `max`, `mean` and `std` of `state` (Do,), `action` (Da,) and, where recorded, `goal`.

        Over real frames only, accumulated in float64 and returned as float32; `std` is the population's.
        """
        keys = {"state": self.observations, "action": self.actions}
        if "goal" in self.extras:
            keys["goal"] = self.extras["goal"]
        return {key: _moments(value) for key, value in keys.items()}

    def windows(self, chunk: ChunkSpec, pad: bool = True) -> Windows:
        """Return the training windows of this dataset (see `envs.datasets.windows.Windows`)."""
        from envs.datasets.windows import Windows

        return Windows(self, chunk, pad_end=pad)

    def _sum_by_episode(self, values: Tensor) -> Tensor:
        total = torch.cat([values.new_zeros(1, dtype=torch.float64), values.double().cumsum(0)])
        return total[self.episode_start].diff()

    def _apply(
        self, frames: Callable[[Tensor], Tensor], episodes: Callable[[Tensor], Tensor], start: Tensor
    ) -> EpisodeDataset:
        return replace(
            self,
            observations=frames(self.observations),
            actions=frames(self.actions),
            rewards=frames(self.rewards),
            terminated=frames(self.terminated),
            truncated=frames(self.truncated),
            episode_start=start,
            next_observations=None if self.next_observations is None else frames(self.next_observations),
            extras={key: frames(value) for key, value in self.extras.items()},
            episode_extras={key: episodes(value) for key, value in self.episode_extras.items()},
        )

    def _check_index(self) -> None:
        start, frames = self.episode_start, len(self.observations)
        if frames == 0:
            raise DatasetError(f"{self.source}: key 'observations' is empty; expected at least one frame.")
        if start.ndim != 1 or len(start) < 2 or int(start[0]) != 0 or int(start[-1]) != frames:
            raise DatasetError(
                f"{self.source}: key 'episode_start' must run from 0 to the number of frames {frames}; got "
                f"shape {tuple(start.shape)}, first {start.flatten()[:1].tolist()}, last "
                f"{start.flatten()[-1:].tolist()}."
            )
        if bool((start.diff() < 1).any()):
            first = int((start.diff() < 1).nonzero()[0])
            raise DatasetError(
                f"{self.source}: key 'episode_start' must increase (no empty episodes); got "
                f"{int(start[first + 1])} after {int(start[first])} at position {first + 1}."
            )

    def _check_frames(self) -> None:
        num, width = self.observations.shape[0], self.observations.shape[-1]
        expected: dict[str, tuple[Tensor, tuple[int | str, ...]]] = {
            "observations": (self.observations, (num, "Do")),
            "actions": (self.actions, (num, "Da")),
            "rewards": (self.rewards, (num,)),
            "terminated": (self.terminated, (num,)),
            "truncated": (self.truncated, (num,)),
        }
        if self.next_observations is not None:
            expected["next_observations"] = (self.next_observations, (num, width))
        for key, (value, shape) in expected.items():
            if value.ndim != len(shape) or any(
                want != got for want, got in zip(shape, value.shape, strict=True) if isinstance(want, int)
            ):
                raise DatasetError(
                    f"{self.source}: key '{key}' must have shape ({', '.join(map(str, shape))}); "
                    f"got {tuple(value.shape)}."
                )
        for extras, size, what in (
            (self.extras, num, "frames"),
            (self.episode_extras, self.num_episodes, "episodes"),
        ):
            for key, value in extras.items():
                if value.ndim < 1 or len(value) != size:
                    raise DatasetError(
                        f"{self.source}: key '{key}' must have one row for each of the {size} {what}; "
                        f"got shape {tuple(value.shape)}."
                    )

    def _check_finite(self) -> None:
        keys = {"observations": self.observations, "actions": self.actions, "rewards": self.rewards}
        if self.next_observations is not None:
            keys["next_observations"] = self.next_observations
        for key, value in {**keys, **self.extras, **self.episode_extras}.items():
            if not value.is_floating_point() or bool(torch.isfinite(value).all()):
                continue
            bad = (~torch.isfinite(value)).nonzero()
            at = bad[0].tolist()
            raise DatasetError(
                f"{self.source}: key '{key}' must be finite; got {value[tuple(at)].item()} at index {at} "
                f"({len(bad)} such entries). Remove or repair the affected episodes."
            )

    def _check_ends(self) -> None:
        inside = torch.ones(self.num_frames, dtype=torch.bool, device=self.terminated.device)
        inside[self.episode_start[1:] - 1] = False
        for key, flags in (("terminated", self.terminated), ("truncated", self.truncated)):
            early = (flags & inside).nonzero()
            if len(early):
                raise DatasetError(
                    f"{self.source}: key '{key}' may be set on the last frame of an episode only; it is set "
                    f"on frame {int(early[0])} inside one ({len(early)} such frames)."
                )


def _tensor(values: ArrayLike, dtype: torch.dtype | None = None) -> Tensor:
    """Copy-free where possible; arrays that torch cannot share are copied."""
    if isinstance(values, Tensor):
        return values.to(dtype) if dtype is not None else values
    array = np.ascontiguousarray(values)
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array).to(dtype or torch.from_numpy(array).dtype)


def _moments(values: Tensor) -> dict[str, Tensor]:
    wide = values.double()
    mean = wide.mean(0)
    moments = {
        "min": values.min(0).values,
        "max": values.max(0).values,
        "mean": mean,
        "std": (wide - mean).square().mean(0).sqrt(),
    }
    return {key: value.float() for key, value in moments.items()}


def _check_episode(episode: Episode, first: Episode, source: str) -> None:
    frames = len(episode.actions)
    if frames == 0:
        raise DatasetError(f"{source}: expected at least one action; the episode is empty.")
    expected = {
        "observations": (np.shape(episode.observations), (frames + 1, np.shape(first.observations)[-1])),
        "actions": (np.shape(episode.actions), (frames, np.shape(first.actions)[-1])),
        "rewards": (np.shape(episode.rewards), (frames,)),
    }
    for key, (got, want) in expected.items():
        if got != want:
            raise DatasetError(f"{source}: key '{key}' must have shape {want}; got {got}.")
    if set(episode.extras) != set(first.extras):
        raise DatasetError(
            f"{source}: expected the extra keys {sorted(first.extras)} of the first episode; got "
            f"{sorted(episode.extras)}."
        )
    for key, value in episode.extras.items():
        if len(value) != frames or np.shape(value)[1:] != np.shape(first.extras[key])[1:]:
            want = (frames, *np.shape(first.extras[key])[1:])
            raise DatasetError(f"{source}: key '{key}' must have shape {want}; got {np.shape(value)}.")
