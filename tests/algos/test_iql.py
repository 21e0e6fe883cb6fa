"""IQL with a deterministic actor, as published for two datasets of Hopper."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import mentions
from test_offline_specified import (
    ACTION,
    STATE,
    adam,
    assert_same,
    batch_of,
    dataset,
    down,
    follow,
    run_of,
    sampling,
)
from torch import nn

from algos.base import Setup
from algos.iql import IqlConfig
from algos.offline.config import plain_actor
from algos.offline.td3_update import actor_network
from algos.optim import weights_of
from burnish.config.schema import compose_config
from policies.build import build_policy
from policies.errors import ConfigError
from policies.networks import native
from policies.processes import RectifiedFlow
from policies.processes.deterministic import DeterministicPolicy
from policies.processes.gaussian import GaussianProcess
from policies.threads import torch_threads


def plain_of(policy: Any) -> nn.Sequential:
    """Return the actor as a plain stack with the weights of a policy."""
    layers: list[nn.Module] = []
    for layer in (policy.trunk.inlet, *policy.trunk.layers):
        layers += [copy.deepcopy(layer), nn.ReLU()]
    return nn.Sequential(*layers[:-1], nn.Tanh())


def test_a_step_with_a_deterministic_actor_is_that_of_a_plain_program() -> None:
    """Squared errors are summed over entries and weighted by the advantages of before the step of V."""
    config = IqlConfig(
        steps=4, deterministic=True, temperature=4.0, gamma=0.9, tau=0.1, normalize_returns=50.0
    )
    run = run_of(config)
    learner: Any = run.learner
    actor, q, v = plain_of(learner.policy), copy.deepcopy(learner.critic), copy.deepcopy(learner.value)
    shapes = [(m.in_features, m.out_features) for m in actor if isinstance(m, nn.Linear)]
    assert shapes == [(STATE, 256), (256, 256), (256, ACTION)]
    slow = copy.deepcopy(q)
    optimizers = {net: adam(net, 3e-4) for net in (actor, q, v)}
    for step in range(3):
        batch, none = batch_of(run, step), torch.zeros(32, 0)
        with torch.no_grad():
            low = slow(batch.cond, batch.action).min(dim=0).values
            aim = batch.reward + batch.discount * v(batch.next_cond, none)[0]
        u = low - v(batch.cond, none)[0]
        down(optimizers[v], ((0.7 - (u < 0).float()).abs() * u**2).mean())
        first, second = q(batch.cond, batch.action)
        down(optimizers[q], (F.mse_loss(first, aim) + F.mse_loss(second, aim)) / 2)
        follow(slow, q, 0.1)
        weight = (4.0 * u.detach()).exp().clamp(max=100.0)
        for group in optimizers[actor].param_groups:
            group["lr"] = 3e-4 * 0.5 * (1 + math.cos(math.pi * step / 4))
        loss = (weight * (actor(batch.cond) - batch.action).square().sum(dim=1)).mean()
        down(optimizers[actor], loss)
        told = learner.step(batch, learner.draw(32, torch.Generator().manual_seed(step)))
        torch.testing.assert_close(told["actor/loss"], loss.detach())
        for ours, plain in ((learner.value, v), (learner.critic, q), (learner.target_critic, slow)):
            assert_same(ours, plain)
        assert_same(learner.policy.trunk, actor)


@pytest.mark.skipif(native.library() is None, reason="there is no program in C")
@pytest.mark.parametrize(("deterministic", "log_var"), [(True, 0.0), (False, -1.0), (False, 4.1)])
def test_gradients_of_a_plain_actor_without_a_graph_are_those_of_autograd(
    deterministic: bool, log_var: float
) -> None:
    learner: Any = run_of(IqlConfig(steps=1, deterministic=deterministic)).learner
    loss, weights = learner.policy_loss, weights_of(learner.actor_optimizer)
    if not deterministic:
        learner.policy.head.log_var.data.fill_(log_var)  # beyond 4 no gradient reaches it
    batch, draws = batch_of(run_of(IqlConfig(steps=1)), 0), learner.draw(32, torch.Generator())
    slope = torch.rand(32, generator=torch.Generator().manual_seed(0))
    with torch_threads(1):
        found = loss.evaluate(batch, draws, weights)
        assert found.values.grad_fn is None and len(weights) == (6 if deterministic else 7)
        expected = loss(batch, draws)
        torch.testing.assert_close(found.values, expected.detach())
        of_graph = torch.autograd.grad(expected, weights, slope)
        for one, other in zip(found.gradients(slope), of_graph, strict=True):
            assert one is not None and (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("squash", [True, False])
def test_a_mean_that_no_tanh_bounds_has_a_graph(squash: bool) -> None:
    config, one = plain_actor(GaussianProcess(squash=squash), (8, 8)), torch.ones(2)
    moments = {"mean": 0 * one, "std": one, "min": -one, "max": one}
    policy = build_policy(config, obs_dim=2, action_dim=2, statistics={"state": moments, "action": moments})
    assert (actor_network(policy) is not None) == squash


def test_a_deterministic_actor_is_what_ships() -> None:
    policy = run_of(IqlConfig(steps=1, deterministic=True)).snapshot()
    assert isinstance(policy, DeterministicPolicy) and policy.is_deterministic
    assert "log_var" not in "".join(policy.state_dict())


def test_what_a_new_actor_is_has_no_meaning_beside_an_old_one() -> None:
    setup = Setup(dataset=dataset(), init=sampling(RectifiedFlow()), seed=1)
    with pytest.raises(ConfigError, match=mentions("algo.deterministic")):
        IqlConfig(steps=1, deterministic=True).build(setup)


@pytest.mark.parametrize(
    ("experiment", "published"),
    [
        ("hopper_medium_iql", (True, 0.7, 3.0, 0.001, 1000.0)),
        ("hopper_medium_replay_iql", (True, 0.7, 3.0, 0.001, 1000.0)),
        ("hopper_medium_expert_iql", (False, 0.5, 6.0, 0.005, None)),
        ("hopper_iql", (False, 0.7, 3.0, 0.005, 1000.0)),
    ],
)
def test_experiments_on_hopper_have_the_published_settings(experiment: str, published: Any) -> None:
    algo = compose_config("train", [f"experiment={experiment}"]).algo
    found = (algo.deterministic, algo.expectile, algo.temperature, algo.tau, algo.normalize_returns)
    assert found == published
    assert (algo.batch_size, algo.actor_lr, algo.critic_lr, algo.steps) == (256, 3e-4, 3e-4, 1_000_000)
