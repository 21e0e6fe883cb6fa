"""Offline reinforcement learning (TD3+BC) on arrays, in one file.

    python -m examples.offline

A point mass is pushed around by a weak, noisy controller; an actor learns from the recordings to do better.
For logs of your own replace `record`: all that is used are arrays of observations, actions and rewards.
Legend: N episodes, T steps, B batch, C width of an encoded state, A width of an action.

Source: TD3+BC, arXiv 2106.06860.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import numpy as np
import torch

from algos.offline.td3_update import Actor
from algos.optim import descend
from algos.transitions import Rewarding, TransitionTable, tabulate
from envs.datasets.episodes import EpisodeDataset
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.networks.critics import EnsembleConfig, polyak
from policies.policy import Policy, PolicyConfig
from policies.processes.deterministic import DeterministicProcess
from policies.seeds import seeded_weights

Array = np.ndarray
STEPS = 50  # control steps of 0.1 s in an episode


def simulate(controller: Callable[[Array], Array], episodes: int, seed: int) -> tuple[Array, Array, Array]:
    """Push point masses towards the origin; their distance from it is the negative reward.

    Returns:
        states (N, T+1, 4), position and velocity; actions (N, T, 2), acceleration in [-1, 1]; rewards (N, T).
    """
    state = np.random.default_rng(seed).uniform(-1, 1, (episodes, 4)) * [1, 1, 0.2, 0.2]
    states, actions, rewards = [state], [], []
    for _ in range(STEPS):
        action = np.clip(controller(state), -1, 1)
        velocity = state[:, 2:] + 0.1 * action
        state = np.concatenate([state[:, :2] + 0.1 * velocity, velocity], axis=1)
        states.append(state)
        actions.append(action)
        rewards.append(-np.linalg.norm(state[:, :2], axis=1))
    return np.stack(states, axis=1), np.stack(actions, axis=1), np.stack(rewards, axis=1)


def record(episodes: int, seed: int = 0) -> EpisodeDataset:
    """Record the weak controller as a dataset of episodes that end by their time limit."""
    rng = np.random.default_rng(seed)
    gain = np.array([[0.4, 0, 0.5, 0], [0, 0.4, 0, 0.5]])
    states, actions, rewards = simulate(
        lambda state: -state @ gain.T + 0.4 * rng.standard_normal((len(state), 2)), episodes, seed
    )
    ends = np.tile(np.arange(STEPS) == STEPS - 1, episodes)
    return EpisodeDataset.from_arrays(
        observations=states[:, :-1].reshape(-1, 4),
        next_observations=states[:, 1:].reshape(-1, 4),
        actions=actions.reshape(-1, 2),
        rewards=rewards.reshape(-1),
        terminated=np.zeros_like(ends),  # the task never ends, so values look beyond the time limit
        truncated=ends,
        episode_start=np.arange(episodes + 1) * STEPS,
    )


def make_actor(dataset: EpisodeDataset, width: int, seed: int) -> Policy:
    """Return a deterministic policy of single actions."""
    config = PolicyConfig(
        process=DeterministicProcess(),
        backbone=MlpConfig(residual=False, hidden_dims=(width, width)),
        horizon=1,
        act_steps=1,
        normalizer={"state": "gaussian", "action": "limits"},
    )
    return build_policy(config, obs_dim=4, action_dim=2, statistics=dataset.statistics(), seed=seed)


def train(policy: Policy, table: TransitionTable, *, steps: int, alpha: float, seed: int = 0) -> Policy:
    """Train an actor in place; `alpha` weighs value against closeness to the data, 0 is behaviour cloning."""
    with seeded_weights(seed):
        critic = EnsembleConfig(hidden_dims=(64, 64)).build(table.cond.shape[1], table.action.shape[1])
    actor = Actor(policy)
    target_actor, target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    start = torch.zeros(256, *policy.noise_shape)  # a deterministic actor starts from no noise
    for step in range(1, steps + 1):
        batch = table.gather(torch.randint(len(table), (256,), generator=generator))
        with torch.no_grad():
            # a' = clip(pi_bar(s') + clip(0.2 eps, ±0.5), ±1)
            noise = (0.2 * torch.randn(batch.action.shape, generator=generator)).clamp(-0.5, 0.5)
            following = (target_actor(batch.next_cond, start) + noise).clamp(-1, 1)
            # y = r + gamma min_i Q_bar_i(s', a')
            target = batch.reward + batch.discount * target_critic(batch.next_cond, following).amin(dim=0)
        # critic loss = sum_i E (Q_i(s, a) - y)^2
        values = critic(batch.cond, batch.action)  # (2, B)
        descend(critic_optimizer, (values - target).square().mean(dim=1).sum())
        if step % 2 == 0:
            # actor loss = -lambda E Q_1(s, pi(s)) + E (pi(s) - a)^2,  lambda = alpha / E |Q_1|
            action = actor(batch.cond, start)
            value = critic(batch.cond, action, members=1, frozen=True)[0]
            scale = alpha / value.detach().abs().mean()
            descend(actor_optimizer, -scale * value.mean() + (action - batch.action).square().mean())
            polyak(target_critic, critic, 0.005)
            polyak(target_actor.network, policy, 0.005)
    return policy


def mean_return(policy: Policy, episodes: int = 100) -> float:
    """Return the mean sum of rewards of a policy over episodes of new starts."""
    _, _, rewards = simulate(lambda state: policy.act(state[:, None]).numpy()[:, 0], episodes, seed=1)
    return float(rewards.sum(axis=1).mean())


def main() -> None:
    """Compare what was recorded, its clone, and what TD3+BC makes of it."""
    parser = argparse.ArgumentParser(prog="python -m examples.offline")
    parser.add_argument("--episodes", type=int, default=200, help="recorded")
    parser.add_argument("--steps", type=int, default=3000, help="gradient steps of the critics")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dataset = record(args.episodes)
    print(f"recorded return: {float(dataset.returns.mean()):.1f}")
    for name, alpha in (("cloned", 0.0), ("TD3+BC", 2.5)):
        policy = make_actor(dataset, width=64, seed=0)
        table = tabulate(dataset, policy, Rewarding(gamma=0.98))
        train(policy, table, steps=args.steps, alpha=alpha)
        print(f"{name} return: {mean_return(policy):.1f}")


if __name__ == "__main__":
    main()
