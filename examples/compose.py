"""Two policies act as one: composition of diffusion policies on `avoid`, in one file.

    python -m examples.compose

At every denoising step a composition combines what several networks predict; nothing is trained anew.

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
from policies.composition.policy import compose
from policies.denoising import DenoisingPolicy
from policies.policy import Policy

COMBINATIONS = {
    "the first alone": ("convex", (1.0, 0.0)),
    "the second alone": ("convex", (0.0, 1.0)),
    "average": ("convex", (0.5, 0.5)),  # eps = sum_i w_i eps_i
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


def clones(env: Avoid, ways: tuple[int, int], *, each: int, steps: int) -> list[DenoisingPolicy]:
    """Return a policy for each of two ways."""
    return [clone(demonstrations(env, range(way, way + 1), each), steps=steps) for way in ways]


def main() -> None:
    """Print which ways every combination takes."""
    parser = argparse.ArgumentParser(prog="python -m examples.compose")
    parser.add_argument("--demonstrations", type=int, default=20, help="of each way")
    parser.add_argument("--steps", type=int, default=2000, help="gradient steps of each policy")
    parser.add_argument("--episodes", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    env, ways = Avoid(), (0, 4)
    members = clones(env, ways, each=args.demonstrations, steps=args.steps)
    for name, (operator, weights) in COMBINATIONS.items():
        policy = compose(members, weights, operator=operator)
        taken = ways_taken(policy, env, episodes=args.episodes)
        success = 1 - taken[-1] / args.episodes
        shares = ", ".join(f"way {way}: {count}" for way, count in sorted(taken.items()) if way >= 0)
        print(f"{name:16s}  success {success:4.0%}  {shares}")


if __name__ == "__main__":
    main()
