"""FQL and its chunked form against the released programs: teacher, student, Q, losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from official_critics import (
    STATED,
    assert_critic_gradient,
    assert_flow_gradient,
    batch_of,
    critic_sizes,
    flow_policy,
    layers_of,
    load_critics,
    restore_gradients,
    valid_rows,
)

from algos.critics.fql import FqlConfig, FqlLearner
from policies.protocols import Cond

files = pytest.mark.golden("*fql_losses*.npz")


@pytest.fixture
def learner(arrays: dict[str, Any]) -> FqlLearner:
    layers = layers_of(arrays, "param_critic.value_net")
    horizon = int(arrays["cfg_H"]) if "cfg_H" in arrays else 1
    config = FqlConfig(
        alpha=float(arrays["cfg_alpha"]),
        normalize_value=bool(arrays.get("cfg_normalize_q_loss", False)),
        **critic_sizes(layers),
        aggregate=arrays["cfg_q_agg"],
    )
    student = flow_policy(arrays, "actor_onestep_flow", horizon, one_step=True)
    student = student.with_sampler(type(student.sampler)(steps=1, clip_action=1.0)).train()
    made = FqlLearner(flow_policy(arrays, "actor_bc_flow", horizon).train(), student, config)
    load_critics(made, arrays)
    return made


def shaped(learner: FqlLearner, noise: torch.Tensor) -> torch.Tensor:
    return noise.unflatten(-1, learner.policy.chunk.shape)


@files
def test_teacher_and_student_act_as_the_official_ones(arrays: dict[str, Any], learner: FqlLearner) -> None:
    cond, noise = Cond(arrays["batch_observations"]), shaped(learner, arrays["noises"])
    wanted = learner.base.decode(cond, noise)
    torch.testing.assert_close(wanted.flatten(1), arrays["target_flow_actions"], **STATED)
    plan = learner._unclipped.decode(cond, noise)
    torch.testing.assert_close(plan.flatten(1), arrays["onestep_actions"], **STATED)
    values = learner.critic(cond.vec, learner.policy.decode(cond, noise).flatten(1))
    torch.testing.assert_close(values, arrays["q_onestep"], **STATED)


@files
def test_losses_and_gradients_of_the_student_are_the_official_ones(
    arrays: dict[str, Any], learner: FqlLearner
) -> None:
    noise = shaped(learner, arrays["noises"])
    distillation, value, scale = learner.student_losses(batch_of(arrays), noise, learner.base)
    torch.testing.assert_close(distillation, arrays["distill_loss"].float(), **STATED)
    torch.testing.assert_close(value, arrays["q_loss"].float(), **STATED)
    torch.testing.assert_close(scale, arrays.get("lam", torch.ones(())).float(), **STATED)
    (learner.config.alpha * distillation + value).backward()
    assert_flow_gradient(learner.policy.field, arrays, "grad_actor_onestep_flow.mlp", STATED)
    assert all(weight.grad is None for weight in learner.critic.parameters())
    assert all(weight.grad is None for weight in learner.base.parameters())


@files
def test_cloning_of_the_teacher_is_the_official_one(arrays: dict[str, Any], learner: FqlLearner) -> None:
    eps = shaped(learner, arrays["bc_x0"])
    loss = learner.matching(batch_of(arrays), {"te/t": arrays["bc_t"][:, 0], "te/eps": eps})
    torch.testing.assert_close(loss, arrays["bc_flow_loss"].float(), **STATED)
    loss.backward()
    assert_flow_gradient(learner.base.field, arrays, "grad_actor_bc_flow.mlp", STATED)


@files
def test_target_and_loss_of_the_critics_are_the_official_ones(
    arrays: dict[str, Any], learner: FqlLearner
) -> None:
    batch = batch_of(arrays)
    noise = shaped(learner, arrays["critic_next_noises"])
    action = learner.chunk(learner.policy, batch.next_cond, noise)
    torch.testing.assert_close(action, arrays["critic_next_actions"], **STATED)
    target = learner.target(batch, {"next": noise, "subset": torch.arange(2)})
    if "target_q" in arrays:
        torch.testing.assert_close(target, arrays["target_q"].float(), **STATED)
    kept = valid_rows(batch)
    share = len(kept.row) / len(batch.row)
    learner.critic_optimizer.param_groups[0]["lr"] = 0.0
    out = learner.update_critic(kept, target[kept.row])
    restore_gradients(learner.critic_optimizer)
    torch.testing.assert_close(share * out["critic/loss"], arrays["critic_loss"].float(), **STATED)
    gradient = (
        "grad_critic.value_net" if "target_q" in arrays else ""
    )  # QC-FQL's file has that of the actor, zero
    if gradient:
        assert_critic_gradient(learner.critic, arrays, gradient, share, STATED)
