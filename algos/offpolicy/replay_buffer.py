"""Replay buffer of chunk transitions, and batches from one or two sources.

Legend: M rows in the buffer, B rows of a batch, C condition width, L latent width, A = Ta Da, l <= Ta
executed steps. Rewards and discounts are computed when a row is sampled::

    reward   sum over j < l of gamma^j (scale r_{t+j} + shift)
    discount gamma^l, or 0 where the task ended

`paper_compat` uses the conventions of the released code: plain reward sum, one gamma per chunk, and no
bootstrap beyond the end of an episode, whether terminated or truncated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from algos.transitions import Rewarding, TransitionTable
from policies.errors import CheckpointError


@dataclass(frozen=True)
class ChunkBatch:
    """Rows of transitions, normalised.

    Shapes:
        cond, next_cond: (B, C). latent: (B, L). action: (B, A). reward, discount: (B,). images, next_images:
        (B, To, H, W, 3) uint8 by camera, for a trained encoder; until they are encoded, the conditions are
        states and goals, physical and flat.
    """

    cond: Tensor
    latent: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_cond: Tensor
    images: Mapping[str, Tensor] = field(default_factory=dict)
    next_images: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.reward)


@dataclass(frozen=True)
class Discounting(Rewarding):
    """Reward transform and discount of chunks."""

    paper_compat: bool = False  # gamma is per chunk

    def __call__(self, rewards: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Return reward and discount (B,); see the module docstring.

        Shapes:
            rewards: (B, Ta). end: (B, 3), executed steps, terminated and truncated, 1 or 0.
        """
        steps = rewards.shape[1]
        code, table = _outcome_table(self, steps, rewards.device, rewards.dtype)
        outcome = table.index_select(0, end.mv(code).long())  # one look-up instead of a dozen small kernels
        reward = torch.linalg.vecdot(rewards, outcome[:, :steps]) + outcome[:, steps]
        return reward, outcome[:, steps + 1]


@cache
def _outcome_table(
    rule: Discounting, steps: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return a table of chunk outcomes, and the factors (3,) that map an end to its row.

    Rows: l = 0 ... Ta executed steps, for four cases: neither, terminated, truncated, both. Ta + 2
    columns: Ta reward factors, 0 beyond l; the sum of the shifts; the discount after the chunk.
    """
    step, length = torch.arange(steps), torch.arange(steps + 1)[:, None]
    inner = 1.0 if rule.paper_compat else rule.gamma
    weight = (inner ** step.double()) * (step < length)
    later = torch.full_like(weight[:, :1], rule.gamma) if rule.paper_compat else rule.gamma ** length.double()
    reward = torch.cat([rule.scale * weight, rule.shift * weight.sum(dim=1, keepdim=True)], dim=1)
    bootstraps = (1, 0, 0, 0) if rule.paper_compat else (1, 0, 1, 0)
    table = torch.cat([torch.cat([reward, has_future * later], dim=1) for has_future in bootstraps])
    code = torch.tensor([1, steps + 1, 2 * (steps + 1)])
    return code.to(device, dtype), table.to(device, dtype)


class Replay:
    """Ring buffer of the latest transitions, on one device; widths C, L, A and Ta as in the legend.

    `images` are the shapes (To, H, W, 3) of stored images by camera.
    """

    def __init__(
        self,
        capacity: int,
        *,
        cond: int,
        latent: int,
        action: int,
        steps: int,
        images: Mapping[str, tuple[int, ...]] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._widths = [cond, latent, action, steps, 3, cond]
        self._rows = torch.empty(capacity, sum(self._widths), device=device)
        byte = partial(torch.empty, dtype=torch.uint8, device=device)
        shapes = {c: (capacity, *shape) for c, shape in (images or {}).items()}
        self._images = {camera: byte(shape) for camera, shape in shapes.items()}
        self._next_images = {camera: byte(shape) for camera, shape in shapes.items()}
        self._size = self._next = 0

    def __len__(self) -> int:
        return self._size

    @property
    def capacity(self) -> int:
        return len(self._rows)

    @property
    def device(self) -> torch.device:
        return self._rows.device

    def add(
        self,
        *,
        cond: Tensor,
        latent: Tensor,
        action: Tensor,
        rewards: Tensor,
        length: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        next_cond: Tensor,
        images: Mapping[str, Tensor] | None = None,
        next_images: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Overwrite the oldest rows with n transitions; shapes as in `ChunkBatch` and `Discounting`."""
        single = (length[:, None], terminated[:, None], truncated[:, None])
        parts = [part.to(self._rows) for part in (cond, latent, action, rewards, *single, next_cond)]
        rows = torch.cat(parts, dim=1)[-self.capacity :]
        place = (self._next + torch.arange(len(rows), device=self.device)) % self.capacity
        self._rows.index_copy_(0, place, rows)
        for store, new in ((self._images, images), (self._next_images, next_images)):
            for camera, kept in store.items():
                kept.index_copy_(0, place, (new or {})[camera][-self.capacity :].to(kept.device))
        self._next = (self._next + len(rows)) % self.capacity
        self._size = min(self._size + len(rows), self.capacity)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return n row indices, sampled uniformly with replacement."""
        return torch.randint(self._size, (n,), generator=generator, device=generator.device).to(self.device)

    def gather(self, row: Tensor, discounting: Discounting) -> ChunkBatch:
        parts = self._rows.index_select(0, row).split(self._widths, dim=1)
        cond, latent, action, rewards, end, next_cond = parts
        reward, discount = discounting(rewards, end)
        if not self._images:
            return ChunkBatch(cond, latent, action, reward, discount, next_cond)
        pictures = ({c: kept.index_select(0, row) for c, kept in store.items()} for store in self._stores)
        return ChunkBatch(cond, latent, action, reward, discount, next_cond, *pictures)

    @property
    def _stores(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self._images, self._next_images

    def state_dict(self) -> dict[str, Any]:
        images = [{c: kept[: self._size].clone() for c, kept in store.items()} for store in self._stores]
        state = {"rows": self._rows[: self._size].clone(), "next": self._next, "capacity": self.capacity}
        return state | ({"images": images} if self._images else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; the capacity may differ (CheckpointError if too small)."""
        rows, next_row = state["rows"], int(state["next"])
        if len(rows) > self.capacity or rows.shape[1:] != self._rows.shape[1:]:
            raise CheckpointError(
                f"the saved replay has {len(rows)} rows of {rows.shape[1]} numbers; this one has place for "
                f"{self.capacity} of {self._rows.shape[1]}. Keep policy, budget and algo.buffer_size."
            )
        shift = 0
        if state["capacity"] != self.capacity:  # begin with the oldest row
            shift, next_row = -next_row, len(rows) % self.capacity
        self._size, self._next = len(rows), next_row
        self._rows[: self._size] = rows.roll(shift, dims=0).to(self._rows)
        for store, saved in zip(self._stores, state.get("images", ()), strict=bool(self._images)):
            for camera, kept in store.items():
                kept[: self._size] = saved[camera].roll(shift, dims=0).to(kept.device)


class Mixture:
    """Batches from a replay buffer and, for a fraction of the rows, from a fixed dataset.

    Args:
        online: Replay buffer.
        discounting: Reward transform of the buffer.
        offline: Dataset transitions with computed rewards and discounts; None: no dataset.
        ratio: Fraction of dataset rows, rounded; at least one row comes from the buffer.
        value_offset: c; rewards increase by c (1 - discount), which increases every value by c.
        encode: Encodes the images of a batch, given the generator of the draw; None: no images.
    """

    def __init__(
        self,
        online: Replay,
        discounting: Discounting,
        offline: TransitionTable | None = None,
        ratio: float = 0.0,
        value_offset: float = 0.0,
        encode: Callable[[ChunkBatch, torch.Generator], ChunkBatch] | None = None,
    ) -> None:
        self.encode = encode
        self.online, self.discounting, self.offline = online, discounting, offline
        self.ratio = ratio if offline is not None else 0.0
        self.value_offset = value_offset

    def draw(self, n: int, generator: torch.Generator) -> ChunkBatch:
        """Return a batch of n rows, dataset rows last."""
        batch = self._sample(n, generator)
        if self.encode is not None:
            batch = self.encode(batch, generator)
        if not self.value_offset:
            return batch
        return replace(batch, reward=batch.reward + self.value_offset * (1 - batch.discount))

    def _sample(self, n: int, generator: torch.Generator) -> ChunkBatch:
        count = min(round(self.ratio * n), n - 1)
        online = self.online.gather(self.online.draw(n - count, generator), self.discounting)
        if self.offline is None or not count:
            return online
        data = self.offline.gather(self.offline.draw(count, generator))
        unknown = data.action.new_zeros(count, online.latent.shape[1])  # critics over chunks do not use it
        names = ("cond", "action", "reward", "discount", "next_cond")
        parts = {name: (getattr(online, name), getattr(data, name)) for name in names}
        parts["latent"] = (online.latent, unknown)
        joined: dict[str, Any] = {name: torch.cat(pair) for name, pair in parts.items()}
        for name in ("images", "next_images"):
            ours, theirs = getattr(online, name), getattr(data, name)
            joined[name] = {camera: torch.cat([ours[camera], theirs[camera]]) for camera in ours}
        return ChunkBatch(**joined)
