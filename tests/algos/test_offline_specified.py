"""What publications say, against plain programs: networks, constants, and whole steps of IQL."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algos.a2pr import A2prConfig, AdvantageGuide
from algos.base import Setup
from algos.iql import IqlConfig, IqlLearner
from algos.offline.loop import OfflineRun
from algos.prdc import PrdcConfig
from algos.rebrac import RebracConfig
from algos.td3_bc import Td3BcConfig
from envs.datasets.episodes import EpisodeDataset
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import ConfigError
from policies.policy import Policy, PolicyConfig
from policies.processes import RectifiedFlow, VPDiffusion
from policies.protocols import Cond
from policies.storage.policy_folder import load_policy, save_policy

STATE, ACTION = 11, 3


def dataset(frames: int = 60, length: int = 5, seed: int = 0) -> EpisodeDataset:
    generator = torch.Generator().manual_seed(seed)
    ends = torch.zeros(frames, dtype=torch.bool)
    ends[length - 1 :: length] = True
    over = ends & (torch.arange(frames) < frames // 2)
    return EpisodeDataset(
        observations=3 + 2 * torch.randn(frames, STATE, generator=generator),
        actions=torch.rand(frames, ACTION, generator=generator) * 2 - 1,
        rewards=torch.randn(frames, generator=generator), terminated=over, truncated=ends & ~over,
        episode_start=torch.arange(0, frames + 1, length), meta={"source": "noise"},
    )  # fmt: skip


def run_of(config: Any, **changes: Any) -> Any:
    return config.build(Setup(dataset=dataset(**changes), seed=1))


def hidden(module: torch.nn.Module) -> list[tuple[int, int]]:
    """Return (in, out) of every linear layer."""
    return [(m.in_features, m.out_features) for m in module.modules() if isinstance(m, torch.nn.Linear)]


def stacked(net: Any) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in net.weight]


# -- networks and constants -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "actor", "critic"),
    [(Td3BcConfig, 2, 2), (PrdcConfig, 2, 2), (A2prConfig, 3, 4), (RebracConfig, 3, 3), (IqlConfig, 2, 2)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_networks_have_the_published_depths(config: Any, actor: int, critic: int) -> None:
    run = run_of(config(steps=1))
    wide = [256] * actor
    assert hidden(run.learner.policy) == list(zip([STATE, *wide], [*wide, ACTION], strict=True))
    sizes = [STATE + ACTION, *[256] * critic, 1]
    assert stacked(run.learner.critic) == [(2, a, b) for a, b in pairwise(sizes)]
    assert len(run.learner.critic.scale) == (critic if config is RebracConfig else 0)


def test_the_guide_of_a2pr_has_the_published_size() -> None:
    guide = run_of(A2prConfig(steps=1)).learner.regulariser
    assert isinstance(guide, AdvantageGuide)
    assert stacked(guide.value) == [(1, STATE, 256), *[(1, 256, 256)] * 3, (1, 256, 1)]
    encoder, latent = [(STATE + ACTION, 750), (750, 750)], 2 * ACTION
    assert hidden(guide.vae.encoder) == encoder and hidden(guide.vae.mean) == [(750, latent)]
    assert hidden(guide.vae.log_std) == [(750, latent)] and hidden(guide.vae.outlet) == [(750, ACTION)]
    assert hidden(guide.vae.decoder) == [(STATE + latent, 750), (750, 750)]
    rates = [opt.param_groups[0]["lr"] for opt in (guide.value_optimizer, guide.vae_optimizer)]
    assert rates == [3e-4, 1e-3]


@pytest.mark.parametrize("config", [Td3BcConfig, PrdcConfig, A2prConfig])
def test_constants_are_the_published_ones(config: Any) -> None:
    found = config()
    constants = (found.gamma, found.tau, found.batch_size, found.steps, found.actor_lr, found.critic_lr)
    assert constants == (0.99, 0.005, 256, 1_000_000, 3e-4, 3e-4)
    assert (found.alpha, found.policy_noise, found.noise_clip, found.policy_delay) == (2.5, 0.2, 0.5, 2)


@pytest.mark.parametrize("config", [Td3BcConfig, A2prConfig, IqlConfig])
def test_weights_begin_as_those_of_pytorch(config: Any) -> None:
    """Uniform within 1 / sqrt(fan in), weights and biases."""
    run = run_of(config(steps=1))
    for weight, bias in zip(run.learner.critic.weight, run.learner.critic.bias, strict=True):
        assert_uniform(weight, weight.shape[1])
        assert float(bias.detach().abs().max()) <= weight.shape[1] ** -0.5
    for layer in run.learner.policy.modules():
        if isinstance(layer, torch.nn.Linear):
            assert_uniform(layer.weight, layer.in_features)


def assert_uniform(weight: Tensor, fan_in: int) -> None:
    bound = fan_in**-0.5
    value = weight.detach()
    assert 0.99 * bound < float(value.abs().max()) <= bound
    if value.numel() > 1000:
        assert float(value.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_states_are_standardised_by_those_that_transitions_start_from(tmp_path: Path) -> None:
    """The deviation is that of the population, and raised by 0.001; both are saved with the policy."""
    data = dataset()
    run = run_of(Td3BcConfig(steps=1))
    starts = data.transitions().observations.double()
    assert len(starts) < data.num_frames, "the last row of a cut recording starts nothing"
    mean, std = starts.mean(0), starts.std(0, correction=0) + 1e-3
    torch.testing.assert_close(run.table.cond.double(), (starts - mean) / std, rtol=1e-5, atol=1e-5)
    policy = run.snapshot()
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    obs = 100 * torch.randn(4, 1, STATE, generator=torch.Generator().manual_seed(0))
    cond = loaded.encode(loaded.observation(obs)).vec
    torch.testing.assert_close(cond.double(), (obs[:, 0].double() - mean) / std, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(loaded.act(obs), policy.act(obs))


# -- the neighbour of PRDC ------------------------------------------------------------------------------


def test_prdc_next_to_the_data_is_td3_bc_and_says_so() -> None:
    run = run_of(PrdcConfig(steps=4, beta=50.0))
    batch = run.table.gather(torch.arange(20))
    action = (batch.action + 0.01).requires_grad_()
    penalty, _, told = run.learner.regulariser.penalty(batch, action, run.learner.critic, {})
    assert float(told["constraint/own_row"]) == 1.0 and float(told["constraint/certified"]) == 1.0
    assert float(told["constraint/own_distance"]) == 0.0
    torch.testing.assert_close(penalty, F.mse_loss(action, batch.action))
    (grad,) = torch.autograd.grad(penalty, action)
    torch.testing.assert_close(grad, 2 * (action - batch.action).detach() / action.numel())


def test_prdc_follows_the_nearest_row_and_counts_how_often_that_is_the_own() -> None:
    run = run_of(PrdcConfig(steps=4, beta=0.05))
    batch = run.table.gather(torch.arange(20))
    action = -batch.action
    penalty, _, told = run.learner.regulariser.penalty(batch, action, run.learner.critic, {})
    rows = run.table.gather(torch.arange(len(run.table)))
    cost = 0.05**2 * torch.cdist(batch.cond.double(), rows.cond.double()).square()
    cost = cost + torch.cdist(action.double(), rows.action.double()).square()
    nearest = cost.argmin(1)
    torch.testing.assert_close(penalty, F.mse_loss(action, rows.action[nearest]))
    assert float(told["constraint/own_row"]) == pytest.approx(float((nearest == batch.row).float().mean()))
    away = (rows.action[nearest] - batch.action).square().mean().sqrt()
    torch.testing.assert_close(told["constraint/own_distance"], away)


@pytest.mark.parametrize("search", ["lists", "tree", "brute"])
def test_a_copy_of_a_row_is_the_own_row_and_another_action_of_its_state_is_not(search: str) -> None:
    once = dataset()
    twice = once.select([*range(once.num_episodes)] * 2)
    run = PrdcConfig(steps=4, beta=50.0, search=search).build(Setup(dataset=twice, seed=1))
    batch = run.table.gather(torch.arange(len(run.table)))
    *_, told = run.learner.regulariser.penalty(batch, batch.action + 0.01, run.learner.critic, {})
    assert float(told["constraint/own_row"]) == 1.0, "half of the numbers are those of copies"
    second = torch.arange(twice.num_frames) >= once.num_frames
    apart = replace(twice, actions=torch.where(second[:, None], -twice.actions, twice.actions))
    run = PrdcConfig(steps=4, beta=50.0, search=search).build(Setup(dataset=apart, seed=1))
    batch = run.table.gather(torch.arange(len(run.table)))
    *_, told = run.learner.regulariser.penalty(batch, -batch.action, run.learner.critic, {})
    assert float(told["constraint/own_row"]) == 0.0, "the other row of the state has that action"


def test_two_runs_in_one_process_search_their_own_rows() -> None:
    runs = [run_of(PrdcConfig(steps=4, beta=0.05), seed=seed) for seed in (0, 1)]
    for run in (*runs, *runs):
        batch = run.table.gather(torch.arange(10))
        found = run.learner.regulariser.search.nearest(batch.row, batch.cond, batch.action).row
        assert torch.equal(found, batch.row)


# -- steps of IQL ---------------------------------------------------------------------------------------


def adam(net: torch.nn.Module, lr: float) -> torch.optim.Adam:
    return torch.optim.Adam(net.parameters(), lr=lr, fused=False, foreach=False)


def down(optimizer: torch.optim.Adam, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def assert_same(ours: torch.nn.Module, plain: torch.nn.Module) -> None:
    """Compare weights within a tenth of Adam's step of 3e-4.

    Adam divides by the size of a gradient, so where that is about its rounding, the step is uncertain by a
    visible part of itself, of which processors differ: 1.2e-5 was seen. A missing term moves whole steps.
    """
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=3e-5)


def follow(target: torch.nn.Module, net: torch.nn.Module, tau: float) -> None:
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
            slow.copy_(tau * fast + (1 - tau) * slow)


def batch_of(run: OfflineRun, step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return run.table.gather(torch.randint(len(run.table), (32,), generator=generator))


def test_a_step_of_iql_is_that_of_a_plain_program() -> None:
    """V by expectiles, Q towards the V before its step, then the policy by the u before that step."""
    config = IqlConfig(steps=4, expectile=0.8, temperature=4.0, gamma=0.9, tau=0.1)
    run = run_of(config)
    learner = run.learner
    assert isinstance(learner, IqlLearner)
    policy, q, v = (copy.deepcopy(net) for net in (learner.policy, learner.critic, learner.value))
    slow = copy.deepcopy(q)
    optimizers = {net: adam(net, 3e-4) for net in (policy, q, v)}
    for step in range(3):
        batch = batch_of(run, step)
        none = torch.zeros(32, 0)
        with torch.no_grad():
            low = slow(batch.cond, batch.action).min(dim=0).values
            aim = batch.reward + batch.discount * v(batch.next_cond, none)[0]
        u = low - v(batch.cond, none)[0]
        share = torch.where(u < 0, torch.full_like(u, 0.2), torch.full_like(u, 0.8))
        down(optimizers[v], (share * u**2).mean())
        first, second = q(batch.cond, batch.action)
        down(optimizers[q], (F.mse_loss(first, aim) + F.mse_loss(second, aim)) / 2)
        follow(slow, q, 0.1)
        mean, std = policy.head(batch.cond)
        log_prob = torch.distributions.Normal(mean[:, 0], std.expand_as(mean)[:, 0]).log_prob(batch.action)
        weight = (4.0 * u.detach()).exp().clamp(max=100.0)
        for group in optimizers[policy].param_groups:
            group["lr"] = 3e-4 * 0.5 * (1 + math.cos(math.pi * step / 4))
        down(optimizers[policy], -(weight * log_prob.sum(dim=1)).mean())
        learner.step(batch, learner.draw(32, torch.Generator().manual_seed(step)))
        for ours, plain in ((learner.value, v), (learner.critic, q), (learner.target_critic, slow)):
            assert_same(ours, plain)
        assert_same(learner.policy, policy)


# -- policies that sample chunks ------------------------------------------------------------------------


def sampling(process: Any) -> Policy:
    """Return a policy that samples chunks of four actions, of which three are executed from the second on."""
    one = torch.ones(STATE)
    limits = {"mean": 3 * one, "std": 2 * one, "min": -3 * one, "max": 9 * one}
    action = {"mean": 0 * one, "std": one, "min": -one, "max": one}
    return build_policy(
        PolicyConfig(
            process=process, backbone=MlpConfig(width=16, time_dim=4), horizon=4, act_steps=3, action_start=1
        ),
        obs_dim=STATE, action_dim=ACTION, seed=2,
        statistics={"state": limits, "action": {name: value[:ACTION] for name, value in action.items()}},
    )  # fmt: skip


@pytest.mark.parametrize("process", [VPDiffusion(num_levels=4), RectifiedFlow()], ids=["diffusion", "flow"])
def test_prdc_keeps_sampled_chunks_near_recorded_ones_through_all_denoising_steps(process: Any) -> None:
    """Its gradient is that of the distance of whole chunks, the neighbour being constant."""
    run = PrdcConfig(steps=4, beta=0.1).build(Setup(dataset=dataset(), init=sampling(process), seed=1))
    learner: Any = run.learner
    batch, rows = run.table.gather(torch.arange(12)), run.table.gather(torch.arange(len(run.table)))
    assert batch.action.shape == (12, 3 * ACTION)
    noise = learner.actor.draw(12, torch.Generator().manual_seed(0))
    chunk = learner.policy.decode(Cond(batch.cond), noise, grad=True)
    sampled = chunk[:, 1:4].flatten(1)
    scale = rows.cond.double().std(dim=0, correction=0)  # distances are those of standardised states
    assert float(scale.max()) < 0.7
    cost = 0.1**2 * torch.cdist(batch.cond / scale, rows.cond / scale).square()
    cost = cost + torch.cdist(sampled.detach().double(), rows.action.double()).square()
    expected = F.mse_loss(sampled, rows.action[cost.argmin(1)])
    action = learner.actor(batch.cond, noise)
    penalty = learner.regulariser.penalty(batch, action, learner.critic, {}).value
    torch.testing.assert_close(penalty, expected)
    assert_same_gradients(learner.policy, penalty, expected)


@pytest.mark.parametrize("process", [VPDiffusion(num_levels=4), RectifiedFlow()], ids=["diffusion", "flow"])
def test_the_guide_of_a2pr_rebuilds_sampled_chunks_and_passes_gradients_back(process: Any) -> None:
    config = A2prConfig(steps=4, constraint_weight=0.4, vae_width=16, value_dims=(16,), critic_dims=(16,))
    run = config.build(Setup(dataset=dataset(), init=sampling(process), seed=1))
    learner: Any = run.learner
    batch, generator = run.table.gather(torch.arange(12)), torch.Generator().manual_seed(0)
    draws = learner.draw(12, generator)
    draws = draws | learner.regulariser.draw(12, generator)
    guide: AdvantageGuide = learner.regulariser
    v = guide.value(batch.cond, torch.zeros(12, 0))[0].detach()  # before its step
    guide.learn(batch, learner.backup(batch, draws), learner.critic, draws)
    action = learner.actor(batch.cond, learner.actor.draw(12, generator))
    penalty, _, told = guide.penalty(batch, action, learner.critic, draws)
    rebuilt = guide.vae(batch.cond, action, draws["vae_policy"])[0]
    first = [learner.critic(batch.cond, one)[0].detach() for one in (rebuilt, batch.action)]
    follows, active = first[0] >= first[1], (first[0] >= v) | (first[1] > v)
    aim = torch.where(follows[:, None], rebuilt, batch.action)
    expected = (0.4 * active[:, None] * (action - aim).square()).mean()
    torch.testing.assert_close(penalty, expected)
    assert float(told["guide/followed_fraction"]) == pytest.approx(float(follows.float().mean()))
    assert float(told["guide/active_fraction"]) == pytest.approx(float(active.float().mean()))
    assert follows.any() and not follows.all() and active.any()
    assert_same_gradients(learner.policy, penalty, expected)


def assert_same_gradients(policy: Policy, one: Tensor, other: Tensor) -> None:
    """Gradients of two losses agree, and reach the network."""
    weights = [p for p in policy.parameters() if p.requires_grad]
    grads = [
        torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True) for loss in (one, other)
    ]
    reached = [(a, b) for a, b in zip(*grads, strict=True) if a is not None and b is not None]
    assert reached and any(float(a.abs().max()) > 0 for a, _ in reached)
    for a, b in reached:
        torch.testing.assert_close(a, b)


# -- rewards --------------------------------------------------------------------------------------------


def test_returns_span_what_they_are_told_to() -> None:
    """IQL's locomotion rewards, 1000 r / (largest - smallest return), arXiv 2110.06169, appendix."""
    data, run = dataset(), run_of(IqlConfig(steps=1, normalize_returns=1000.0))
    returns = data.rewards.view(-1, 5).sum(1)
    scale = 1000 / (returns.max() - returns.min())
    plain = run_of(IqlConfig(steps=1)).table.gather(torch.arange(20)).reward
    scaled = run.table.gather(torch.arange(20)).reward
    torch.testing.assert_close(scaled, scale * plain)


def test_a_span_needs_returns_that_differ() -> None:
    data = dataset()
    data.rewards.fill_(1.0)
    with pytest.raises(ConfigError, match=r"algo\.normalize_returns needs episodes of different returns"):
        IqlConfig(normalize_returns=1000.0).build(Setup(dataset=data, seed=1))
    with pytest.raises(ConfigError, match=r"algo\.normalize_returns must be null with algo\.reward_scale"):
        IqlConfig(normalize_returns=1000.0, reward_scale=2.0)


# -- averages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [Td3BcConfig, IqlConfig])
def test_what_ships_is_the_average_of_the_weights(config: Any) -> None:
    """And what learns is what learns without it."""
    options: dict[str, Any] = {"steps": 6, "log_every": 1, "batch_size": 16, "hidden_dims": (8,)}
    run, plain = run_of(config(ema_decay=0.75, **options)), run_of(config(**options))
    average = [p.detach().clone() for p in run.learner.policy.parameters()]
    for _ in range(6):
        run.advance()
        plain.advance()
        average = [
            0.75 * a + 0.25 * p.detach() for a, p in zip(average, plain.snapshot().parameters(), strict=True)
        ]
    for ours, theirs in zip(run.learner.policy.parameters(), plain.learner.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for export_policy, expected in zip(run.snapshot().parameters(), average, strict=True):
        torch.testing.assert_close(export_policy, expected)


def test_an_average_asked_for_on_resuming_begins_there() -> None:
    options: dict[str, Any] = {"steps": 4, "log_every": 2, "hidden_dims": (8,)}
    begun, continued = run_of(Td3BcConfig(**options)), run_of(Td3BcConfig(ema_decay=0.9, **options))
    begun.advance()
    continued.load_state_dict(begun.state_dict())
    for export_policy, weight in zip(
        continued.snapshot().parameters(), begun.snapshot().parameters(), strict=True
    ):
        assert torch.equal(export_policy, weight)
