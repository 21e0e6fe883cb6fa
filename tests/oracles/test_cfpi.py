"""Closed-form improvement against the released program: its actions, and steps of its critics.

Ours add less to the variances that they normalise by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from official_critics import arrays_of
from torch import Tensor

from algos.critics.cfpi import CfpiConfig, CfpiLearner
from algos.critics.losses import fractions
from algos.transitions import Batch
from policies.build import build_policy
from policies.networks.critics import QuantileEnsemble, aggregate
from policies.policy import PolicyConfig
from policies.processes.gaussian import GaussianProcess
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


NETS = ("qf1", "qf2")
HIDDEN = (("base_fc.0", "base_fc.1"), ("base_fc.3", "base_fc.4"), ("merge_fc.0", "merge_fc.1"))


def stacked(arrays: dict[str, Any], prefix: str, layer: str, norm: str = "") -> list[Tensor]:
    """Return weight (E, in, out), bias, scale and shift (E, 1, out) of a layer of a file's critics."""
    names = [f"{layer}.weight", f"{layer}.bias", *([f"{norm}.weight", f"{norm}.bias"] if norm else [])]
    weight, *rows = (torch.stack([arrays[f"{prefix}{net}/{name}"] for net in NETS]) for name in names)
    return [weight.transpose(1, 2), *(row[:, None] for row in rows)]


def pairs(critic: QuantileEnsemble, arrays: dict[str, Any], prefix: str) -> list[tuple[Tensor, Tensor]]:
    """Return every weight of ours beside that of a file."""
    found = list(zip(critic.fraction, stacked(arrays, prefix, "tau_fc.0", "tau_fc.1"), strict=True))
    for i, names in enumerate(HIDDEN):
        own = (critic.weight[i], critic.bias[i], critic.scale[i], critic.shift[i])
        found += zip(own, stacked(arrays, prefix, *names), strict=True)
    return found + list(
        zip((critic.weight[-1], critic.bias[-1]), stacked(arrays, prefix, "last_fc"), strict=True)
    )


def sarsa_learner(arrays: dict[str, Any]) -> CfpiLearner:
    first = {name: arrays[f"init/qf1/{name}"] for name in ("tau_fc.0.weight", "merge_fc.0.weight")}
    width, cosines = first["tau_fc.0.weight"].shape
    config = CfpiConfig(
        critics=len(NETS), critic_dims=(width, width, len(first["merge_fc.0.weight"])),
        critic_activation="relu", norm_after=False, critic_cosines=cosines,
        quantiles=arrays["step1/u"].shape[1], critic_lr=3e-4, tau=0.005,
    )  # fmt: skip
    parts = PolicyConfig(
        process=GaussianProcess(), horizon=1, act_steps=1, observation_clip=None,
        normalizer={"state": "identity", "action": "identity"},
    )  # fmt: skip
    state, action = (arrays[f"step1/{name}"].shape[1] for name in ("observations", "actions"))
    learner = CfpiLearner(build_policy(parts, obs_dim=state, action_dim=action), config)
    for critic, prefix in ((learner.critic, "init/"), (learner.target_critic, "init/target_")):
        assert isinstance(critic, QuantileEnsemble)
        critic.config = replace(critic.config, norm_eps=1e-5)
        with torch.no_grad():
            for own, official in pairs(critic, arrays, prefix):
                own.copy_(official)
    return learner


@pytest.mark.golden("cfpi_sarsa_iqn*.npz")
def test_steps_of_the_critics_are_those_of_the_released_program(arrays: dict[str, Any]) -> None:
    learner = sarsa_learner(arrays)
    for step in ("step1", "step2"):
        one = {name.removeprefix(f"{step}/"): part for name, part in arrays.items()}
        rows = len(one["actions"])
        batch = Batch(
            cond=one["observations"], action=one["actions"], reward=one["rewards"][:, 0],
            next_cond=one["next_observations"], discount=0.99 * (1 - one["terminals"][:, 0]),
            next_action=one["next_actions"], has_next=torch.ones(rows), plan=one["actions"],
            real=torch.ones(rows, 1), row=torch.arange(rows),
        )  # fmt: skip
        draws = {"next": torch.zeros(rows, 0), "fractions": one["u"].unflatten(0, (2, rows))}
        torch.testing.assert_close(fractions(one["u"]), (one["tau_hat"], one["weights"]), **CLOSE)
        found = learner.step(batch, draws)["critic/loss"]
        torch.testing.assert_close(found, one["loss"], rtol=1e-6, atol=1e-7)
        for critic, prefix in ((learner.critic, "after/"), (learner.target_critic, "after/target_")):
            for own, official in pairs(critic, one, prefix):
                torch.testing.assert_close(own.detach(), official, rtol=0, atol=1e-6)


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
