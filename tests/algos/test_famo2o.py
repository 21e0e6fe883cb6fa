"""FamO2O: a coefficient in the condition, the model that chooses it, a family of policies in one network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import everything
from small_algorithms import finished, init, mixed, noise_of, observed, policy_config, setup, small

from algos.critics.famo2o import Famo2oConfig
from algos.offline.loop import OfflineRun
from policies.backbones.mlp import MlpConfig
from policies.errors import CapabilityError, ConfigError
from policies.samplers.ode import Euler
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.balance import Balance, BalancedPolicy
from policies.wrappers.candidates import Candidates


def begin(process: str = "flow", config: Famo2oConfig | None = None, **changes: Any) -> OfflineRun:
    return (config or small(Famo2oConfig)).build(setup(process, **changes))


@pytest.mark.parametrize("process", ["flow", "diffusion", "gaussian", "mixture", "deterministic"])
def test_a_new_coefficient_changes_nothing(process: str) -> None:
    policy, base = begin(process).snapshot(), init(process)
    assert isinstance(policy, BalancedPolicy) and policy.goal_dim == 0
    assert Candidates(num_candidates=1).wrap(policy).goal_dim == 0
    noise = noise_of(base)
    found = policy.act(observed(), noise=noise)
    torch.testing.assert_close(found, base.act(observed(), noise=noise), rtol=0, atol=1e-5)


def moved(policy: Any) -> Any:
    """Return the policy with other weights, all of which have an effect."""
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    return policy


def test_a_range_of_one_coefficient_leaves_no_choice_bit_by_bit() -> None:
    config = replace(small(Famo2oConfig), min_coefficient=2.0, max_coefficient=2.0)
    policy = moved(begin(config=config).snapshot())
    noise, before = noise_of(policy), policy.act(observed(), noise=noise_of(policy))
    with torch.no_grad():
        for weight in policy.chooser.parameters():
            weight.mul_(-3)
    assert torch.equal(policy.act(observed(), noise=noise), before)
    wide = moved(begin().snapshot())
    chosen = wide.act(observed(), noise=noise)
    with torch.no_grad():
        for weight in wide.chooser.parameters():
            weight.mul_(-3)
    assert not torch.equal(wide.act(observed(), noise=noise), chosen)


def test_the_policy_acts_at_the_middle_of_its_choice() -> None:
    policy = moved(begin().snapshot())
    cond, noise = policy.encode({"state": observed()}), noise_of(policy)
    middle = policy.drawn(cond.vec, torch.zeros(5, 1))[0]
    assert ((middle > 1) & (middle < 5)).all() and middle.std() > 0
    at = policy.base.condition(policy.at(cond.vec, middle))
    assert torch.equal(policy.decode(cond, noise), policy.base.decode(at, noise))


def test_the_gradient_of_the_balance_model_is_that_through_the_whole_policy() -> None:
    run = begin()
    learner: Any = run.learner
    moved(learner.policy)
    batch, draws = run.table.gather(torch.arange(8)), learner.draw(8, torch.Generator().manual_seed(0))
    weights = [*learner.policy.chooser.parameters(), learner.policy.log_std]
    found = torch.autograd.grad(learner.balance_loss(batch, draws)[0], weights)
    coefficient, log_prob = learner.policy.drawn(batch.cond, draws["choice"])
    action = learner.chunk(
        learner.base, learner.policy.at(batch.cond, coefficient), draws["acting"], grad=True
    )
    loss = (log_prob - learner.target_critic(batch.cond, action).amin(dim=0)).mean()
    for one, other in zip(found, torch.autograd.grad(loss, weights), strict=True):
        torch.testing.assert_close(one, other)


def test_the_choice_of_a_coefficient_moves_no_weight_of_the_policy() -> None:
    run = begin()
    learner: Any = run.learner
    before = [weight.clone() for weight in learner.base.parameters()]
    batch, draws = run.table.gather(torch.arange(8)), learner.draw(8, torch.Generator().manual_seed(0))
    learner.update_balance(batch, draws)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.base.parameters(), strict=True))


def test_in_the_task_the_policy_clones_at_the_choice_of_before_the_step() -> None:
    run = begin(config=replace(small(Famo2oConfig), actor_lr=0.1))
    learner: Any = run.learner
    batch, seen = run.table.gather(torch.arange(8)), []
    batch = replace(batch, row=torch.full_like(batch.row, -1))
    draws = learner.draw(8, torch.Generator().manual_seed(0))
    before = learner.policy.drawn(batch.cond, draws["coefficient"])[0].detach()
    matching = learner.matching
    learner.matching = lambda at, *rest: (seen.append((at.cond, rest[-1])), matching(at, *rest))[1]
    learner.step(batch, draws)
    at, weight = seen[0]
    torch.testing.assert_close(at, learner.policy.at(batch.cond, before))
    after = learner.policy.drawn(batch.cond, draws["coefficient"])[0]
    assert (after - before).abs().max() > 1e-3
    with torch.no_grad():  # by the new V, and target copies of before their step
        fresh: Any = begin(config=replace(small(Famo2oConfig), actor_lr=0.1)).learner
        u = fresh.worth(batch.cond, batch.action) - learner.value_of(batch.cond)
    torch.testing.assert_close(weight, (before * u).exp().clamp(max=100))
    assert not torch.equal(draws["choice"], draws["coefficient"])


@pytest.mark.slow
@pytest.mark.skipif(not everything, reason="with --all: without it another method prefers it")
def test_a_larger_coefficient_asks_for_the_better_half_of_the_data_and_is_chosen() -> None:
    config = Famo2oConfig(
        steps=600, log_every=200, batch_size=64, gamma=0.0, actor_lr=3e-3, critic_lr=3e-3,
        critic_dims=(32, 32), balance_dims=(16,), min_coefficient=0.0, max_coefficient=4.0, init_alpha=0.01,
    )  # fmt: skip
    shape = replace(policy_config("flow"), backbone=MlpConfig(width=32), horizon=2)
    policy: Any = finished(
        begin(config=config, dataset=mixed(), env=None, init=None, policy=shape)
    ).snapshot()
    obs, noise = observed(256), noise_of(policy, 256)
    vec = policy.encode({"state": obs}).vec

    def share(coefficient: float) -> float:
        at = policy.base.condition(policy.at(vec, torch.full((256,), coefficient)))
        return float((policy.base.decode(at, noise)[:, 0, 0] > 0).double().mean())

    assert share(0.0) < 0.7 and share(4.0) > 0.85
    assert policy.drawn(vec, torch.zeros(256, 1))[0].mean() > 2.5
    assert float((policy.act(obs, noise=noise)[:, 0, 0] > 0).double().mean()) > 0.85


def test_the_policy_is_a_directory(tmp_path: Path) -> None:
    policy = moved(begin().snapshot()).eval()
    again = load_policy(save_policy(policy, tmp_path / "policy"))
    noise = noise_of(policy)
    assert torch.equal(again.act(observed(), noise=noise), policy.act(observed(), noise=noise))


def test_the_policy_is_a_graph(tmp_path: Path) -> None:
    policy = moved(begin().snapshot()).with_sampler(Euler(steps=1)).eval()
    noise = noise_of(policy)
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    pytest.importorskip("onnxscript", reason="needs the extra `export`")
    from policies.export.export import export_onnx
    from policies.runner import MODEL

    export_onnx(policy, tmp_path / "out", latency_batches=())
    graph = onnxruntime.InferenceSession(tmp_path / "out" / MODEL)
    found = graph.run(["action"], {"observation": observed().numpy(), "noise": noise.numpy()})[0]
    np.testing.assert_allclose(found, policy.act(observed(), noise=noise).numpy(), atol=1e-5)


def test_what_has_no_place_for_a_coefficient_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("algo.refit true")):
        replace(small(Famo2oConfig), refit=False)
    with pytest.raises(ConfigError, match=mentions("algo.max_coefficient algo.min_coefficient=3")):
        replace(small(Famo2oConfig), min_coefficient=3.0, max_coefficient=2.0)
    with pytest.raises(ConfigError, match=mentions("balance goal width 6 0")):
        Balance().wrap(init("flow"))
    with pytest.raises(CapabilityError, match=mentions("algo=famo2o BalancedPolicy")):
        begin(init=begin().snapshot())
