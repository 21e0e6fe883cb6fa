"""FPO and AWM: draws, losses, what an update does to an action, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from messages import mentions
from point_dppo import make_init
from point_flows import FPO, RATES, SIZES, make_flow, make_run

from algos.fpo import AwmConfig, FpoConfig
from algos.onpolicy.advantages import Experience
from algos.onpolicy.fpo_ratio import AwmRatio, FpoRatio, Matching
from algos.onpolicy.ratios import Rows
from algos.training.observations import encode
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, ConfigError
from policies.processes.shortcut import Shortcut
from policies.samplers.ode import Euler

AWM = AwmConfig(**SIZES, **RATES)
ROWS = 16


def acted(config: FpoConfig, policy: DenoisingPolicy | None = None) -> tuple[FpoRatio, Experience, Rows]:
    policy = (policy or make_flow()).with_sampler(Euler(steps=4, clip_action=None))
    ratio = config.estimator(policy)
    obs = torch.rand(ROWS, 1, 2, generator=torch.Generator().manual_seed(0))
    _, record = ratio.act({"state": obs}, torch.Generator().manual_seed(1))
    unused = torch.zeros(ROWS)
    experience = Experience(encode(policy, {"state": obs}), record, unused, unused, unused)
    return ratio, experience, Rows.sorted_from(torch.arange(ROWS * ratio.inner_steps), ratio.inner_steps)


def test_draws_lie_on_the_grid_of_the_sampler_where_the_loss_has_weight() -> None:
    every = {0.0, 0.25, 0.5, 0.75}
    for prediction, times in (("eps", every - {0.0}), ("velocity", every), ("x0", every)):
        _, experience, _ = acted(replace(FPO, prediction=prediction, num_draws=20))
        assert set(experience.record["t"].flatten().tolist()) == times
    _, experience, _ = acted(replace(FPO, times="density", num_draws=20))
    t = experience.record["t"]
    assert 0.0 < float(t.min()) < 0.1 and 0.9 < float(t.max()) < 1.0


def test_the_eps_loss_is_the_velocity_loss_times_the_square_of_the_time() -> None:
    policy = make_flow()
    ratios = [FpoRatio(policy, Matching(prediction=kind)) for kind in ("eps", "velocity", "x0")]
    generator = torch.Generator().manual_seed(0)
    cond = encode(policy, {"state": torch.rand(9, 1, 2, generator=generator)})
    action, eps = torch.randn(2, 9, 3, 2, generator=generator)
    t = torch.linspace(0.1, 0.9, 9)
    by_eps, by_velocity, by_x0 = (ratio.losses(cond, action, eps, t) for ratio in ratios)
    torch.testing.assert_close(by_eps, t.square() * by_velocity)
    torch.testing.assert_close(by_x0, (1 - t).square() * by_velocity)


def test_only_executed_rows_count() -> None:
    policy = make_flow()
    ratio = FpoRatio(policy, Matching())
    cond, t = encode(policy, {"state": torch.rand(2, 1, 2)}), torch.tensor([0.3, 0.6])
    action, eps = torch.randn(2, 2, 3, 2)
    with torch.no_grad():
        policy.field.trunk.outlet.weight.zero_()  # the network sees none of its input
        before = ratio.losses(cond, action, eps, t)
        action[:, 2] += 1.0
        assert torch.equal(ratio.losses(cond, action, eps, t), before)
        action[:, 1] += 1.0
        assert not torch.equal(ratio.losses(cond, action, eps, t), before)


@pytest.mark.parametrize("config", [FPO, replace(FPO, per_draw=True), AWM], ids=["fpo", "fpo++", "awm"])
def test_a_step_makes_good_actions_likelier_and_bad_ones_less_likely(config: FpoConfig) -> None:
    policy = make_flow()
    ratio, experience, rows = acted(replace(config, num_draws=64), policy)
    good = (torch.arange(ROWS) < ROWS // 2).float() * 2 - 1
    before = ratio_losses(ratio, experience)
    score = ratio.score(experience, rows)
    advantage = good.index_select(0, rows.state_of_row)
    loss = -(score.log_ratio.exp() * advantage).mean()
    weights = list(policy.field.parameters())
    with torch.no_grad():
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.sub_(1e-2 * gradient)
    change = ratio_losses(ratio, experience) - before
    assert float(change[good > 0].mean()) < 0 < float(change[good < 0].mean())


def ratio_losses(ratio: FpoRatio, experience: Experience) -> torch.Tensor:
    """Return the present mean loss of every action (M,)."""
    record, n = experience.record, ratio.num_draws
    with torch.no_grad():
        losses = ratio.losses(
            experience.cond.repeat(n),
            record["action"].repeat_interleave(n, 0),
            record["eps"].flatten(0, 1),
            record["t"].flatten(),
        )
    return losses.view(-1, n).mean(1)


def test_a_bounded_value_keeps_its_gradient_and_a_bounded_range_does_not() -> None:
    old, new = torch.tensor([5.0, 0.5]), torch.tensor([1.0, 0.2], requires_grad=True)
    passing, stopped = Matching(max_difference=1.0).difference(old, new)
    assert passing.tolist() == pytest.approx([1.0, 0.3]) and stopped.tolist() == [0.0, 0.0]
    assert torch.autograd.grad(passing.sum(), new)[0].tolist() == [-1.0, -1.0]
    cut, stopped = Matching(difference_range=(-1.0, 1.0)).difference(old, new)
    assert torch.autograd.grad(cut.sum(), new)[0].tolist() == [0.0, -1.0] and stopped.tolist() == [1.0, 0.0]


BOUNDS: tuple[dict[str, Any], ...] = (
    {},
    {"max_loss": 0.4},
    {"max_loss_negative": 0.3},
    {"difference_range": (-0.3, 0.3)},
    {"max_difference": 0.1},
    {"max_loss": 0.8, "max_loss_negative": 0.5, "difference_range": (-0.4, 0.4), "max_difference": 0.2},
)


@pytest.mark.parametrize("weight", [None, "noise"], ids=["fpo", "awm"])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_draws_are_counted_as_saturated_exactly_where_no_gradient_reaches_them(
    bounds: dict[str, Any], weight: str | None
) -> None:
    policy, matching = make_flow(), Matching(**bounds)
    ratio = FpoRatio(policy, matching) if weight is None else None
    ratio = ratio or AwmRatio(policy, matching, weight=str(weight))
    draws = torch.rand(4, 200, generator=torch.Generator().manual_seed(0))
    old, new, advantage, t = draws[0], draws[1].requires_grad_(), draws[2] - 0.5, draws[3]
    pairs = ratio.compare(old, new, advantage, t)
    (gradient,) = torch.autograd.grad(pairs.log_ratio.sum(), new)
    assert torch.equal(pairs.stopped.bool(), gradient == 0)
    passes = set(bounds) <= ({"max_difference"} if weight is None else {"max_difference", "difference_range"})
    assert bool(pairs.stopped.any()) is not passes


def test_a_drift_stands_in_for_the_divergence_of_ratios_that_are_one() -> None:
    run = make_run(replace(AWM, update_epochs=4, actor_lr=1e-2))
    metrics = run.advance()
    assert float(metrics["policy/ratio_mean"]) == 1 and float(metrics["policy/ratio_spread"]) == 0
    assert float(metrics["policy/approx_kl"]) > 0 and "policy/joint_clip" not in metrics
    run.close()
    stopped = make_run(replace(AWM, update_epochs=4, actor_lr=1e-2, target_kl=1e-12))
    assert float(stopped.advance()["policy/updates"]) == 2 < float(metrics["policy/updates"])
    stopped.close()


WEIGHTS: dict[str, tuple[Any, Any]] = {
    "one": (lambda s, loss: loss, lambda s, loss: torch.ones_like(s)),
    "noise": (lambda s, loss: s * loss, lambda s, loss: s),
    "noise_squared": (lambda s, loss: s * s * loss, lambda s, loss: s * s),
    "huber": (
        lambda s, loss: 4 * s * ((loss + 1e-10).sqrt().sqrt() - 1e-10**0.25),
        lambda s, loss: s / (loss + 1e-10) ** 0.75,
    ),
}
"""Of a noise amplitude and a loss: the weighted loss and its derivative."""


@pytest.mark.parametrize("weight", AwmRatio.WEIGHTS)
def test_losses_are_weighted_by_the_noise_that_the_times_leave(weight: str) -> None:
    ratio = AwmRatio(make_flow(), Matching(), weight=weight)
    loss, t = torch.rand(2, 20, generator=torch.Generator().manual_seed(0))
    weighted = ratio.weighted(loss.requires_grad_(), t)
    (gradient,) = torch.autograd.grad(weighted.sum(), loss)
    for found, formula in zip((weighted, gradient), WEIGHTS[weight], strict=True):
        torch.testing.assert_close(found, formula(1 - t, loss))


@pytest.mark.parametrize("per_draw", [False, True])
def test_the_drift_is_the_fall_of_the_loss(per_draw: bool) -> None:
    ratio, experience, rows = acted(replace(AWM, per_draw=per_draw, loss_scale=2.0))
    before = experience.record["loss"]
    with torch.no_grad():
        for weight in ratio.policy.field.parameters():
            weight.mul_(1.1)
        drift = ratio.score(experience, rows).drift
    record, n = experience.record, ratio.num_draws
    chunks = record["action"].repeat_interleave(n, 0), record["eps"].flatten(0, 1), record["t"].flatten()
    after = ratio.losses(experience.cond.repeat(n), *chunks).view_as(before)
    fell = (2.0 * (before - after)).flatten() if per_draw else 2.0 * (before - after).mean(1)
    torch.testing.assert_close(drift, fell.detach())


def test_a_run_warns_once_where_bounds_leave_little_gradient(caplog: pytest.LogCaptureFixture) -> None:
    for config, times in ((FPO, 0), (replace(FPO, max_loss=1e-3), 1)):
        run = make_run(config)
        caplog.clear()
        shares = [float(run.advance()["policy/saturated_fraction"]) for _ in range(2)]
        run.close()
        assert [share > 0.1 for share in shares] == [bool(times)] * 2
        assert sum("policy/saturated_fraction" in record.message for record in caplog.records) == times


def test_losses_of_bad_actions_have_a_bound_of_their_own() -> None:
    matching = Matching(max_loss=5.0, max_loss_negative=2.0)
    loss = torch.tensor([9.0, 9.0, 1.0])
    assert matching.bounded(loss, torch.tensor([1.0, -1.0, -1.0])).tolist() == [5.0, 2.0, 1.0]
    assert matching.bounded(loss).tolist() == [5.0, 5.0, 1.0]


@pytest.mark.parametrize("config", [FPO, replace(FPO, per_draw=True, surrogate="aspo"), AWM])
def test_a_run_trains_the_network_and_ships_its_sampler(config: FpoConfig) -> None:
    run = make_run(config)
    before = [weight.clone() for weight in run.learner.actor]
    metrics = run.advance()
    assert not all(torch.equal(a, b) for a, b in zip(before, run.learner.actor, strict=True))
    assert float(metrics["policy/updates"]) > 0
    assert run.snapshot().sampler == Euler(steps=4)  # type: ignore[attr-defined]
    run.close()


def test_what_has_no_matching_loss_of_its_sampler_is_refused() -> None:
    with pytest.raises(CapabilityError, match=mentions("algo=fpo Shortcut algo=dppo algo=reinflow")):
        make_run(FPO, make_flow(process=Shortcut(max_steps=8)))


def test_the_sampler_may_draw_noise() -> None:
    """The matching loss bounds the likelihood of whatever sampler acts, a chain included."""
    for init in (make_init(), make_flow().with_sampler(Euler(steps=4, min_std=0.1, clip_action=None))):
        run = make_run(FPO, init)  # type: ignore[arg-type]
        assert not run.policy.is_deterministic  # type: ignore[attr-defined]
        run.advance()
        run.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entropy_coef": 0.1}, "algo.entropy_coef flow"),
        ({"difference_range": (0.5, 1.0)}, "algo.difference_range negative positive"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        FpoConfig(**options)


def test_one_step_of_pure_noise_has_nothing_to_match_in_eps() -> None:
    with pytest.raises(ConfigError, match=mentions("algo.times=grid algo.prediction=eps")):
        make_run(FPO, make_flow(steps=1))
    make_run(replace(FPO, prediction="velocity"), make_flow(steps=1)).close()


def test_an_unknown_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("noise_squared")):
        AwmConfig(weight="two")
