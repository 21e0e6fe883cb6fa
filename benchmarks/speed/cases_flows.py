"""Acting and learning of flows: the cases of `benchmarks.speed` around ReinFlow, DPPO's sizes, four steps."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from algos.base import Setup
from algos.onpolicy.advantages import Experience
from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.reinflow_ratio import NoiseConfig
from algos.reinflow import ReinFlowConfig
from benchmarks.speed import peers
from benchmarks.speed.sides import (
    CHUNK,
    ENVS,
    OBS,
    THREADS,
    copy_trunk,
    dppo_run,
    plain_nets,
    require_close,
    unit_statistics,
)
from benchmarks.speed.timing import Figure, compare
from envs.make import env as make_env
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.policy import PolicyConfig
from policies.processes.flow import RectifiedFlow
from policies.samplers.ode import Euler

STEPS, HIDDEN = 4, 64
ITERATION = 125  # chunk steps of every environment
TIME_SCALE = 1.0


class ReinFlowStyle:
    """ReinFlow the straightforward way: a loop over steps with distribution objects, observations at each."""

    def __init__(self, net: peers.PlainMlp, critic: peers.PlainCritic) -> None:
        self.net, self.critic = net, critic
        size, time_dim = CHUNK[0] * CHUNK[1], net.time[0].dim
        self.noise = nn.Sequential(
            nn.Linear(time_dim + OBS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(),
            nn.Linear(HIDDEN, size),
        )  # fmt: skip
        low, high = NoiseConfig().min_std, NoiseConfig().max_std
        self.low, self.high = (2 * torch.log(torch.tensor(bound)) for bound in (low, high))
        actor = [*net.parameters(), *self.noise.parameters()]
        self.actor_optimizer = torch.optim.AdamW(actor, lr=4.5e-5, weight_decay=0.0)
        self.critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=6.5e-4, weight_decay=1e-5)

    def step(self, x: Tensor, k: int, state: Tensor) -> torch.distributions.Normal:
        """Return the distribution of the state after step k."""
        time = torch.full((len(x),), TIME_SCALE * k / STEPS)
        mean = x + self.net(x, time, state) / STEPS
        raw = self.noise(torch.cat([self.net.time(time).detach(), state], dim=-1))
        log_var = self.low + (self.high - self.low) * (torch.tanh(raw) + 1) / 2
        return torch.distributions.Normal(mean, torch.exp(0.5 * log_var).view_as(x))

    @torch.no_grad()
    def act(self, state: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chain (B, K+1, Th, Da) and its mean log-density (B,)."""
        x = draws[:, 0]
        chain, total = [x], torch.distributions.Normal(0.0, 1.0).log_prob(x).sum((-2, -1))
        for k in range(STEPS):
            normal = self.step(x, k, state)
            x = normal.mean + normal.stddev * draws[:, k + 1].clamp(-3, 3)
            if k == STEPS - 1:
                x = x.clamp(-1, 1)
            total = total + normal.log_prob(x).sum((-2, -1))
            chain.append(x)
        return torch.stack(chain, dim=1), total / (STEPS + 1) / (CHUNK[0] * CHUNK[1])

    def log_prob(self, state: Tensor, chain: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean log-density and mean entropy of chains, (B,) each."""
        start = torch.distributions.Normal(torch.zeros(()), torch.ones(()))
        total = start.log_prob(chain[:, 0]).sum((-2, -1))
        entropy = start.entropy() * CHUNK[0] * CHUNK[1]
        for k in range(STEPS):
            normal = self.step(chain[:, k], k, state)
            total = total + normal.log_prob(chain[:, k + 1]).sum((-2, -1))
            entropy = entropy + normal.entropy().sum((-2, -1))
        count = (STEPS + 1) * CHUNK[0] * CHUNK[1]
        return total / count, entropy / count

    def loss(self, state: Tensor, chain: Tensor, old: Tensor, advantage: Tensor, returns: Tensor) -> Tensor:
        """PPO's loss of whole chains."""
        new, entropy = self.log_prob(state, chain)
        ratio = (new - old).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.99, 1.01)).mean()
        value = 0.5 * (self.critic(state) - returns).square().mean()
        return policy - 0.03 * entropy.mean() + 0.5 * value

    def update(self, *batch: Tensor) -> None:
        """One minibatch: loss, backward, both optimisers."""
        loss = self.loss(*batch)
        self.actor_optimizer.zero_grad()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        self.critic_optimizer.step()


def flow_policy(net: nn.Module) -> DenoisingPolicy:
    """Return our flow with the peer's weights."""
    config = PolicyConfig(
        process=RectifiedFlow(time_scale=TIME_SCALE),
        sampler=Euler(steps=STEPS),
        observation_clip=None,
    )
    policy = build_policy(config, obs_dim=OBS, action_dim=CHUNK[1], statistics=unit_statistics())
    assert isinstance(policy, DenoisingPolicy)
    copy_trunk(net, policy.field)
    return policy.eval()


def both_sides() -> tuple[OnPolicy, ReinFlowStyle]:
    """Return our ReinFlow on Hopper and the peer, with equal weights."""
    _, tuned, critic = copy.deepcopy(plain_nets())
    torch.manual_seed(1)
    peer = ReinFlowStyle(tuned, critic)
    noise = NoiseConfig(hidden_dims=(HIDDEN, HIDDEN))
    config = ReinFlowConfig(num_envs=1, steps_per_iteration=2, denoising_steps=STEPS, noise=noise)
    setup = Setup(env=make_env("hopper"), init=flow_policy(tuned), num_workers=0, num_threads=1)
    run = config.build(setup)
    copy_trunk(critic, run.learner.critic)
    layers = run.ratio.noise.layers  # type: ignore[attr-defined]
    layers.load_state_dict(peer.noise.state_dict())
    return run, peer


def flow(options: argparse.Namespace) -> Iterator[Figure]:
    """Four Euler steps of a flow, one thread, against a diffusers scheduler in the loop."""
    net = plain_nets()[1]
    policy = flow_policy(net)
    schedule = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000)
    for batch, floor in ((1, 2.5), (40, 2.2)):
        generator = torch.Generator().manual_seed(batch)
        state = torch.randn(batch, OBS, generator=generator)
        start = torch.randn(batch, *CHUNK, generator=generator)

        @torch.no_grad()
        def peer(state: Tensor = state, start: Tensor = start) -> Tensor:
            schedule.set_timesteps(sigmas=[1 - k / STEPS for k in range(STEPS)])
            x = start
            for k, timestep in enumerate(schedule.timesteps):
                time = torch.full((len(state),), TIME_SCALE * k / STEPS)
                x = schedule.step(-net(x, time, state), timestep, x).prev_sample
            return x.clamp(-1, 1)

        ours = partial(policy.act, state.unsqueeze(1), noise=start)
        require_close("flow", ours(), peer(), 2e-5)
        sides = ("policy.act", ours), ("diffusers loop", peer)
        yield compare(f"flow, 4 steps, batch {batch}", *sides, floor, rounds=options.rounds)


def reinflow(options: argparse.Namespace) -> Iterator[Figure]:
    """ReinFlow's exploring steps with their densities, and its update, as against their usual form."""
    run, peer = both_sides()
    yield _exploring(run, peer, options)
    run.close()
    for rows, floor in ((64, 2.0), (1000, 1.6)):
        run, peer = both_sides()
        yield _scoring(run, peer, rows, floor, options)
        yield _updating(run, peer, rows, options)
        run.close()
    yield _iterating()


def _exploring(run: OnPolicy, peer: ReinFlowStyle, options: argparse.Namespace) -> Figure:
    generator = torch.Generator().manual_seed(0)
    state = 0.5 * torch.randn(40, OBS, generator=generator)
    ratio: Any = run.ratio

    def draws(seed: int) -> Tensor:
        return torch.randn(40, STEPS + 1, *CHUNK, generator=torch.Generator().manual_seed(seed))

    _, record = ratio.act({"state": state.unsqueeze(1)}, torch.Generator().manual_seed(5))
    chain, log_prob = peer.act(state, draws(5))
    require_close("chain", record["chain"], chain, 2e-5)
    require_close("density of the chain", record["log_prob"], log_prob, 2e-5)
    return compare(
        "ReinFlow explores, batch 40",
        ("ratio.act", lambda: ratio.act({"state": state.unsqueeze(1)}, generator)),
        (
            "usual style",
            lambda: peer.act(state, torch.randn(40, STEPS + 1, *CHUNK, generator=generator)),
        ),
        1.5,
        rounds=options.rounds,
    )


def _iterating() -> Figure:
    """Time whole iterations on Hopper, of ReinFlow and of our DPPO, which take the same control steps."""
    config = ReinFlowConfig(
        num_envs=ENVS, steps_per_iteration=ITERATION, denoising_steps=STEPS, batch_size=1250, update_epochs=5
    )
    init = flow_policy(plain_nets()[1])
    setup = Setup(env=make_env("hopper"), init=init, num_workers=2, num_threads=THREADS)
    ours, dppo = config.build(setup), dppo_run(2, THREADS, ITERATION)
    sides = ("2 processes", ours.advance), ("our DPPO iteration", dppo.advance)
    found = compare("whole ReinFlow iteration", *sides, 1.8, rounds=3)
    ours.close(), dppo.close()
    return found


def _scoring(
    run: OnPolicy, peer: ReinFlowStyle, rows: int, floor: float, options: argparse.Namespace
) -> Figure:
    """Time the densities of chains with their gradients, one thread."""
    generator, ratio = torch.Generator().manual_seed(3), cast(Any, run.ratio)
    state = 0.5 * torch.randn(rows, OBS, generator=generator)
    _, record = ratio.act({"state": state.unsqueeze(1)}, generator)
    cond, chain = run.policy.encode({"state": state.unsqueeze(1)}), record["chain"]

    def ours() -> Tensor:
        density: Tensor = ratio.reduce(ratio.log_prob(cond, chain)[0], chain)
        density.mean().backward()
        return density.detach()

    def theirs() -> Tensor:
        density = peer.log_prob(state, chain)[0]
        density.mean().backward()
        return density.detach()

    require_close("density of chains", ours(), theirs(), 2e-5)
    sides = ("one evaluation", ours), ("usual style", theirs)
    return compare(f"densities of {rows:,} chains", *sides, floor, rounds=options.rounds)


def _updating(run: OnPolicy, peer: ReinFlowStyle, rows: int, options: argparse.Namespace) -> Figure:
    generator = torch.Generator().manual_seed(3)
    state = 0.5 * torch.randn(rows, OBS, generator=generator)
    _, record = run.ratio.act({"state": state.unsqueeze(1)}, generator)
    advantage, returns, value = (torch.randn(rows, generator=generator) for _ in range(3))
    experience = Experience(
        run.policy.encode({"state": state.unsqueeze(1)}), record, advantage, returns, value
    )
    index = torch.arange(rows)
    batch = (state, record["chain"], record["log_prob"], advantage, returns)
    _check_gradients(run, peer, experience, index, batch)
    return compare(
        f"ReinFlow update, {rows:,} chains",
        ("one thread", lambda: run.learner.step(experience, index, draws=run.draws, train_actor=True)),
        ("usual style", lambda: peer.update(*batch)),
        1.5,
        rounds=max(3, options.rounds // 2),
    )


def _check_gradients(
    run: OnPolicy, peer: ReinFlowStyle, experience: Any, index: Tensor, batch: tuple[Tensor, ...]
) -> None:
    """Compare the norm of the actor's gradient with that of the peer's, and the gradient of the noise."""
    peer.actor_optimizer.zero_grad(), peer.critic_optimizer.zero_grad()
    peer.loss(*batch).backward()
    ours, _ = run.learner.actor_gradient(experience, index, draws=run.draws)
    theirs = [p.grad for group in peer.actor_optimizer.param_groups for p in group["params"]]
    norms = [torch.cat([g.flatten() for g in grads]).norm() for grads in (ours, theirs)]
    require_close("norm of the gradient", norms[0] / norms[1], 1.0, 1e-4)
    noise = len(list(peer.noise.parameters()))
    for a, b in zip(ours[-noise:], theirs[-noise:], strict=True):
        require_close("gradient of the noise", (a - b).norm() / b.norm(), 0.0, 1e-4)
    peer.actor_optimizer.zero_grad(), peer.critic_optimizer.zero_grad()
