"""Laws of single methods whose critics of chunks choose, edit and weigh: losses, targets, what is learned."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from messages import mentions
from pairwise import everything, repeated
from small_algorithms import QAMS, begin, dataset, finished, init, mixed, noise_of, observed, small, weights
from torch import Tensor

from algos.bc import BcConfig
from algos.critics.dqc import DqcConfig
from algos.critics.expo import ExpoConfig
from algos.critics.fql import FqlConfig
from algos.critics.idql import IdqlConfig
from algos.critics.losses import bce, implicit_loss, value_loss
from algos.critics.pa_rl import PaRlConfig
from algos.critics.qam import QamConfig
from algos.critics.qc import QcConfig
from algos.critics.residual import ResidualConfig
from algos.critics.trqam import TrqamConfig
from policies import registry
from policies.errors import CapabilityError, ConfigError
from policies.networks.distributions import highest_entropy
from policies.policy import Policy
from policies.wrappers.candidates import CandidatePolicy, ascend
from policies.wrappers.noise_policy import Steering

# -- losses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", [0.3, 0.7, 0.9])
def test_expectile_and_quantile_losses_end_at_expectile_and_quantile(kappa: float) -> None:
    values = torch.tensor([0.0, 1.0, 2.0, 10.0], dtype=torch.float64)
    grid = torch.linspace(0, 10, 10_001, dtype=torch.float64)
    for how in ("expectile", "quantile"):
        losses = torch.vmap(lambda v, how=how: value_loss(values - v, how, kappa))(grid)
        best = grid[losses.argmin()]
        if how == "quantile":
            assert (values <= best).double().mean() >= kappa >= (values < best).double().mean()
        else:
            share = torch.where(values > best, kappa, 1 - kappa)
            assert float((share * (values - best)).sum()) == pytest.approx(0, abs=5e-3)


def test_implicit_losses_weigh_probabilities_without_a_gradient_through_the_weight() -> None:
    logit = torch.tensor([0.0, 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0.9, 0.2, 0.5], dtype=torch.float64)
    weight = torch.tensor([0.8, 0.2, 0.8], dtype=torch.float64)
    found = torch.autograd.grad(implicit_loss(logit, target, "expectile", 0.8).sum(), logit)[0]
    torch.testing.assert_close(found, weight * (logit.detach().sigmoid() - target))
    found = torch.autograd.grad(implicit_loss(logit, target, "quantile", 0.8).sum(), logit)[0]
    torch.testing.assert_close(found, weight * torch.sign(logit.detach() - torch.logit(target)))
    reference = torch.nn.functional.binary_cross_entropy_with_logits(logit, target, reduction="none")
    torch.testing.assert_close(bce(logit, target), reference)


# -- Q-chunking, IDQL and FQL ---------------------------------------------------------------------------


def test_in_a_chain_every_critic_has_a_target_of_its_own() -> None:
    config = replace(small(QcConfig), critics=3, iterate_every=4, chain_every=2)
    run = begin(config)
    learner = run.learner
    batch, draws = run.table.gather(torch.arange(8)), learner.draw(8, torch.Generator().manual_seed(0))
    with torch.no_grad():
        chosen = learner.chunk(learner.policy, batch.next_cond, draws["next"])
        wanted = batch.reward + batch.discount * learner.target_critic(batch.next_cond, chosen)
        torch.testing.assert_close(learner.target(batch, draws), wanted)
    first = learner.target_critic.weight[0].clone()
    finished(run)  # 6 updates; targets move before an update: after 2 along the chain, after 4 all
    assert wanted.shape == (3, 8) and not torch.equal(learner.target_critic.weight[0][0], first[0])
    with pytest.raises(ConfigError, match=mentions("algo.critics 2 algo.iterate_every")):
        replace(config, critics=1, subset=1)


def test_the_weight_of_a_row_is_that_of_its_matching_loss() -> None:
    run = begin(small(IdqlConfig))
    learner, batch = run.learner, run.table.gather(torch.arange(8))
    draws, row = learner.draw(8, torch.Generator().manual_seed(0)), torch.arange(8)
    alone = replace(batch, real=batch.real * (row == 3)[:, None])
    found = learner.matching(batch, draws, 2.5 * (row == 3))
    torch.testing.assert_close(found, 2.5 * learner.matching(alone, draws))
    torch.testing.assert_close(learner.matching(batch, draws, torch.ones(8)), learner.matching(batch, draws))


def test_idql_never_decodes_while_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin(small(IdqlConfig))
    monkeypatch.setattr(type(run.learner.base), "decode", lambda *_, **__: pytest.fail("decoded"))
    run.advance()
    assert run.snapshot().critic is not None


def test_student_and_teacher_decode_the_same_noise_and_the_student_is_one_step() -> None:
    run = begin(small(FqlConfig))
    policy = run.snapshot()
    assert policy.sampler.steps == 1 and not isinstance(policy, CandidatePolicy)
    teacher = run.learner.base.clone().with_sampler(policy.sampler)
    noise = noise_of(policy)
    assert torch.equal(policy.act(observed(), noise=noise), teacher.act(observed(), noise=noise))


def test_a_student_of_a_deterministic_diffusion_begins_anew_with_its_scales() -> None:
    run = begin(small(FqlConfig), "edm")
    student, teacher = run.learner.policy, run.learner.base
    assert (
        type(student.process).__name__ == "RectifiedFlow"
        and type(teacher.process).__name__ != "RectifiedFlow"
    )
    for name, value in teacher.normalizer.state_dict().items():
        assert torch.equal(student.normalizer.state_dict()[name], value)


# -- edits ----------------------------------------------------------------------------------------------


def test_more_edits_than_candidates_are_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("algo.num_edited algo.num_candidates=1")):
        ExpoConfig(num_candidates=1)


def test_expo_chooses_by_one_subset_of_target_critics_and_values_by_another() -> None:
    learner = begin(replace(small(ExpoConfig), critics=4, num_candidates=3, num_edited=2)).learner
    generator = torch.Generator().manual_seed(0)
    drawn = [learner.draw(8, generator) for _ in range(100)]
    share = sum(set(one["choosing"].tolist()) == set(one["subset"].tolist()) for one in drawn) / 100
    assert share == pytest.approx(1 / 6, abs=0.1)  # of six pairs


@pytest.mark.parametrize("scale", [0.05, 0.3, 1.0])
def test_a_target_entropy_that_no_edit_reaches_is_refused_and_the_default_is_reachable(scale: float) -> None:
    width = 4
    most = width * (highest_entropy() + math.log(scale))
    assert replace(small(ExpoConfig), edit_scale=scale).target_entropy_of(width) < most
    beyond = replace(small(ExpoConfig), edit_scale=scale, target_entropy=most + 0.01)
    with pytest.raises(ConfigError, match=mentions("algo.target_entropy largest entropy")):
        beyond.target_entropy_of(width)
    assert replace(beyond, learn_alpha=False).target_entropy_of(width) == most + 0.01


def test_edits_of_the_policy_are_trained_at_its_own_chunks() -> None:
    for where in ("data", "policy"):
        run = begin(replace(small(ExpoConfig), edits_at=where, edit_scale=0.3))
        learner, batch = run.learner, run.table.gather(torch.arange(8))
        draws = learner.draw(8, torch.Generator().manual_seed(0))
        moved = replace(batch, action=batch.action + 0.1)
        losses = [learner.edit_loss(each, draws)[0] for each in (batch, moved)]
        assert torch.equal(*losses) == (where == "policy")


def test_edits_begin_as_small_as_they_are_told() -> None:
    run = begin(replace(small(ResidualConfig), edit_init_std=0.1))
    policy, cond = run.learner.policy, torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    eps = torch.randn(2000, 4, generator=torch.Generator().manual_seed(1))
    u, _ = policy.edits(cond, eps.flip(0), eps)
    torch.testing.assert_close(u, torch.tanh(0.1 * eps))


@pytest.mark.parametrize(
    ("ramp", "after", "wanted"),
    [(0, 0, [0.2, 0.2, 0.2, 0.2]), (4, 0, [0.0, 0.1, 0.2, 0.2]), (4, 2, [0.0, 0.0, 0.1, 0.2])],
)
def test_the_scale_of_a_residual_rises_and_edits_wait_for_it(
    ramp: int, after: int, wanted: list[float]
) -> None:
    run = begin(replace(small(ResidualConfig), ramp_steps=ramp, ramp_after=after, edit_scale=0.2, steps=6))
    editor = run.learner.policy.editor
    found, first = [float(run.snapshot().scale)], [weight.clone() for weight in editor.parameters()]
    while run.progress < run.total:
        run.advance()
        found.append(float(run.snapshot().scale))
        still = all(torch.equal(*pair) for pair in zip(editor.parameters(), first, strict=True))
        assert still == (run.progress <= after)
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize("algo", ["residual", "expo", "qam_edit"])
def test_edits_of_scale_zero_are_their_policy_after_training(algo: str) -> None:
    one = {"num_candidates": 1} | ({"num_edited": 1} if algo == "expo" else {})
    run = finished(begin(replace(small(registry.lookup("algo", algo)), edit_scale=0.0, **one)))
    policy = run.snapshot()
    noise = noise_of(policy)
    found, alone = policy.act(observed(), noise=noise), policy.base.act(observed(), noise=noise[:, 0])
    assert torch.equal(found, alone)
    assert torch.equal(weights(policy.base), weights(init("flow"))) == (algo == "residual")


# -- PA-RL ----------------------------------------------------------------------------------------------


def test_chunks_that_neither_compete_nor_climb_are_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("algo.ascent_steps algo.num_candidates=1")):
        PaRlConfig(num_candidates=1, num_ascended=1, ascent_steps=0)


def test_the_set_that_pa_rl_clones_ends_with_the_recorded_chunk() -> None:
    config = replace(small(PaRlConfig), num_candidates=5, num_ascended=3, ascent_steps=0, critics=2)
    run = begin(replace(config, ascent_steps=2))
    learner, batch = run.learner, run.table.gather(torch.arange(8))
    draws = learner.draw(8, torch.Generator().manual_seed(0))
    learner.policy.wrapper = replace(learner.policy.wrapper, ascent_steps=0)
    plans, real, weight = learner.refit_set(batch, draws["refit"])
    torch.testing.assert_close(plans[:, -1].flatten(1), batch.plan)
    assert torch.equal(real[:, -1], batch.real) and bool((real[:, :-1] == 1).all())
    torch.testing.assert_close(weight.exp().sum(1), torch.ones(8))
    sampled, actions = learner.policy.candidates(learner.base.condition(batch.cond), draws["refit"])
    order = learner.policy.worth(batch.cond, actions).argsort(1)[:, -2:]
    kept = actions[torch.arange(8)[:, None], order]
    torch.testing.assert_close(learner.policy.executed_part(plans)[:, :-1], kept)
    torch.testing.assert_close(plans[:, :-1], sampled[torch.arange(8)[:, None], order])


def test_pa_rl_clones_a_chunk_that_climbed_as_often_as_its_value_says() -> None:
    config = replace(small(PaRlConfig), num_candidates=4, num_ascended=3, ascent_lr=0.5, temperature=0.2)
    run = begin(config)
    learner, batch, seen = run.learner, run.table.gather(torch.arange(8)), []
    draws = learner.draw(8, torch.Generator().manual_seed(0))
    plans, real, weight = learner.refit_set(batch, draws["refit"])

    def worth(points: Tensor) -> Tensor:
        return torch.stack([learner.critic(batch.cond, point).mean(0) for point in points.unbind(1)], 1)

    start = batch.action[:, None]
    wanted, _ = ascend(worth, start, steps=config.ascent_steps, lr=0.5, box=(-1.0, 1.0))
    actions = learner.policy.executed_part(plans)
    torch.testing.assert_close(actions[:, -1:], wanted)
    assert (wanted - start).abs().max() > 1e-3
    with torch.no_grad():
        torch.testing.assert_close(weight, (worth(actions) / 0.2).log_softmax(1))
    index = torch.arange(8) % 3
    draws["gumbel"] = 100 * torch.nn.functional.one_hot(index, 3).float()
    matching = learner.matching
    learner.matching = lambda aim, *rest: (seen.append(aim), matching(aim, *rest))[1]
    learner.update_base(batch, draws)
    rows = torch.arange(8)
    assert torch.equal(seen[0].plan.view_as(plans[:, 0]), plans[rows, index])
    assert torch.equal(seen[0].real, real[rows, index])
    gumbel = learner.draw(20_000, torch.Generator().manual_seed(1))["gumbel"]
    wanted = torch.tensor([0.8, 0.15, 0.05])
    share = torch.bincount((wanted.log() + gumbel).argmax(1), minlength=3) / 20_000
    torch.testing.assert_close(share, wanted, rtol=0, atol=0.015)


def test_pa_rl_begins_to_clone_after_its_critics() -> None:
    run = begin(replace(small(PaRlConfig), refit_after=4))
    first = weights(run.learner.base)
    run.advance(), run.advance()
    assert torch.equal(weights(run.learner.base), first)
    run.advance()
    assert not torch.equal(weights(run.learner.base), first)


# -- decoupled chunks -----------------------------------------------------------------------------------


def test_values_of_dqc_reach_back_over_long_chunks_while_short_ones_are_chosen() -> None:
    run = begin(replace(small(DqcConfig), critic_horizon=4))
    batch = run.table.gather(torch.arange(6))
    assert batch.action.shape[1] == 4 * 2 and run.snapshot().critic is not None
    assert run.learner.policy.width == 2 * 2  # numbers of executed steps
    finished(run)
    assert run.snapshot().act(observed()).shape == (5, 2, 2)


def test_a_reward_of_decoupled_chunks_is_that_of_their_steps() -> None:
    run = begin(replace(small(DqcConfig), critic_horizon=4, gamma=0.5))
    data, row = dataset(), 3
    batch = run.table.gather(torch.tensor([row]))
    frame = int(run.table.frame[row])
    length = min(4, 5 - frame % 5)
    wanted = sum(0.5**j * float(data.rewards[frame + j]) for j in range(length))
    assert float(batch.reward) == pytest.approx(wanted, rel=1e-5)
    assert float(batch.discount) == pytest.approx(0.0 if frame % 5 + 4 >= 5 else 0.5**4)


def test_dqc_finds_the_value_of_a_reward_beyond_its_executed_chunk() -> None:
    """Mode +0.6 of the first chunk leads to a reward of 1 after the chunk; values lie in [0, 1]."""
    data = later_reward()
    config = DqcConfig(
        steps=120, log_every=120, batch_size=64, gamma=0.9, critic_horizon=4, critic_dims=(32, 32),
        actor_lr=3e-3, critic_lr=3e-3, tau=0.05, num_candidates=16,
    )  # fmt: skip
    run = finished(begin(config, dataset=data, env=None, init=None))
    policy, obs = run.snapshot(), torch.zeros(64, 1, 2)
    chosen = policy.act(obs, generator=torch.Generator().manual_seed(3))[:, 0, 0]
    cloned = policy.base.act(obs, generator=torch.Generator().manual_seed(3))[:, 0, 0]
    assert (chosen > 0).double().mean() > 0.9
    assert 0.25 < (cloned > 0).double().mean() < 0.75


def later_reward(episodes: int = 200) -> Any:
    """Episodes of four steps; the sign of the first two actions decides about the reward of the last."""
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(0, 2, (episodes,), generator=generator) * 2.0 - 1.0
    actions = torch.zeros(episodes, 4, 2)
    actions[:, :2, 0] = 0.6 * sign[:, None]
    observations = torch.zeros(episodes, 4, 2)
    observations[:, 1:, 1] = torch.tensor([0.3, 0.6, 0.9])  # time alone: nothing tells the modes apart
    rewards = torch.zeros(episodes, 4)
    rewards[:, 3] = (sign > 0).float()
    base = dataset(episodes, 4)
    return replace(
        base,
        observations=observations.flatten(0, 1),
        actions=actions.flatten(0, 1),
        rewards=rewards.flatten(),
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"online_steps": 5, "critic_horizon": 3}, "algo.critic_horizon act_steps=2 algo.online_steps"),
        ({"critic_horizon": 1}, "algo.critic_horizon policy.act_steps=2"),
    ],
)
def test_what_decoupled_chunks_cannot_do_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        begin(replace(small(DqcConfig), **values))
    with pytest.raises(ConfigError, match=mentions("algo.value_max algo.value_min")):
        DqcConfig(value_min=1.0)


# -- adjoint matching -----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [QamConfig, TrqamConfig])
def test_values_without_slope_leave_the_flow_of_adjoint_matching_bit_by_bit(config: Any) -> None:
    """Constant critics; and, with a temperature, values of no weight."""
    run = begin(replace(small(config), num_candidates=1, refit=False))
    run.learner.critic_optimizer.param_groups[0]["lr"] = 0.0
    with torch.no_grad():
        for critic in (run.learner.critic, run.learner.target_critic):
            critic.weight[-1].zero_()
    assert torch.equal(weights(finished(run).snapshot()), weights(init("flow")))
    if config is QamConfig:
        cold = finished(begin(replace(small(config), num_candidates=1, refit=False, inverse_temperature=0.0)))
        assert torch.equal(weights(cold.snapshot()), weights(init("flow")))
    tuned = finished(begin(replace(small(config), num_candidates=1, refit=False)))
    assert not torch.equal(weights(tuned.snapshot()), weights(init("flow")))


def test_rows_that_are_not_executed_have_no_value_gradient() -> None:
    learner = begin(small(QamConfig)).learner  # horizon 3, of which 2 rows are executed
    cond = learner.base.condition(torch.zeros(4, 2))
    chunk = torch.rand(4, 3, 2, generator=torch.Generator().manual_seed(0)) - 0.5
    chunk[0, 0] = 1.5
    found = learner.value_gradient(cond, chunk)
    assert bool((found[:, 2] == 0).all() & (found[0, 0] == 0).all() & (found[1:, :2] != 0).all())
    learner.config.clip_gradient = False
    assert bool((learner.value_gradient(cond, chunk)[0, 0] != 0).all())


def test_the_bound_of_gradients_is_that_of_the_flow_alone() -> None:
    free, bound = (begin(replace(small(QamConfig), max_grad_norm=limit)) for limit in (None, 1e-20))
    for run in (free, bound):
        run.advance()
    flow = weights(init("flow"))
    torch.testing.assert_close(weights(bound.learner.tuned), flow, rtol=0, atol=1e-9)
    assert (weights(free.learner.tuned) - flow).abs().max() > 1e-4
    assert torch.equal(weights(free.learner.base), weights(bound.learner.base))


@pytest.mark.parametrize("algo", QAMS)
def test_no_flow_is_no_flow_without_refit_either(algo: str) -> None:
    black_box = Steering(hidden_dims=(8,)).wrap(init("flow"))
    with pytest.raises(CapabilityError, match=mentions(f"algo={algo} matching loss")) as refused:
        begin(small(registry.lookup("algo", algo)), init=black_box)
    assert "algo.refit" not in str(refused.value)


# -- two modes, of which one is better ------------------------------------------------------------------


@cache
def clone_of_two_modes() -> Policy:
    config = BcConfig(steps=600 if everything else 350, batch_size=64, lr=3e-3, validation_fraction=0.0)
    return finished(begin(config, dataset=mixed(), env=None, init=None)).snapshot()


@pytest.mark.parametrize(
    ("config", "values"),
    repeated(
        [
            (IdqlConfig, {"num_candidates": 16}),
            (
                PaRlConfig,
                {"num_candidates": 8, "ascent_lr": 0.05, "temperature": 0.1, "refit_after": 30}
                | {"steps": 100, "log_every": 100, "batch_size": 32},
            ),
            (TrqamConfig, {"divergence_budget": 0.5, "refit": False, "steps": 200, "log_every": 200}),
        ]
    ),
)
def test_the_better_of_two_modes_becomes_more_frequent_than_in_the_clone(
    config: Any, values: dict[str, Any]
) -> None:
    sizes = {"steps": 120, "log_every": 120, "batch_size": 64, "critic_dims": (32, 32), "critics": 2}
    method = replace(small(config), gamma=0.0, actor_lr=3e-3, critic_lr=3e-3, **(sizes | values))
    policy = finished(begin(method, dataset=mixed(), env=None, init=clone_of_two_modes())).snapshot()
    before, after = (
        one.act(observed(256), generator=torch.Generator().manual_seed(3))[:, 0, 0]
        for one in (clone_of_two_modes(), policy)
    )
    assert (after > 0).double().mean() > (before > 0).double().mean() + 0.2


@pytest.mark.slow
@pytest.mark.skipif(not everything, reason="with --all: without it another method prefers it")
def test_adjoint_matching_moves_both_modes_by_their_value_and_keeps_them() -> None:
    """Actions are +-0.6; the value is the first action, so p(a) is that of the data times exp(a tau_Q)."""
    config = QamConfig(
        steps=400, log_every=400, batch_size=64, gamma=0.0, critic_dims=(32, 32), critics=2, actor_lr=3e-3,
        critic_lr=3e-3, inverse_temperature=1.5, clip_gradient=False, refit=False,
    )  # fmt: skip
    cloned = clone_of_two_modes()
    policy = finished(begin(config, dataset=mixed(), env=None, init=cloned)).snapshot()
    obs = observed(256)
    before, after = (
        one.act(obs, generator=torch.Generator().manual_seed(3))[:, 0, 0] for one in (cloned, policy)
    )
    assert 0.35 < (before > 0).double().mean() < 0.65
    odds = math.exp(1.5 * 1.2)  # of the values of the modes
    assert (after > 0).double().mean() > (before > 0).double().mean() + 0.1
    assert (after > 0).double().mean() < odds / (1 + odds) + 0.1
    assert float(after[after > 0].median()) == pytest.approx(0.6, abs=0.2)


@pytest.mark.slow
@pytest.mark.skipif(not everything, reason="with --all: without it another method prefers it")
def test_qc_prefers_the_better_of_two_modes_that_the_policy_keeps() -> None:
    """Actions are +-0.6; the reward is the first action. The policy stays a clone of both modes."""
    data = mixed()
    config = QcConfig(
        steps=250, log_every=250, batch_size=32, gamma=0.0, critic_dims=(32, 32), actor_lr=3e-3,
        critic_lr=3e-3, num_candidates=16,
    )  # fmt: skip
    policy = finished(begin(config, dataset=data, env=None, init=None)).snapshot()
    obs = observed(64)
    chosen = policy.act(obs, generator=torch.Generator().manual_seed(3))[:, 0, 0]
    cloned = policy.base.act(obs, generator=torch.Generator().manual_seed(3))[:, 0, 0]
    assert (chosen > 0).double().mean() > 0.95
    assert 0.25 < (cloned > 0).double().mean() < 0.75
