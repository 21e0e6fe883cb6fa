"""Improvement in closed form: on the boundary of its bound, never worse, inside one mode, one graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from small_algorithms import init, observed, saved, setup, small, weights
from torch import Tensor

from algos.critics.cfpi import CfpiConfig
from algos.transitions import Batch
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.networks.critics import EnsembleConfig, QuantileEnsemble
from policies.policy import Policy
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.closed_form import ClosedForm, ClosedFormImprovement, improved

PROCESSES = ("gaussian", "mixture", "tanh_gaussian")


QUANTILES = {"critic_cosines": 4, "critic_dims": (8, 6)}


def wrapped(process: str, **values: Any) -> ClosedFormImprovement:
    torch.manual_seed(4)
    return ClosedForm(**{"critic_dims": (8,), **values}).wrap(init(process)).eval()


def act(policy: Policy) -> Tensor:
    return policy.act(observed(), noise=policy.sample_noise(5, generator=torch.Generator().manual_seed(1)))


def test_a_linear_worth_leads_to_the_boundary() -> None:
    """sqrt(2 delta) in units of the deviation, along Sigma g."""
    generator = torch.Generator().manual_seed(0)
    mean, slope = torch.randn(2, 6, 4, generator=generator)
    std = torch.rand(6, 4, generator=generator) + 0.5
    modes = mean[:, None], std[:, None], torch.zeros(6, 1)
    found, _ = improved(
        lambda x: (x * slope[:, None]).sum(-1), modes, torch.tensor([0.7]), min_weight=0.05, bound=None
    )
    step = (found - mean) / std
    torch.testing.assert_close(step.square().sum(1), torch.full((6,), 1.4))
    torch.testing.assert_close(
        step / step.norm(dim=1, keepdim=True), std * slope / (std * slope).norm(dim=1, keepdim=True)
    )


def test_a_mixture_stays_in_one_mode_and_a_light_mode_may_not_act() -> None:
    """Of two modes the better acts, within its own radius, which a smaller weight shrinks."""
    mean = torch.tensor([[[-1.0], [1.0]]])
    for weight, least, mode in (((0.6, 0.4), 0.05, 1), ((0.97, 0.03), 0.05, 0), ((0.97, 0.03), 0.01, 1)):
        modes = mean, torch.full_like(mean, 0.1), torch.tensor([weight]).log()
        found, chosen = improved(
            lambda x: x[..., 0], modes, torch.tensor([0.5]), min_weight=least, bound=None
        )
        margin = max(0.5 + float(modes[2][0, mode]), 0.0)  # the weights sum to 1
        assert int(chosen) == mode
        torch.testing.assert_close(float(found), float(mean[0, mode]) + 0.1 * (2 * margin) ** 0.5)


@pytest.mark.parametrize("process", PROCESSES)
def test_no_chosen_action_is_worth_less_than_the_best_mean(process: str) -> None:
    policy, plain = wrapped(process, radii=(0.0, 0.2, 2.0)), wrapped(process, radii=(0.0,))
    cond = policy.encode({"state": observed()})
    noise = policy.sample_noise(5)
    one, other = (each.executed_part(each.decode(cond, noise)) for each in (policy, plain))
    with torch.no_grad():
        worth = [policy.wrapper.worth(policy.critic, cond.vec, each[:, None]) for each in (one, other)]
    assert (worth[0] >= worth[1]).all() and (worth[0] > worth[1]).any()
    assert (one.abs() <= 1).all() and policy.is_deterministic and not policy.noise_sensitive


@pytest.mark.parametrize("process", ["gaussian", "tanh_gaussian"])
def test_radius_zero_is_the_policy(process: str) -> None:
    torch.testing.assert_close(act(wrapped(process, radii=(0.0,))), act(init(process)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("process", PROCESSES)
def test_a_critic_that_values_all_alike_changes_nothing(process: str) -> None:
    policy, plain = wrapped(process, radii=(0.5, 2.0)), wrapped(process, radii=(0.0,))
    with torch.no_grad():
        for one in (policy, plain):
            one.critic.weight[-1].zero_()
    assert torch.equal(act(policy), act(plain))


def test_it_acts_by_the_target_copies() -> None:
    run = small(CfpiConfig).build(setup("gaussian"))
    while run.progress < run.total:
        run.advance()
    shipped, own = run.snapshot().critic.state_dict(), run.learner.target_critic.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in shipped.items())
    assert run.learner.policy.critic is run.learner.target_critic


@pytest.mark.parametrize("values", [{}, QUANTILES])
def test_the_improved_policy_is_a_directory_like_any_other(values: dict[str, Any], tmp_path: Path) -> None:
    policy = wrapped("mixture", **values)
    again = load_policy(save_policy(policy, tmp_path / "policy"))
    assert isinstance(again, ClosedFormImprovement) and again.wrapper == policy.wrapper
    assert torch.equal(act(again), act(policy))
    assert policy.with_act_steps(2) is policy
    with pytest.raises(CapabilityError, match=mentions("act_steps=1")):
        policy.with_act_steps(1)


@pytest.mark.parametrize("values", [{}, QUANTILES])
def test_the_improved_policy_is_exported_as_one_graph(values: dict[str, Any], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    pytest.importorskip("onnxscript", reason="needs the extra `export`")
    from policies.export.export import export_onnx
    from policies.runner import MODEL

    policy = wrapped("gaussian", radii=(0.0, 1.0), **values)
    export_onnx(policy, tmp_path / "out", latency_batches=())
    graph = onnxruntime.InferenceSession(tmp_path / "out" / MODEL)
    given = {"observation": observed().numpy()}
    if "noise" in {one.name for one in graph.get_inputs()}:
        given["noise"] = policy.sample_noise(5).numpy()
    np.testing.assert_allclose(graph.run(["action"], given)[0], act(policy).numpy(), atol=1e-5)


def test_critics_learn_the_value_of_recorded_chunks_each_from_its_own_copy() -> None:
    learner = small(CfpiConfig).build(setup("gaussian")).learner
    rows, generator = 6, torch.Generator().manual_seed(0)
    state, action = torch.randn(rows, 2, generator=generator), torch.rand(rows, 4, generator=generator)
    has_next, zero = torch.tensor([1.0, 1, 1, 0, 0, 0]), torch.zeros(rows)
    parts = {"plan": action, "real": action, "row": zero.long(), "next_action": 0.5 * action}
    batch = Batch(
        state, action, reward=zero + 2, next_cond=state, discount=zero + 0.5, has_next=has_next, **parts
    )
    draws = learner.draw(rows, generator)
    with torch.no_grad():
        found = learner.target(batch, draws)
        own = learner.chunk(learner.base, state, draws["next"])
        chosen = torch.cat([0.5 * action[:3], own[3:]])
        torch.testing.assert_close(found, 2 + 0.5 * learner.target_critic(state, chosen))
    assert found.shape == (2, rows)


def test_a_value_is_the_mean_of_its_quantiles_and_rows_are_apart() -> None:
    torch.manual_seed(0)
    net = EnsembleConfig(3, (8, 6), layer_norm=True, cosines=4).build(2, 2)
    assert isinstance(net, QuantileEnsemble)
    cond, action = torch.randn(2, 9, 2)
    tau = torch.rand(9, 5)
    found = net.quantiles(cond, action, tau)
    assert found.shape == (3, 9, 5)
    torch.testing.assert_close(found[:, 4:5, 3:4], net.quantiles(cond[4:5], action[4:5], tau[4:5, 3:4]))
    middles = (torch.arange(32) + 0.5) / 32
    torch.testing.assert_close(
        net(cond, action), net.quantiles(cond, action, middles.expand(9, -1)).mean(dim=2)
    )
    torch.testing.assert_close(net(cond, action, members=1), net(cond, action)[:1])
    net(cond, action.requires_grad_(), frozen=True).sum().backward()
    assert action.grad is not None and all(weight.grad is None for weight in net.parameters())


def test_critics_of_quantiles_find_the_distribution_of_returns() -> None:
    """Among deviations below 1 the point of the least loss is no quantile: the loss is square there."""
    config = replace(small(CfpiConfig), **QUANTILES | {"critic_dims": (32, 32), "critic_lr": 3e-3})
    learner = config.build(setup("gaussian")).learner
    generator, rows = torch.Generator().manual_seed(0), 128
    zero, one = torch.zeros(rows, 4), torch.ones(rows)
    parts = {"plan": zero, "real": zero, "row": one.long(), "next_action": zero, "has_next": one}
    for _ in range(300):
        reward = 1 + 0.5 * torch.randn(rows, generator=generator)
        batch = Batch(zero[:, :2], zero, reward, zero[:, :2], discount=0 * one, **parts)
        learner.step(batch, learner.draw(rows, generator))
    tau = torch.tensor([[0.1, 0.3, 0.5, 0.7, 0.9]])
    known = torch.distributions.Normal(1.0, 0.5).icdf((torch.arange(1000) + 0.5) / 1000)
    points = torch.linspace(-1, 3, 401)[:, None]
    huber = torch.nn.functional.huber_loss(*torch.broadcast_tensors(points, known), reduction="none")
    loss = [(torch.where(known < points, 1 - t, t) * huber).sum(dim=1) for t in tau[0]]
    least = torch.stack([points[one.argmin(), 0] for one in loss])
    found = learner.critic.quantiles(zero[:1, :2], zero[:1], tau)[:, 0]
    torch.testing.assert_close(found, least.expand(2, 5), rtol=0, atol=0.1)
    value = learner.critic(zero[:1, :2], zero[:1])[:, 0]
    torch.testing.assert_close(value, torch.ones(2), rtol=0, atol=0.1)


def test_critics_of_quantiles_are_resumed_bit_by_bit_and_are_no_others() -> None:
    config = replace(small(CfpiConfig), **QUANTILES)
    run, again = (config.build(setup("gaussian")) for _ in range(2))
    run.advance()
    again.load_state_dict(saved(run))
    run.advance(), again.advance()
    assert torch.equal(weights(again.snapshot()), weights(run.snapshot()))
    with pytest.raises(CheckpointError, match=mentions("algo.critic_cosines 4 0")):
        replace(config, critic_cosines=0).build(setup("gaussian")).load_state_dict(saved(run))
    with pytest.raises(ConfigError, match=mentions("critic.cosines 0 critic.bins")):
        replace(config, critic_bins=5)
    with pytest.raises(ConfigError, match=mentions("critic.hidden_dims two critic.cosines")):
        replace(config, critic_dims=(8,))


def test_policies_without_a_density_and_radii_below_zero_are_refused() -> None:
    with pytest.raises(CapabilityError, match=mentions("algo=cfpi density mixture Use algo=dppo")):
        small(CfpiConfig).build(setup("flow"))
    with pytest.raises(CapabilityError, match=mentions("process=flow process=gaussian mixture")):
        wrapped("flow")
    with pytest.raises(ConfigError, match="radii"):
        ClosedForm(radii=())
    with pytest.raises(ConfigError, match="radii"):
        CfpiConfig(radii=(-0.5,))
