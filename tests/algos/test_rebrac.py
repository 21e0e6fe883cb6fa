"""ReBRAC against plain networks and plain steps in the order of its released code."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import mentions
from test_offline_specified import (
    ACTION,
    STATE,
    adam,
    assert_uniform,
    batch_of,
    dataset,
    down,
    follow,
    run_of,
)
from torch import Tensor, nn

from algos.base import Setup
from algos.rebrac import RebracConfig
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CheckpointError
from policies.policy import Policy, PolicyConfig
from policies.processes.deterministic import DeterministicProcess
from policies.storage.policy_folder import load_policy, save_policy

WIDTH, DEPTH = 256, 3


def plain_actor() -> nn.Sequential:
    """Return the actor: no normalisation, tanh at its end."""
    sizes = [STATE] + [WIDTH] * DEPTH
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, ACTION), nn.Tanh())


def plain_critic() -> nn.Sequential:
    """Return a critic: every hidden layer is linear, then ReLU, then LayerNorm with eps 1e-6."""
    sizes = [STATE + ACTION] + [WIDTH] * DEPTH
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU(), nn.LayerNorm(fan_out, eps=1e-6)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def pairs_of_actor(policy: Any, plain: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    """Return parameters of a policy and of the plain actor that mean the same."""
    ours = [policy.trunk.inlet, *policy.trunk.layers]
    theirs = [layer for layer in plain if isinstance(layer, nn.Linear)]
    both = zip(ours, theirs, strict=True)
    return [(getattr(a, name), getattr(b, name)) for a, b in both for name in ("weight", "bias")]


def pairs_of_critics(ours: Any, plain: nn.ModuleList) -> list[tuple[Tensor, Tensor]]:
    """Return parameters of an ensemble, laid out as in layers, and of plain critics that mean the same."""
    found: list[tuple[Tensor, Tensor]] = []
    for e, net in enumerate(plain):
        linear = [layer for layer in net if isinstance(layer, nn.Linear)]
        norms = [layer for layer in net if isinstance(layer, nn.LayerNorm)]
        for i, layer in enumerate(linear):
            found += [(ours.weight[i][e].t(), layer.weight), (ours.bias[i][e, 0], layer.bias)]
        for i, norm in enumerate(norms):
            found += [(ours.scale[i][e, 0], norm.weight), (ours.shift[i][e, 0], norm.bias)]
    return found


@torch.no_grad()
def copied(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for ours, plain in pairs:
        plain.copy_(ours)


def assert_same(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Weights agree to one per cent of a step of Adam."""
    for ours, plain in pairs:
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)


def plain_values(critics: nn.ModuleList, state: Tensor, action: Tensor) -> Tensor:
    """Return the values (2, B) of plain critics."""
    return torch.stack([critic(torch.cat([state, action], dim=1))[:, 0] for critic in critics])


def stirred(learner: Any) -> None:
    """Move the normalisations of critics and targets away from 1 and 0, which would hide a mistake."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for net in (learner.critic, learner.target_critic):
            for part in (*net.scale, *net.shift):
                part.add_(0.3 * torch.randn(part.shape, generator=generator))


@pytest.mark.parametrize("rows", [5, 300], ids=["few rows", "many rows"])
@pytest.mark.parametrize("size", [3.0, 1e-3], ids=["large inputs", "small inputs"])
def test_values_are_those_of_plain_critics(rows: int, size: float) -> None:
    """With small inputs all outputs of the first layer are about 0.1: eps decides what is made of them."""
    learner: Any = run_of(RebracConfig(steps=4)).learner
    stirred(learner)
    plain = nn.ModuleList(plain_critic() for _ in range(2))
    copied(pairs_of_critics(learner.critic, plain))
    generator = torch.Generator().manual_seed(0)
    state, action = (size * torch.randn(rows, width, generator=generator) for width in (STATE, ACTION))
    found, expected = learner.critic(state, action), plain_values(plain, state, action)
    spread = float(expected.detach().std())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * spread)
    if size < 1:
        for norm in (layer for critic in plain for layer in critic if isinstance(layer, nn.LayerNorm)):
            norm.eps = 1e-5
        off = (plain_values(plain, state, action) - found).abs().max()
        assert float(off.detach()) > 1e-2 * spread, "eps matters here"


def test_actions_are_those_of_a_plain_actor_on_recorded_states(tmp_path: Path) -> None:
    run = run_of(RebracConfig(steps=4))
    starts = dataset().transitions().observations
    torch.testing.assert_close(run.table.cond, starts, rtol=0, atol=0)
    plain = plain_actor()
    copied(pairs_of_actor(run.learner.policy, plain))
    loaded = load_policy(save_policy(run.snapshot(), tmp_path / "policy"))
    states = 40 * torch.randn(9, 1, STATE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded.act(states)[:, 0], plain(states[:, 0]).detach())


def test_steps_are_those_of_plain_networks() -> None:
    """Sums over entries of actions, penalties on actor and target apart, the smaller value for the actor."""
    config = RebracConfig(steps=4, actor_weight=0.3, critic_weight=0.7, gamma=0.9)
    run = run_of(config)
    learner: Any = run.learner
    stirred(learner)
    actor, slow_actor = plain_actor(), plain_actor()
    q, slow = (nn.ModuleList(plain_critic() for _ in range(2)) for _ in range(2))
    pairs = [
        *pairs_of_actor(learner.policy, actor), *pairs_of_critics(learner.critic, q),
        *pairs_of_actor(learner.target_actor.policy, slow_actor),
        *pairs_of_critics(learner.target_critic, slow),
    ]  # fmt: skip
    copied(pairs)
    optimizers = {net: adam(net, 1e-3) for net in (actor, q)}
    for step in range(4):
        batch = batch_of(run, step)
        draws = learner.draw(32, torch.Generator().manual_seed(step))
        with torch.no_grad():
            noise = (0.2 * draws["target"]).clamp(-0.5, 0.5)
            ahead = (slow_actor(batch.next_cond) + noise).clamp(-1, 1)
            low = plain_values(slow, batch.next_cond, ahead).min(dim=0).values
            cost = batch.has_next * (ahead - batch.next_action).square().sum(dim=1)
            aim = batch.reward + batch.discount * (low - 0.7 * cost)
        first, second = plain_values(q, batch.cond, batch.action)
        down(optimizers[q], F.mse_loss(first, aim) + F.mse_loss(second, aim))
        if step % 2:
            action = actor(batch.cond)
            value = plain_values(q, batch.cond, action).min(dim=0).values
            distance = (action - batch.action).square().sum(dim=1)
            down(optimizers[actor], (0.3 * distance - value / value.abs().mean().detach()).mean())
            follow(slow, q, 0.005)
            follow(slow_actor, actor, 0.005)
        learner.step(batch, draws)
        assert_same(pairs)


def test_new_networks_begin_as_published() -> None:
    learner: Any = run_of(RebracConfig(steps=4)).learner
    actor, q = plain_actor(), nn.ModuleList(plain_critic() for _ in range(2))
    copied([*pairs_of_actor(learner.policy, actor), *pairs_of_critics(learner.critic, q)])
    for net, bound in ((actor, 1e-3), *((critic, 3e-3) for critic in q)):
        *hidden, last = (layer for layer in net if isinstance(layer, nn.Linear))
        for layer in hidden:
            assert_uniform(layer.weight, layer.in_features)
            assert torch.equal(layer.bias, torch.full_like(layer.bias, 0.1))
        weight = last.weight.detach()
        assert 0.95 * bound < float(weight.abs().max()) <= bound
        assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert 0 < float(last.bias.detach().abs().max()) <= bound
        for norm in (layer for layer in net if isinstance(layer, nn.LayerNorm)):
            assert bool((norm.weight == 1).all()) and bool((norm.bias == 0).all())
    assert not torch.equal(q[0][0].weight, q[1][0].weight)
    assert_same([*pairs_of_actor(learner.target_actor.policy, actor)])
    again: Any = run_of(RebracConfig(steps=4)).learner
    copied(pairs_of_actor(again.policy, other := plain_actor()))
    assert all(torch.equal(a, b) for a, b in zip(actor.parameters(), other.parameters(), strict=True))


def cloned() -> Policy:
    """Return a deterministic policy on normalised states."""
    one = torch.ones(STATE)
    state = {"mean": 3 * one, "std": 2 * one, "min": -3 * one, "max": 9 * one}
    action = {"mean": 0 * one, "std": one, "min": -one, "max": one}
    config = PolicyConfig(
        process=DeterministicProcess(), backbone=MlpConfig(residual=False, hidden_dims=(8,)), horizon=1,
        act_steps=1, normalizer={"state": "gaussian", "action": "limits"},
    )  # fmt: skip
    statistics = {"state": state, "action": {name: value[:ACTION] for name, value in action.items()}}
    return build_policy(config, obs_dim=STATE, action_dim=ACTION, statistics=statistics, seed=4)


def test_a_policy_to_start_from_keeps_weights_and_normaliser() -> None:
    init = cloned()
    run = RebracConfig(steps=4).build(Setup(dataset=dataset(), init=init, seed=1))
    found = run.learner.policy.state_dict()
    assert all(torch.equal(found[name], value) for name, value in init.state_dict().items())
    torch.testing.assert_close(run.table.cond, (dataset().transitions().observations - 3) / 2)


def test_states_are_standardised_where_that_is_asked_for() -> None:
    run = run_of(RebracConfig(steps=4, normalize_states=True))
    starts = dataset().transitions().observations.double()
    expected = (starts - starts.mean(0)) / (starts.std(0, correction=0) + 1e-3)
    torch.testing.assert_close(run.table.cond.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_run_goes_on_with_its_states_alone() -> None:
    """Weights would fit other states, too."""
    state = run_of(RebracConfig(steps=4)).state_dict()
    run_of(RebracConfig(steps=4)).load_state_dict(state)
    with pytest.raises(CheckpointError, match=mentions("policy.normalizer.state gaussian")):
        run_of(RebracConfig(steps=4, normalize_states=True)).load_state_dict(state)
