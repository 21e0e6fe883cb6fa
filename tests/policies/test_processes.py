"""Processes: corruption, conversions between kinds, times."""

from __future__ import annotations

import itertools

import pytest
import torch
from messages import mentions
from torch import Tensor

from policies.errors import ConfigError
from policies.processes import Edm, GaussianPath, RectifiedFlow, VPDiffusion
from policies.processes.base import KINDS
from policies.processes.schedules import cumulative_alphas, make_betas, time_of_level

PROCESSES = [
    *(VPDiffusion(20, prediction=p) for p in ("eps", "x0", "v")),
    VPDiffusion(100, "linear"),
    RectifiedFlow(),
    Edm(),
]
NAMES = [f"{type(p).__name__}-{p.kind}-{i}" for i, p in enumerate(PROCESSES)]


def draw(n: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x0, eps = (torch.randn(n, 4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return x0, eps, torch.linspace(0.02, 0.98, n, dtype=torch.float64)


@pytest.mark.parametrize("process", PROCESSES, ids=NAMES)
def test_conversions_agree_with_the_definitions_and_invert(process: GaussianPath) -> None:
    x0, eps, t = draw()
    x = process.corrupt(x0, eps, t)
    alpha, sigma = (a[:, None, None] for a in process.alpha_sigma(t))
    alpha_rate, sigma_rate = (a[:, None, None] for a in process.rates(t))
    truth = {
        "eps": eps,
        "x0": x0,
        "v": alpha * eps - sigma * x0,
        "score": -eps / sigma,
        "velocity": alpha_rate * x0 + sigma_rate * eps,
    }
    for src, dst in itertools.product(KINDS, KINDS):
        there = process.convert(x, t, truth[src], src, dst)
        torch.testing.assert_close(there, truth[dst], rtol=1e-10, atol=1e-10)
        back = process.convert(x, t, there, dst, src)
        torch.testing.assert_close(back, truth[src], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("process", PROCESSES, ids=NAMES)
def test_the_path_runs_from_noise_to_data(process: GaussianPath) -> None:
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    alpha, sigma = process.alpha_sigma(ends)
    assert alpha[0] < sigma[0]
    assert (alpha[1], sigma[1]) == (1.0, 0.0)
    inner = torch.linspace(0, 1, 301, dtype=torch.float64)
    alpha, sigma = process.alpha_sigma(inner)
    assert bool((alpha.diff() > 0).all())
    assert bool((sigma.diff() < 0).all())


@pytest.mark.parametrize("process", PROCESSES, ids=NAMES)
def test_rates_are_the_derivatives_of_the_path(process: GaussianPath) -> None:
    t = torch.arange(20, dtype=torch.float64) / 20 + 0.003  # never on a level
    step = 1e-6
    for rate, high, low in zip(
        process.rates(t), process.alpha_sigma(t + step), process.alpha_sigma(t - step), strict=True
    ):
        torch.testing.assert_close(rate, (high - low) / (2 * step), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("process", PROCESSES, ids=NAMES)
def test_the_target_is_the_native_kind_of_the_corrupted_chunk(process: GaussianPath) -> None:
    x0, eps, t = draw()
    x = process.corrupt(x0, eps, t)
    want = process.convert(x, t, eps, "eps", process.kind)
    torch.testing.assert_close(process.target(x0, eps, t), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_levels", [5, 20, 100, 1000])
def test_levels_are_exact_in_single_precision(num_levels: int) -> None:
    bar = cumulative_alphas(make_betas(num_levels))
    t = time_of_level(torch.arange(num_levels), num_levels)
    assert t.dtype == torch.float32
    process = VPDiffusion(num_levels)
    alpha, sigma = process.alpha_sigma(t)
    torch.testing.assert_close(alpha, bar.double().sqrt().float(), rtol=2e-7, atol=0)
    torch.testing.assert_close(sigma, (1 - bar.double()).sqrt().float(), rtol=2e-7, atol=0)
    assert torch.equal(process.net_time(t), torch.arange(num_levels, dtype=torch.float32))


def test_diffusion_times_are_the_levels_drawn_evenly() -> None:
    process = VPDiffusion(10)
    t = process.sample_time(20_000, generator=torch.Generator().manual_seed(0))
    tau = process.net_time(t)
    counts = torch.bincount(tau.long(), minlength=10)
    assert torch.equal(tau, tau.round())
    assert counts.min() > 1800
    assert counts.max() < 2200


def test_flow_time_densities_have_the_quantiles_of_their_formulas() -> None:
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    normal = torch.distributions.Normal(0.0, 1.0).icdf(quantiles).sigmoid()
    want = {
        "uniform": quantiles,
        "logit_normal": normal,
        "beta": 0.999 * (1 - (1 - quantiles) ** (2 / 3)),
    }
    for density, values in want.items():
        t = RectifiedFlow(density).sample_time(40_000, generator=torch.Generator().manual_seed(1))
        assert t.min() >= 0
        assert t.max() <= 1
        torch.testing.assert_close(t.quantile(quantiles), values, rtol=0, atol=0.012)


def test_tables_first_used_in_inference_mode_still_train() -> None:
    process = VPDiffusion(37, prediction="v")  # a size that no other test uses
    with torch.inference_mode():
        process.alpha_sigma(torch.zeros(2))
    pred = torch.zeros(2, 4, 3, requires_grad=True)
    process.convert(torch.ones(2, 4, 3), torch.tensor([0.2, 0.7]), pred, "v", "x0").sum().backward()
    assert pred.grad is not None


@pytest.mark.parametrize("process", PROCESSES, ids=NAMES)
def test_corruption_compiles_to_one_graph_with_the_same_numbers(process: GaussianPath) -> None:
    x0, eps, t = (a.float() for a in draw())
    compiled = torch.compile(process.corrupt, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x0, eps, t), process.corrupt(x0, eps, t), rtol=0, atol=0)


def test_betas_do_not_fall() -> None:
    with pytest.raises(ConfigError, match=mentions("beta_start=0.5 beta_end 0.02")):
        VPDiffusion(beta_start=0.5)
