"""Cases against other programs as their package index has them: `--peers`, in an environment with them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from algos.base import Setup
from algos.onpolicy.loop import OnPolicy
from algos.ppo import PpoConfig
from benchmarks.speed.peers import program
from benchmarks.speed.sides import require_close
from benchmarks.speed.timing import Figure, compare
from envs.make import env as make_env
from policies.backbones.mlp import MlpConfig
from policies.networks.heads import CriticConfig
from policies.policy import PolicyConfig
from policies.processes.gaussian import GaussianProcess, Mean

SB3 = "stable_baselines3"
ENVS, STEPS = 8, 256
"""Environments and their steps per iteration; all else is Stable-Baselines3's default."""


def ppo_run() -> OnPolicy:
    """Return our PPO with Stable-Baselines3's settings on Hopper."""
    network: dict[str, Any] = {"residual": False, "hidden_dims": (64, 64), "activation": "tanh"}
    policy = PolicyConfig(
        process=GaussianProcess(init_std=1.0, min_std=1e-3, max_std=10.0, squash=False),
        sampler=Mean(),
        backbone=MlpConfig(**network),
        horizon=1,
        act_steps=1,
        normalizer={"state": "identity", "action": "limits"},
    )
    config = PpoConfig(
        num_envs=ENVS,
        steps_per_iteration=STEPS,
        batch_size=64,
        update_epochs=10,
        reward_scaling=False,
        clip_range=0.2,
        target_kl=None,
        vf_coef=1.0,
        max_grad_norm=0.5,
        actor_lr=3e-4,
        critic_lr=3e-4,
        critic=CriticConfig(**network),
        log_prob_range=None,
        log_prob_reduction="joint",
    )
    return config.build(Setup(env=make_env("hopper"), policy=policy, num_workers=0, num_threads=1))


def require_equal_networks(run: OnPolicy, peer: Any) -> None:
    """Give the peer our weights, and compare log-densities, values and their gradients."""
    head, critic = run.policy.head, run.learner.critic  # type: ignore[attr-defined]
    theirs = peer.policy.mlp_extractor
    sides = (
        (head.trunk, theirs.policy_net, peer.policy.action_net),
        (critic.trunk, theirs.value_net, peer.policy.value_net),
    )
    layers = [
        pair
        for ours, net, out in sides
        for pair in zip((ours.inlet, *ours.layers), (net[0], net[2], out), strict=True)
    ]
    for mine, other in layers:
        other.load_state_dict(mine.state_dict())
    with torch.no_grad():
        peer.policy.log_std.copy_(head.log_var / 2)
    generator = torch.Generator().manual_seed(0)
    obs, action = (torch.randn(64, width, generator=generator) for width in (11, 3))
    value, log_prob, _ = peer.policy.evaluate_actions(obs, action)
    cond = run.policy.encode({"state": obs[:, None]})
    ours = run.policy.transition_log_prob(cond, action, action[:, None], torch.zeros(64))[0].sum((1, 2))  # type: ignore[attr-defined]
    require_close("log-densities", ours.detach(), log_prob.detach(), 1e-5)
    require_close("values", critic(cond).detach(), value[:, 0].detach(), 1e-5)
    both: list[tuple[Tensor, ...]] = [
        torch.autograd.grad(total, [layer.weight for layer in chosen])
        for total, chosen in (
            (ours.mean() + critic(cond).mean(), [mine for mine, _ in layers]),
            (log_prob.mean() + value.mean(), [other for _, other in layers]),
        )
    ]
    for mine, other in zip(*both, strict=True):
        require_close("gradients", (mine - other).norm() / other.norm(), 0.0, 1e-5)


def ppo(options: argparse.Namespace) -> Iterator[Figure]:
    """A whole iteration of PPO at Stable-Baselines3's defaults: 64 x 64, minibatches of 64; CPU time."""
    sb3, tools = (program(name, "stable-baselines3") for name in (SB3, f"{SB3}.common.env_util"))
    peer = sb3.PPO("MlpPolicy", tools.make_vec_env("Hopper-v5", n_envs=ENVS), n_steps=STEPS, device="cpu")
    run, total = ppo_run(), 0
    require_equal_networks(run, peer)

    def iteration() -> None:
        nonlocal total
        total += ENVS * STEPS
        peer.learn(total - peer.num_timesteps, reset_num_timesteps=False)

    sides = ("one thread", run.advance), ("Stable-Baselines3", iteration)
    case, clock = "PPO iteration, 64 x 64, batch 64", time.process_time
    yield compare(case, *sides, 1.5, rounds=options.rounds, clock=clock)
    run.close()
