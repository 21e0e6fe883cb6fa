"""Play seeded episodes such that nothing but the episode's own number can change what happens in it.

The policy is called on blocks of a fixed number of rows, and an episode always occupies the same row of
its block (its lane). So neither the other episodes, nor the number of environments, nor the shape of a
matrix product, whose rounding may depend on size and row, can touch the result.

Legend: N environments, M of them playing, To observation history, Ta executed steps, Do and Da widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from envs.episodes import EpisodeRow, Tally
from envs.spec import EnvConfig
from envs.vector import Array, VectorEnv
from policies.protocols import ChunkSpec
from policies.seeds import seeded_generator

BLOCK_ROWS = 8  # rows of every call of the policy


class EvaluatedPolicy(Protocol):
    """What an evaluation needs of a policy."""

    chunk: ChunkSpec

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of one row of noise."""
        ...

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw noise (n, *noise_shape)."""
        ...

    def act(self, obs: Any, *, noise: Tensor | None = None) -> Tensor:
        """Map `state` (B, To, Do) to physical actions (B, Ta, Da), deterministically given the noise."""
        ...


@dataclass(frozen=True)
class Player:
    """A policy with the switches of an evaluation."""

    policy: EvaluatedPolicy
    first_seed: int
    noise_seed: int
    start_noise: str
    sampling_noise: str
    keep: bool

    def generator(self, episode: int) -> torch.Generator:
        """Return the noise generator of an episode."""
        return seeded_generator(self.noise_seed, "evaluation", episode)

    def noise(self, generator: torch.Generator) -> Tensor:
        """Draw the noise of one decision, (*noise_shape), with the switched-off parts zero."""
        noise = self.policy.sample_noise(1, generator=generator)[0]
        has_steps = noise.dim() == len(self.policy.chunk.shape) + 1
        if self.start_noise == "zero":
            (noise[0] if has_steps else noise).zero_()
        if self.sampling_noise == "zero" and has_steps:
            noise[1:] = 0.0
        return noise

    def act(self, obs: Array, noise: Sequence[Tensor], lanes: Sequence[int]) -> Array:
        """Choose chunks for M episodes: obs (M, To, Do), their lanes (fixed rows of a block).

        Returns:
            (M, Ta, Da) physical actions.
        """
        out: list[Array | None] = [None] * len(lanes)
        for members in _blocks(lanes):
            rows = [lanes[m] for m in members]
            state = torch.zeros(BLOCK_ROWS, *obs.shape[1:])
            state[rows] = torch.from_numpy(obs[members]).float()
            tape = torch.zeros(BLOCK_ROWS, *noise[0].shape, dtype=noise[0].dtype, device=noise[0].device)
            tape[rows] = torch.stack([noise[m] for m in members])
            with torch.inference_mode():
                actions = self.policy.act({"state": state}, noise=tape).cpu().numpy()
            for member, row in zip(members, rows, strict=True):
                out[member] = actions[row]
        return np.stack([chunk for chunk in out if chunk is not None])


class Evaluator:
    """One worker's share of an evaluation.

    Args:
        env: The task.
        player: The policy and its switches.
        episodes: Numbers of the episodes to play.
        num_envs: Environments of this worker.
    """

    notify: Callable[[Any], None]

    def __init__(self, env: EnvConfig, player: Player, episodes: list[int], num_envs: int) -> None:
        self._player = player
        self._waiting = _Queue(episodes)
        width = min(num_envs, len(episodes))
        self._vector: VectorEnv = env.make_vector(width, obs_steps=self._player.policy.chunk.obs_steps)
        self._tally = Tally(width)
        self._episode = np.full(width, -1)  # -1: this environment has nothing left to play
        self._obs = np.zeros((width, self._vector.obs_steps, self._vector.spec.obs_dim))
        self._generators: list[torch.Generator] = [torch.Generator()] * width
        self._reels = [_Reel() for _ in range(width)]

    def run(self) -> list[EpisodeRow]:
        """Play all episodes."""
        done: list[EpisodeRow] = []
        self._begin(np.arange(len(self._episode)))
        while (self._episode >= 0).any():
            ended = self._advance()
            done += ended
            if ended:
                self.notify(len(ended))
        return done

    def close(self) -> None:
        """Release the simulators."""
        self._vector.close()

    def _begin(self, rows: Array) -> None:
        """Start the next waiting episodes in these rows."""
        for row in rows.tolist():
            lane = int(self._episode[row]) % BLOCK_ROWS if self._episode[row] >= 0 else row % BLOCK_ROWS
            self._episode[row] = episode = self._waiting.take(lane)
            if episode < 0:
                continue
            seed = self._player.first_seed + episode
            self._obs[row] = self._vector.reset([seed], [row])[0]
            self._generators[row] = self._player.generator(episode)
            self._tally.reset(np.array([row]))
            self._tally.begin(np.array([row]), [seed], [episode])
            self._reels[row] = _Reel([self._obs[row, -1].copy()[None]])

    def _advance(self) -> list[EpisodeRow]:
        """Execute one chunk in every environment that plays."""
        active = self._episode >= 0
        playing = np.flatnonzero(active)
        noise = [self._player.noise(self._generators[i]) for i in playing.tolist()]
        lanes = (self._episode[playing] % BLOCK_ROWS).tolist()
        chosen = self._player.act(self._obs[playing], noise, lanes)
        actions = np.zeros((len(active), *chosen.shape[1:]), chosen.dtype)
        actions[playing] = chosen
        step = self._vector.step_chunk(actions, active)
        self._tally.add(step)
        self._obs[playing] = step.obs[playing]
        if self._player.keep:
            for i in playing.tolist():
                self._reels[i].add(step.path[i, : step.length[i]], actions[i, : step.length[i]])
        ended = np.flatnonzero(step.done & active)
        rows = self._tally.rows(ended, step)
        if self._player.keep:
            rows = [self._reels[i].develop(row) for i, row in zip(ended.tolist(), rows, strict=True)]
        self._begin(ended)
        return rows


class _Reel:
    """Observations and actions of one running episode."""

    def __init__(self, observations: list[Array] | None = None) -> None:
        self._observations = observations or []
        self._actions: list[Array] = []

    def add(self, path: Array, actions: Array) -> None:
        """Append the observations after some control steps and their actions."""
        self._observations.append(path)
        self._actions.append(actions)

    def develop(self, row: EpisodeRow) -> EpisodeRow:
        """Attach the trajectory to the episode's row."""
        return replace(
            row, observations=np.concatenate(self._observations), actions=np.concatenate(self._actions)
        )


class _Queue:
    """Episodes that wait, handed out lane by lane so that blocks stay full."""

    def __init__(self, episodes: Sequence[int]) -> None:
        self._lanes: dict[int, list[int]] = {}
        for episode in reversed(episodes):
            self._lanes.setdefault(episode % BLOCK_ROWS, []).append(episode)

    def take(self, lane: int) -> int:
        """Return an episode of this lane, else of the fullest one, else -1."""
        queue = self._lanes.get(lane) or max(self._lanes.values(), key=len, default=[])
        return queue.pop() if queue else -1


def _blocks(lanes: Sequence[int]) -> list[list[int]]:
    """Group members so that no block holds a lane twice; as few blocks as that allows."""
    blocks: list[list[int]] = []
    used: dict[int, int] = {}
    for member, lane in enumerate(lanes):
        block = used.get(lane, 0)
        used[lane] = block + 1
        if block == len(blocks):
            blocks.append([])
        blocks[block].append(member)
    return blocks
