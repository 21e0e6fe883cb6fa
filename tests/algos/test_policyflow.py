"""PolicyFlow: noise, ratio and regulariser in closed form, and what a run learns, ships and refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from curved_flow import CurvedFlow
from messages import mentions
from pairwise import everything
from point_dppo import make_init
from point_flows import POLICYFLOW, make_flow, make_run
from torch.distributions import Normal

from algos.onpolicy.advantages import Experience
from algos.onpolicy.policyflow_ratio import EndNoise, EndNoiseConfig, PolicyflowRatio
from algos.onpolicy.ratios import Rows, Score
from algos.onpolicy.requirements import has_straight_paths
from algos.policyflow import PolicyFlowConfig
from algos.training.observations import encode
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, ConfigError
from policies.processes.shortcut import Shortcut
from policies.samplers.ode import Euler

ROWS = 16


def acted(
    config: PolicyFlowConfig = POLICYFLOW, policy: DenoisingPolicy | None = None
) -> tuple[PolicyflowRatio, Experience, Rows]:
    policy = (policy or make_flow()).with_sampler(Euler(steps=4, clip_action=None)).to(torch.float64)
    ratio = config.estimator(policy)
    obs = torch.rand(ROWS, 1, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, record = ratio.act({"state": obs}, torch.Generator().manual_seed(1))
    unused = torch.zeros(ROWS, dtype=torch.float64)
    experience = Experience(encode(policy, {"state": obs}), record, unused, unused, unused)
    return ratio, experience, Rows.sorted_from(torch.arange(ROWS * ratio.inner_steps), ratio.inner_steps)


def pushed(ratio: PolicyflowRatio, push: torch.Tensor) -> None:
    """Add a constant (Da,) to the velocity everywhere."""
    with torch.no_grad():
        ratio.policy.field.trunk.outlet.bias.view(3, 2).add_(push)


# -- noise ----------------------------------------------------------------------------------------------


def test_deviations_begin_where_they_should_and_keep_their_bounds() -> None:
    noise = EndNoise(EndNoiseConfig(min_std=0.05, initial_std=0.1, max_std=0.4), 3)
    torch.testing.assert_close(noise(), torch.full((3,), 0.1))
    for extreme, bound in ((-50.0, 0.05), (50.0, 0.4)):
        with torch.no_grad():
            noise.weight.fill_(extreme)
        torch.testing.assert_close(noise(), torch.full((3,), bound))


@pytest.mark.parametrize(
    "bounds", [{"min_std": 0.0}, {"initial_std": 0.3}, {"initial_std": 0.05}, {"max_std": math.inf}]
)
def test_bounds_that_leave_no_room_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"algo\.noise\.(min_std|initial_std|max_std) must be .*; got"):
        EndNoiseConfig(**bounds)


# -- the ratio ------------------------------------------------------------------------------------------


def test_an_action_is_the_end_of_the_flow_plus_noise() -> None:
    policy = make_flow().with_sampler(Euler(steps=4, clip_action=None))
    ratio = POLICYFLOW.estimator(policy)
    obs = torch.rand(ROWS, 1, 2, generator=torch.Generator().manual_seed(0))
    action, record = ratio.act({"state": obs}, torch.Generator().manual_seed(1))
    end = policy.decode(encode(policy, {"state": obs}), record["start"])
    torch.testing.assert_close(record["end"], end)
    torch.testing.assert_close(action, policy.executed(end + record["noise"]))
    spread = float(record["noise"].std())
    assert spread == pytest.approx(POLICYFLOW.noise.initial_std, rel=0.3)
    assert set(record["step"].flatten().tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(("reduction", "count"), [("joint", 1), ("per_step", 2), ("mean", 4)])
def test_a_velocity_that_moves_everywhere_alike_moves_a_gaussian(reduction: str, count: int) -> None:
    ratio, experience, rows = acted(replace(POLICYFLOW, log_prob_reduction=reduction))
    push = torch.tensor([0.03, -0.02], dtype=torch.float64)
    pushed(ratio, push)
    with torch.no_grad():
        ratio.noise.weight.add_(0.2)
    score = ratio.score(experience, rows)
    noise = experience.record["noise"][:, :2]  # two of three rows are executed
    new, old = (Normal(mean, std) for mean, std in ((push, ratio.noise()), (0 * push, _initial())))
    expected = (new.log_prob(noise) - old.log_prob(noise)).sum((1, 2)) / count
    torch.testing.assert_close(score.log_ratio, expected.repeat_interleave(ratio.num_draws))
    torch.testing.assert_close(score.entropy, new.entropy().sum().mul(2 / count).expand_as(score.entropy))
    assert ratio.factors == count


def _initial() -> torch.Tensor:
    return torch.full((2,), POLICYFLOW.noise.initial_std, dtype=torch.float64)


def test_the_shift_of_the_velocity_stands_for_the_shift_of_the_end() -> None:
    ratio, experience, _ = acted()
    push = torch.tensor([0.03, -0.02], dtype=torch.float64)
    before = experience.record["end"]
    pushed(ratio, push)
    after = ratio.policy.decode(experience.cond, experience.record["start"])
    # The network sees where the push leads, so the two agree to first order only.
    torch.testing.assert_close(after - before, push.expand_as(before), rtol=0.3, atol=0)


# -- the regulariser ------------------------------------------------------------------------------------


def scored(ratio: PolicyflowRatio, experience: Experience, rows: Rows) -> Score:
    return ratio.score(experience, rows)


def test_the_brownian_term_is_the_distance_from_minus_the_score() -> None:
    ratio, experience, rows = acted(replace(POLICYFLOW, brownian_coef=0.7))
    pushed(ratio, torch.tensor([0.1, 0.2], dtype=torch.float64))
    record, n = experience.record, ratio.num_draws
    t = (record["step"].flatten() / 4).double()[:, None, None]
    start, end = (record[name].repeat_interleave(n, 0) for name in ("start", "end"))
    x, old = (1 - t) * start + t * end, record["velocity"].flatten(0, 1)
    velocity = ratio.policy.predict(x, t.flatten(), experience.cond.repeat(n), kind="velocity")
    noise_of_old = x - t * old  # the noise that the old velocity explains x by; -(1 - t) times the score
    expected = 0.7 * ((1 - t) * velocity - noise_of_old).square().mean((1, 2))
    penalty = scored(ratio, experience, rows).penalty
    assert penalty is not None
    torch.testing.assert_close(penalty, expected)


def test_the_brownian_term_has_a_gradient_that_widens_the_flow() -> None:
    ratio, experience, rows = acted(replace(POLICYFLOW, brownian_coef=1.0))
    weights = list(ratio.policy.field.parameters())
    start = experience.record["start"]
    before = ratio.policy.decode(experience.cond, start).std()
    for _ in range(20):
        penalty = scored(ratio, experience, rows).penalty
        assert penalty is not None
        gradients = torch.autograd.grad(penalty.mean(), weights, allow_unused=True)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    weight.sub_(0.05 * gradient)
    assert float(ratio.policy.decode(experience.cond, start).std()) > 1.02 * float(before)


def test_without_its_weight_there_is_no_penalty() -> None:
    assert scored(*acted()).penalty is None


# -- runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("brownian_coef", [0.0, 0.01])
def test_a_run_trains_velocity_and_noise_and_ships_the_policy_alone(brownian_coef: float) -> None:
    run = make_run(replace(POLICYFLOW, brownian_coef=brownian_coef))
    trainable = run.ratio.trainable  # type: ignore[attr-defined]
    before = {name: value.clone() for name, value in trainable.named_parameters()}
    metrics = run.advance()
    moved = {name for name, value in trainable.named_parameters() if not torch.equal(before[name], value)}
    assert {name.split(".")[0] for name in moved} == {"0", "1"}
    assert (float(metrics["policy/penalty"]) > 0) is (brownian_coef > 0)
    assert float(metrics["policy/joint_clip"]) == pytest.approx(0.2)
    export_policy = run.snapshot()
    assert export_policy.sampler == Euler(steps=4) and export_policy.is_deterministic  # type: ignore[attr-defined]
    assert set(export_policy.state_dict()) == set(make_flow().state_dict())
    run.close()


@pytest.mark.slow
@pytest.mark.skipif(not everything, reason="with --all: without it PPO reaches it")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_learns_to_reach_the_goal(seed: int) -> None:
    config = replace(
        POLICYFLOW,
        num_envs=16,
        steps_per_iteration=16,
        batch_size=256,
        microbatch_size=1024,
        update_epochs=5,
        actor_lr=3e-3,
        num_draws=2,
        noise=EndNoiseConfig(min_std=0.2, initial_std=0.5, max_std=1.0),
    )
    run = make_run(config, make_flow(seed=seed, steps=2), seed=seed)
    returns = [float(run.advance()["rollout/return"]) for _ in range(20)]
    run.close()
    assert sum(returns[-3:]) / 3 > sum(returns[:3]) / 3 + 2.0


@pytest.mark.parametrize("init", [make_init, lambda: make_flow(process=Shortcut(max_steps=8))])
def test_what_has_no_velocity_along_its_path_is_refused(init: Any) -> None:
    with pytest.raises(CapabilityError, match=mentions("algo=policyflow process=flow")):
        make_run(POLICYFLOW, init())


def test_a_velocity_along_a_curved_path_is_refused() -> None:
    assert has_straight_paths(make_flow())
    curved = make_flow(process=CurvedFlow())
    assert not has_straight_paths(curved)
    with pytest.raises(CapabilityError, match=mentions("algo=policyflow process=flow CurvedFlow")):
        POLICYFLOW.check_policy(curved)
