"""DSRL by SAC against Stable-Baselines3's SAC around a diffusers sampler: `--peers`.

Both choose the noise of ten DDIM steps of a frozen policy on Hopper in 4 environments, execute chunks of 4,
and take 10 gradient steps after a chunk of every environment; three layers of 128, tanh, batches of 256.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from algos.base import Setup
from algos.dsrl import DsrlConfig
from algos.offpolicy.loop import OffPolicyRun
from benchmarks.speed import peers
from benchmarks.speed.cases_offpolicy import BATCH, LATENT, steered_policy
from benchmarks.speed.cases_peers import SB3
from benchmarks.speed.sides import CHUNK, OBS, copy_critics, plain_nets, require_close
from benchmarks.speed.timing import Figure, compare
from envs.make import env as make_env
from policies.wrappers.noise_policy import Steering

ENVS, UPDATES, ROUNDS, WIDTHS = 4, 10, 32, (128, 128, 128)
"""Environments, gradient steps after a chunk of each, chunks of each that are timed together, layers."""
STEPS = ROUNDS * ENVS * CHUNK[0]


def our_run() -> OffPolicyRun:
    """Return DSRL by SAC with the settings of the peer."""
    config = DsrlConfig(
        variant="sac",
        total_steps=10**9,
        warmup_steps=2 * STEPS,
        num_envs=ENVS,
        log_every=STEPS,
        updates_per_step=UPDATES / (ENVS * CHUNK[0]),
        batch_size=BATCH,
        critic_dims=WIDTHS,
        critic_layer_norm=False,
        steering=Steering(hidden_dims=WIDTHS, layer_norm=False),
    )
    init = steered_policy(plain_nets()[0]).base
    run: OffPolicyRun = config.build(Setup(env=make_env("hopper"), init=init, num_workers=0, num_threads=1))
    return run


def sb3_sac(bound: float) -> Any:
    """Return Stable-Baselines3's SAC over the noise of the frozen policy."""
    sb3, vectors = (peers.program(name, "stable-baselines3") for name in (SB3, f"{SB3}.common.vec_env"))

    class Denoised(vectors.VecEnvWrapper):  # type: ignore[misc, name-defined]
        """Actions are the noise of the frozen policy's chunks."""

        def __init__(self, venv: Any) -> None:
            box = gymnasium.spaces.Box(-bound, bound, (LATENT,), np.float32)
            super().__init__(venv, action_space=box)
            self.net, self.schedule = plain_nets()[0], peers.ddim_scheduler()
            self.seen = np.zeros((ENVS, OBS))

        def reset(self) -> np.ndarray:
            self.seen = self.venv.reset()
            return self.seen

        def step_async(self, actions: np.ndarray) -> None:
            start = torch.as_tensor(actions).float().view(-1, *CHUNK)
            state = torch.as_tensor(self.seen).float()
            self.venv.step_async(peers.diffusers_ddim(self.net, self.schedule, state, start).numpy())

        def step_wait(self) -> Any:
            found = self.venv.step_wait()
            self.seen = found[0]
            return found

    makers = [peers.chunked_env("Hopper-v5", CHUNK[0]) for _ in range(ENVS)]
    return sb3.SAC(
        "MlpPolicy",
        Denoised(vectors.DummyVecEnv(makers)),
        learning_starts=2 * STEPS // CHUNK[0],
        train_freq=1,
        gradient_steps=UPDATES,
        batch_size=BATCH,
        target_entropy=0.0,
        policy_kwargs={"net_arch": list(WIDTHS), "activation_fn": nn.Tanh},
        device="cpu",
    )


def require_equal_networks(run: OffPolicyRun, peer: Any, bound: float) -> None:
    """Give the peer our weights; compare means and deviations of latents, and values."""
    learner: Any = run.learner
    trunk, theirs = learner.policy.actor.trunk, peer.actor
    hidden = [layer for layer in theirs.latent_pi if isinstance(layer, nn.Linear)]
    for own, other in zip((trunk.inlet, *trunk.layers), hidden, strict=False):
        other.load_state_dict(own.state_dict())
    copy_critics(learner.critic, [peer.critic.qf0, peer.critic.qf1])
    with torch.no_grad():
        last = trunk.layers[-1]
        for head, rows in ((theirs.mu, slice(LATENT)), (theirs.log_std, slice(LATENT, None))):
            head.weight.copy_(last.weight[rows])
            head.bias.copy_(last.bias[rows])
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(BATCH, OBS, generator=generator)
    latent = torch.rand(BATCH, LATENT, generator=generator) * 2 - 1
    mean, log_std, _ = theirs.get_action_dist_params(obs)
    found = learner.policy.actor(obs)
    expected: tuple[Tensor, ...] = (mean, log_std)
    for ours, other in zip(found, expected, strict=True):
        require_close("latents", ours.detach(), other.detach(), 1e-5)
    pair = zip(learner.critic(obs, latent), peer.critic(obs, latent), strict=True)
    for ours, other in pair:
        require_close("values of latents", ours.detach(), other[:, 0].detach(), 1e-5)
    start = (bound * latent).view(-1, *CHUNK)
    chunk = peers.diffusers_ddim(peer.env.net, peer.env.schedule, obs, start)
    require_close("chunks of latents", learner.policy.chunk_of(obs, latent), chunk, 5e-5)


def dsrl_sac(options: argparse.Namespace) -> Iterator[Figure]:
    """512 control steps of both with 320 gradient steps, once enough is stored to learn from; CPU time."""
    bound = Steering().bound
    run, peer, total = our_run(), sb3_sac(bound), 0
    require_equal_networks(run, peer, bound)

    def theirs() -> None:
        nonlocal total
        total += ROUNDS * ENVS
        peer.learn(total - peer.num_timesteps, reset_num_timesteps=False)

    for _ in range(3):
        run.advance()
        theirs()
    both = ("one thread", run.advance), ("Stable-Baselines3", theirs)
    yield compare("DSRL by SAC, 512 steps", *both, 1.6, rounds=options.rounds, clock=time.process_time)
    run.close()
