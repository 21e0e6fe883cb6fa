"""How much a frozen policy depends on its noise: known for one whose chunks are state plus scaled noise."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from point_steering import changed, start
from torch import Tensor

from algos.steerability import look_at_noise


class Additive:
    """chunk = state + scale * noise."""

    latent_dim = 3

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def warmup_latent(self, cond: Tensor, eps: Tensor) -> Tensor:
        return eps

    def chunk(self, cond: Tensor, latent: Tensor) -> Tensor:
        return cond + self.scale * latent


@pytest.mark.parametrize(("scale", "is_little"), [(0.5, False), (0.08, False), (0.01, True)])
def test_deviations_over_noises_and_over_states_are_told_apart(
    scale: float, is_little: bool, caplog: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    cond = torch.linspace(-1, 1, 64)[:, None].expand(-1, 3)
    with caplog.at_level(logging.WARNING, logger="algos.steerability"):
        found = look_at_noise(Additive(scale), cond, generator)  # type: ignore[arg-type]
    assert float(found["frozen/noise_spread"]) == pytest.approx(scale, rel=0.1)
    assert float(found["frozen/state_spread"]) == pytest.approx(float(cond[:, 0].std()), rel=0.1)
    assert ("nearly the same from every noise" in caplog.text) == is_little


@pytest.mark.parametrize("variant", ["na", "sac"])
def test_a_run_looks_once_before_its_first_update(variant: str) -> None:
    run = start(changed(variant=variant))
    reports = []
    while run.progress < run.total:
        reports.append(run.advance())
    run.close()
    told = [report for report in reports if "frozen/noise_spread" in report]
    assert len(told) == 1 and told[0]["frozen/noise_spread"] > 0
    assert "critic/loss" in told[0] and not any("critic/loss" in r for r in reports[: reports.index(told[0])])
