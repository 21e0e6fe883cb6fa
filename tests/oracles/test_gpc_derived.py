"""Five conventions at one noisy state, their composition, and mixtures of Gaussians in closed form.

`flow_chain_x` is not covered: it interpolates the diffusion's levels in ln(alpha / sigma), we in their angle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from official_networks import read
from torch import Tensor

from policies.composition.compose import compose
from policies.composition.operators import Sum, combine, responsibilities
from policies.composition.policy import ComposedPolicy
from policies.denoising import DenoisingPolicy
from policies.processes import RectifiedFlow, VPDiffusion
from policies.processes.edm import Edm
from policies.processes.schedules import time_of_level
from policies.samplers.ddpm import DDIM
from policies.samplers.ode import Euler
from tests.oracles.toy_field import toy_policy

TOLERANCE: dict[str, Any] = {"atol": 1e-10, "rtol": 1e-10}
LEVELS = 100
NAMES = ("eps", "x0", "v", "flow", "edm")


def member(arrays: dict[str, Tensor], name: str, horizon: int) -> DenoisingPolicy:
    """One of the five models, in our conventions.

    The flow's time and sign are ours, and EDM's first layer absorbs the scale of our state.
    """
    weights = {key: arrays[f"net_{name}_{key}"].clone() for key in ("A", "v", "c")}
    options: dict[str, Any] = {"horizon": horizon, "act_steps": horizon}
    if name == "flow":
        weights["c"] += weights["v"]
        weights["v"] *= -1
        process = RectifiedFlow(time_scale=1.0)
        return toy_policy(process, weights, sign=-1.0, sampler=Euler(clip_action=None), **options)
    if name == "edm":
        weights["A"] /= 0.5
        return toy_policy(
            Edm(data_std=0.5, noise_min=1e-4, noise_max=100.0, time_scale=1.0), weights, **options
        )
    process_of = VPDiffusion(LEVELS, prediction=name)
    return toy_policy(process_of, weights, time_scale=LEVELS, sampler=DDIM(clip_x0=None), **options)


def composed(arrays: dict[str, Tensor]) -> ComposedPolicy:
    horizon = arrays["x"].shape[2]
    members = [member(arrays, name, horizon) for name in NAMES]
    return compose(members, arrays["weights"].tolist())


@pytest.mark.golden("gpc_derived*.npz")
def test_five_conventions_at_one_state(golden_path: Path) -> None:
    arrays = read(golden_path)
    policy = composed(arrays)
    times = time_of_level(arrays["t"].double(), LEVELS)
    for name, expected in zip(policy.process.alpha_sigma(times), ("alpha", "sigma"), strict=True):
        torch.testing.assert_close(name, arrays[expected], **TOLERANCE)
    for row, t in enumerate(times):
        x = arrays["x"][row]
        cond = policy.encode({"state": torch.zeros(len(x), 1, 1, dtype=x.dtype)})
        rows = t.expand(len(x))
        for number, name in enumerate(NAMES):
            alone = policy.with_weights(*(float(i == number) for i in range(len(NAMES))))
            said = alone.predict(x, rows, cond, kind="eps")
            torch.testing.assert_close(said, arrays[f"out_eps_from_{name}"][row], **TOLERANCE)
        for kind in ("eps", "score", "x0", "v"):
            said = policy.predict(x, rows, cond, kind=kind)
            torch.testing.assert_close(said, arrays[f"out_{kind}_composed"][row], **TOLERANCE)
        x0, eps = (policy.predict(x, rows, cond, kind=kind) for kind in ("x0", "eps"))
        torch.testing.assert_close(eps - x0, arrays["out_flow_velocity_composed"][row], **TOLERANCE)
        alpha, sigma = policy.process.alpha_sigma(time_of_level(arrays["t_next"][row].double(), LEVELS))
        torch.testing.assert_close(alpha * x0 + sigma * eps, arrays["out_ddim_next"][row], **TOLERANCE)


@pytest.mark.golden("gpc_derived*.npz")
def test_the_bound_composition_says_the_same_at_its_steps(golden_path: Path) -> None:
    arrays = read(golden_path)
    policy = composed(arrays).with_sampler(DDIM(steps=LEVELS, clip_x0=None))
    cond = policy.encode({"state": torch.zeros(arrays["x"].shape[1], 1, 1, dtype=torch.float64)})
    bound = policy.bind(cond)
    for row, level in enumerate(arrays["t"].tolist()):
        eps = bound(LEVELS - 1 - level, arrays["x"][row])
        # the loop hands networks their times in float32
        torch.testing.assert_close(eps, arrays["out_eps_composed"][row], atol=1e-6, rtol=0)


@pytest.mark.golden("gpc_derived*.npz")
def test_and_and_or_of_two_gaussians(golden_path: Path) -> None:
    arrays = read(golden_path)
    scores, shares = arrays["ao_score"], arrays["ao_w"].tolist()
    found = responsibilities(shares, arrays["ao_logp"])
    torch.testing.assert_close(found, arrays["ao_resp"], **TOLERANCE)
    mixed = combine(list(scores), list(found[..., None]))
    torch.testing.assert_close(mixed, arrays["ao_or_score"], **TOLERANCE)
    torch.testing.assert_close(combine(list(scores), shares), arrays["ao_and_score"], **TOLERANCE)
    both = Sum((0, 1), (1.0, 1.0), surplus=1.0, noise_free=0.0)
    torch.testing.assert_close(
        both(lambda i: scores[i], arrays["ao_x"]), arrays["ao_and_sum_score"], **TOLERANCE
    )
