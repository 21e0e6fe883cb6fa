"""The plans that ITPS samples along a guide, on recorded noise.

The arrays of RTI-DP in the same files are covered by `test_steering_rti`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_steering_rti import read, toy_policy
from torch import Tensor

from policies.policy import Policy
from policies.samplers.ddpm import DDPM
from policies.wrappers.sketch_guidance import SketchedPolicy, SketchSettings
from policies.wrappers.sketches import ActionSketch, resampled

TOLERANCE = 1e-4
NAMES = {"unconditional": "random"}
"""Strategies that the files call otherwise."""


def ancestral(arrays: dict[str, Tensor], steps: int) -> Policy:
    sampler = DDPM(steps=steps, noise_clip=None, min_std=0.0, final_std=None)
    return toy_policy(arrays).with_sampler(sampler)


def tape(arrays: dict[str, Tensor], steered: SketchedPolicy, steps: int) -> Tensor:
    """Lay the recorded draws out as the noise of one candidate, (B, 1, rows, Th, Da).

    Published code draws the noise of a step at every visit and uses it at the last one, and counts only the
    steps that it takes when it skips some.
    """
    repeats = steered.recipe.resample_steps
    first = steps - steered.calls // repeats
    rows = [arrays["x_init"]]
    for step in range(steps):
        drawn = (step - first) * repeats + repeats - 1
        rows += [arrays["mcmc_noise"][step * (repeats - 1) + m] for m in range(repeats - 1)]
        rows.append(arrays["step_noise"][drawn] if 0 <= drawn < len(arrays["step_noise"]) else rows[0])
    return torch.stack(rows, dim=1)[:, None]


@pytest.mark.golden("steering_rti_itps*.npz")
def test_guides_are_resampled_by_truncation(golden_path: Path) -> None:
    arrays = read(golden_path)
    got = resampled(arrays["guide"], len(arrays["itps_guide_index"]))
    torch.testing.assert_close(got, arrays["itps_guide_resampled"], rtol=0, atol=0)
    torch.testing.assert_close(got, arrays["guide"][arrays["itps_guide_index"]], rtol=0, atol=0)


@pytest.mark.golden("steering_rti_itps*.npz")
def test_plans_along_a_guide(golden_path: Path) -> None:
    arrays = read(golden_path)
    sketch = ActionSketch(tuple(map(tuple, arrays["guide"].tolist())))
    obs = {"state": torch.zeros(len(arrays["x_init"]), 1, 1)}
    found = [name for name in arrays if name.startswith("itps_") and "_N" in name]
    assert found
    for name in found:
        strategy, steps = name.removeprefix("itps_").rsplit("_N", 1)
        policy = ancestral(arrays, int(steps))
        steered = SketchedPolicy(policy, sketch, SketchSettings(NAMES.get(strategy, strategy), gradient="x"))
        with torch.no_grad():
            plan = steered.plan(obs, tape(arrays, steered, int(steps)))
        torch.testing.assert_close(plan, arrays[name], rtol=0, atol=TOLERANCE, msg=name)
