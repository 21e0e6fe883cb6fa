"""Closed-form improvement against the released program, by its critics of quantiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from official_critics import arrays_of
from torch import Tensor

from policies.networks.critics import aggregate
from policies.wrappers.closed_form import improved

CLOSE = {"rtol": 1e-5, "atol": 2e-6}
FRACTIONS = 32


def quantile_mean(w: Mapping[str, Tensor], net: str, state: Tensor, action: Tensor) -> Tensor:
    """Return the mean (B,) of a file's implicit quantiles."""

    def dense(name: str, norm: str, h: Tensor) -> Tensor:
        h = F.linear(h, w[f"{net}/{name}.weight"], w[f"{net}/{name}.bias"])
        return F.layer_norm(h, h.shape[-1:], w[f"{net}/{norm}.weight"], w[f"{net}/{norm}.bias"])

    h = torch.cat([state, action], dim=-1)
    for layer in (0, 3):
        h = dense(f"base_fc.{layer}", f"base_fc.{layer + 1}", h).relu()
    tau = (torch.arange(FRACTIONS) + 0.5) / FRACTIONS
    angle = tau[:, None] * torch.pi * torch.arange(1, w[f"{net}/tau_fc.0.weight"].shape[1] + 1)
    x = dense("tau_fc.0", "tau_fc.1", angle.cos()).sigmoid()
    h = dense("merge_fc.0", "merge_fc.1", x * h[..., None, :]).relu()
    return F.linear(h, w[f"{net}/last_fc.weight"], w[f"{net}/last_fc.bias"]).mean(dim=(-2, -1))


def worth_of(arrays: dict[str, Any], beta: float) -> Callable[[Tensor], Tensor]:
    """Return the lower bound (B, R) of what tanh makes of points (B, R, A)."""

    def worth(points: Tensor) -> Tensor:
        state = arrays["obs"][:, None].expand(-1, points.shape[1], -1)
        values = torch.stack([quantile_mean(arrays, net, state, points.tanh()) for net in ("q1", "q2")])
        return aggregate(values, "mean_std", pessimism=beta * math.sqrt(2))  # of the corrected deviation

    return worth


def gaussian(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return mean[:, None], std[:, None], torch.zeros(len(mean), 1)


@pytest.mark.golden("cfpi_actions.npz")
def test_a_gaussian_acts_as_the_released_program_does(golden_path: Path) -> None:
    arrays = arrays_of(golden_path)
    for beta in ("0.1", "0.5", "1.0", "2.0"):
        found = worth_of(arrays, float(beta))(arrays["mean"][:, None])[:, 0]
        torch.testing.assert_close(found, arrays[f"q_lb/beta_{beta}"], **CLOSE)
    modes = gaussian(arrays["mean"], arrays["std"])
    for case in ("wide", "fixed", "fine", "none"):
        radii = arrays[f"single/{case}/delta"] if case != "none" else torch.zeros(1)
        worth = worth_of(arrays, float(arrays[f"single/{case}/beta_LB"]))
        found, _ = improved(worth, modes, radii, min_weight=0.05, bound=None)
        torch.testing.assert_close(found, arrays[f"single/{case}/pre_tanh"], **CLOSE)
    behaviour = torch.atanh(arrays["det/behavior_action"].clamp(-0.999999, 0.999999))
    low, high = arrays["det/delta_range"]
    radii = (arrays["det/u"] * (high - low) + low).float()
    modes = gaussian(behaviour, torch.ones_like(behaviour))
    found, _ = improved(worth_of(arrays, 1.0), modes, radii, min_weight=0.05, bound=None)
    torch.testing.assert_close(found.tanh(), arrays["det/action"], **CLOSE)


@pytest.mark.golden("cfpi_actions.npz")
def test_a_mixture_acts_by_the_corrected_form(golden_path: Path) -> None:
    arrays = arrays_of(golden_path)
    modes = arrays["mix/mean"], arrays["mix/std"], arrays["mix/weights"].log()
    worth = worth_of(arrays, 1.0)
    for case, radius in (("d05", 0.5), ("d2", 2.0)):
        found, mode = improved(worth, modes, torch.tensor([radius]), min_weight=0.05, bound=None)
        known = f"mix_corrected/lse/{case}/max"
        torch.testing.assert_close(found, arrays[f"{known}/pre_tanh"], **CLOSE)
        torch.testing.assert_close(worth(found[:, None])[:, 0], arrays[f"{known}/value"], **CLOSE)
        assert (arrays["mix/weights"].gather(1, mode[:, None]) >= 0.05).all()
    found, _ = improved(worth, modes, torch.zeros(1), min_weight=0.05, bound=None)
    torch.testing.assert_close(found.tanh(), arrays["mix/none/action"], **CLOSE)
