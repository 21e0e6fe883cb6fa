"""Our samplers against recorded trajectories of diffusers' schedulers.

Not covered, because the package does not implement it: multistep solvers (`samplers_dpmpp`), EDM
(`samplers_edm`), and the non-uniform, shifted or higher-order flow solvers of `samplers_flow`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from policies.processes import RectifiedFlow, VPDiffusion
from policies.samplers import DDIM, DDPM, Euler, StepTable, denoise
from policies.schedules import cumulative_alphas, make_betas, time_of_level

PREDICTIONS = {"epsilon": "eps", "sample": "x0", "v": "v"}


def read(path: Path) -> dict[str, Tensor]:
    with np.load(path) as file:
        return {name: torch.from_numpy(np.asarray(file[name])) for name in file.files}


def case_names(arrays: dict[str, Tensor]) -> list[str]:
    names = [name.removesuffix("__x") for name in arrays if name.endswith("__x")]
    assert names
    return names


def affine(arrays: dict[str, Tensor], table: StepTable, scale: float, sign: float = 1.0) -> Callable:
    """net(x, tau) = x A + tau v + c with tau = net time / scale."""
    tau = (table.net_time / scale).tolist()
    matrix, slope, offset = (arrays[n] for n in ("net_A", "net_v", "net_c"))
    return lambda k, x: sign * (x @ matrix.to(x) + tau[k] * slope.to(x) + offset.to(x))


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
        table = Euler(steps=int(case.split("_N")[1]), clip_action=None).table(RectifiedFlow(time_scale=1.0))
        mirrored = affine({**arrays, "net_v": -arrays["net_v"]}, table, 1.0, sign=-1.0)
        bound = lambda k, x, net=mirrored: net(k, x) - arrays["net_v"].to(x)  # noqa: E731
        start = arrays["x_init"].to(arrays[f"{case}__x"].dtype)
        out = denoise(bound, table, start, record_from=0)
        assert_near(out.chain.transpose(0, 1), arrays[f"{case}__x"], 1e-6)
