"""EDM's process against DIAMOND's preconditioning, which counts its offset noise into every noise level.

Not covered, because the package imagines states and not frames: the network of frames, bytes, the loss over
two imagined steps, churn, the model of rewards and ends, lambda returns of signs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from policies.processes import Edm
from policies.processes.schedules import noise_grid

pytestmark = pytest.mark.golden("diamond_core*.npz")

OFFSET = 0.3
PROCESS = Edm(data_std=0.5, noise_min=1e-3, noise_max=100.0, time_scale=1.0)


@pytest.fixture
def arrays(golden_path: Path) -> dict[str, Tensor]:
    with np.load(golden_path) as file:
        return {name: torch.from_numpy(np.asarray(file[name])) for name in file.files}


def times_of(sigma: Tensor) -> Tensor:
    """Return our times at DIAMOND's levels."""
    return 1 / (1 + torch.hypot(sigma, torch.tensor(OFFSET)))


def test_preconditioning(arrays: dict[str, Tensor]) -> None:
    times = times_of(arrays["sigma"])
    alpha, sigma = PROCESS.alpha_sigma(times)
    torch.testing.assert_close(alpha / PROCESS.data_std, arrays["c_in"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alpha.square(), arrays["c_skip"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sigma, arrays["c_out"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(PROCESS.net_time(times), arrays["c_noise"], rtol=1e-5, atol=1e-5)


def test_denoised_frames_follow_from_the_networks_output(arrays: dict[str, Tensor]) -> None:
    times = times_of(arrays["in.sigma"])
    alpha, _ = PROCESS.alpha_sigma(times)
    noisy, output = (arrays[name].flatten(2) for name in ("in.noisy", "net"))  # (B, C, pixels), as chunks
    x0 = PROCESS.convert(alpha[:, None, None] * noisy, times, output, "edm", "x0")
    expected = arrays["denoised_unquantised"].flatten(2)
    torch.testing.assert_close(x0, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [3, 5, 10])
def test_noise_levels_of_sampling(arrays: dict[str, Tensor], steps: int) -> None:
    levels = noise_grid("karras", steps, 5.0, 2e-3, 7.0)
    torch.testing.assert_close(levels.float(), arrays[f"sigmas_{steps}"][:-1], rtol=1e-5, atol=1e-5)
