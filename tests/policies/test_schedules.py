"""Schedules and clocks."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from messages import mentions

from policies.errors import ConfigError
from policies.processes.schedules import (
    cumulative_alphas,
    level_of_time,
    make_betas,
    spaced_levels,
    time_of_level,
)


@pytest.mark.parametrize("num_levels", [5, 20, 100, 1000])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("cosine", "squaredcos_cap_v2"), ("linear", "linear"), ("scaled_linear", "scaled_linear")],
)
def test_tables_equal_diffusers_bit_for_bit(num_levels: int, ours: str, theirs: str) -> None:
    scheduler = DDPMScheduler(num_levels, beta_schedule=theirs)
    betas = make_betas(num_levels, ours)
    assert torch.equal(betas, scheduler.betas)
    assert torch.equal(cumulative_alphas(betas), scheduler.alphas_cumprod)


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize(("num_levels", "steps"), [(20, 20), (20, 5), (100, 10), (100, 16), (1000, 7)])
def test_spacings_equal_diffusers(num_levels: int, steps: int, spacing: str) -> None:
    scheduler = DDIMScheduler(num_levels, beta_schedule="squaredcos_cap_v2", timestep_spacing=spacing)
    scheduler.set_timesteps(steps)
    assert spaced_levels(num_levels, steps, spacing) == scheduler.timesteps.tolist()


@pytest.mark.parametrize("num_levels", [2, 20, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_levels_survive_the_round_trip_exactly(num_levels: int, dtype: torch.dtype) -> None:
    tau = torch.arange(-1, num_levels, dtype=dtype)
    t = time_of_level(tau, num_levels)
    assert t[0] == 1.0
    assert t[-1] == 0.0
    assert torch.equal(level_of_time(t, num_levels).to(dtype), tau)


def test_levels_between_integers_are_kept() -> None:
    tau = torch.tensor([0.25, 7.5], dtype=torch.float64)
    torch.testing.assert_close(level_of_time(time_of_level(tau, 20), 20), tau)


@pytest.mark.parametrize("steps", [0, 21])
def test_a_step_count_outside_the_levels_is_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match=mentions("sampler.steps 1 process.num_levels=20")):
        spaced_levels(20, steps)


@pytest.mark.parametrize("spacing", ["leading", "linspace"])
def test_a_single_step_must_start_at_the_noise(spacing: str) -> None:
    with pytest.raises(ConfigError, match=mentions(f"{spacing} 0 spacing=trailing 2")):
        spaced_levels(20, 1, spacing)
    assert spaced_levels(20, 1, "trailing") == [19]
    assert spaced_levels(1, 1, spacing) == [0]


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=mentions("scaled_linear sigmoid cosine linear")):
        make_betas(10, "sigmoid")
    with pytest.raises(ConfigError, match=mentions("karras leading trailing linspace")):
        spaced_levels(10, 5, "karras")


def test_a_start_far_from_the_noise_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert spaced_levels(23, 10) == [18, 16, 14, 12, 10, 8, 6, 4, 2, 0] and not caplog.records
    for _ in range(2):
        assert spaced_levels(23, 13)[0] == 12
    assert ["begins at level 12 of 22" in record.getMessage() for record in caplog.records] == [True]
