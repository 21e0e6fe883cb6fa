"""Consistency models: the boundary, exact maps, the loss, and sampling as diffusers does it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from diffusers import CMStochasticIterativeScheduler
from messages import mentions
from pairwise import everything, repeated
from small_cloning import finish
from small_policies import small_policy
from torch import Tensor
from two_modes import LEVEL, two_mode_setup

from algos.bc import BcConfig
from policies.errors import ConfigError
from policies.processes import Consistency, Edm, RectifiedFlow
from policies.processes.base import KINDS
from policies.processes.schedules import noise_grid
from policies.protocols import TE
from policies.samplers.consistency import Renoise
from policies.samplers.loop import denoise
from policies.samplers.ode import Euler

TH, DA = 3, 2
PROCESS = Consistency()


def draw(n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x0, eps = (torch.randn(n, TH, DA, generator=generator, dtype=torch.float64) for _ in range(2))
    return x0, eps


def time_of(noise: float | Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.as_tensor(noise, dtype=torch.float64))


def rows(value: Tensor) -> Tensor:
    return value[:, None, None]


def test_outputs_are_mixed_as_published() -> None:
    generator = torch.Generator().manual_seed(1)
    noise = torch.tensor([0.005, 0.02, 0.3, 2.0, 10.0], dtype=torch.float64)
    y, out = (torch.randn(5, TH, DA, generator=generator, dtype=torch.float64) for _ in range(2))
    sd, least = PROCESS.data_std, PROCESS.noise_min
    c_in = 1.0 / (noise**2 + sd**2).sqrt()
    c_skip = sd**2 / ((noise - least) ** 2 + sd**2)
    want = rows(c_skip) * y + rows((noise - least) * sd * c_in) * out
    x, t = rows(sd * c_in) * y, time_of(noise)
    found = PROCESS.convert(x, t, out, "consistency", "x0")
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("src", "dst"), list(itertools.product((*KINDS, "edm", "consistency"), repeat=2)))
def test_conversions_invert(src: str, dst: str) -> None:
    x0, eps = draw()
    t = time_of(torch.logspace(-2, 0.9, 6, dtype=torch.float64))
    x = PROCESS.corrupt(x0, eps, t)
    there = PROCESS.convert(x, t, PROCESS.express(x0, eps, t, src), src, dst)
    torch.testing.assert_close(there, PROCESS.express(x0, eps, t, dst), rtol=1e-8, atol=1e-8)


def test_at_the_smallest_noise_the_state_is_its_own_end() -> None:
    x, out = draw()
    t = time_of(PROCESS.noise_min).expand(6)
    alpha, _ = PROCESS.alpha_sigma(t)
    found = PROCESS.convert(x, t, 100.0 * out, "consistency", "x0")
    torch.testing.assert_close(found, x / rows(alpha), rtol=0, atol=1e-9)


def test_neighbours_walk_down_the_karras_grid() -> None:
    process = Consistency(num_levels=9)
    grid = noise_grid("karras", 9, process.noise_max, process.noise_min, process.rho)
    t = time_of(grid[0])
    for noise in (*grid[1:], grid[-1]):
        t = process.cleaner(t)
        torch.testing.assert_close(1.0 / t - 1.0, noise, rtol=1e-9, atol=0)


# -- the loss -------------------------------------------------------------------------------------------


def exact(process: Consistency, end: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The network whose f is a given function of y and s."""

    def net(x: Tensor, t: Tensor, *_: object, **__: object) -> Tensor:
        y, noise = x / rows(process.alpha_sigma(t)[0]), rows((1 - t) / t)
        skip, out = (rows(value) for value in process.scalings(t))
        return (end(y, noise) - skip * x) / out.clamp(min=1e-12)

    return net


def gaussian_end(process: Consistency, mean: float, std: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Where trajectories of Normal(mean, std^2) data end."""
    least = process.noise_min
    return lambda y, s: mean + (y - mean) * ((std**2 + least**2) / (std**2 + s**2)) ** 0.5


def test_the_exact_map_of_a_single_chunk_has_no_loss() -> None:
    _, eps = draw()
    action = torch.full_like(eps, 0.3)
    te = TE(PROCESS.sample_time(6, generator=torch.Generator().manual_seed(2), dtype=torch.float64), eps)
    right = exact(PROCESS, gaussian_end(PROCESS, 0.3, 0.0))
    wrong = exact(PROCESS, gaussian_end(PROCESS, 0.2, 0.0))
    assert PROCESS.losses(right, action, te).abs().max() < 1e-10
    assert PROCESS.losses(wrong, action, te).mean() > 1e-3


def gaussian_teacher(process: Consistency, mean: float, std: float) -> Callable[..., tuple[Tensor, Tensor]]:
    def predict(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = (rows(a) for a in process.alpha_sigma(t))
        share = (x - alpha * mean) / (alpha**2 * std**2 + sigma**2)
        return mean + alpha * std**2 * share, sigma * share

    return predict


def test_the_exact_map_of_gaussian_data_loses_only_what_a_heun_step_misses() -> None:
    mean, std, losses = 0.2, 0.6, []
    x0, eps = draw(64)
    action, t = mean + std * x0, time_of(torch.logspace(-1, 0.9, 64, dtype=torch.float64))
    for levels in (40, 80, 160):
        process = Consistency(num_levels=levels, huber=1e-9)  # the error itself, per step
        te = process.taught(action, TE(t, eps), gaussian_teacher(process, mean, std))
        right, wrong = (exact(process, gaussian_end(process, mean, s)) for s in (std, 0.8 * std))
        losses.append(process.losses(right, action, te).mean().item())
        assert losses[-1] < 0.05 * process.losses(wrong, action, te).mean().item()
    for coarse, fine in itertools.pairwise(losses):
        assert coarse / fine == pytest.approx(4.0, rel=0.1)  # second order


def test_the_loss_is_the_pseudo_huber_distance_per_step() -> None:
    process = Consistency(huber=0.01)
    action, eps = draw(4)
    t = time_of(torch.tensor([0.01, 0.3, 2.0, 9.0], dtype=torch.float64))
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def net(x: Tensor, t: Tensor, *_: object, **__: object) -> Tensor:
        return torch.tanh(weight * x + rows(t))

    near = process.cleaner(t)
    ends = [process.end_of(x, at, net(x, at)) for at in (t, near) for x in [process.corrupt(action, eps, at)]]
    gap, c = (1 / t - 1 / near), 0.01 * math.sqrt(TH * DA)
    square = (ends[0] - ends[1].detach()).square().sum((-2, -1))
    want = ((square + c * c).sqrt() - c) / gap
    loss = process.losses(net, action, TE(t, eps)).sum((-2, -1))
    torch.testing.assert_close(loss, want)
    grads = [torch.autograd.grad(value.sum(), weight, retain_graph=True)[0] for value in (loss, want)]
    torch.testing.assert_close(*grads)


# -- sampling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [[0], [22, 0], [31, 13, 0]])
def test_sampling_equals_diffusers(levels: list[int]) -> None:
    process = Consistency(noise_min=0.002, noise_max=80.0)
    theirs = CMStochasticIterativeScheduler()
    theirs.set_timesteps(timesteps=levels)
    weight = torch.randn(DA, DA, generator=torch.Generator().manual_seed(3))

    def network(x: Tensor) -> Tensor:  # of c_in y
        return torch.tanh(x @ weight) + 0.3

    generator = torch.Generator().manual_seed(5)
    start = torch.randn(6, TH, DA, generator=generator)
    state, y = generator.get_state(), start * theirs.init_noise_sigma
    for t in theirs.timesteps:
        scaled = theirs.scale_model_input(y, t)
        y = theirs.step(network(scaled), t, y, generator=generator).prev_sample

    generator.set_state(state)
    draws = [torch.randn(6, TH, DA, generator=generator) for _ in levels]
    table = Renoise(noise_clip=None).over(process, [*time_of(theirs.sigmas[:-1]).tolist(), 1.0])
    noise = start if len(levels) == 1 else torch.stack([start, *draws], dim=1)
    ours = denoise(lambda k, x: network(x / process.data_std), table, noise).action
    torch.testing.assert_close(ours, y, rtol=1e-4, atol=1e-4)


def test_one_step_depends_on_the_start_and_more_steps_on_fresh_noise() -> None:
    policy = small_policy(Consistency())
    for steps, shape in ((1, (TH, DA)), (2, (3, TH, DA)), (3, (4, TH, DA))):
        view = policy.with_sampler(Renoise(steps=steps))
        assert view.noise_shape == shape and view.noise_sensitive
        assert view.table.times[0] == pytest.approx(1 / 11) and view.table.times[-1] == 1.0
        noise = 1.0 / torch.tensor(view.table.times[:-1]) - 1.0
        assert (noise.diff() < 0).all() and noise[-1] > PROCESS.noise_min
    assert policy.with_sampler(Renoise(steps=1)).is_deterministic


def test_the_start_can_be_calmer_than_the_first_level() -> None:
    wide, calm = (Renoise(steps=1, start_noise=s).table(PROCESS) for s in (None, 1.0))
    assert wide.start_std / calm.start_std == pytest.approx(PROCESS.noise_max)
    assert calm.times == wide.times
    still = small_policy(PROCESS, Renoise(steps=1, start_noise=0.0))
    assert not still.noise_sensitive


@pytest.mark.skipif(not everything, reason="with --all: without it a distilled one learns")
@pytest.mark.slow
@pytest.mark.parametrize("seed", repeated([0, 1, 2]))
def test_both_modes_are_learned_within_400_steps(seed: int) -> None:
    config = BcConfig(steps=400, batch_size=128, lr=3e-3, log_every=400, validation_fraction=0.0)
    algorithm = config.build(two_mode_setup(seed, process=Consistency(num_levels=10), width=64))
    finish(algorithm)
    x = torch.linspace(-0.9, 0.9, 400)
    obs = torch.stack([x, torch.ones_like(x)], dim=1).unsqueeze(1)
    action = algorithm.snapshot().act(obs, generator=torch.Generator().manual_seed(seed)).squeeze(-1)
    error = (action.abs() - (LEVEL + 0.2 * x).unsqueeze(1)).abs()
    assert error.median() < 0.2
    assert 0.3 < (action[:, 0] > 0).float().mean() < 0.7
    assert (action[:, 0].sign() == action[:, 1].sign()).float().mean() > 0.95


# -- refusals -------------------------------------------------------------------------------------------


def test_other_samplers_and_other_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("sampler=euler process=consistency sampler=consistency")):
        small_policy(Consistency(), Euler())
    for process in (RectifiedFlow(), Edm()):
        with pytest.raises(ConfigError, match=mentions("sampler=consistency process=consistency process=")):
            small_policy(process, Renoise())
