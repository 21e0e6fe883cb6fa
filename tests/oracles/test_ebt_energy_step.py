"""Energy descent follows the released code of EBT-Policy: steps, losses and their gradients, acting.

The reference normalises and stops by the batch as a whole; `batch_coupled` does so here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from official_networks import read
from torch import Tensor, nn

from policies.build import build_policy
from policies.policy import PolicyConfig
from policies.processes.ebt import EnergyDescent
from policies.protocols import TE, Cond
from policies.samplers.descent import Descent, DescentPolicy

STATES, GRADIENTS = 2e-5, 1e-5
"""Tolerances stated with the reference numbers."""

WEIGHTS = ("A", "W", "b", "C", "d")


@dataclass(frozen=True)
class ToyConfig:
    """Builds a `Toy`."""

    hidden: int

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> Toy:
        return Toy(shape[1], cond_dim, self.hidden)


class Toy(nn.Module):
    """(tanh(x A + cond W + b) C + d)^2 for every row of a chunk."""

    def __init__(self, action_dim: int, cond_dim: int, hidden: int) -> None:
        super().__init__()
        shapes = ((action_dim, hidden), (cond_dim, hidden), (hidden,), (hidden, action_dim), (action_dim,))
        for name, shape in zip(WEIGHTS, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> Callable[[int, Tensor], Tensor]:
        a, w, b, c, d = (self.get_parameter(name) for name in WEIGHTS)
        offset = (cond.vec @ w + b).unsqueeze(1)
        return lambda k, x: (torch.tanh(x @ a + offset) @ c + d).square()


def policy_of(arrays: dict[str, Tensor], alpha: float, tau: float, **settings: Any) -> DescentPolicy:
    """Build the policy of a case: alpha / tau is the step down the mean of the network's output."""
    (horizon, action_dim), cond_dim = arrays["x_init"].shape[1:], arrays["cond"].shape[1]
    process = EnergyDescent(
        step_size=alpha / tau / (horizon * action_dim), batch_coupled=True, max_growth=math.inf, **settings
    )
    config = PolicyConfig(
        process=process,
        backbone=ToyConfig(len(arrays["net_b"])),
        horizon=horizon,
        act_steps=horizon,
        normalizer={"state": "identity", "action": "identity"},
    )
    policy = build_policy(config, obs_dim=cond_dim, action_dim=action_dim)
    assert isinstance(policy, DescentPolicy)
    policy.field.net.load_state_dict({name: arrays[f"net_{name}"] for name in WEIGHTS})
    return policy


def cases(arrays: dict[str, Tensor]) -> list[str]:
    names = [name.removesuffix("__hyper") for name in arrays if name.endswith("__hyper")]
    return [name for name in names if name != "infer"]


def trained(arrays: dict[str, Tensor], case: str) -> tuple[DescentPolicy, Cond, TE]:
    """Return the policy of a training case, its condition and its draws."""
    alpha, tau, scale, truncate, steps, momentum, least, most = arrays[f"{case}__hyper"].tolist()
    policy = policy_of(
        arrays,
        alpha,
        tau,
        num_steps=int(steps),
        extra_steps=0,
        step_spread=scale,
        truncate=bool(truncate),
        momentum=momentum,
        noise_min=least,
        noise_max=most,
    )
    start = arrays["x_init"]
    count = torch.full((len(start),), int(steps))
    ratio, noise = (arrays[f"{case}__{name}"].transpose(0, 1) for name in ("alpha_u", "langevin_noise"))
    draws = {"num_steps": count, "ratio": ratio.flatten(1), "langevin": noise}
    return policy, Cond(arrays["cond"]), TE(torch.zeros(len(start)), start, more=draws)


@pytest.mark.golden("ebt_energy_step*.npz")
def test_every_step_of_training(golden_path: Path) -> None:
    arrays = read(golden_path)
    assert cases(arrays)
    for case in cases(arrays):
        policy, cond, te = trained(arrays, case)
        process, energy = policy.process, policy.field.bind_energy(cond, torch.zeros(1))
        x, v = te.eps, torch.zeros_like(te.eps)
        for i, draws in enumerate(te.more["langevin"].unbind(1)):
            std = process.noise_std(torch.tensor(float(i)), te.more["num_steps"][0])
            least = 1 / process.step_spread
            ratio = least + te.more["ratio"][:, i, None, None] * (process.step_spread - least)
            x, v, value, gradient = (
                part.detach() for part in process.step(energy, x, v, ratio=ratio, noise=std * draws)
            )
            found = {"x": x, "velocity_after": v, "energy": value, "grad": gradient}
            for name, part in found.items():
                torch.testing.assert_close(part, arrays[f"{case}__{name}"][i], rtol=0, atol=STATES)


@pytest.mark.golden("ebt_energy_step*.npz")
def test_losses_and_their_gradients(golden_path: Path) -> None:
    arrays = read(golden_path)
    for case in cases(arrays):
        policy, cond, te = trained(arrays, case)
        loss = policy.matching_loss(cond, arrays["action"], te, reduce="mean")
        torch.testing.assert_close(loss.double(), arrays[f"{case}__loss"], rtol=0, atol=STATES)
        weights = [policy.field.net.get_parameter(name) for name in WEIGHTS]
        for name, gradient in zip(WEIGHTS, torch.autograd.grad(loss, weights), strict=True):
            torch.testing.assert_close(gradient, arrays[f"{case}__loss_grad_{name}"], rtol=0, atol=GRADIENTS)


@pytest.mark.golden("ebt_energy_step*.npz")
def test_noise_falls_along_a_cosine(golden_path: Path) -> None:
    tables = {name: value for name, value in read(golden_path).items() if name.startswith("sigma_table_N")}
    assert tables
    for name, table in tables.items():
        count = int(name.removeprefix("sigma_table_N"))
        i = torch.arange(count, dtype=table.dtype)
        found = EnergyDescent().noise_std(i, torch.tensor(count))
        torch.testing.assert_close(found, table, rtol=0, atol=1e-7)


@pytest.mark.golden("ebt_energy_step*.npz")
def test_the_walk_of_acting(golden_path: Path) -> None:
    arrays = read(golden_path)
    alpha, tau, momentum = arrays["infer__hyper"].tolist()
    most, flat = int(arrays["infer__max_steps"]), float(arrays["infer__min_grad"])
    policy, cond = policy_of(arrays, alpha, tau, momentum=momentum), Cond(arrays["cond"])
    whole = policy.with_sampler(Descent(steps=most, min_slope=flat)).descend(cond, arrays["x_init"])
    assert set(whole.steps.tolist()) == {int(arrays["infer__steps"])}
    for i, (x, value) in enumerate(zip(arrays["infer__x"], arrays["infer__energy"], strict=True)):
        part = policy.with_sampler(Descent(steps=i + 1, min_slope=flat)).descend(cond, arrays["x_init"])
        torch.testing.assert_close(part.action, x, rtol=0, atol=STATES)
        torch.testing.assert_close(part.energy, value, rtol=0, atol=STATES)
    torch.testing.assert_close(whole.action, arrays["infer__x"][-1], rtol=0, atol=STATES)
    slopes, energy = arrays["infer__grad_norm"], policy.field.bind_energy(cond, torch.zeros(1))
    x, v = arrays["x_init"], torch.zeros_like(arrays["x_init"])
    for slope in slopes:
        x, v, _, gradient = (part.detach() for part in policy.process.step(energy, x, v))
        found = policy.process.slope(gradient)
        torch.testing.assert_close(found.double(), slope.expand(len(x)), rtol=0, atol=STATES)
