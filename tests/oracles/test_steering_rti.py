"""The short runs of RTI-DP from the plan of the decision before, on recorded noise.

The arrays of ITPS in the same files are covered by `test_steering_itps`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from policies.processes import VPDiffusion
from policies.samplers import DDPM, StepTable, denoise
from policies.schedules import cumulative_alphas

TOLERANCE = 1e-4
PREFIX = "rti_steps_"


def read(path: Path) -> dict[str, Tensor]:
    with np.load(path) as file:
        return {name: torch.from_numpy(np.asarray(file[name])) for name in file.files}


def run(arrays: dict[str, Tensor], table: StepTable, start: Tensor) -> Tensor:
    """Denoise with net(x, tau) = x A + (tau / K) v + c; the recorded noise is consumed in order."""
    matrix, slope, offset = (arrays[n] for n in ("net_A", "net_v", "net_c"))
    tau = (table.net_time / len(arrays["alphas_cumprod"])).tolist()
    draws = arrays["step_noise"][: table.num_steps].transpose(0, 1)
    tape = torch.cat([start[:, None], draws], dim=1)
    return denoise(lambda k, x: x @ matrix + tau[k] * slope + offset, table, tape).action


@pytest.mark.golden("steering_rti_itps*.npz")
def test_short_runs_from_the_previous_plan(golden_path: Path) -> None:
    arrays = read(golden_path)
    process = VPDiffusion(len(arrays["alphas_cumprod"]))
    bar = cumulative_alphas(process.betas())
    torch.testing.assert_close(bar, arrays["alphas_cumprod"], rtol=2e-5, atol=0)
    plan = arrays["rti_previous_plan"]
    start = torch.cat([plan[:, 1:], plan[:, -1:]], dim=1)
    names = [name for name in arrays if name.startswith(PREFIX)]
    assert names
    for name in names:
        levels = tuple(int(level) for level in name.removeprefix(PREFIX).split("_"))
        sampler = DDPM(levels=levels, noise_clip=None, min_std=0.0, final_std=None)
        table = sampler.table(process)
        assert table.net_time.tolist() == list(levels)
        torch.testing.assert_close(run(arrays, table, start), arrays[name], rtol=0, atol=TOLERANCE)
