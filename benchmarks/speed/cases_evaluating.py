"""The case of judging: episodes of an evaluation, against a loop around gymnasium's environments."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor

from benchmarks.speed import peers
from benchmarks.speed.sides import CHUNK, LEVELS, OBS, our_policy, plain_nets, require_close, tape
from benchmarks.speed.timing import Figure, interleave
from envs.datasets import read_dataset
from envs.evaluation.evaluate import evaluate as evaluate_policy
from envs.evaluation.settings import EvaluationSettings
from envs.make import env as make_env
from envs.rollouts.episodes import EpisodeRow

EPISODES, SEED, CLONING_STEPS = 20, 1000, 3000


@dataclass
class PlainEvaluation:
    """A first episode in each of some environments, all of which step until the last one ends."""

    net: peers.PlainMlp

    def __post_init__(self) -> None:
        makers = [peers.chunked_env("Hopper-v5", CHUNK[0]) for _ in range(EPISODES)]
        self.envs, self.schedule = gymnasium.vector.SyncVectorEnv(makers), peers.scheduler(LEVELS)
        self.decisions = 0

    def run(self) -> np.ndarray:
        """Return the returns, and count decisions of unfinished episodes."""
        generator, running = torch.Generator().manual_seed(SEED), np.ones(EPISODES, dtype=bool)
        obs, _ = self.envs.reset(seed=list(range(SEED, SEED + EPISODES)))
        returns, self.decisions = np.zeros(EPISODES), 0
        while running.any():
            state = torch.from_numpy(obs).float()
            action = peers.diffusers_sample(self.net, self.schedule, state, generator)
            obs, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            returns += np.where(running, reward, 0.0)
            self.decisions += int(running.sum())
            running &= ~(terminated | truncated)
        return returns


def cloned(dataset: Path | None) -> peers.PlainMlp:
    """Return the plain network, cloned from the data of a file, if one is given."""
    net = plain_nets()[0]
    if dataset is None:
        return net
    data, schedule = read_dataset(dataset), peers.scheduler(LEVELS)
    starts = torch.cat([torch.arange(a, b - CHUNK[0] + 1) for a, b in pairwise(data.episode_start.tolist())])
    optimizer, generator = torch.optim.Adam(net.parameters(), lr=1e-3), torch.Generator().manual_seed(0)
    for _ in range(CLONING_STEPS):
        start = starts[torch.randint(len(starts), (256,), generator=generator)]
        chunk = data.actions[start[:, None] + torch.arange(CHUNK[0])]
        noise = torch.randn(chunk.shape, generator=generator)
        tau = torch.randint(LEVELS, (256,), generator=generator)
        guess = net(schedule.add_noise(chunk, noise, tau), tau, data.observations[start])
        loss = (guess - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def require_equal_episodes(rows: tuple[EpisodeRow, ...]) -> None:
    """Play the actions of our episodes in gymnasium; lengths and returns must agree to the last bit."""
    env = gymnasium.make("Hopper-v5")
    for row in rows:
        assert row.actions is not None
        env.reset(seed=row.seed)
        rewards, done = [], False
        for action in row.actions:
            _, reward, terminated, truncated, _ = env.step(np.clip(action, -1, 1))
            rewards.append(float(reward))
            done = terminated or truncated
        if not done or len(rewards) != row.length:
            raise SystemExit(f"evaluate: episode {row.episode} ends elsewhere in gymnasium")
        require_close("return", sum(rewards), row.return_, 0.0)
    env.close()


def evaluate(options: argparse.Namespace) -> Iterator[Figure]:
    """Twenty Hopper episodes on twenty environments, one thread, CPU time per decision of an episode."""
    net, task = cloned(options.dataset), make_env("hopper")
    policy, plain = our_policy(net, noise_clip=None), PlainEvaluation(net)

    def run(keep: bool = False) -> tuple[EpisodeRow, ...]:
        settings = EvaluationSettings(episodes=EPISODES, first_seed=SEED, num_envs=EPISODES)
        return evaluate_policy(policy, task, settings, keep_observations=keep).rows

    rows = run(keep=True)
    require_equal_episodes(rows)
    state = torch.stack([_first(row) for row in rows])
    expected = peers.diffusers_sample(net, plain.schedule, state, torch.Generator().manual_seed(1))
    noise = tape(EPISODES, 1, last=False)
    require_close("actions", policy.act(state.unsqueeze(1), noise=noise), expected, 2e-5)
    decisions = sum(-(-row.length // CHUNK[0]) for row in rows)
    times = interleave({"ours": run, "peer": plain.run}, rounds=options.rounds, clock=time.process_time)
    ours, theirs = times["ours"] / decisions, times["peer"] / plain.decisions
    print(f"{decisions} decisions of ours, {plain.decisions} of the loop")
    plain.envs.close()
    yield Figure("evaluation, 20 episodes, a decision", "evaluate", "SyncVectorEnv", ours, theirs, 2.2)


def _first(row: EpisodeRow) -> Tensor:
    """Return the first observation of an episode, (OBS,)."""
    assert row.observations is not None
    return torch.from_numpy(row.observations[0]).float().view(OBS)
