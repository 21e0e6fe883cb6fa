"""Run evaluation episodes whose result depends only on their seed, not on batch size or neighbours.

Decisions of episodes that play at the same time are computed in blocks; see `envs.rollouts.blocks`.

Legend: N environments, M of them playing, To observation history, Th horizon, Ta executed steps, Do and Da
widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from envs.engine.lanes import distinct_groups
from envs.rollouts.blocks import BLOCK_ROWS, SIZES, Blocks, scattered
from envs.rollouts.episodes import EpisodeRow, EpisodeTracker
from envs.rollouts.observations import observe, to_tensors
from envs.spec import Array, EnvConfig, VectorEnv
from policies.execution.replanning import Replanner, WarmStart
from policies.policy_config import ChunkSpec
from policies.seeds import seeded_generator
from policies.wrappers.best_of_n import BestOfN
from policies.wrappers.candidates import CandidatePolicy

NETWORK_CALLS = "network_calls"
"""Metric of an episode that was played from warm starts: evaluations of the network per decision."""


class EvaluatedPolicy(Protocol):
    """Interface of policies in an evaluation."""

    chunk: ChunkSpec

    @property
    def noise_shape(self) -> tuple[int, ...]: ...

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw noise (n, *noise_shape)."""
        ...

    def act(self, obs: Any, *, noise: Tensor | None = None) -> Tensor:
        """Map `state` (B, To, Do) to physical actions (B, Ta, Da), deterministically given the noise.

        Tasks with goals also pass `goal` (B, Dg). Policies with `images` (shapes by camera) also receive
        images (B, To, H, W, 3) uint8 by camera.
        """
        ...


@dataclass
class Memory:
    """State of an episode between decisions; `plan` (Th, Da) is normalised, None before the first."""

    plan: Tensor | None = None
    calls: int = 0
    decisions: int = 0

    def remember(self, plan: Tensor, calls: int) -> None:
        self.plan = plan
        self.calls += calls
        self.decisions += 1


@dataclass(frozen=True)
class EpisodeRunner:
    """A policy with the options of an evaluation."""

    policy: EvaluatedPolicy
    first_seed: int
    noise_seed: int
    start_noise: str
    sampling_noise: str
    keep: bool
    warm_start: WarmStart = field(default_factory=WarmStart)
    noise_span: int | None = None  # episodes that share a noise seed; the next ones have the seed after it

    @cached_property
    def replanner(self) -> Replanner | None:
        """Replanning from the previous plan; None for independent decisions."""
        return Replanner(self.policy, self.warm_start) if self.warm_start.is_on else None

    def generator(self, episode: int) -> torch.Generator:
        """Return the generator of the noise of an episode."""
        span, number = self._span_and_number(episode)
        return seeded_generator(self.noise_seed + span, "evaluation", number)

    def lane(self, episode: int) -> int:
        """Return the row of its blocks that an episode occupies."""
        return self._span_and_number(episode)[1] % BLOCK_ROWS

    def _span_and_number(self, episode: int) -> tuple[int, int]:
        """Return which span of `noise_span` episodes an episode belongs to, and its number within it."""
        return (0, episode) if self.noise_span is None else divmod(episode, self.noise_span)

    def noise(self, generator: torch.Generator) -> Tensor:
        """Draw the noise of one decision, (*noise_shape), with disabled parts zero."""
        source = self.replanner or self.policy
        noise = source.sample_noise(1, generator=generator)[0]  # ([N,] [K + 1,] Th, Da)
        has_steps = noise.dim() > len(self.policy.chunk.shape) and not getattr(
            source, "is_deterministic", False
        )
        if self.start_noise == "zero":
            (noise[..., 0, :, :] if has_steps else noise).zero_()
        if self.sampling_noise == "zero" and has_steps:
            noise[..., 1:, :, :] = 0.0
        return noise

    def act(
        self,
        obs: Mapping[str, Array],
        noise: Sequence[Tensor],
        lanes: Sequence[int],
        memories: Sequence[Memory],
    ) -> Array:
        """Compute chunks for M episodes.

        Args:
            obs: `state` (M, To, Do), `goal` (M, Dg) and images (M, To, H, W, 3) uint8 by camera.
            noise: Noise of each decision.
            lanes: Fixed block rows.
            memories: States of the episodes; updated in place.

        Returns:
            (M, Ta, Da) physical actions.
        """
        tensors = to_tensors(obs)
        starts = torch.stack(list(noise))
        with torch.inference_mode():
            if self.replanner is None:
                return self._blocks.actions(tensors, starts, lanes).cpu().numpy()
            return self._replan(self.replanner, tensors, starts, lanes, memories)

    @cached_property
    def _blocks(self) -> Blocks:
        parts: Any = self.policy.modules() if isinstance(self.policy, nn.Module) else ()
        compares = any(isinstance(part, BestOfN | CandidatePolicy) for part in parts)
        return Blocks(lambda obs, noise: self.policy.act(obs, noise=noise), () if compares else SIZES)

    def _replan(
        self,
        replanner: Replanner,
        obs: Mapping[str, Tensor],
        noise: Tensor,
        lanes: Sequence[int],
        memories: Sequence[Memory],
    ) -> Array:
        """Compute chunks from previous plans; first decisions, which have none, are in other blocks."""
        chunks: list[Array] = [np.empty(0)] * len(lanes)
        is_first = [memory.plan is None for memory in memories]
        for first in (True, False):
            alike = [i for i, value in enumerate(is_first) if value == first]
            for group in distinct_groups([lanes[i] for i in alike]):
                members = [alike[i] for i in group]
                rows = [lanes[i] for i in members]
                plans = [plan for i in members if (plan := memories[i].plan) is not None]
                decision = replanner.decide(
                    {name: scattered(values[members], rows) for name, values in obs.items()},
                    noise=scattered(noise[members], rows),
                    previous=scattered(torch.stack(plans), rows) if plans else None,
                )
                for i, row in zip(members, rows, strict=True):
                    memories[i].remember(decision.plan[row], decision.calls)
                    chunks[i] = decision.actions[row].cpu().numpy()
        return np.stack(chunks)


class Evaluator:
    """One worker's share of an evaluation: `episodes` of a task with the policy's cameras."""

    notify: Callable[[list[EpisodeRow]], None]  # told of episodes that ended, without their trajectories

    def __init__(self, env: EnvConfig, runner: EpisodeRunner, episodes: list[int], num_envs: int) -> None:
        self._runner = runner
        self._queue = _EpisodeQueue(episodes, runner.lane)
        width = min(num_envs, len(episodes))
        self._vector: VectorEnv = env.make_vector(width, obs_steps=self._runner.policy.chunk.obs_steps)
        self._tracker = EpisodeTracker(width)
        self._episode = np.full(width, -1)  # -1: no episode left for this environment
        self._obs = np.zeros((width, self._vector.obs_steps, self._vector.spec.obs_dim))
        self._generators: list[torch.Generator] = [torch.Generator()] * width
        self._buffers = [_EpisodeBuffer() for _ in range(width)]
        self._memories = [Memory() for _ in range(width)]

    def run(self) -> list[EpisodeRow]:
        done: list[EpisodeRow] = []
        self._begin(np.arange(len(self._episode)))
        while (self._episode >= 0).any():
            done += self._advance()
        return done

    def close(self) -> None:
        self._vector.close()

    def _begin(self, rows: Array) -> None:
        for row in rows.tolist():
            playing = int(self._episode[row])
            lane = self._runner.lane(playing) if playing >= 0 else row % BLOCK_ROWS
            self._episode[row] = episode = self._queue.take(lane)
            if episode < 0:
                continue
            seed = self._runner.first_seed + episode
            self._obs[row] = self._vector.reset([seed], [row])[0]
            self._generators[row] = self._runner.generator(episode)
            self._tracker.reset(np.array([row]))
            self._tracker.begin(np.array([row]), [seed], [episode])
            self._buffers[row] = _EpisodeBuffer([self._obs[row, -1].copy()[None]])
            self._memories[row] = Memory()

    def _advance(self) -> list[EpisodeRow]:
        active = self._episode >= 0
        playing = np.flatnonzero(active)
        noise = [self._runner.noise(self._generators[i]) for i in playing.tolist()]
        lanes = [self._runner.lane(episode) for episode in self._episode[playing].tolist()]
        memories = [self._memories[i] for i in playing.tolist()]
        obs = observe(self._vector, self._obs[playing], playing)
        chosen = self._runner.act(obs, noise, lanes, memories)
        actions = np.zeros((len(active), *chosen.shape[1:]), chosen.dtype)
        actions[playing] = chosen
        step = self._vector.step_chunk(actions, active)
        self._tracker.add(step)
        self._obs[playing] = step.obs[playing]
        if self._runner.keep:
            for i in playing.tolist():
                done = slice(step.length[i])
                self._buffers[i].add(step.path[i, done], actions[i, done], step.rewards[i, done])
        ended = np.flatnonzero(step.done & active)
        rows = self._tracker.rows(ended, step)
        rows = [
            _with_network_calls(row, self._memories[i]) for i, row in zip(ended.tolist(), rows, strict=True)
        ]
        if rows:
            self.notify(rows)
        if self._runner.keep:
            rows = [self._buffers[i].attach_to(row) for i, row in zip(ended.tolist(), rows, strict=True)]
        self._begin(ended)
        return rows


class _EpisodeBuffer:
    """Observations, actions and rewards of one running episode."""

    def __init__(self, observations: list[Array] | None = None) -> None:
        self._observations = observations or []
        self._actions: list[Array] = []
        self._rewards: list[Array] = []

    def add(self, path: Array, actions: Array, rewards: Array) -> None:
        self._observations.append(path)
        self._actions.append(actions)
        self._rewards.append(rewards)

    def attach_to(self, row: EpisodeRow) -> EpisodeRow:
        return replace(
            row,
            observations=np.concatenate(self._observations),
            actions=np.concatenate(self._actions),
            rewards=np.concatenate(self._rewards),
        )


class _EpisodeQueue:
    """Pending episodes, dispatched by lane so that blocks stay full."""

    def __init__(self, episodes: Sequence[int], lane_of: Callable[[int], int]) -> None:
        self._lanes: dict[int, list[int]] = {}
        for episode in reversed(episodes):
            self._lanes.setdefault(lane_of(episode), []).append(episode)

    def take(self, lane: int) -> int:
        """Return an episode of this lane, else of the fullest one, else -1."""
        queue = self._lanes.get(lane) or max(self._lanes.values(), key=len, default=[])
        return queue.pop() if queue else -1


def _with_network_calls(row: EpisodeRow, memory: Memory) -> EpisodeRow:
    if not memory.decisions:
        return row
    return replace(row, metrics={**row.metrics, NETWORK_CALLS: memory.calls / memory.decisions})
