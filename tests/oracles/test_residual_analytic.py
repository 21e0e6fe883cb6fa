"""Residual policies against closed forms: actions, densities, transitions, the best correction, the ramp.

Not compared: the schedule of probing episodes (`probe_*`), in which the policy alone acts first: no
algorithm collects so.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from official_critics import arrays_of
from torch import Tensor

from algos.critics.residual import ResidualConfig
from algos.transitions import Rewarding, tabulate
from envs.datasets.episodes import EpisodeDataset
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.networks.distributions import tanh_draw
from policies.policy import Policy, PolicyConfig
from policies.processes import RectifiedFlow
from policies.wrappers.candidates import CandidatePolicy, Candidates

files = pytest.mark.golden("residual_analytic*.npz")
EXACT = {"rtol": 0.0, "atol": 1e-6}


@pytest.fixture
def arrays(golden_path: Path) -> dict[str, Any]:
    return {name: torch.as_tensor(value).double() for name, value in arrays_of(golden_path).items()}


def base_policy(width: int, obs_dim: int = 1, steps: int = 1) -> Policy:
    config = PolicyConfig(
        process=RectifiedFlow(), backbone=MlpConfig(width=8), horizon=steps, act_steps=steps,
        normalizer={"state": "identity", "action": "identity"}, observation_clip=None,
    )  # fmt: skip
    return build_policy(config, obs_dim=obs_dim, action_dim=width)


def corrected(arrays: dict[str, Any]) -> CandidatePolicy:
    wrapper = Candidates(
        num_candidates=1,
        num_edited=1,
        keeps_base=False,
        edit_scale=float(arrays["action_scale"]),
        edit_dims=(8,),
    )
    return wrapper.wrap(base_policy(arrays["base"].shape[1])).double()


@files
def test_executed_actions_stay_in_the_box(arrays: dict[str, Any]) -> None:
    policy = corrected(arrays)
    torch.testing.assert_close(policy.scale * arrays["pre_tanh"].tanh(), arrays["residual"], **EXACT)
    found = policy.edited(arrays["base"], arrays["pre_tanh"].tanh())
    torch.testing.assert_close(found, arrays["executed"], **EXACT)


@files
def test_densities_are_those_of_the_unit_box_and_of_scaled_edits(arrays: dict[str, Any]) -> None:
    scale, width = float(arrays["action_scale"]), arrays["mu"].shape[1]
    u, log_prob = tanh_draw(arrays["mu"], arrays["log_std"], arrays["eps"])
    torch.testing.assert_close(log_prob, arrays["log_prob_unit"], **EXACT)
    torch.testing.assert_close(scale * u, arrays["sampled_residual"], **EXACT)
    scaled = log_prob - width * math.log(scale)
    torch.testing.assert_close(scaled, arrays["log_prob_scaled"], **EXACT)
    assert width * math.log(2 * scale) == pytest.approx(float(arrays["max_entropy_scaled"]))
    config = ResidualConfig(edit_scale=scale, online_steps=1)
    assert config.target_entropy_of(width) < float(arrays["max_entropy_scaled"])


@files
def test_transitions_of_several_steps_end_with_task_and_episode(arrays: dict[str, Any]) -> None:
    """Rows that are cut by a time limit before n steps are no transitions of ours; the others are."""
    steps, gamma = int(arrays["n"]), float(arrays["gamma"])
    episode = arrays["episode"].long()
    begins = (episode.diff() != 0).nonzero().squeeze(1) + 1
    starts = torch.cat([torch.zeros(1, dtype=torch.long), begins, torch.tensor([len(episode)])])
    rows, width = len(episode), 2
    data = EpisodeDataset.from_arrays(
        torch.arange(rows).float()[:, None], torch.zeros(rows, width), arrays["rew"].float(),
        arrays["terminated"].bool(), arrays["truncated"].bool(), starts,
        next_observations=torch.arange(1, rows + 1).float()[:, None],
    )  # fmt: skip
    table = tabulate(data, base_policy(width, steps=steps), Rewarding(gamma))
    batch, kept = table.gather(torch.arange(len(table))), table.frame
    assert kept is not None
    is_whole = (arrays["nstep_len"] == steps) | (arrays["nstep_discount"] == 0)
    assert torch.equal(kept, is_whole.nonzero().squeeze(1))
    torch.testing.assert_close(batch.discount.double(), arrays["nstep_discount"][kept], **EXACT)
    last = kept + arrays["nstep_len"][kept].long() - 1
    found = batch.reward.double() + batch.discount.double() * arrays["bootstrap_value"][last]
    torch.testing.assert_close(found, arrays["nstep_target"][kept], **EXACT)


@files
def test_the_best_correction_is_reached_by_climbing_the_value(arrays: dict[str, Any]) -> None:
    policy, goal, base = corrected(arrays), arrays["a_star"], arrays["base"]
    u = torch.zeros_like(base, requires_grad=True)
    for _ in range(1500):
        loss = (policy.edited(base, u) - goal).square().sum()
        (slope,) = torch.autograd.grad(loss, u)
        u = (u - 2.0 * slope).clamp(-1, 1).detach().requires_grad_()
    inside = (base + arrays["best_residual"]).abs() <= 1
    found = policy.edited(base, u) - base
    assert bool(inside.any())
    torch.testing.assert_close(found[inside], arrays["best_residual"][inside], **EXACT)
    torch.testing.assert_close(-(base - goal).square().sum(1), arrays["base_value"], **EXACT)
    value: Tensor = -(base + arrays["best_residual"] - goal).square().sum(1)
    torch.testing.assert_close(value, arrays["best_value"], **EXACT)


@files
def test_the_scale_rises_as_asked(arrays: dict[str, Any]) -> None:
    scale, length = float(arrays["action_scale"]), int(arrays["ramp_len"])
    config = ResidualConfig(edit_scale=scale, ramp_steps=length, online_steps=1)
    found = [config.scale_after(int(step)) for step in arrays["ramp_step"]]
    assert found == pytest.approx(arrays["ramp_scale"].tolist())
