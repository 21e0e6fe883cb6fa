"""DPPO's reference numbers: schedule, posterior, cloning loss, sampling, densities, DDIM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from official_networks import read
from torch import Tensor

from policies.networks.distributions import gaussian_log_prob
from policies.processes import VPDiffusion
from policies.processes.schedules import (
    cosine_betas,
    cumulative_alphas,
    make_betas,
    spaced_levels,
    time_of_level,
)
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.loop import denoise
from policies.samplers.step_table import StepTable, transition

Arrays = Mapping[str, Tensor]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
LOG_PROB_TOLERANCE = {"rtol": 2e-3, "atol": 1e-3}


class AffineNet:
    """eps(x, t, s) = Wx vec(x) + Ws vec(s) + wt t + b."""

    def __init__(self, arrays: Arrays, prefix: str) -> None:
        self.weights = {n: arrays[f"{prefix}_{n}"].clone().requires_grad_() for n in ("Wx", "Ws", "wt", "b")}

    def __call__(self, x: Tensor, tau: Tensor | float, state: Tensor) -> Tensor:
        w = self.weights
        time = torch.as_tensor(tau, dtype=x.dtype).reshape(-1, 1)
        flat = x.flatten(1) @ w["Wx"].T + state.flatten(1) @ w["Ws"].T + time * w["wt"] + w["b"]
        return flat.view_as(x)

    def bind(self, table: StepTable, state: Tensor) -> Callable[[int, Tensor], Tensor]:
        return lambda k, x: self(x, table.net_time[k], state)


def switched(base: AffineNet, tuned: AffineNet, table: StepTable, state: Tensor, num_tuned: int) -> Callable:
    bound = (base.bind(table, state), tuned.bind(table, state))
    first = table.num_steps - num_tuned
    return lambda k, x: bound[k >= first](k, x)


def tape(arrays: Arrays, case: str) -> Tensor:
    """(B, K+1, Th, Da) from the recorded start (B, …) and step noise (K, B, …)."""
    start, noise = arrays[f"{case}_x_init"], arrays[f"{case}_noise"]
    return torch.cat([start[:, None], noise.transpose(0, 1)], dim=1)


def log_prob_of_chain(
    table: StepTable, net: AffineNet, state: Tensor, chain: Tensor, row: Tensor, index: Tensor, floor: float
) -> Tensor:
    """Densities of chain transitions (row, index) under a net, scored in one batch."""
    step = index + table.num_steps - (chain.shape[1] - 1)
    x, x_next = chain[row, index], chain[row, index + 1]
    mean = transition(table, step, x, net(x, table.net_time[step], state[row]))
    return gaussian_log_prob(x_next, mean, table.schedule_std[step].clamp(min=floor).to(x.dtype)[:, None])


def all_pairs(chain: Tensor) -> tuple[Tensor, Tensor]:
    batch, steps = chain.shape[0], chain.shape[1] - 1
    return torch.arange(batch).repeat_interleave(steps), torch.arange(steps).repeat(batch)


@pytest.mark.golden("dppo_schedule*.npz")
def test_schedule_and_posterior_tables(golden_path: Path) -> None:
    arrays = read(golden_path)
    levels = [int(n[1:].split("_")[0]) for n in arrays if n.startswith("K") and n.endswith("_betas")]
    assert levels
    for k in levels:
        want = {n.removeprefix(f"K{k}_"): v for n, v in arrays.items() if n.startswith(f"K{k}_")}
        betas = make_betas(k)
        bar = cumulative_alphas(betas)
        assert torch.equal(betas, want["betas"])
        assert torch.equal(1 - betas, want["alphas"])
        assert torch.equal(bar, want["alphas_cumprod"])
        torch.testing.assert_close(cosine_betas(k), want["betas_float64"], rtol=0, atol=1e-13)
        process = VPDiffusion(k, prediction="eps")
        alpha, sigma = process.alpha_sigma(time_of_level(torch.arange(k), k))
        torch.testing.assert_close(alpha, want["sqrt_alphas_cumprod"], **TOLERANCE)
        torch.testing.assert_close(sigma, want["sqrt_one_minus_alphas_cumprod"], **TOLERANCE)
        torch.testing.assert_close(1 / alpha, want["sqrt_recip_alphas_cumprod"], **TOLERANCE)
        torch.testing.assert_close(sigma / alpha, want["sqrt_recipm1_alphas_cumprod"], **TOLERANCE)
        check_ddpm_table(DDPM().table(process), want)


def check_ddpm_table(table: StepTable, want: Arrays) -> None:
    """Posterior coefficients, read off by feeding (x0, x) = (1, 0) and (0, 1) to the transition."""
    steps = torch.arange(table.num_steps).flip(0)
    one, zero = torch.ones(table.num_steps, 1, 1), torch.zeros(table.num_steps, 1, 1)
    process = VPDiffusion(table.num_steps, prediction="x0")
    x0_table = DDPM().table(process)
    of_x0 = transition(x0_table, steps, zero, one).flatten()
    of_x = transition(x0_table, steps, one, zero).flatten()
    torch.testing.assert_close(of_x0, want["ddpm_mu_coef1"], **TOLERANCE)
    torch.testing.assert_close(of_x, want["ddpm_mu_coef2"], **TOLERANCE)
    var = table.schedule_std.flip(0).flatten().square().float()
    torch.testing.assert_close(var, want["ddpm_var"], **TOLERANCE)
    torch.testing.assert_close(var.clamp(min=1e-20).log(), want["ddpm_logvar_clipped"], rtol=1e-4, atol=1e-3)
    bar_next = torch.tensor([*table.alpha[1:], 1.0]).square().flip(0)
    torch.testing.assert_close(bar_next, want["alphas_cumprod_prev"], **TOLERANCE)


@pytest.mark.golden("dppo_schedule*.npz")
def test_ddim_tables(golden_path: Path) -> None:
    arrays = read(golden_path)
    cases = [n.removesuffix("_ddim_t") for n in arrays if n.startswith("ddim_") and n.endswith("_ddim_t")]
    assert cases
    for case in cases:
        k, s = (int(part[1:]) for part in case.split("_")[1:])
        process = VPDiffusion(k, prediction="eps")
        table = DDIM(steps=s, eta=1.0).table(process)
        assert spaced_levels(k, s) == arrays[f"{case}_ddim_t"].tolist()
        assert table.net_time.long().tolist() == arrays[f"{case}_ddim_t"].tolist()
        alpha, sigma = torch.tensor(table.alpha), torch.tensor(table.sigma)
        alpha_next = torch.tensor([*table.alpha[1:], 1.0])
        torch.testing.assert_close(alpha.square(), arrays[f"{case}_ddim_alphas"], **TOLERANCE)
        torch.testing.assert_close(alpha, arrays[f"{case}_ddim_alphas_sqrt"], **TOLERANCE)
        torch.testing.assert_close(alpha_next.square(), arrays[f"{case}_ddim_alphas_prev"], **TOLERANCE)
        torch.testing.assert_close(sigma, arrays[f"{case}_ddim_sqrt_one_minus_alphas"], **TOLERANCE)
        std = table.schedule_std.flatten().float()
        torch.testing.assert_close(std, arrays[f"{case}_sigma_eta1"], **TOLERANCE)
        still = DDIM(steps=s).table(process)
        torch.testing.assert_close(still.std.flatten().float(), arrays[f"{case}_ddim_sigmas"], **TOLERANCE)


@pytest.mark.golden("dppo_posterior*.npz")
def test_posterior_mean_and_variance(golden_path: Path) -> None:
    arrays = read(golden_path)
    net, x, state = AffineNet(arrays, "net"), arrays["x"], arrays["state"]
    cases = [n for n in arrays if n.endswith("_mean")]
    assert cases
    for name in cases:
        levels, variant = name.removesuffix("_mean").split("_", 1)
        k = int(levels[1:])
        prediction = "x0" if variant.startswith("x0pred") else "eps"
        clip = None if variant.endswith("noclip") else 1.0
        table = DDPM(clip_x0=clip).table(VPDiffusion(k, prediction=prediction))
        bound = net.bind(table, state)
        got = torch.stack([transition(table, i, x, bound(i, x)) for i in reversed(range(k))])
        torch.testing.assert_close(got.detach(), arrays[name], **TOLERANCE)
        log_var = 2 * table.schedule_std.flip(0).clamp(min=1e-10).log().float()
        torch.testing.assert_close(log_var.expand(k, len(x)), arrays[f"K{k}_logvar"], rtol=1e-4, atol=1e-3)


@pytest.mark.golden("dppo_bc_loss*.npz")
def test_cloning_loss_and_gradients(golden_path: Path) -> None:
    arrays = read(golden_path)
    actions, eps, state = arrays["actions"], arrays["noise"], arrays["state"]
    t = time_of_level(arrays["t"], 20)
    for prediction, name in (("eps", "loss"), ("x0", "loss_predict_x0")):
        process, net = VPDiffusion(20, prediction=prediction), AffineNet(arrays, "net")
        x = process.corrupt(actions, eps, t)
        torch.testing.assert_close(x, arrays["x_noisy"], **TOLERANCE)
        assert torch.equal(process.net_time(t), arrays["t"].float())
        loss = (net(x, process.net_time(t), state) - process.target(actions, eps, t)).square().mean()
        torch.testing.assert_close(loss.detach(), arrays[name], **TOLERANCE)
        loss.backward()
        for weight, value in net.weights.items() if name == "loss" else ():
            torch.testing.assert_close(value.grad, arrays[f"grad_{weight}"], **TOLERANCE)


EXPLORE = {"min_std": 0.1, "final_std": None}
SAMPLE_CASES = {
    "train": EXPLORE,
    "eval": {},
    "train_base": EXPLORE,
    "train_allft": EXPLORE,
    "train_clipfinal": {**EXPLORE, "clip_action": 0.5},
    "train_std04": {"min_std": 0.4, "final_std": None, "noise_clip": 1.0},
}


@pytest.mark.golden("dppo_sample_ddpm*.npz")
def test_ddpm_chains(golden_path: Path) -> None:
    arrays = read(golden_path)
    cases = [n.removesuffix("_chain") for n in arrays if n.endswith("_chain")]
    assert cases
    for case in cases:
        check_ddpm_chain(arrays, case)


def check_ddpm_chain(arrays: Arrays, case: str) -> None:
    base, tuned, state = AffineNet(arrays, "base"), AffineNet(arrays, "ft"), arrays["state"]
    chain, levels = arrays[f"{case}_chain"], len(arrays[f"{case}_noise"])
    table = DDPM(**SAMPLE_CASES[case]).table(VPDiffusion(levels, prediction="eps"))
    num_tuned = chain.shape[1] - 1
    bound = switched(base, base if case == "train_base" else tuned, table, state, num_tuned)
    with torch.no_grad():
        out = denoise(bound, table, tape(arrays, case), record_from=levels - num_tuned)
        lean = denoise(bound, table, tape(arrays, case))
    torch.testing.assert_close(out.chain, chain, **TOLERANCE)
    torch.testing.assert_close(lean.action, arrays[f"{case}_action"], **TOLERANCE)


@pytest.mark.golden("dppo_logprob*.npz")
def test_chain_densities(golden_path: Path) -> None:
    arrays = read(golden_path)
    base, tuned, state, chain = (
        AffineNet(arrays, "base"),
        AffineNet(arrays, "ft"),
        arrays["state"],
        arrays["chain"],
    )
    table = DDPM(**EXPLORE).table(VPDiffusion(20, prediction="eps"))
    pairs = all_pairs(chain)
    subset = (arrays["sub_batch_inds"], arrays["sub_denoising_inds"])
    cases = (
        ("logprob", tuned, pairs, 0.1),
        ("logprob_base_policy", base, pairs, 0.1),
        ("logprob_minstd03", tuned, pairs, 0.3),
        ("sub_logprob", tuned, subset, 0.1),
    )
    for name, net, (row, index), floor in cases:
        got = log_prob_of_chain(table, net, state, chain, row, index, floor)
        torch.testing.assert_close(got.detach(), arrays[name], **LOG_PROB_TOLERANCE)


DDIM_CASES = {
    "eta1": (20, {}, 0.1, 0.1),
    "eta1_allft": (100, {}, 0.1, 0.1),
    "eta05": (20, {}, 0.01, 0.02),
    "etaact": (20, {}, 0.01, 0.02),
    "epsclip": (20, {"eps_clip": 0.8}, 0.1, 0.1),
}


@pytest.mark.golden("dppo_ddim*.npz")
def test_ddim_chains_densities_and_moments(golden_path: Path) -> None:
    arrays = read(golden_path)
    cases = [n.removesuffix("_train_chain") for n in arrays if n.endswith("_train_chain")]
    assert cases
    for case in cases:
        check_ddim_case(arrays, case)


@torch.no_grad()
def check_ddim_case(arrays: Arrays, case: str) -> None:
    base, tuned, state = AffineNet(arrays, "base"), AffineNet(arrays, "ft"), arrays["state"]
    levels, extra, min_std, log_prob_min_std = DDIM_CASES[case]
    eta = tuple(arrays[f"{case}_eta"][0].tolist())
    noise, chain = arrays[f"{case}_train_noise"], arrays[f"{case}_train_chain"]
    steps, num_tuned = len(noise), chain.shape[1] - 1
    sampler = DDIM(steps=steps, eta_per_dim=eta, min_std=min_std, **extra)
    table = sampler.table(VPDiffusion(levels, prediction="eps"))
    bound = switched(base, tuned, table, state, num_tuned)
    out = denoise(bound, table, tape(arrays, f"{case}_train"), record_from=steps - num_tuned)
    torch.testing.assert_close(out.chain, chain, **TOLERANCE)
    got = log_prob_of_chain(table, tuned, state, chain, *all_pairs(chain), log_prob_min_std)
    torch.testing.assert_close(got, arrays[f"{case}_logprob"], **LOG_PROB_TOLERANCE)
    x = arrays["x"]
    mean = torch.stack([transition(table, k, x, bound(k, x)) for k in range(steps)])
    torch.testing.assert_close(mean, arrays[f"{case}_pmv_mean"], **TOLERANCE)
    log_var = 2 * table.schedule_std.clamp(min=1e-10).log().float()[:, None, None, :]
    want = arrays[f"{case}_pmv_logvar"]
    torch.testing.assert_close(log_var.expand_as(want), want, rtol=1e-4, atol=1e-3)
    still = DDIM(steps=steps, **extra).table(VPDiffusion(levels, prediction="eps"))
    bound = switched(base, tuned, still, state, num_tuned)
    out = denoise(bound, still, arrays[f"{case}_eval_x_init"], record_from=steps - num_tuned)
    torch.testing.assert_close(out.chain, arrays[f"{case}_eval_chain"], **TOLERANCE)
    torch.testing.assert_close(out.action, arrays[f"{case}_eval_action"], **TOLERANCE)
