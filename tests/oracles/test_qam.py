"""QAM, its variants and TRQAM against the released agents: chains, adjoints, losses, gradients, targets.

Not compared: the joint optimiser step, whose clipping couples networks that have an optimiser each here. The
variant with a residual field is a tuned flow whose velocity is a sum.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from official_critics import (
    arrays_of,
    assert_critic_gradient,
    assert_editor_gradient,
    assert_flow_gradient,
    batch_of,
    flow_policy,
    install_editor,
    layers_of,
    load_critic,
    restore_gradients,
    valid_rows,
)
from pairwise import repeated
from torch import Tensor

from algos.critics.qam import QamConfig, QamLearner
from algos.critics.qam_edit import QamEditConfig, QamEditLearner
from algos.critics.qam_fql import QamFqlConfig, QamFqlLearner
from algos.critics.trqam import TrqamConfig, TrqamLearner
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.networks.distributions import TanhGaussianConfig
from policies.policy import PolicyConfig
from policies.processes import RectifiedFlow
from policies.protocols import BoundField, Cond
from policies.samplers.ode import Euler

agents = pytest.mark.golden("*qam_[peforst]*.npz")  # plain, edit, fql, online_unclipped, residual
edited = pytest.mark.golden("qam_edit*.npz")
taught = pytest.mark.golden("qam_fql*.npz")
trust = pytest.mark.golden("trqam_*.npz")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
STATED = {"rtol": 2e-5, "atol": 4e-5}
"""Tolerance that the reference numbers state for gradients, whose norms are 30 to 100."""


@pytest.fixture
def arrays(golden_path: Path) -> dict[str, Any]:
    return arrays_of(golden_path)


def learner_of(arrays: dict[str, Any]) -> QamLearner:
    layers = layers_of(arrays, "param_critic.value_net")
    values: dict[str, Any] = {
        "critics": layers[0].kernel.shape[0],
        "critic_dims": tuple(layer.kernel.shape[2] for layer in layers[:-1]),
        "pessimism": float(arrays["cfg_rho"]),
        "tau": float(arrays["cfg_tau"]),
        "num_candidates": int(arrays["cfg_best_of_n"]),
        "clip_gradient": bool(arrays["cfg_clip_adj"]),
        "target_gradient": bool(arrays["cfg_use_target_grad"]),
        "max_grad_norm": None,
    }
    own = {
        "cfg_flow_steps": arrays["cfg_K"],
        "cfg_action_dim": torch.tensor(arrays["batch_actions"].shape[-1]),
    }
    made: list[Any] = []
    nets = ("actor_slow", "target_actor_slow", "actor_fast")
    for net in nets:
        made.append(flow_policy(arrays | own, net, int(arrays["cfg_H"])).train())
    if "kl_ema" in arrays:
        values |= {
            "init_weight": float(arrays["lam"]),
            "weight_scale": float(arrays["cfg_lam_scale"]),
            "divergence_budget": float(arrays["cfg_kl_budget"]),
            "weight_lr": float(arrays["cfg_eta_lambda"]),
            "divergence_rate": float(arrays["cfg_kl_ema_coef"]),
            "divergence_clip": float(arrays["cfg_kl_clip_coef"]),
            "min_weight": float(arrays["cfg_lambda_min"]),
            "max_weight": float(arrays["cfg_lambda_max"]),
        }
        trusted = TrqamLearner(made[0], TrqamConfig(**values))
        trusted.divergence = arrays["kl_ema"].float()
        learner: QamLearner = trusted
    else:
        values["inverse_temperature"] = float(arrays["cfg_inv_temp"])
        if has_edits(arrays):
            learner = edit_learner(made[0], arrays, values)
        elif has_student(arrays):
            learner = student_learner(made[0], arrays, values)
        else:
            learner = QamLearner(made[0], QamConfig(**values))
    used = made[1] if int(arrays["cfg_target_actor"]) else made[0]
    learner.target_base.load_state_dict(used.state_dict())
    if arrays.get("cfg_residual", 0):
        learner.tuned.field = Sum(learner.target_base.field, made[2].field)
    else:
        learner.tuned.load_state_dict(made[2].state_dict())
    load_critic(learner.critic, layers)
    load_critic(learner.target_critic, layers_of(arrays, "param_target_critic.value_net"))
    return learner


class Sum(torch.nn.Module):
    """The velocity of a flow that stays as it is plus that of another."""

    def __init__(self, fixed: torch.nn.Module, tuned: torch.nn.Module) -> None:
        super().__init__()
        self.fixed, self.tuned = fixed, tuned

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.fixed(*args, **kwargs) + self.tuned(*args, **kwargs)

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> BoundField:
        return lambda k, x: self(x, times[k], cond)


def has_edits(arrays: dict[str, Any]) -> bool:
    return "param_edit_alpha.log_value" in arrays


def edit_learner(base: DenoisingPolicy, arrays: dict[str, Any], values: dict[str, Any]) -> QamEditLearner:
    """The learner with the edit actor of a file, whose activation is another."""
    hidden = layers_of(arrays, "param_edit_actor.MLP_0")
    dims = tuple(layer.kernel.shape[1] for layer in hidden)
    scale, alpha = float(arrays["cfg_edit_scale"]), float(arrays["param_edit_alpha.log_value"].exp())
    values |= {"edit_scale": scale, "edit_dims": dims, "init_alpha": alpha}
    learner = QamEditLearner(base, QamEditConfig(**values))
    width = learner.policy.width
    editor = TanhGaussianConfig(dims, "gelu", layer_norm=False).build(base.encoder.cond_dim + width, width)
    learner.policy.editor = learner.acting.editor = editor
    install_editor(learner, arrays, hidden)
    return learner


def has_student(arrays: dict[str, Any]) -> bool:
    return "param_one_step_actor.mlp.Dense_0.kernel" in arrays


def student_learner(base: DenoisingPolicy, arrays: dict[str, Any], values: dict[str, Any]) -> QamFqlLearner:
    """The learner with the student of a file."""
    learner = QamFqlLearner(base, QamFqlConfig(**values, alpha=float(arrays["cfg_fql_alpha"])), seed=0)
    own = {"cfg_action_dim": torch.tensor(arrays["batch_actions"].shape[-1])}
    student = flow_policy(arrays | own, "one_step_actor", int(arrays["cfg_H"]), one_step=True)
    student = student.with_sampler(Euler(steps=1, clip_action=1.0)).train()
    learner.student_optimizer = learner.begin_student(student)
    learner.policy = student
    return learner


def chunked(learner: QamLearner, flat: Tensor) -> Tensor:
    return flat.unflatten(-1, learner.tuned.chunk.shape)


def chain_noise(arrays: dict[str, Any], learner: QamLearner) -> Tensor:
    return chunked(learner, torch.cat([arrays["adj_x0"][None], arrays["adj_noise"][:-1]]))


@agents
def test_chain_adjoints_loss_and_gradient_are_the_official_ones(arrays: dict[str, Any]) -> None:
    learner = learner_of(arrays)
    cond = Cond(arrays["batch_observations"])
    states, chunk = learner.chain(cond, chain_noise(arrays, learner))
    torch.testing.assert_close(states.flatten(2), arrays["xs"], **CLOSE)
    adjoint = learner.adjoints(cond, states, chunk)
    torch.testing.assert_close(adjoint.flatten(2), arrays["adjs"], **CLOSE)
    loss = learner.matching_sum(learner.difference(cond, states), adjoint)
    torch.testing.assert_close(loss, arrays["out_adj_loss"], rtol=1e-5, atol=0)
    loss.backward()
    field = learner.tuned.field
    assert_flow_gradient(getattr(field, "tuned", field), arrays, "grad_actor_fast.mlp", STATED)
    assert all(weight.grad is None for weight in learner.critic.parameters())


@agents
def test_cloning_of_the_base_is_the_official_one(arrays: dict[str, Any]) -> None:
    learner = learner_of(arrays)
    eps = chunked(learner, arrays["bc_x0"])
    batch = batch_of(arrays)  # where a chunk counts as a whole
    batch = replace(batch, real=batch.real[:, -1:].expand_as(batch.real))
    loss = learner.matching(batch, {"te/t": arrays["bc_t"][:, 0], "te/eps": eps})
    torch.testing.assert_close(loss, arrays["out_flow_loss"], **CLOSE)
    loss.backward()
    assert_flow_gradient(learner.base.field, arrays, "grad_actor_slow.mlp", STATED)


@agents
def test_target_and_loss_of_the_critics_are_the_official_ones(arrays: dict[str, Any]) -> None:
    learner, batch = learner_of(arrays), batch_of(arrays)
    if isinstance(learner.tuned.field, Sum):  # acts beside the latest clone
        learner.tuned.field.fixed = learner.base.field
    noise = chunked(learner, arrays["next_noise"])
    noise = noise if learner.config.num_candidates > 1 else noise[:, 0]
    if has_edits(arrays):
        noise = torch.cat([noise, edit_noise(learner, arrays, noise)], dim=1)
    chosen = learner.chunk(learner.policy, batch.next_cond, noise)
    torch.testing.assert_close(chosen, arrays["next_actions"], **CLOSE)
    target = learner.target(batch, {"next": noise, "subset": torch.arange(1)})
    torch.testing.assert_close(target, arrays["target_q"], **CLOSE)
    kept = valid_rows(batch)
    share = len(kept.row) / len(batch.row)
    learner.critic_optimizer.param_groups[0]["lr"] = 0.0
    out = learner.update_critic(kept, target[kept.row])
    restore_gradients(learner.critic_optimizer)
    torch.testing.assert_close(share * out["critic/loss"], arrays["critic_loss"].float(), **CLOSE)
    assert_critic_gradient(learner.critic, arrays, "grad_critic.value_net", share, STATED)


def edit_noise(learner: Any, arrays: dict[str, Any], noise: Tensor) -> Tensor:
    """The noise of the file's edits of next chunks, of which it holds the values."""
    vec = arrays["batch_next_observations"][:, -1]
    with torch.no_grad():
        actions = learner.policy.executed_part(learner.policy.sampled(Cond(vec), noise))
        repeated = vec[:, None].expand(-1, actions.shape[1], -1)
        mean, log_std = learner.policy.editor(torch.cat([repeated, actions], dim=-1).flatten(0, 1))
    eps = (torch.atanh(arrays["next_edit_u"].double()).flatten(0, 1) - mean) / log_std.exp()
    return eps.float().view_as(noise)


@edited
def test_edits_their_losses_and_gradients_are_the_official_ones(arrays: dict[str, Any]) -> None:
    learner: Any = learner_of(arrays)
    mean, std = arrays["edit_mean"], arrays["edit_std"]
    eps = ((torch.atanh(arrays["edit_u"].double()) - mean) / std).float()
    draws = {"edit": eps, "edit_start": chunked(learner, arrays["side_noise"]), "subset": torch.arange(1)}
    loss, log_prob, u = learner.edit_loss(batch_of(arrays), draws)
    shift = learner.policy.width * learner.log_scale  # ours is the density of scaled edits
    torch.testing.assert_close(u, arrays["edit_u"], **CLOSE)
    torch.testing.assert_close(log_prob + shift, arrays["edit_log_prob"], rtol=1e-4, atol=1e-4)
    official = arrays["out_edit_q_loss"] + arrays["out_edit_entropy_loss"]
    torch.testing.assert_close(loss + learner.alpha * shift, official.float(), rtol=1e-4, atol=1e-4)
    temperature = learner.temperature_loss(log_prob)
    torch.testing.assert_close(temperature, arrays["out_edit_alpha_loss"].float(), rtol=1e-4, atol=1e-4)
    (loss + temperature).backward()
    assert_editor_gradient(learner, arrays, rtol=1e-4, atol=1e-3)
    slope = arrays["grad_edit_alpha.log_value"].float().view(1)
    torch.testing.assert_close(learner.log_alpha.grad, slope, rtol=1e-4, atol=1e-3)
    assert all(weight.grad is None for weight in (*learner.critic.parameters(), *learner.tuned.parameters()))


@taught
def test_the_student_its_losses_and_gradients_are_the_official_ones(arrays: dict[str, Any]) -> None:
    learner = learner_of(arrays)
    assert isinstance(learner, QamFqlLearner)
    batch, noise = batch_of(arrays), chunked(learner, arrays["side_noise"])
    wanted = learner.tuned.decode(Cond(batch.cond), noise)
    torch.testing.assert_close(wanted.flatten(1), arrays["side_flow_actions"], **CLOSE)
    distillation, value, _ = learner.student_losses(batch, noise, learner.tuned)
    official = arrays["out_fql_distill_loss"].float()
    torch.testing.assert_close(distillation, official, **CLOSE)
    torch.testing.assert_close(value, arrays["out_fql_q_loss"].float(), **CLOSE)
    (learner.config.alpha * distillation + value).backward()
    assert_flow_gradient(learner.student.field, arrays, "grad_one_step_actor.mlp", STATED)
    assert all(weight.grad is None for weight in (*learner.critic.parameters(), *learner.tuned.parameters()))


@agents
def test_target_copies_move_towards_the_networks_of_before_the_step(arrays: dict[str, Any]) -> None:
    if "after_target_critic.value_net.Dense_0.kernel" not in arrays:
        pytest.skip("the file holds no step")
    learner = learner_of(arrays)
    learner.step(batch_of(arrays), learner.draw(5, torch.Generator().manual_seed(0)))
    for i, layer in enumerate(layers_of(arrays, "after_target_critic.value_net")):
        torch.testing.assert_close(learner.target_critic.weight[i].data, layer.kernel, **CLOSE)
    for i, layer in enumerate(layers_of(arrays, "after_target_actor_slow.mlp")):
        torch.testing.assert_close(
            getattr(learner.target_base.field, f"kernel_{i}").data, layer.kernel, **CLOSE
        )


@trust
def test_the_weight_of_the_base_follows_the_divergence(arrays: dict[str, Any]) -> None:
    learner = learner_of(arrays)
    assert isinstance(learner, TrqamLearner)
    cond = Cond(arrays["batch_observations"])
    states, _ = learner.chain(cond, chain_noise(arrays, learner))
    found = learner.measured(learner.difference(cond, states).detach())
    path_kl = found["actor/path_kl"] / learner.tuned.chunk.horizon
    torch.testing.assert_close(path_kl, arrays["out_path_kl"], **CLOSE)
    torch.testing.assert_close(learner.weight, arrays["lam_after"], **CLOSE)
    torch.testing.assert_close(learner.divergence, arrays["kl_ema_after"], **CLOSE)
    learner.weight, learner.divergence = arrays["lam"].float(), arrays["kl_ema"].float()
    for given, weight, divergence in zip(
        arrays["dual_kl_trace"], arrays["dual_lam"], arrays["dual_ema"], strict=True
    ):
        learner.adapt(given.float())
        torch.testing.assert_close(learner.weight, weight.float(), **CLOSE)
        torch.testing.assert_close(learner.divergence, divergence.float(), **CLOSE)


SINGLE = {"rtol": 0.0, "atol": 1e-6}
"""Of chunks: a table of steps holds times in single precision, and slopes here are below 4."""


class Line(torch.nn.Module):
    """Velocity of the straight path to N(m, s^2), plus an offset per step that may be set."""

    def __init__(self, m: float, s: float, steps: int) -> None:
        super().__init__()
        self.m, self.s = m, s
        self.offset = torch.nn.Parameter(torch.zeros(steps, dtype=torch.float64))

    def forward(self, x: Tensor, time: Tensor, cond: Cond, *_: Any, **__: Any) -> Tensor:
        t = time[:, None, None]
        slope = (t * self.s**2 - (1 - t)) / (t**2 * self.s**2 + (1 - t) ** 2)
        k = (time * len(self.offset)).round().long().clamp(max=len(self.offset) - 1)
        return self.m + slope * (x - t * self.m) + self.offset[k][:, None, None]

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> BoundField:
        return lambda k, x: self(x, times[k].expand(len(x)), cond)


class LinearValue(torch.nn.Module):
    """Q(s, a) = slope * a, of one critic."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, cond: Tensor, action: Tensor, **_: Any) -> Tensor:
        return self.slope * action.T


@pytest.mark.golden("qam_analytic*.npz")
def test_the_fixed_point_of_a_gaussian_and_a_linear_value(arrays: dict[str, Any]) -> None:
    for steps in arrays["Ks"].tolist():
        config = PolicyConfig(
            process=RectifiedFlow(time_scale=1.0), backbone=MlpConfig(width=8), horizon=1, act_steps=1,
            sampler=Euler(steps=steps, clip_action=None),
            normalizer={"state": "identity", "action": "identity"},
        )  # fmt: skip
        base = build_policy(config, obs_dim=1, action_dim=1).double()
        assert isinstance(base, DenoisingPolicy)
        base.field = Line(float(arrays["m"]), float(arrays["s"]), steps)
        base = base.with_sampler(Euler(steps=steps, clip_action=None))
        settings = QamConfig(
            critics=1, subset=1, critic_dims=(4,), aggregate="mean", clip_gradient=False,
            inverse_temperature=float(arrays["inv_temp"]),
        )  # fmt: skip
        learner = QamLearner(base, settings)
        learner.target_critic = LinearValue(float(arrays["g"]))  # type: ignore[assignment]
        cond, noise = Cond(torch.zeros(3, 1).double()), torch.randn(steps, 3, 1, 1).double()
        states, chunk = learner.chain(cond, noise)
        adjoint = learner.adjoints(cond, states, chunk)
        wanted = arrays[f"adj_K{steps}"]
        torch.testing.assert_close(adjoint[:, :, 0, 0], wanted[:, None].expand(-1, 3), rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            learner.tuned.field.offset.copy_(arrays[f"dv_K{steps}"])
        loss = learner.matching_sum(learner.difference(cond, states), adjoint)
        assert float(loss.detach()) < 1e-18
        start = torch.tensor([0.0, 1.0]).view(2, 1, 1).double()
        mean, above = learner.tuned.decode(Cond(torch.zeros(2, 1).double()), start).flatten()
        torch.testing.assert_close(mean, arrays[f"ode_mean_K{steps}"], **SINGLE)
        torch.testing.assert_close(above - mean, arrays[f"ode_std_K{steps}"], **SINGLE)
        kl = learner.measured(learner.difference(cond, states).detach())["actor/path_kl"]
        torch.testing.assert_close(kl, arrays[f"path_kl_K{steps}"], rtol=1e-6, atol=0)


@trust
@pytest.mark.parametrize("budget", repeated([0.2, 0.05, 1.0]))
def test_the_divergence_settles_at_its_budget(arrays: dict[str, Any], budget: float) -> None:
    """Where a flow follows the weight at once: (g s)^2 / (2 lambda^2) of a Gaussian and a linear value."""
    learner = learner_of(arrays)
    assert isinstance(learner, TrqamLearner)
    learner.config = TrqamConfig(divergence_budget=budget, weight_scale=1.0)
    learner.weight, learner.divergence = torch.tensor(1.0), torch.tensor(0.0)
    slope = 0.6  # g s
    for _ in range(9_000 if budget < 0.1 else 5_000):
        learner.adapt(slope**2 / (2 * learner.weight**2))
    torch.testing.assert_close(learner.divergence, torch.tensor(budget), rtol=0.02, atol=0)
    torch.testing.assert_close(learner.weight, torch.tensor(slope / (2 * budget) ** 0.5), rtol=0.02, atol=0)
