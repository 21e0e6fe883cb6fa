"""Samplers of every path: closed forms on a Gaussian target, orders of convergence, grids, refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from curved_flow import CurvedFlow
from pairwise import each_value
from torch import Tensor

from policies.errors import CapabilityError, ConfigError
from policies.processes import Edm, GaussianPath, RectifiedFlow, VPDiffusion
from policies.samplers.ddpm import DDIM
from policies.samplers.loop import denoise
from policies.samplers.ode import Ancestral, DPMpp2M, Euler, Heun, Midpoint, PathRules
from policies.samplers.step_table import StepTable

MEAN, STD = 0.3, 0.4
PROCESSES = [RectifiedFlow(), Edm(data_std=0.4), VPDiffusion(1000, prediction="v")]
FREE = {"clip_x0": None, "clip_action": None, "noise_clip": None}
every_process = pytest.mark.parametrize("process", PROCESSES, ids=["flow", "edm", "diffusion"])


def exact(process: GaussianPath, table: StepTable) -> Callable[[int, Tensor], Tensor]:
    """The best network for data ~ Normal(MEAN, STD^2), in the kind of the process."""

    def bound(k: int, x: Tensor) -> Tensor:
        alpha, sigma = table.alpha[k], table.sigma[k]
        x0 = MEAN + alpha * STD**2 * (x - alpha * MEAN) / (alpha**2 * STD**2 + sigma**2)
        t = torch.full((len(x),), table.times[k], dtype=x.dtype)
        return process.convert(x, t, x0, "x0", process.kind)

    return bound


def end_of_flow(table: StepTable, start: Tensor) -> Tensor:
    """Where the probability flow takes a start state."""
    alpha, sigma = table.alpha[0], table.sigma[0]
    return MEAN + STD * (table.start_std * start - alpha * MEAN) / math.hypot(alpha * STD, sigma)


def error(process: GaussianPath, sampler: PathRules) -> float:
    table = sampler.table(process)
    start = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None, None]
    got = denoise(exact(process, table), table, start).action
    return float((got - end_of_flow(table, start)).abs().max())


@pytest.mark.parametrize(
    ("process", "sampler"), each_value(PROCESSES, [(Euler, 1), (Heun, 2), (Midpoint, 2), (DPMpp2M, 2)])
)
def test_errors_fall_with_the_order_of_the_method(
    process: GaussianPath, sampler: tuple[type[PathRules], int]
) -> None:
    """Doubling the steps divides the error by 2^order, in the regime where that holds, or more.

    Equal steps in flow time are very unequal in log noise, where the multistep method is second order.
    """
    method, order = sampler
    counts = (256, 1024) if (method, process) == (DPMpp2M, RectifiedFlow()) else (32, 128)
    few, many = (error(process, method(steps=n, **FREE)) for n in counts)
    assert math.log2(few / many) / 2 > order - 0.45
    if order == 1:
        assert math.log2(few / many) / 2 < 1.2


@pytest.mark.parametrize("method", [Heun, Midpoint, DPMpp2M])
def test_a_curved_path_may_begin_at_noise_alone(method: type[PathRules]) -> None:
    process = CurvedFlow()
    few, many = (error(process, method(steps=n, **FREE)) for n in (256, 1024))
    assert math.log2(few / many) / 2 > 1.55


@every_process
def test_ancestral_steps_draw_from_the_target(process: GaussianPath) -> None:
    table = Ancestral(steps=100, **FREE).table(process)
    noise = torch.randn(4000, 101, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = denoise(exact(process, table), table, noise).action
    assert abs(float(got.mean()) - MEAN) < 4 * STD / math.sqrt(4000)
    assert abs(float(got.std()) / STD - 1) < 0.06


@every_process
def test_ancestral_without_fresh_noise_is_euler(process: GaussianPath) -> None:
    quiet, euler = (
        s(steps=7, **FREE, **more).table(process) for s, more in ((Ancestral, {"eta": 0.0}), (Euler, {}))
    )
    assert quiet.is_deterministic
    torch.testing.assert_close(quiet.coefficients, euler.coefficients, rtol=1e-12, atol=1e-12)


def test_euler_on_a_diffusion_is_ddim() -> None:
    process = VPDiffusion(100)
    ours, ddim = Euler(steps=10, clip_x0=1.0, clip_action=None).table(process), DDIM(steps=10).table(process)
    torch.testing.assert_close(ours.coefficients, ddim.coefficients, rtol=1e-12, atol=1e-12)
    assert ours.times == ddim.times


@every_process
@pytest.mark.parametrize("grid", ["karras", "exponential", "linear"])
def test_grids_of_noise_levels_fall_between_their_ends(process: GaussianPath, grid: str) -> None:
    times = Euler(steps=6, grid=grid, noise_max=8.0, noise_min=0.02).times(process)
    alpha, sigma = process.alpha_sigma(torch.tensor(times, dtype=torch.float64))
    noise = sigma / alpha
    assert noise[0] == pytest.approx(8.0) and noise[-2] == pytest.approx(0.02) and noise[-1] == 0
    assert bool((noise.diff() < 0).all())


@every_process
def test_even_times_begin_at_the_noisiest_trained_one_and_give_finite_states(process: GaussianPath) -> None:
    (first,) = process.nearest_time(torch.zeros(1, dtype=torch.float64)).tolist()
    for sampler in (Ancestral, Euler, Heun, Midpoint, DPMpp2M):
        table = sampler(steps=4, grid="uniform", eta=0.0).table(process) if sampler is Ancestral else None
        table = table or sampler(steps=4, grid="uniform", clip_x0=1.0).table(process)
        assert table.times[0] == first and bool((torch.tensor(table.times).diff() >= 0).all())
        start = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None, None]
        assert denoise(exact(process, table), table, start).action.isfinite().all()


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(PROCESSES, 2)))
def test_a_state_moves_between_paths_at_equal_noise_over_signal(
    one: GaussianPath, other: GaussianPath
) -> None:
    generator = torch.Generator().manual_seed(0)
    x0, eps = (torch.randn(12, 4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    t = torch.linspace(0.05, 0.95, 12, dtype=torch.float64)
    alpha, sigma = one.alpha_sigma(t)
    there = other.time_of_lambda(alpha.log() - sigma.log())
    scale = (other.alpha_sigma(there)[0] / alpha)[:, None, None]
    x = scale * one.corrupt(x0, eps, t)
    torch.testing.assert_close(x, other.corrupt(x0, eps, there), rtol=1e-9, atol=1e-10)
    back = one.time_of_lambda(torch.log(torch.div(*other.alpha_sigma(there))))
    torch.testing.assert_close(back, t, rtol=0, atol=1e-10)
    pred = other.convert(x, there, eps, "eps", other.kind)
    torch.testing.assert_close(other.convert(x, there, pred, other.kind, "x0"), x0, rtol=1e-8, atol=1e-9)


def test_a_warm_start_never_begins_at_a_corrector() -> None:
    table = Heun(steps=4, **FREE).table(RectifiedFlow())
    assert table.num_steps == 7 and table.entries == (True, False) * 3 + (True,)
    assert [table.step_at(t) for t in (0.0, 0.25, 0.5, 0.75)] == [0, 2, 4, 6]
    process, start = RectifiedFlow(), torch.full((2, 1, 1), 0.1, dtype=torch.float64)
    late = denoise(exact(process, table), table, start, start=start, first_step=2).action
    fine = Heun(steps=400, **FREE).table(process)
    reference = denoise(exact(process, fine), fine, start, start=start, first_step=fine.step_at(0.25)).action
    torch.testing.assert_close(late, reference, rtol=0, atol=2e-2)


def test_a_multistep_method_begins_with_a_first_order_step_wherever_it_starts() -> None:
    process = RectifiedFlow()
    second, first = (s(steps=8, **FREE).table(process) for s in (DPMpp2M, Euler))
    start = torch.full((1, 1, 1), 0.2, dtype=torch.float64)
    seen: list[Tensor] = []

    def watch(k: int, x: Tensor) -> Tensor:
        seen.append(x)
        return exact(process, second)(k, x)

    denoise(watch, second, start, start=start, first_step=3)
    denoise(watch, first, start, start=start, first_step=3)
    torch.testing.assert_close(seen[1], seen[6], rtol=1e-12, atol=1e-12)


def test_steps_with_a_memory_cannot_be_recorded() -> None:
    table = DPMpp2M(**FREE).table(RectifiedFlow())
    with pytest.raises(CapabilityError, match=r"memory .* cannot be recorded"):
        denoise(exact(RectifiedFlow(), table), table, torch.zeros(1, 1, 1), record_from=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Heun(grid="karras", noise_min=2.0, noise_max=1.0), "noise_max must be at least noise_min=2"),
        (lambda: Heun(noise_max=80.0), "exponential, linear; got sampler.grid=auto"),
        (lambda: Heun(min_std=0.1), "sampler=heun is deterministic; got min_std=0.1 .* Use ancestral"),
        (lambda: Euler(grid="karras").table(RectifiedFlow()), r"pure noise\. Set sampler\.noise_max"),
        (lambda: Euler(grid="linear", noise_max=1e5).table(VPDiffusion(20)), "at most .* starts; got 100000"),
        (lambda: Heun(steps=30).table(VPDiffusion(20)), "between 1 and process.num_levels=20; got 30"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
