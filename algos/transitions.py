"""Chunk transitions of a fixed dataset, encoded once for a policy, stored as one matrix.

Legend: M transitions, B rows of a batch, To observation history, Ta executed steps, l <= Ta steps until the
task ends, C condition width, A = Ta Da::

    reward   sum over j < l of gamma^j (scale r_{t+j} + shift)
    discount gamma^l, or 0 where the task ended with step l

A chunk that extends past the end of a recording is excluded. One in which the task ends is included, with its
remaining actions repeating the last. With Ta = 1 these are the transitions of the dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from algos.base import seen_by
from algos.training.observations import encode, flat_state
from envs.datasets.curation import SAMPLING_WEIGHT, WeightedRows
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.free_memory import require_memory
from envs.datasets.segments import Segments, episode_bounds, histories, segment_starts
from policies.errors import DatasetError
from policies.policy import Policy

T = TypeVar("T")
_ENCODED_AT_ONCE = 16_384
_IMAGES_AT_ONCE = 512
_CONSTANT_STD = 1e-4  # std below which an entry counts as constant


@dataclass(frozen=True)
class Batch:
    """Rows of transitions, normalised.

    Shapes:
        cond, next_cond: (B, C). action, next_action: (B, A). reward, discount: (B,). has_next: (B,), 1 where
        `next_action` was recorded. plan: (B, Th Da), the window that contains the executed `action`.
        real: (B, Th), 1 where the plan was recorded. row: (B,) int64, transition indices. images,
        next_images: (B, To, H, W, 3) uint8 by camera, of a table for a trained encoder.
    """

    cond: Tensor
    action: Tensor
    reward: Tensor
    next_cond: Tensor
    discount: Tensor
    next_action: Tensor
    has_next: Tensor
    plan: Tensor
    real: Tensor
    row: Tensor
    images: Mapping[str, Tensor] = field(default_factory=dict)
    next_images: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row)

    def stored(self) -> tuple[Tensor, ...]:
        """Return the columns of a table, (B, width) each; a plan of the executed step alone is left out."""
        scalars = (self.reward[:, None], self.discount[:, None], self.has_next[:, None])
        is_single = self.real.shape[1] == 1 and self.plan.shape == self.action.shape
        window = () if is_single else (self.plan, self.real)
        return (self.cond, self.action, self.next_cond, *scalars, self.next_action, *window)


@dataclass(frozen=True)
class Pictures:
    """Images of frames (M, To) of a dataset."""

    images: Mapping[str, Any]
    frames: Tensor

    def __call__(self, row: Tensor) -> dict[str, Tensor]:
        """Return the images (B, To, H, W, 3) by camera of rows (B,)."""
        frames = self.frames.index_select(0, row).cpu()
        flat = {camera: images[frames.flatten()] for camera, images in self.images.items()}
        return {camera: part.unflatten(0, frames.shape).to(row.device) for camera, part in flat.items()}


class TransitionTable:
    """All transitions, one row each, on one device; shapes as in `Batch`, M rows.

    Args:
        blocks: Transitions whose `row` is their place in the table; each is copied before the next is made.
        num: M.
        frame: (M,), start frames of the transitions in the dataset, if any.
        weight: (M,), proportional to how often a row is drawn; None: all alike.
        pictures: Images of transitions and of their successors, for a trained encoder; empty: none.
    """

    def __init__(
        self,
        blocks: Iterable[Batch],
        num: int,
        *,
        frame: Tensor | None = None,
        weight: Tensor | None = None,
        pictures: Sequence[Pictures] = (),
    ) -> None:
        self.frame, self._pictures = frame, pictures
        self._weighted = None if weight is None else WeightedRows(weight)
        self._cache: dict[str, Any] = {}
        self._widths: list[int] = []
        for block in blocks:
            parts = block.stored()
            if not self._widths:
                self._widths = [part.shape[1] for part in parts]
                self._rows = parts[0].new_empty(num, sum(self._widths))
            self._rows[block.row] = torch.cat(parts, dim=1)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def device(self) -> torch.device:
        return self._rows.device

    @property
    def cond(self) -> Tensor:
        """Conditions (M, C); a view."""
        return self._split(self._rows)[0]

    @property
    def action(self) -> Tensor:
        """Flattened chunks (M, A); a view."""
        return self._split(self._rows)[1]

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return the indices (n,) of a batch, drawn with replacement."""
        if self._weighted is not None:
            return self._weighted.draw(n, generator)
        return torch.randint(len(self), (n,), generator=generator, device=generator.device).to(self.device)

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """Return `make()`, evaluated once per name."""
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]

    def gather(self, row: Tensor) -> Batch:
        """Return the transitions at indices (...,)."""
        rows = self._rows.index_select(0, row.flatten())
        parts = self._split(rows.view(*row.shape, rows.shape[1]))
        cond, action, next_cond, *scalars, next_action = parts[:7]
        reward, discount, has_next = (part.squeeze(-1) for part in scalars)
        plan, real = parts[7:] or (action, torch.ones_like(parts[3]))  # the executed step alone, recorded
        batch = Batch(cond, action, reward, next_cond, discount, next_action, has_next, plan, real, row)
        if not self._pictures:
            return batch
        now, later = self._pictures
        return replace(batch, images=now(row), next_images=later(row))

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self._widths, dim=-1)


@dataclass(frozen=True)
class Rewarding:
    """Reward transform: scale r + shift, discounted by gamma per step."""

    gamma: float = 0.99
    scale: float = 1.0
    shift: float = 0.0


@torch.no_grad()
def deviations(cond: Tensor) -> Tensor:
    """Return the std (C,) of each entry of conditions (M, C); 1 for near-constant entries."""
    std = cond.double().std(dim=0, correction=0)
    return torch.where(std < _CONSTANT_STD, torch.ones_like(std), std).to(cond)


def tabulate(
    dataset: EpisodeDataset,
    policy: Policy,
    rewarding: Rewarding,
    *,
    trains_encoder: bool = False,
    steps: int | None = None,
) -> TransitionTable:
    """Return the transitions of a dataset on the policy's device, in the policy's encoding.

    The policy's history, executed steps (`steps`: others), encoding and normalisation are used. With images,
    the last frame of an episode that goes on is left out: the image after it is not recorded. With
    `trains_encoder`, conditions are states and goals, physical and flat, and the images are looked up.

    Raises:
        DatasetError: If there is no transition.
    """
    dataset = seen_by(policy, dataset)
    steps = policy.chunk.act_steps if steps is None else steps
    start = segment_starts(dataset, steps)
    if not len(start):
        is_own = steps == policy.chunk.act_steps
        fewer = "a policy with fewer act_steps" if is_own else f"algo.critic_horizon below {steps}"
        raise DatasetError(
            f"{dataset.source}: no {steps} frames in a row have a known successor. "
            f"Use longer episodes or {fewer}."
        )
    _require_memory(dataset, policy, len(start), steps)
    # Of a trained encoder: where the image histories before and after a chunk end.
    ends = [(start, False), (Segments.of(dataset, start, steps).last, True)] if trains_encoder else []
    frames = (
        histories(dataset, newest, policy.chunk.obs_steps, successor=after)[1] for newest, after in ends
    )
    rows = torch.arange(len(start), device=start.device).split(_ENCODED_AT_ONCE)
    segments = ((row, Segments.of(dataset, start[row], steps)) for row in rows)
    return TransitionTable(
        (_batch(dataset, policy, rewarding, trains_encoder, *pair) for pair in segments),
        len(start),
        frame=start,
        weight=dataset.extras[SAMPLING_WEIGHT][start] if SAMPLING_WEIGHT in dataset.extras else None,
        pictures=[Pictures(dataset.images, history) for history in frames],
    )


def _batch(
    dataset: EpisodeDataset,
    policy: Policy,
    rewarding: Rewarding,
    trains_encoder: bool,
    row: Tensor,
    segment: Segments,
) -> Batch:
    """Return the transitions of segments as rows (B,) of the table."""
    rewards = rewarding.scale * dataset.rewards[segment.frames].double() + rewarding.shift
    weight = rewarding.gamma ** torch.arange(segment.frames.shape[1], device=rewards.device).double()
    following, has_next = segment.next_chunks(dataset)
    planned, real = segment.plans(policy.chunk)
    read = _flat if trains_encoder else _encode

    def actions(frames: Tensor) -> Tensor:
        return policy.normalize_action(dataset.actions[frames]).flatten(1)

    return Batch(
        cond=read(policy, dataset, segment.start),
        action=actions(segment.frames),
        reward=(rewards * weight * segment.real).sum(dim=1).float(),
        next_cond=read(policy, dataset, segment.last, successor=True),
        discount=(rewarding.gamma ** segment.length.double() * ~segment.over).float(),
        next_action=actions(following),
        has_next=has_next.float(),
        plan=actions(planned),
        real=real.float(),
        row=row,
    )


def _require_memory(dataset: EpisodeDataset, policy: Policy, num: int, steps: int) -> None:
    """Refuse a table that does not fit into memory, for a dataset mapped from disk."""
    if not dataset.storage.on_disk:
        return
    chunk = policy.chunk
    conditions, actions = 2 * chunk.obs_steps * dataset.obs_dim, 2 * steps * dataset.action_dim
    width = conditions + actions + chunk.horizon * (dataset.action_dim + 1) + 3
    require_memory(2 * 4 * num * width, f"{dataset.source}, as a table of transitions")


def _encode(policy: Policy, dataset: EpisodeDataset, newest: Tensor, *, successor: bool = False) -> Tensor:
    """Return the condition (M, C) of the history up to frames (M,), or up to their successors.

    A successor has goal and images of the next frame; of the last one, of which none is recorded, its own.
    """
    pieces = newest.split(_IMAGES_AT_ONCE if policy.images else _ENCODED_AT_ONCE)
    return torch.cat([encode(policy, _observed(policy, dataset, piece, successor)).vec for piece in pieces])


def _flat(policy: Policy, dataset: EpisodeDataset, newest: Tensor, *, successor: bool = False) -> Tensor:
    """Return states and goals of the same histories, physical and flat, (M, To Do + Dg)."""
    return flat_state(_observed(policy, replace(dataset, images={}), newest, successor))


def _observed(policy: Policy, dataset: EpisodeDataset, frame: Tensor, successor: bool) -> dict[str, Tensor]:
    """Return the observations with the history up to frames (M,), or up to their successors."""
    of_states, of_images = histories(dataset, frame, policy.chunk.obs_steps, successor=successor)  # (M, To)
    obs = {"state": dataset.observations[of_states]}
    if successor:
        obs["state"][:, -1] = _successors(dataset, frame)
    if policy.goal_dim:
        obs["goal"] = dataset.extras["goal"][of_images[:, -1]].float()
    for camera, images in dataset.images.items():
        obs[camera] = images[of_images.flatten().cpu()].unflatten(0, of_images.shape)
    return obs


def _successors(dataset: EpisodeDataset, frame: Tensor) -> Tensor:
    """Return the observations after frames (M,), (M, Do); if unknown, those of the frames."""
    if dataset.next_observations is not None:
        return dataset.next_observations[frame]
    return dataset.observations[torch.minimum(frame + 1, episode_bounds(dataset, frame)[1])]
