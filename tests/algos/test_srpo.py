"""SRPO: where the actor comes to rest, what is trained when, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gaussian_field import gaussian_policy
from messages import mentions
from small_algorithms import init, saved, setup, small, weights
from torch import Tensor, nn

from algos.critics.srpo import WEIGHTS, SrpoConfig, noise_weight, value_gradient
from algos.transitions import Batch
from policies import registry
from policies.errors import CapabilityError, ConfigError
from policies.networks.critics import EnsembleConfig
from policies.processes.continuous import VPContinuous
from policies.processes.deterministic import DeterministicPolicy
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow

BEST = 0.8
"""The action of the largest value."""


class Parabola(nn.Module):
    """Q = - (a - BEST)^2 / 2, summed over the chunk."""

    def forward(self, cond: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        return -(action - BEST).square().sum(dim=1, keepdim=True).T / 2


@pytest.mark.parametrize(
    ("process", "how"), [(VPDiffusion(), "vds"), (VPDiffusion(), "score"), (RectifiedFlow(), "stable")]
)
def test_the_actor_rests_between_the_data_and_the_best_action(process: Any, how: str) -> None:
    """At (c m + beta a_best) / (c + beta), where c is the mean of w alpha sigma / (alpha^2 s^2 + sigma^2)."""
    mean, std, beta, steps = -0.3, 0.5, 0.3, 100
    config = SrpoConfig(
        steps=steps + 1,
        warmup_steps=1,
        beta=beta,
        time_weight=how,
        hidden_dims=(4,),
        critic_dims=(4,),
        actor_lr=0.05,
    )
    torch.manual_seed(0)
    learner = config.learner_of(gaussian_policy(process, (mean,), std), seed=0)
    learner.target_critic, learner.steps = Parabola(), 1  # type: ignore[assignment]
    rows = 400
    u = 0.02 + 0.96 * (torch.arange(rows // 2).double() + 0.5) / (rows // 2)
    z = torch.randn(rows // 2, 2, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = {"t": process.nearest_time(u).repeat(2), "z": torch.cat([z, -z])}
    zero = torch.zeros(rows, dtype=torch.float64)
    parts = {"action": zero[:, None].expand(-1, 2), "next_action": zero, "plan": zero, "real": zero}
    state = zero[:, None]
    batch = Batch(state, reward=zero, next_cond=state, discount=zero, has_next=zero, row=zero, **parts)
    for _ in range(steps):
        learner.step(batch, draws)
    alpha, sigma = process.alpha_sigma(draws["t"])
    c = float((noise_weight(alpha, sigma, how) * alpha * sigma / (alpha**2 * std**2 + sigma**2)).mean())
    found = learner.policy.decode(learner.base.condition(state[:1]), zero[:1])
    wanted = (c * mean + beta * BEST) / (c + beta)
    torch.testing.assert_close(found, torch.full_like(found, wanted), atol=5e-3, rtol=0)


def test_weights_of_a_path_are_those_of_its_scaled_state() -> None:
    alpha, sigma = VPContinuous().alpha_sigma(torch.linspace(0.1, 0.9, 5))
    for how in WEIGHTS:
        found = noise_weight(3 * alpha, 3 * sigma, how)
        torch.testing.assert_close(found, noise_weight(alpha, sigma, how))
    torch.testing.assert_close(noise_weight(alpha, sigma, "vds"), sigma.square())


@pytest.mark.parametrize("size", [0.0, 1e-25, 1e-6, 1.0])
def test_a_flat_value_has_no_normalised_gradient(size: float) -> None:
    critic = EnsembleConfig(hidden_dims=(4,)).build(2, 3)
    with torch.no_grad():
        critic.weight[-1].mul_(size)
    slope, _ = value_gradient(critic, torch.ones(5, 2), torch.ones(5, 3), normalize=True)
    root = slope.square().mean(dim=1).sqrt()
    torch.testing.assert_close(root, torch.full_like(root, float(size > 1e-9)))


def test_values_are_fitted_first_and_kept_then_and_the_actor_is_what_ships() -> None:
    run = small(SrpoConfig).build(setup("diffusion"))
    learner, before = run.learner, run.snapshot().state_dict()
    while run.progress < learner.config.warmup_steps:
        run.advance()
    values = {key: value.clone() for key, value in learner.target_critic.state_dict().items()}
    shipped = run.snapshot()
    assert all(torch.equal(value, before[key]) for key, value in shipped.state_dict().items())
    while run.progress < run.total:
        run.advance()
    assert all(torch.equal(value, values[key]) for key, value in learner.target_critic.state_dict().items())
    assert isinstance(shipped, DeterministicPolicy) and shipped.chunk == init("diffusion").chunk
    assert not all(torch.equal(value, before[key]) for key, value in run.snapshot().state_dict().items())
    clone = init("diffusion").state_dict()
    assert all(torch.equal(value, clone[key]) for key, value in learner.base.state_dict().items())


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_run_is_resumed_bit_by_bit_while_values_or_actor_are_fitted(after: int) -> None:
    config = replace(small(SrpoConfig), steps=8, warmup_steps=4)
    one, two = (config.build(setup("diffusion")) for _ in range(2))
    for _ in range(after):
        one.advance()
    two.load_state_dict(saved(one))
    assert two.learner.fits_values == (after < 2)
    for run in (one, two):
        while run.progress < run.total:
            run.advance()
    assert torch.equal(weights(one.snapshot()), weights(two.snapshot()))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"refit": True}, "algo.refit false"),
        ({"warmup_steps": 6}, "algo.warmup_steps below algo.steps"),
        ({"online_steps": 5}, "algo.online_steps values kept"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=mentions(words)):
        SrpoConfig(**{"steps": 6, "warmup_steps": 2} | values)


def test_policies_without_a_score_are_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("score init=<run>")):
        small(SrpoConfig).build(setup("diffusion", init=None))
    for process in ("gaussian", "shortcut", "consistency"):
        with pytest.raises(CapabilityError, match=mentions("every level Use algo=")):
            small(registry.lookup("algo", "srpo")).build(setup(process))
