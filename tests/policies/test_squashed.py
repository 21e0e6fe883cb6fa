"""The squashed Gaussian policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import mentions
from small_policies import observations, small_policy
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from policies.errors import CapabilityError, ConfigError
from policies.networks.distributions import tanh_draw
from policies.processes.gaussian import Mean
from policies.processes.squashed import Squashed, TanhGaussianPolicy, TanhGaussianProcess, squashed_nll
from policies.protocols import Hook


def policy(**values: Any) -> TanhGaussianPolicy:
    made = small_policy(TanhGaussianProcess(**values))
    assert isinstance(made, TanhGaussianPolicy)
    return made


def test_it_acts_by_tanh_of_the_mean_and_by_draws_when_asked() -> None:
    mean_policy = policy()
    cond = mean_policy.encode(mean_policy.observation(observations(5)))
    noise = mean_policy.sample_noise(5, generator=torch.Generator().manual_seed(0))
    mean, log_std = mean_policy.head(cond.vec)
    assert not mean_policy.noise_sensitive
    torch.testing.assert_close(mean_policy.decode(cond, noise).flatten(1), torch.tanh(mean))

    for temperature in (0.5, 1.0):
        drawing = mean_policy.with_sampler(Squashed(temperature=temperature))
        drawn = tanh_draw(mean, log_std, temperature * noise.flatten(1))[0]
        assert drawing.noise_sensitive and not mean_policy.noise_sensitive
        torch.testing.assert_close(drawing.decode(cond, noise).flatten(1), drawn)
        assert drawing.decode(cond, noise).abs().max() < 1


def test_cloning_maximises_the_density_of_the_transformed_distribution() -> None:
    generator = torch.Generator().manual_seed(1)
    mean, log_std, z = (torch.randn(7, 6, generator=generator).double() for _ in range(3))
    action = torch.tanh(0.5 * z).view(7, 3, 2)
    law = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
    expected = -law.log_prob(action.flatten(1))
    found = squashed_nll(action, mean, log_std, edge=0.999999)
    torch.testing.assert_close(found.flatten(1), expected, rtol=1e-8, atol=1e-8)


def test_demonstrations_at_the_edge_of_the_box_have_a_finite_loss() -> None:
    edge = torch.ones(4, 3, 2)
    made = policy(edge=0.99)
    cond = made.encode(made.observation(observations(4)))
    te = made.sample_te(4)
    loss = made.matching_loss(cond, edge, te, reduce="none")
    assert loss.isfinite().all()
    assert torch.equal(loss, made.matching_loss(cond, 0.99 * edge, te, reduce="none"))


def test_deviations_stay_within_the_limits_of_the_process() -> None:
    made = policy(min_log_std=-0.01, max_log_std=0.01)
    _, log_std = made.head(100 * torch.randn(50, made.encoder.cond_dim))
    assert float(log_std.detach().min()) == pytest.approx(-0.01)
    assert float(log_std.detach().max()) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("process.min_log_std", lambda: TanhGaussianProcess(min_log_std=2.0)),
        ("sampler=squashed", lambda: policy().with_sampler(Mean())),
    ],
)
def test_senseless_settings_are_refused(key: str, make: Any) -> None:
    with pytest.raises(ConfigError, match=mentions(key)):
        make()


def test_what_changes_a_loop_is_refused() -> None:
    made = policy()
    cond, noise = made.encode(made.observation(observations(2))), made.sample_noise(2)
    with pytest.raises(CapabilityError, match=mentions("process=tanh_gaussian")):
        made.decode(cond, noise, hooks=[Hook()])
