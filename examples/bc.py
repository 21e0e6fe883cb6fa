"""Behaviour cloning with a diffusion policy on `avoid`, in one file.

    python -m examples.bc

Collect demonstrations of the scripted expert, cut them into windows, regress the noise, sample actions.
Legend: B batch, To observation history, Th chunk of actions, Do and Da widths.

Source: Diffusion Policy, arXiv 2303.04137.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from algos.optim import Ema, PowerDecay, warmup_cosine
from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.windows import Batch, Windows
from envs.spec import EnvConfig
from envs.tasks.avoid.task import Avoid
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.policy import Policy, PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.samplers.ddpm import DDPM


def demonstrations(env: Avoid, ways: range, each: int) -> EpisodeDataset:
    """Record the scripted expert; keep successful episodes, `each` of every one of these ways."""
    kept: dict[int, list[Episode]] = {way: [] for way in ways}
    seed = 0
    while any(len(episodes) < each for episodes in kept.values()):
        episode = env.demonstrate(seed)  # way, start and wobble follow from the seed
        found = kept.get(int(episode.extras["mode"][0]))
        if episode.success and found is not None and len(found) < each:
            found.append(episode)
        seed += 1
    return EpisodeDataset.from_episodes([episode for way in ways for episode in kept[way]])


def diffusion_loss(policy: DenoisingPolicy, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """Return how badly the network tells noise from action, averaged over recorded actions."""
    cond = policy.encode({"state": batch.obs})  # (B, To, Do) metres and m/s -> normalised features
    action = policy.normalize_action(batch.action)  # (B, Th, Da) in [-1, 1]
    draw = policy.sample_te(len(action), generator=generator)  # a noise level and noise for every row
    # x_t = alpha_t a + sigma_t eps
    alpha, sigma = (part[:, None, None] for part in policy.process.alpha_sigma(draw.t))
    noisy = alpha * action + sigma * draw.eps
    # loss = E |eps - eps_theta(x_t, t, s)|^2
    predicted = policy.evaluate(cond)(noisy, draw.t, level=draw.level)
    error = (predicted - draw.eps).square().mean(dim=-1)  # (B, Th)
    return (error * batch.mask).sum() / batch.mask.sum()  # chunks that reach behind the end are padded


def clone(
    dataset: EpisodeDataset,
    *,
    steps: int = 4000,
    batch_size: int = 128,
    lr: float = 2e-3,
    width: int = 256,
    seed: int = 0,
) -> DenoisingPolicy:
    """Return a diffusion policy that imitates the actions of a dataset."""
    config = PolicyConfig(
        process=VPDiffusion(num_levels=20, prediction="eps"),  # the network predicts eps at 20 noise levels
        sampler=DDPM(),  # and actions are drawn through all of them
        backbone=MlpConfig(width=width),
        horizon=4,  # Th: actions predicted
        act_steps=4,  # Ta: actions executed before the next decision
    )
    policy = build_policy(
        config,
        obs_dim=dataset.obs_dim,
        action_dim=dataset.action_dim,
        statistics=dataset.statistics(),  # the map to [-1, 1] is part of the policy
        seed=seed,
    )
    windows = Windows(dataset, policy.chunk)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=1e-6)
    average = Ema(policy, PowerDecay(every=5))  # the average of the weights is what acts
    generator = torch.Generator().manual_seed(seed)
    running = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(step, lr=lr, min_lr=lr / 10, warmup=steps // 20, cycle=steps)
        loss = diffusion_loss(policy, windows.sample(batch_size, generator=generator), generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        average.update(policy)
        running += loss.detach() / (steps // 10)
        if (step + 1) % (steps // 10) == 0:
            print(f"step {step + 1:5d}  loss {float(running):.4f}")
            running.zero_()
    return average.module


def success_rate(policy: Policy, env: EnvConfig, *, episodes: int = 100, first_seed: int = 10_000) -> float:
    """Play one episode per seed, all side by side, and return the share that succeeded."""
    vector = env.make_vector(episodes, obs_steps=policy.chunk.obs_steps)
    generator = torch.Generator().manual_seed(first_seed)
    obs = vector.reset(range(first_seed, first_seed + episodes))  # (N, To, Do)
    running, success = np.ones(episodes, bool), np.zeros(episodes, bool)
    while running.any():
        actions = policy.act(obs, generator=generator).numpy()  # (N, Ta, Da)
        step = vector.step_chunk(actions, running)
        obs, success, running = step.obs, success | step.success, running & ~step.done
    vector.close()
    return float(success.mean())


def main() -> None:
    """Clone and evaluate."""
    parser = argparse.ArgumentParser(prog="python -m examples.bc")
    parser.add_argument("--ways", type=int, default=2, help="how many ways the expert shows, of 12")
    parser.add_argument("--demonstrations", type=int, default=20, help="of each way")
    parser.add_argument("--steps", type=int, default=4000, help="gradient steps")
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks of this size gain nothing from more
    env = Avoid()
    dataset = demonstrations(env, range(args.ways), args.demonstrations)
    policy = clone(dataset, steps=args.steps)
    print(f"success: {success_rate(policy, env):.0%} of 100 episodes")


if __name__ == "__main__":
    main()
