"""Online phase of a run on a dataset: act, store, draw batches of data and experience.

Legend: N environments, B rows, C condition width, A = Ta Da, l <= Ta executed steps. Transitions are those
of `algos.transitions`: chunks start where the policy decides, reward and discount are those of the run. A
chunk is stored whole with its plan, also if it ends its episode; steps that were not executed are masked in
`real`. Time limits do not end the task. Transitions longer than a chunk join consecutive ones; one begins
with every chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from algos.base import Setup
from algos.training.experience import transitions_of
from algos.training.serialization import capture_generator, restore_generator
from algos.transitions import Batch, Rewarding, TransitionTable
from envs.rollouts.episodes import EpisodeRow
from envs.rollouts.rollout import Rollout
from envs.spec import EnvSpec
from policies.bounds import Checked, bounded
from policies.errors import CapabilityError, CheckpointError
from policies.policy import Policy
from policies.seeds import seeded_generator

_COLUMNS = tuple(one.name for one in fields(Batch) if "images" not in one.name)


@dataclass
class OnlineConfig(Checked):
    """Settings of the online phase."""

    key = "algo.online"

    num_envs: int = bounded(4, ge=1)  # parallel environments
    warmup_steps: int = bounded(1000, ge=0)  # control steps before the first online update
    updates_per_step: float = bounded(1.0, gt=0)  # gradient steps per executed control step
    offline_ratio: float | None = bounded(0.5, ge=0, le=1)  # dataset share of a batch; null: that of all rows
    buffer_size: int = bounded(1_000_000, ge=1)  # capacity for experience, transitions
    exploration_std: float = bounded(0.0, ge=0)  # std of noise on executed actions, normalised units


def noise_bounds(policy: Policy, spec: EnvSpec) -> tuple[Tensor, Tensor]:
    """Return the normalised bounds (Da,) of noisy actions: ±1, or the task's without limits of the policy."""
    sides = (spec.action_low, spec.action_high)
    low, high = (torch.tensor(side, device=policy.device, dtype=policy.dtype) for side in sides)
    if policy.normalizer.modes["action"] == "limits":
        return -torch.ones_like(low), torch.ones_like(high)
    return policy.normalize_action(low), policy.normalize_action(high)


class Explorer:
    """Rollout actor: a policy's sampled chunks, with Gaussian noise; see `envs.rollouts.rollout.Actor`.

    Noisy actions stay within `bounds` (Da,) each, normalised.
    """

    def __init__(self, policy: Policy, std: float, bounds: tuple[Tensor, Tensor]) -> None:
        self.policy, self.std, self.bounds = policy, std, bounds

    @torch.no_grad()
    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Return physical actions (N, Ta, Da), and condition and normalised plan (Th Da) of each."""
        policy = self.policy
        cond = policy.encode(policy.observation(obs))
        plan = policy.decode(cond, policy.sample_noise(len(cond), generator=generator)).clone()
        action = plan[:, policy.chunk.executed]
        if self.std:
            noise = torch.randn(action.shape, generator=generator, device=generator.device)
            low, high = (side.to(action) for side in self.bounds)
            action.copy_((action + self.std * noise.to(action)).clamp(low, high))
        return policy.physical(action), {"cond": cond.vec, "plan": plan.flatten(1)}


class Experience(TransitionTable):
    """Ring of the latest transitions, with the columns of a dataset's table."""

    def __init__(self, capacity: int, like: TransitionTable) -> None:
        nothing = torch.empty(0, dtype=torch.int64, device=like.device)
        super().__init__([like.gather(nothing)], capacity)
        self.size = self._next = 0

    def __len__(self) -> int:
        return self.size

    def add(self, batch: Batch) -> None:
        """Overwrite the oldest rows with those of a batch."""
        rows = torch.cat(batch.stored(), dim=1).to(self._rows)[-len(self._rows) :]
        place = (self._next + torch.arange(len(rows), device=self.device)) % len(self._rows)
        self._rows.index_copy_(0, place, rows)
        self._next = (self._next + len(rows)) % len(self._rows)
        self.size = min(self.size + len(rows), len(self._rows))

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": self._rows[: self.size].clone(),
            "next": self._next,
            "capacity": len(self._rows),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; the capacity may differ (CheckpointError if too small)."""
        rows, place = state["rows"], int(state["next"])
        if len(rows) > len(self._rows) or rows.shape[1:] != self._rows.shape[1:]:
            raise CheckpointError(
                f"the saved experience has {len(rows)} rows of {rows.shape[1]} numbers; this run has place "
                f"for {len(self._rows)} of {self._rows.shape[1]}. Keep policy and algo.online.buffer_size."
            )
        if state["capacity"] != len(self._rows):  # oldest first
            rows, place = rows.roll(-place, dims=0), len(rows) % len(self._rows)
        self.size, self._next = len(rows), place
        self._rows[: self.size] = rows.to(self._rows)


class RunningChunks:
    """Latest chunks of N environments, joined into transitions of a number of chunks.

    A transition is complete with its last chunk, or where the task ends; one cut by a time limit is dropped.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self._running: list[tuple[Batch, Tensor]] = []  # oldest first, with `first` (N,)

    def add(self, batch: Batch, first: Tensor, terminated: Tensor) -> list[Batch]:
        """Add a chunk of every environment; return the transitions that it completes.

        `first` (N,) says which chunks begin an episode, `terminated` (N,) which end the task.
        """
        self._running.append((batch, first))
        found, goes_on = [], torch.ones_like(first)
        for start in reversed(range(len(self._running))):
            parts = [part for part, _ in self._running[start:]]
            is_complete = torch.full_like(first, len(parts) == self.chunks) | terminated
            row = (goes_on & is_complete).nonzero().squeeze(1)
            if len(row):
                found.append(rows_of(joined(parts, self.chunks), row))
            goes_on = goes_on & ~self._running[start][1]
        del self._running[: max(0, len(self._running) + 1 - self.chunks)]
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"running": [{"first": first} | columns_of(part) for part, first in self._running]}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from `state_dict` with chunks on `device`."""
        moved = [
            {name: part.to(device) for name, part in saved.items()} for saved in state.get("running", [])
        ]
        self._running = [(Batch(**{name: one[name] for name in _COLUMNS}), one["first"]) for one in moved]


class OnlinePhase:
    """Environment steps after the gradient steps on the dataset.

    Args:
        config: Settings.
        total: Control steps to execute.
        setup: Environment, seed, workers, device.
        policy: Its encoding and chunk are those of the transitions.
        table: Transitions of the dataset.
        rewarding: Reward transform.
        chunks: Executed chunks of a transition.
    """

    def __init__(
        self,
        config: OnlineConfig,
        total: int,
        setup: Setup,
        policy: Policy,
        table: TransitionTable,
        rewarding: Rewarding,
        chunks: int = 1,
    ) -> None:
        config.require("warmup_steps", config.warmup_steps <= total, f"at most algo.online_steps={total}")
        if policy.dtype != torch.float32:
            raise CapabilityError(f"online steps need a policy in torch.float32; this one is {policy.dtype}.")
        self.config, self.total, self.table, self._rewarding = config, total, table, rewarding
        self.experience = Experience(min(config.buffer_size, total + config.num_envs), table)
        self._running, self._device = RunningChunks(chunks), policy.device
        self.pool = setup.pool(policy, config.num_envs)
        self._bounds = noise_bounds(policy, self.pool.env.spec)
        self._generator = seeded_generator(setup.seed, "online batches", device=setup.device)
        self.progress, self._pending = 0, 0.0

    def act(self, policy: Policy) -> tuple[int, list[EpisodeRow]]:
        """Execute one chunk in every environment; return the number of updates due, and finished episodes."""
        explorer = Explorer(self.pool.acting(policy), self.config.exploration_std, self._bounds)
        rollout = self.pool.collect(explorer, 1)
        batch = batch_of(rollout, policy, self._rewarding)
        first, terminated = (flags[0].to(self._device) for flags in (rollout.first, rollout.terminated))
        for transitions in self._running.add(batch, first, terminated):
            self.experience.add(transitions)
        executed = int(rollout.length.sum())
        self.progress += executed
        if self.progress < self.config.warmup_steps:
            return 0, rollout.episodes
        self._pending += executed * self.config.updates_per_step
        due = math.floor(self._pending)
        self._pending -= due
        return due, rollout.episodes

    def draw(self, n: int) -> Batch:
        """Return n rows, experience first. `row` is -1 for experience."""
        data, own, ratio = len(self.table), len(self.experience), self.config.offline_ratio
        share = data / (data + own) if ratio is None else ratio
        count = min(round(share * n), n) if own else n
        batches = []
        for table, rows in ((self.experience, n - count), (self.table, count)):
            if rows:
                batches.append(table.gather(table.draw(rows, self._generator)))
        if n > count:
            batches[0] = replace(batches[0], row=torch.full_like(batches[0].row, -1))
        columns = [columns_of(one) for one in batches]
        parts: dict[str, Any] = {name: torch.cat([one[name] for one in columns]) for name in _COLUMNS}
        return Batch(**parts)

    def state_dict(self) -> dict[str, Any]:
        return {
            "progress": self.progress,
            "pending": self._pending,
            "experience": self.experience.state_dict(),
            **self._running.state_dict(),
            "generator": capture_generator(self._generator),
            "pool": self.pool.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.experience.load_state_dict(state["experience"])
        self._running.load_state_dict(state, self._device)
        restore_generator(self._generator, state["generator"])
        self.pool.load_state_dict(state["pool"])
        self.progress, self._pending = int(state["progress"]), float(state["pending"])

    def close(self) -> None:
        self.pool.close()


def batch_of(rollout: Rollout, policy: Policy, rewarding: Rewarding) -> Batch:
    """Return the N transitions of a rollout of one chunk per environment."""
    rows, chunk = transitions_of(rollout, policy), policy.chunk
    rows = {name: part.to(policy.device) for name, part in rows.items()}
    plan, length = rows["plan"].unflatten(1, chunk.shape), rows["length"]
    action = plan[:, chunk.executed].flatten(1)
    step = torch.arange(chunk.act_steps, device=policy.device)
    executed = step < length[:, None]
    rewards = rewarding.scale * rows["rewards"].double() + rewarding.shift
    reward = (rewards * rewarding.gamma ** step.double() * executed).sum(dim=1).float()
    discount = rewarding.gamma ** length.double() * ~rows["terminated"]
    real = action.new_zeros(len(action), chunk.horizon)
    real[:, chunk.executed] = executed.to(real)
    return Batch(
        cond=rows["cond"],
        action=action,
        reward=reward,
        next_cond=rows["next_cond"],
        discount=discount.float(),
        next_action=torch.zeros_like(action),  # unknown: the next chunk is chosen later
        has_next=torch.zeros_like(reward),
        plan=plan.flatten(1),
        real=real,
        row=torch.full_like(length, -1),
    )


def columns_of(batch: Batch) -> dict[str, Any]:
    """Return the tensors of a batch by name."""
    return {name: getattr(batch, name) for name in _COLUMNS}


def rows_of(batch: Batch, row: Tensor) -> Batch:
    """Return the rows at indices (R,)."""
    return Batch(**{name: part[row] for name, part in columns_of(batch).items()})


def joined(parts: Sequence[Batch], chunks: int) -> Batch:
    """Return the transitions over consecutive chunks; of fewer than `chunks`, the last action is repeated."""
    reward, discount, last = parts[0].reward, parts[0].discount, parts[-1]
    for part in parts[1:]:
        reward, discount = torch.addcmul(reward, discount, part.reward), discount * part.discount
    width = last.plan.shape[1] // last.real.shape[1]
    missing = (chunks - len(parts)) * last.action.shape[1] // width
    action = torch.cat([*(part.action for part in parts), last.action[:, -width:].repeat(1, missing)], dim=1)
    return replace(
        parts[0],
        action=action,
        reward=reward,
        discount=discount,
        next_cond=last.next_cond,
        next_action=torch.zeros_like(action),
    )
