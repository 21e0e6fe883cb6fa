"""The official composition of two diffusion policies: its chains on recorded noise, inpainting included."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from official_networks import read
from torch import Tensor

from policies.composition.compose import compose
from policies.composition.policy import ComposedPolicy
from policies.denoising import DenoisingPolicy
from policies.processes import VPDiffusion
from policies.processes.schedules import cumulative_alphas
from policies.protocols import Hook, Step
from policies.samplers.ddpm import DDIM, DDPM
from tests.oracles.toy_field import toy_policy

TOLERANCE = 5e-5
CASE = re.compile(r"(ddpm|ddim)_N(\d+)_w(-?[\d.]+)_(-?[\d.]+?)(_inpaint)?__action")
DDPM_RULES = {"noise_clip": None, "min_std": 0.0, "final_std": None}


@dataclass
class Recorder(Hook):
    """Keeps the states that the networks see, and overwrites known entries as the official loop does."""

    mask: Tensor
    known: Tensor
    states: list[Tensor] = field(default_factory=list)

    def on_prediction(self, step: Step, x: Tensor, x0: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        self.states.append(x)
        return x0, eps

    def on_state(self, step: Step, x: Tensor) -> Tensor:
        return torch.where(self.mask, self.known, x)


def member(arrays: dict[str, Tensor], number: int) -> DenoisingPolicy:
    """One of the two policies; each has an observation of its own."""
    weights = {name: arrays[f"net{number}_{name}"] for name in ("A", "v", "c", "W")}
    horizon = arrays["x_init"].shape[1]
    policy = toy_policy(
        VPDiffusion(int(arrays["K"]), prediction="eps"),
        weights,
        obs_dim=len(weights["W"]),
        time_scale=float(arrays["K"]),
        horizon=horizon,
        act_steps=int(arrays["Ta"]),
        action_start=int(arrays["To"]) - 1,
    )
    for part in ("scale", "offset"):
        policy.normalizer.get_buffer(f"action_{part}").copy_(arrays[f"norm_{part}"])
    return policy


def composed(arrays: dict[str, Tensor], weights: list[float]) -> ComposedPolicy:
    members = [member(arrays, 1), member(arrays, 2)]
    first, whole = members[0].obs_dim, sum(policy.obs_dim for policy in members)
    columns = [range(first), range(first, whole)]
    return compose(members, weights, columns=[tuple(one) for one in columns], obs_dim=whole)


@pytest.mark.golden("gpc_official*.npz")
def test_official_chains(golden_path: Path) -> None:
    arrays = read(golden_path)
    cases = [(name, found) for name in arrays if (found := CASE.fullmatch(name))]
    assert cases and [name for name, _ in cases] == [name for name in arrays if name.endswith("__action")]
    policy = composed(arrays, [0.5, 0.5])
    bar = cumulative_alphas(policy.process.betas())
    torch.testing.assert_close(bar, arrays["alphas_cumprod"], rtol=2e-5, atol=0)
    obs = torch.cat([arrays["global_cond1"], arrays["global_cond2"]], dim=1)[:, None]
    for name, found in cases:
        kind, steps, one, two, inpaint = found.groups()
        rules = {"steps": int(steps)}
        sampler = DDPM(**rules, **DDPM_RULES) if kind == "ddpm" else DDIM(**rules, recompute_eps=False)
        view = policy.with_weights(float(one), float(two)).with_sampler(sampler)
        mask = arrays["inpaint_mask"] if inpaint else torch.zeros_like(arrays["inpaint_mask"])
        recorder = Recorder(mask, arrays["inpaint_data"])
        noise = torch.where(mask, arrays["inpaint_data"], arrays["x_init"])
        if kind == "ddpm":
            noise = torch.cat([noise[:, None], arrays["step_noise"].transpose(0, 1)], dim=1)
        cond = view.encode(view.observation(obs))
        chunk = view.decode(cond, noise, hooks=[recorder])
        expected = {key: arrays[f"{name[:-8]}__{key}"] for key in ("action_pred", "action", "x_at_call")}
        torch.testing.assert_close(view.physical(chunk), expected["action_pred"], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(view.executed(chunk)[0], expected["action"], atol=TOLERANCE, rtol=0)
        calls = arrays[f"{name[:-8]}__call_index"].tolist()
        states = torch.stack([recorder.states[k] for k in calls])
        torch.testing.assert_close(states, expected["x_at_call"], atol=TOLERANCE, rtol=0)
        for k, x, eps in zip(calls, states, arrays[f"{name[:-8]}__eps1_at_call"], strict=True):
            t = torch.tensor([view.table.times[k]])
            said = view.fields[0].predict(x, t, cond.members[0], kind="eps")
            torch.testing.assert_close(said, eps, atol=TOLERANCE, rtol=0)
        if not inpaint:  # without a hook the loop takes a shorter way
            torch.testing.assert_close(view.decode(cond, noise), chunk, atol=TOLERANCE, rtol=0)
