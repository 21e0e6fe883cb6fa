"""Two policies act as one: composition of diffusion policies on `avoid`, in one file.

    python -m examples.compose

One policy is cloned from demonstrations of two ways round the pillars, another from one of them. At every
denoising step a composition combines what both networks predict: the second steers the first towards its way.

Source: General Policy Composition, arXiv 2510.01068; the mixture ("or"): SuperDiff, arXiv 2412.17762.
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np
import torch

from envs.spec import EnvConfig
from envs.tasks.avoid.task import Avoid
from examples.bc import clone, demonstrations
from policies.composition.compose import compose
from policies.policy import Policy

COMBINATIONS = {
    "both ways alone": ("convex", (1.0, 0.0)),
    "one way alone": ("convex", (0.0, 1.0)),
    "a quarter of it": ("convex", (0.75, 0.25)),  # eps = sum_i w_i eps_i
    "half of it": ("convex", (0.5, 0.5)),
    "either": ("or", (0.5, 0.5)),  # eps = sum_i r_i eps_i, r = softmax(log w_i + log q_i)
}
"""Operator and weights by name."""


def ways_taken(policy: Policy, env: EnvConfig, *, episodes: int, first_seed: int = 10_000) -> Counter[int]:
    """Play one episode per seed and count the ways that led to the finish; -1: a pillar was hit."""
    vector = env.make_vector(episodes, obs_steps=policy.chunk.obs_steps)
    generator = torch.Generator().manual_seed(first_seed)
    obs = vector.reset(range(first_seed, first_seed + episodes))
    running, way = np.ones(episodes, bool), np.full(episodes, -1)
    while running.any():
        step = vector.step_chunk(policy.act(obs, generator=generator).numpy(), running)
        way = np.where(running & step.success, step.metrics["mode"].astype(int), way)
        obs, running = step.obs, running & ~step.done
    vector.close()
    return Counter(way.tolist())


def main() -> None:
    """Print which ways every combination takes."""
    parser = argparse.ArgumentParser(prog="python -m examples.compose")
    parser.add_argument("--demonstrations", type=int, default=20, help="of each way")
    parser.add_argument("--steps", type=int, default=1500, help="gradient steps for each way")
    parser.add_argument("--episodes", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = Avoid()
    both, one = (demonstrations(env, ways, args.demonstrations) for ways in (range(0, 2), range(1, 2)))
    members = [clone(both, steps=2 * args.steps), clone(one, steps=args.steps, seed=1)]
    for name, (operator, weights) in COMBINATIONS.items():
        policy = compose(members, weights, operator=operator)
        taken = ways_taken(policy, env, episodes=args.episodes)
        success = 1 - taken[-1] / args.episodes
        shares = ", ".join(f"way {way}: {count}" for way, count in sorted(taken.items()) if way >= 0)
        print(f"{name:16s}  success {success:4.0%}  {shares}")


if __name__ == "__main__":
    main()
