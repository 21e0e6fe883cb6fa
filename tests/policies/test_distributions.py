"""Squashed normal distributions."""

from __future__ import annotations

import math

import pytest
import torch
from messages import mentions
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from policies.errors import ConfigError
from policies.networks import native
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


@pytest.mark.parametrize("form", ["exact", "floored"])
@pytest.mark.parametrize("entries", [slice(None), slice(1, 3)])
def test_gradients_without_a_graph_are_those_of_the_graph(form: str, entries: slice) -> None:
    torch.manual_seed(0)
    net = TanhGaussianConfig(hidden_dims=(16, 16)).build(5, 4)
    with torch.no_grad():
        net.trunk.layers[-1].bias[4:].uniform_(-22, 4)  # some deviations beyond the limits
        net.trunk.layers[-1].weight[4:] *= 20
    cond, eps = torch.randn(64, 5), torch.randn(64, 4)[:, entries]
    weights = list(net.parameters())
    found = net.draw_without_graph(cond, eps, weights, form=form, entries=entries)
    if native.library() is None:
        assert found is None
        return
    assert found is not None and found.gradients is not None
    mean, log_std = (part[:, entries] for part in net(cond))
    u, log_prob = tanh_draw(mean, log_std, eps, form=form)
    torch.testing.assert_close((found.latent, found.log_prob), (u, log_prob), rtol=1e-5, atol=1e-5)
    assert not (found.latent.requires_grad or found.log_prob.requires_grad)
    of_u, of_log_prob = torch.randn_like(u), torch.randn_like(log_prob)
    expected = torch.autograd.grad((u, log_prob), weights, (of_u, of_log_prob))
    for ours, other in zip(found.gradients(of_u, of_log_prob), expected, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
    assert net.draw_without_graph(cond.requires_grad_(), eps, weights) is None
