"""DPPO on `avoid`, in one file: a cloned diffusion policy is fine-tuned by reinforcement learning.

    python -m examples.dppo

Every denoising step is an action with a Gaussian density, so PPO applies to each of them.
Legend: T chunk steps of an iteration, N environments, M = T N decisions, S tuned denoising steps, B rows of a
minibatch; a row is one (decision, denoising step).

Source: Diffusion Policy Policy Optimization, arXiv 2409.00588; PPO, arXiv 1707.06347.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algos.onpolicy.frozen_copy import tunable_copy
from algos.onpolicy.losses import denoising_discounts, gae, normalize_advantage
from algos.optim import descend
from envs.spec import EnvConfig
from envs.tasks.avoid.task import Avoid
from examples.bc import clone, demonstrations, success_rate
from policies.denoising import DenoisingPolicy
from policies.networks.heads import Critic, CriticConfig
from policies.protocols import Cond
from policies.seeds import seeded_weights

ENVS, CHUNKS = 40, 50  # N and T
EPOCHS, BATCH = 5, 5000
TUNED, CLIP = 5, 0.05  # S, and the clip range of a ratio
GAMMA, LAMBDA, GAMMA_DENOISING = 0.99, 0.95, 0.7


@dataclass
class Experience:
    """What one iteration collected, (T, N, ...) each, and whether the episodes that ended were successes."""

    obs: Tensor
    chain: Tensor  # (T, N, S+1, Th, Da), the denoised states
    log_prob: Tensor  # (T, N, S)
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    next_obs: Tensor
    successes: list[bool]


class Collector:
    """N environments that go on from iteration to iteration; an episode that ends is followed by another."""

    def __init__(self, env: EnvConfig, num_envs: int) -> None:
        self.vector: Any = env.make_vector(num_envs)
        self.obs, self.next_seed = self.vector.reset(range(num_envs)), num_envs

    def collect(self, policy: DenoisingPolicy, num_chunks: int, generator: torch.Generator) -> Experience:
        """Act for so many chunks in every environment."""
        rows: list[list[Any]] = []
        successes: list[bool] = []
        for _ in range(num_chunks):
            obs = torch.as_tensor(self.obs).float()
            with torch.no_grad():
                chain = policy.sample_chain(policy.encode({"state": obs}), generator=generator)
            step = self.vector.step_chunk(policy.executed(chain.action).numpy())
            facts = (step.rewards.sum(axis=1), step.terminated, step.truncated, step.obs.astype(np.float32))
            rows.append([obs, chain.x, reduce(policy, chain.log_prob), *map(torch.as_tensor, facts)])
            self.obs, ended = step.obs.copy(), np.flatnonzero(step.done)
            successes += step.success[ended].tolist()
            self.obs[ended] = self.vector.reset(range(self.next_seed, self.next_seed + len(ended)), ended)
            self.next_seed += len(ended)
        return Experience(*(torch.stack(column) for column in zip(*rows, strict=True)), successes)


def reduce(policy: DenoisingPolicy, log_prob: Tensor) -> Tensor:
    """Average log-densities (..., Th, Da) over what is executed, bounded: the ratio is a geometric mean."""
    return log_prob[..., policy.chunk.executed, :].clamp(-5, 2).mean(dim=(-2, -1))


def update(policy: DenoisingPolicy, critic: Critic, data: Experience, optimizer: Any, rng: Any) -> None:
    """Take the gradient steps of one iteration."""
    encode = lambda obs: policy.encode({"state": obs.flatten(0, 1)})  # noqa: E731
    with torch.no_grad():
        cond = encode(data.obs)
        value = critic(cond).view(data.reward.shape).double()
        following = critic(encode(data.next_obs)).view(data.reward.shape).double()
    # A_t = sum_l (gamma lambda)^l delta_{t+l},  delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
    ends = data.terminated, data.truncated  # nothing follows a termination; a truncation is bootstrapped
    estimates = gae(data.reward, value, following, *ends, gamma=GAMMA, lam=LAMBDA)
    advantage, target = (estimate.flatten().float() for estimate in estimates)
    chain, old = data.chain.flatten(0, 1), data.log_prob.flatten()
    discount = denoising_discounts(TUNED, GAMMA_DENOISING)  # gamma_d^(S-1-s): noisier steps weigh less
    for _ in range(EPOCHS):
        for row in torch.randperm(len(old), generator=rng).split(BATCH):
            decision, step = row // TUNED, row % TUNED
            # r = p_theta(x_{s+1} | x_s, state) / p_old(...)
            now, then = chain[decision, step], chain[decision, step + 1]
            log_prob, _ = policy.transition_log_prob(cond.rows(decision), now, then, step)
            ratio = (reduce(policy, log_prob) - old[row]).exp()
            # loss = -E min(r A, clip(r, 1 - c, 1 + c) A)
            weighted = normalize_advantage(advantage[decision]) * discount[step]
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            actor_loss = -torch.minimum(ratio * weighted, clipped * weighted).mean()
            # critic loss = 1/2 E (V - A - V_old)^2
            critic_loss = 0.5 * (critic(Cond(cond.vec[decision])) - target[decision]).square().mean()
            descend(optimizer, actor_loss + critic_loss)  # they share no weights


def fine_tune(init: DenoisingPolicy, env: EnvConfig, *, iterations: int, seed: int = 0) -> DenoisingPolicy:
    """Return a fine-tuned copy of a diffusion policy that samples by `DDPM`."""
    # Exploring needs noise at every step, and no bound that would falsify densities.
    explore = replace(init.sampler, min_std=0.1, final_std=None, clip_action=None, noise_clip=3.0)
    policy = tunable_copy(init, explore, TUNED).with_sampler(explore, tuned_steps=TUNED, log_prob_min_std=0.1)
    with seeded_weights(seed):
        critic = CriticConfig().build(policy.encoder.cond_dim)
    actor = {"params": policy.scored_net.parameters(), "lr": 3e-4}
    optimizer = torch.optim.AdamW([actor, {"params": critic.parameters(), "lr": 1e-3}], weight_decay=0)
    generator = torch.Generator().manual_seed(seed)
    collector = Collector(env, ENVS)
    for iteration in range(1, iterations + 1):
        data = collector.collect(policy, CHUNKS, generator)
        print(f"iteration {iteration:3d}  success while exploring {np.mean(data.successes):.0%}")
        update(policy, critic, data, optimizer, generator)
    collector.vector.close()
    return policy.with_sampler(init.sampler).eval()


def main() -> None:
    """Clone, fine-tune, and evaluate both on the same episodes."""
    parser = argparse.ArgumentParser(prog="python -m examples.dppo")
    parser.add_argument("--steps", type=int, default=2000, help="gradient steps of cloning")
    parser.add_argument("--iterations", type=int, default=20, help="of collecting and updating")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = Avoid()
    init = clone(demonstrations(env, range(1), 20), steps=args.steps)
    print(f"cloned: {success_rate(init, env):.0%} success")
    tuned = fine_tune(init, env, iterations=args.iterations)
    print(f"fine-tuned: {success_rate(tuned, env):.0%} success")


if __name__ == "__main__":
    main()
