"""Our samplers against recorded trajectories of diffusers' schedulers.

Not covered, because the package does not implement it: third-order and stochastic multistep solvers, the
fourth-order Runge-Kutta steps of `samplers_flow`, and Heun's corrector at the clean end, where ours (as
diffusers') takes a first-order step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from official_networks import read
from torch import Tensor

from policies.processes import Edm, RectifiedFlow, VPDiffusion
from policies.processes.schedules import cumulative_alphas, make_betas, time_of_level
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.loop import denoise
from policies.samplers.ode import DPMpp2M, Euler, Heun, Midpoint
from policies.samplers.step_table import StepTable

FLOW = RectifiedFlow(time_scale=1.0)
PREDICTIONS = {"epsilon": "eps", "sample": "x0", "v": "v"}


def case_names(arrays: dict[str, Tensor]) -> list[str]:
    names = [name.removesuffix("__x") for name in arrays if name.endswith("__x")]
    assert names
    return names


def affine(arrays: dict[str, Tensor], table: StepTable, scale: float, sign: float = 1.0) -> Callable:
    """net(x, tau) = x A + tau v + c with tau = net time / scale."""
    tau = (table.net_time / scale).tolist()
    matrix, slope, offset = (arrays[n] for n in ("net_A", "net_v", "net_c"))
    return lambda k, x: sign * (x @ matrix.to(x) + tau[k] * slope.to(x) + offset.to(x))


def mirrored(arrays: dict[str, Tensor], table: StepTable) -> Callable:
    """The network of the other clock: our velocity is minus its output at one minus our time."""
    net = affine({**arrays, "net_v": -arrays["net_v"]}, table, 1.0, sign=-1.0)
    return lambda k, x: net(k, x) - arrays["net_v"].to(x)


def states_of(bound: Callable, table: StepTable, noise: Tensor) -> Tensor:
    """Return every state of a run, the start and after each evaluation."""
    seen: list[Tensor] = []

    def watch(k: int, x: Tensor) -> Tensor:
        seen.append(x)
        return bound(k, x)

    last = denoise(watch, table, noise).action
    return torch.stack([*seen, last])


def assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.to(want), want, rtol=0, atol=tolerance * max(1.0, want.abs().max().item()))


def prediction_of(case: str) -> tuple[str, list[str]]:
    head, *rest = case.replace("v_prediction", "v").split("_")
    return PREDICTIONS[head], rest


@pytest.mark.golden("samplers_ddpm*.npz")
def test_schedules_and_corruption(golden_path: Path) -> None:
    arrays = read(golden_path)
    levels = len(arrays["betas"])
    for schedule, suffix in (("cosine", ""), ("linear", "_linear"), ("scaled_linear", "_scaled_linear")):
        betas = make_betas(levels, schedule)
        torch.testing.assert_close(betas, arrays[f"betas{suffix}"], rtol=0, atol=1e-7)
        want = arrays[f"alphas_cumprod{suffix}"]
        torch.testing.assert_close(cumulative_alphas(betas), want, rtol=2e-5, atol=0)
        assert torch.equal(cumulative_alphas(betas), want)
    process = VPDiffusion(levels, prediction="v")
    x0, eps, t = arrays["x0_data"], arrays["noise_data"], time_of_level(arrays["addnoise_t"], levels)
    assert_near(process.corrupt(x0, eps, t), arrays["addnoise_xt"], 1e-6)
    assert_near(process.target(x0, eps, t), arrays["velocity_target"], 1e-6)


@pytest.mark.golden("samplers_ddpm*.npz")
def test_ddpm_trajectories(golden_path: Path) -> None:
    arrays = read(golden_path)
    levels = len(arrays["betas"])
    for case in case_names(arrays):
        prediction, (clip, *variance, count) = prediction_of(case)
        steps = int(count[1:])
        sampler = DDPM(
            steps=steps,
            variance="_".join(variance),
            clip_x0=1.0 if clip == "clip" else None,
            noise_clip=None,
            min_std=0.0,
        )
        table = sampler.table(VPDiffusion(levels, prediction=prediction))
        assert table.net_time.tolist() == arrays[f"{case}__timesteps"].tolist()
        noise = torch.cat([arrays["x_init"][:, None], arrays["step_noise"][:steps].transpose(0, 1)], dim=1)
        out = denoise(affine(arrays, table, levels), table, noise, record_from=0)
        got = out.chain.transpose(0, 1)[arrays[f"{case}__kept"]]
        assert_near(got, arrays[f"{case}__x"], 5e-5 if steps == levels else 1e-5)
        lean = denoise(affine(arrays, table, levels), table, noise).action
        assert_near(lean, got[-1], 1e-5)


@pytest.mark.golden("samplers_ddim*.npz")
def test_ddim_trajectories(golden_path: Path) -> None:
    arrays = read(golden_path)
    levels = len(arrays["alphas_cumprod"])
    for case in case_names(arrays):
        prediction, (count, eta, final, clip, *ucm, spacing) = prediction_of(case)
        steps = int(count[1:])
        sampler = DDIM(
            steps=steps,
            spacing=spacing,
            eta=float(eta[3:]),
            final_alpha={"one": "one", "a0": "first"}[final],
            clip_x0=1.0 if clip == "clip" else None,
            recompute_eps=bool(ucm),
            noise_clip=None,
        )
        table = sampler.table(VPDiffusion(levels, prediction=prediction))
        assert table.net_time.tolist() == arrays[f"{case}__timesteps"].tolist()
        noise = arrays["x_init"]
        if not table.is_deterministic:
            noise = torch.cat([noise[:, None], arrays["step_noise"][:steps].transpose(0, 1)], dim=1)
        out = denoise(affine(arrays, table, levels), table, noise, record_from=0)
        assert_near(out.chain.transpose(0, 1), arrays[f"{case}__x"], 1e-5)


@pytest.mark.golden("samplers_flow*.npz")
def test_euler_trajectories(golden_path: Path) -> None:
    arrays = read(golden_path)
    cases = [n for n in case_names(arrays) if n.startswith(("euler_uniform_N", "derived_euler_01_N"))]
    assert cases
    for case in cases:
        table = Euler(steps=int(case.split("_N")[1]), clip_action=None).table(FLOW)
        start = arrays["x_init"].to(arrays[f"{case}__x"].dtype)
        out = denoise(mirrored(arrays, table), table, start, record_from=0)
        assert_near(out.chain.transpose(0, 1), arrays[f"{case}__x"], 1e-6)


@pytest.mark.golden("samplers_flow*.npz")
def test_euler_trajectories_over_given_times(golden_path: Path) -> None:
    arrays = read(golden_path)
    cases = [n for n in case_names(arrays) if n.startswith(("euler_default", "euler_shift"))]
    assert cases
    for case in cases:
        table = Euler(clip_action=None).over(FLOW, (1 - arrays[f"{case}__sigmas"].double()).tolist())
        out = denoise(mirrored(arrays, table), table, arrays["x_init"], record_from=0)
        assert_near(out.chain.transpose(0, 1), arrays[f"{case}__x"], 1e-6)


@pytest.mark.golden("samplers_flow*.npz")
def test_second_order_flow_trajectories(golden_path: Path) -> None:
    arrays = read(golden_path)
    midpoints = [n for n in case_names(arrays) if n.startswith("derived_midpoint")]
    heuns = [n for n in case_names(arrays) if n.startswith("heun_default")]
    assert midpoints and heuns
    for case in midpoints:
        want = arrays[f"{case}__x"]
        table = Midpoint(steps=len(want) - 1, clip_x0=None).table(FLOW)
        states = states_of(mirrored(arrays, table), table, arrays["x_init"].to(want))
        assert_near(states[::2], want, 1e-6)
    for case in heuns:
        times = 1 - arrays[f"{case}__sigmas"].double()  # every inner one twice
        table = Heun(clip_x0=None).over(FLOW, [*times[:-1:2].tolist(), 1.0])
        states = states_of(mirrored(arrays, table), table, arrays["x_init"])
        assert_near(states, arrays[f"{case}__x"], 3e-6)


@pytest.mark.golden("samplers_dpmpp*.npz")
def test_multistep_trajectories(golden_path: Path) -> None:
    arrays = read(golden_path)
    levels = len(arrays["alphas_cumprod"])
    cases = [case for case in case_names(arrays) if "_o3_" not in case and "_sde_" not in case]
    assert cases
    for case in cases:
        prediction, (_, order, solver, _, _, _) = prediction_of(case)
        process = VPDiffusion(levels, prediction=prediction)
        noise = arrays[f"{case}__sigmas"].double()[:-1]
        times = [*process.time_of_lambda(-noise.log()).tolist(), 1.0]
        sampler = Euler(clip_action=None) if order == "o1" else DPMpp2M(solver=solver, clip_x0=None)
        table = sampler.over(process, times)
        assert (table.net_time - arrays[f"{case}__timesteps"]).abs().max() < 1  # theirs are whole
        table = replace(table, net_time=arrays[f"{case}__timesteps"].float())
        states = states_of(affine(arrays, table, levels), table, arrays["x_init"])
        assert_near(states, arrays[f"{case}__x"], 1e-5)


@pytest.mark.golden("samplers_edm*.npz")
def test_edm_trajectories(golden_path: Path) -> None:
    """Their state is ours over alpha; their network sees ours over the deviation of the data."""
    arrays = read(golden_path)
    cases = [case for case in case_names(arrays) if not case.startswith("dpmpp3m")]
    assert cases
    for case in cases:
        kind, grid, *prediction, count, low, high = case.split("_")
        process = Edm(data_std=0.5, noise_min=float(low[4:]), noise_max=float(high[4:]), time_scale=1.0)
        rules = {"steps": int(count[1:]), "grid": grid, "clip_x0": None}
        sampler = DPMpp2M(**rules) if kind == "dpmpp2m" else Euler(**rules, clip_action=None)
        table = sampler.table(process)
        noise = torch.tensor(table.sigma) / torch.tensor(table.alpha)
        torch.testing.assert_close(noise, arrays[f"{case}__sigmas"][:-1], rtol=1e-5, atol=0)
        torch.testing.assert_close(table.net_time, arrays[f"{case}__timesteps"], rtol=1e-5, atol=1e-6)
        net = affine(arrays, table, 1.0, sign=-1.0 if prediction == ["v", "prediction"] else 1.0)
        scaled = lambda k, x, net=net: net(k, x / 0.5)  # noqa: E731
        states = states_of(scaled, table, arrays["x_init"])
        alpha = torch.tensor([*table.alpha, 1.0])[:, None, None, None]
        assert_near(states / alpha, arrays[f"{case}__x"], 1e-5)
