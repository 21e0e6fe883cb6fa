"""Advantages of segments are ours of chunks: TCE needs only long chunks and correlated noise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_networks import read
from torch import Tensor

from algos.onpolicy.losses import gae


def advantages(reward: Tensor, value: Tensor, done: Tensor, gamma: float, lam: float) -> Tensor:
    """Return (T, N) from rewards (T, N), values (T + 1, N) and ends (T, N)."""
    none = torch.zeros_like(done)
    return gae(reward, value[:-1], value[1:], done, none, gamma=gamma, lam=lam)[0]


@pytest.mark.golden("tce_segments*.npz")
def test_single_steps_and_segments_from_value_to_value(golden_path: Path) -> None:
    """Not implemented: sums of step advantages that count borders twice, and returns without a critic."""
    data = read(golden_path)
    reward, value, done = data["rewards"].T, data["values"].T, data["done"].T
    for gamma in (1.0, 0.97):
        found = advantages(reward, value, done, gamma, 0.95)
        torch.testing.assert_close(found.T, data[f"{gamma}/step_advantage"], rtol=1e-12, atol=1e-12)
        for k, (first, end) in enumerate(data["pairs"].tolist()):
            weight = gamma ** torch.arange(end - first, dtype=torch.float64)
            total = (weight[:, None] * reward[first:end]).sum(dim=0, keepdim=True)
            ends = value[[first, end]]
            one = advantages(total, ends, done[end - 1 : end], gamma ** (end - first), 0.0)
            expected = data[f"{gamma}/value_subtraction"][:, k]
            torch.testing.assert_close(one[0], expected, rtol=1e-12, atol=1e-12)
