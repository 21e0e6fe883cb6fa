"""Squashed normal distributions."""

from __future__ import annotations

import math

import pytest
import torch
from messages import mentions
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from policies.errors import ConfigError
from policies.networks.distributions import MAX_LOG_STD, TanhGaussianConfig, gaussian_draw, tanh_draw


def draws(n: int = 200, width: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean, log_std, eps = (torch.randn(n, width, generator=generator).double() for _ in range(3))
    return mean, 0.5 * log_std, eps


def test_the_density_is_that_of_the_transformed_distribution() -> None:
    mean, log_std, eps = draws()
    u, log_prob = tanh_draw(mean, log_std, eps)
    law = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1))
    inside = u.abs().amax(1) < 0.999  # the inverse is inaccurate at the edge
    assert inside.sum() > 100
    torch.testing.assert_close(log_prob[inside], law.log_prob(u).sum(1)[inside], rtol=1e-8, atol=1e-8)


def test_the_density_integrates_to_one() -> None:
    g = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    u, log_prob = tanh_draw(torch.tensor([[0.3]]).double(), torch.tensor([[-0.2]]).double(), g[:, None])
    total = torch.trapezoid(log_prob.exp(), u[:, 0])
    assert float(total) == pytest.approx(1.0, abs=1e-6)


def test_the_exact_form_is_finite_at_the_edge_and_the_floored_one_is_bounded() -> None:
    mean, log_std, eps = (torch.full((1, 1), value) for value in (0.0, 0.0, 30.0))
    base = gaussian_draw(mean, log_std, eps)[1]
    exact, floored = (tanh_draw(mean, log_std, eps, form=form)[1] for form in ("exact", "floored"))
    assert float(exact - base) == pytest.approx(60 - 2 * math.log(2), rel=1e-5)
    assert float(floored - base) == pytest.approx(-math.log(1e-6), rel=1e-3)
    with pytest.raises(ConfigError, match=mentions("exact floored")):
        tanh_draw(mean, log_std, eps, form="other")


def test_a_zero_start_is_standard_normal_everywhere_and_deviations_are_bounded() -> None:
    torch.manual_seed(0)
    cond = torch.randn(7, 4)
    mean, log_std = TanhGaussianConfig(hidden_dims=(8, 8), zero_init=True).build(4, 3)(cond)
    assert mean.shape == log_std.shape == (7, 3) and not mean.any() and not log_std.any()
    net = TanhGaussianConfig(hidden_dims=(8, 8)).build(4, 3)
    net.trunk.layers[1].bias.data.fill_(100.0)
    assert float(net(cond)[1].detach().max()) == MAX_LOG_STD
