"""Consistency models against Consistency-AC's released class: the map to clean actions, neighbouring levels.

Not compared: its losses, which are per entry where ours are iCT's of a chunk; its numbers of levels, which
grow with the steps; sampling, whose times are even in the level where ours follow the Karras scale.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from official_critics import arrays_of
from torch import Tensor
from torch.nn.functional import linear, mish

from policies.processes.consistency import Consistency

NUM_LEVELS = (2, 3, 18, 150)
official = pytest.mark.golden("consistency_ac_*.npz")
PROCESS = Consistency(noise_min=0.002, noise_max=80.0, rho=7.0, data_std=0.5)


def network(arrays: dict[str, Tensor], x: Tensor, level: Tensor, state: Tensor) -> Tensor:
    """The network of the file: an embedding of the level, three hidden layers."""

    def layer(name: str, value: Tensor) -> Tensor:
        return linear(value, arrays[f"{name}.weight"], arrays[f"{name}.bias"])

    waves = level * torch.exp(torch.arange(8) * -(math.log(10_000) / 7))
    embedded = torch.cat([waves.sin(), waves.cos()], dim=-1)
    embedded = layer("time_mlp.3", mish(layer("time_mlp.1", embedded)))
    hidden = torch.cat([x, embedded, state], dim=-1)
    for i in (0, 2, 4):
        hidden = mish(layer(f"mid_layer.{i}", hidden))
    return layer("final_layer", hidden)


@official
@pytest.mark.parametrize("case", ["T1", "T2", "T5"])
def test_the_clean_action_of_a_noisy_one_is_the_official_one(golden_path: Path, case: str) -> None:
    found = {k.removeprefix(f"sample/{case}/"): v for k, v in arrays_of(golden_path).items() if case in k}
    weights = {k.removeprefix("model/"): v for k, v in found.items() if k.startswith("model/")}
    y, level = found["f_x"], found["f_t"]
    output = network(weights, y, level, found["state"])
    t = 1 / (1 + level[:, 0].double())
    x = PROCESS.alpha_sigma(t)[0][:, None] * y.double()  # the state of our path
    clean = PROCESS.end_of(x[:, None], t, output.double()[:, None])[:, 0]
    torch.testing.assert_close(clean.float(), found["f"], rtol=1e-5, atol=1e-5)


@official
@pytest.mark.parametrize("count", NUM_LEVELS)
def test_neighbouring_levels_are_the_official_ones(golden_path: Path, count: int) -> None:
    levels = arrays_of(golden_path)[f"boundaries/{count}"].double()
    process = Consistency(noise_min=0.002, noise_max=80.0, rho=7.0, data_std=0.5, num_levels=count)
    cleaner = process.cleaner(1 / (1 + levels[1:]))
    torch.testing.assert_close(1 / cleaner - 1, levels[:-1], rtol=1e-5, atol=0)
