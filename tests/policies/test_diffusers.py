"""Schedulers of diffusers around our networks: equal to our own samplers where both exist."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from messages import mentions
from torch import Tensor

from policies.errors import CapabilityError, ConfigError
from policies.processes import Edm, RectifiedFlow, VPDiffusion
from policies.protocols import Cond, Hook
from policies.samplers.ddpm import DDIM
from policies.samplers.diffusers import DIFFUSION_SCHEDULERS, FLOW_SCHEDULERS, Diffusers
from policies.samplers.loop import denoise
from policies.samplers.ode import DPMpp2M, Euler
from policies.samplers.step_table import StepTable

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers")

NOISE = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))


def network(table: StepTable) -> Callable[[int, Tensor], Tensor]:
    """A smooth stand-in that depends on the network time."""
    return lambda k, x: 0.4 * torch.tanh(x.flip(2) + table.net_time[k] / 40)


def run(sampler: object, process: object) -> Tensor:
    table = sampler.table(process)  # type: ignore[attr-defined]
    return denoise(network(table), table, NOISE).action


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_ddim_is_ours(prediction: str, clip: float | None) -> None:
    process = VPDiffusion(20, prediction=prediction)
    theirs = Diffusers(scheduler="DDIMScheduler", steps=5, clip_x0=clip, clip_action=None)
    ours = DDIM(steps=5, clip_x0=clip, recompute_eps=False)
    torch.testing.assert_close(run(theirs, process), run(ours, process), rtol=1e-4, atol=1e-5)


def test_their_multistep_solver_is_ours() -> None:
    process = VPDiffusion(100, "linear", beta_end=0.2, prediction="v")
    theirs = Diffusers(steps=10, clip_action=None)
    times = theirs.table(process).times
    table = DPMpp2M(clip_x0=None).over(process, times)
    ours = denoise(network(table), table, NOISE).action
    torch.testing.assert_close(run(theirs, process), ours, rtol=1e-4, atol=1e-5)


def test_flow_steps_are_ours() -> None:
    process = RectifiedFlow()
    theirs = Diffusers(scheduler="FlowMatchEulerDiscreteScheduler", steps=6, clip_action=None)
    table = Euler(clip_action=None).over(process, theirs.table(process).times)
    ours = denoise(network(table), table, NOISE).action
    torch.testing.assert_close(run(theirs, process), ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheduler", [*DIFFUSION_SCHEDULERS, *FLOW_SCHEDULERS])
def test_every_scheduler_finds_a_gaussian_target(scheduler: str) -> None:
    """The exact denoiser of Normal(0.3, 0.4^2): start noise keeps its rank, mean and deviation fit."""
    is_flow = scheduler in FLOW_SCHEDULERS
    process = RectifiedFlow() if is_flow else VPDiffusion(1000, prediction="x0")
    sampler = Diffusers(scheduler=scheduler, steps=60, clip_action=None)
    table = sampler.table(process)
    alpha, sigma = process.alpha_sigma(torch.tensor(table.times[:-1], dtype=torch.float64))

    def exact(k: int, x: Tensor) -> Tensor:
        a, s = alpha[k], sigma[k]
        x0 = 0.3 + a * 0.16 * (x - a * 0.3) / (a**2 * 0.16 + s**2)
        return process.convert(x, table_time(k), x0, "x0", process.kind)

    def table_time(k: int) -> Tensor:
        return torch.full((len(noise),), table.times[k], dtype=torch.float64)

    noise = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)[:, None, None]
    got = denoise(exact, table, noise).action
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, 0.3 + 0.4 * noise, rtol=0, atol=0.06)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Diffusers().table(Edm()), "sampler=diffusers process=diffusion"),
        (lambda: Diffusers().table(RectifiedFlow()), "process=flow"),
        (
            lambda: Diffusers(options={"nonsense": 1}).table(VPDiffusion()),
            "['nonsense']",
        ),
        (
            lambda: Diffusers(options={"algorithm_type": "sde-dpmsolver++"}).table(VPDiffusion()),
            "sampler.options sampler=ddpm",
        ),
        (
            lambda: Diffusers(
                scheduler="FlowMatchEulerDiscreteScheduler", options={"stochastic_sampling": True}
            ).table(RectifiedFlow()),
            "sampler.options sampler=ddpm",
        ),
        (
            lambda: Diffusers(clip_x0=1.0).table(VPDiffusion()),
            "clip_x0 DPMSolverMultistepScheduler",
        ),
    ],
)
def test_bad_settings_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        make()


def test_their_loop_takes_no_hooks_and_no_start() -> None:
    table = Diffusers().table(VPDiffusion())
    for more in ({"hooks": [Hook()], "cond": Cond(torch.zeros(3, 1))}, {"start": NOISE}, {"record_from": 0}):
        with pytest.raises(CapabilityError, match=mentions("sampler=diffusers")):
            denoise(network(table), table, NOISE, **more)  # type: ignore[arg-type]
