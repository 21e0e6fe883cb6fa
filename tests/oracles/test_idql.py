"""IDQL against the released learner: value and critic steps, weights of the policy's loss, the choice.

The released network of the policy is rebuilt for its errors. Its schedule and sampler are those of a
diffusion of five steps, which other oracles compare: candidates are taken from the file.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from official_critics import CLOSE, Layer, batch_of, critic_layers, critic_sizes, layers_of, load_critic
from torch import Tensor

from algos.critics.idql import IdqlConfig, IdqlLearner
from algos.critics.losses import VALUE_LOSSES, value_loss
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.networks.critics import aggregate
from policies.policy import PolicyConfig
from policies.processes import RectifiedFlow
from policies.wrappers.candidates import ranked, select

idql = pytest.mark.golden("idql_*.npz")
WEIGHTINGS = {"bc": "clone", "soft_adv": "soft", "hard_adv": "hard", "exp_adv": "exponential"}


def value_layers(arrays: dict[str, Any], name: str) -> tuple[Layer, ...]:
    head = Layer(arrays[f"{name}.OutputVDense.kernel"], arrays[f"{name}.OutputVDense.bias"], None, None)
    layers = (*layers_of(arrays, f"{name}.MLP_0"), head)
    return tuple(Layer(layer.kernel[None], layer.bias[None], None, None) for layer in layers)


@pytest.fixture
def learner(arrays: dict[str, Any]) -> IdqlLearner:
    layers = critic_layers(arrays, "param_critic")
    config = IdqlConfig(
        expectile=float(arrays["cfg_expectile"]),
        **critic_sizes(layers),
        critic_activation="relu",
        critic_layer_norm=False,
        num_candidates=int(arrays["cfg_N"]),
        critic_lr=float(arrays["cfg_lr"]),
        tau=float(arrays["cfg_tau"]),
    )
    small = PolicyConfig(
        process=RectifiedFlow(), backbone=MlpConfig(width=8), horizon=1, act_steps=1, observation_clip=None
    )
    sizes = {"obs_dim": arrays["batch_observations"].shape[1], "action_dim": arrays["batch_actions"].shape[1]}
    made = IdqlLearner(build_policy(small, **sizes), config)
    load_critic(made.critic, layers)
    load_critic(made.target_critic, critic_layers(arrays, "param_target_critic"))
    load_critic(made.value, value_layers(arrays, "param_value"))
    return made


def predicted_noise(arrays: dict[str, Any]) -> Tensor:
    """Return what the released network predicts for the drawn times and noises."""
    prefix, action = "param_score_model", arrays["batch_actions"]
    level = arrays["alpha_hats"][arrays["time"].long()][:, None]
    x = level.sqrt() * action + (1 - level).sqrt() * arrays["eps"]
    phase = 2 * math.pi * arrays["time"].float()[:, None] @ arrays[f"{prefix}.FourierFeatures_0.kernel"].T
    cond = torch.cat([phase.cos(), phase.sin()], dim=1)
    cond = mish_layers(arrays, f"{prefix}.MLP_0", cond)
    return mish_layers(arrays, f"{prefix}.MLP_1", torch.cat([x, arrays["batch_observations"], cond], dim=1))


def mish_layers(arrays: dict[str, Any], prefix: str, h: Tensor) -> Tensor:
    layers = layers_of(arrays, prefix)
    for i, layer in enumerate(layers):
        h = h @ layer.kernel + layer.bias
        h = F.mish(h) if i < len(layers) - 1 else h
    return h


@idql
def test_the_three_losses_of_v_are_the_official_ones(arrays: dict[str, Any], learner: IdqlLearner) -> None:
    u = learner.advantage(batch_of(arrays))
    torch.testing.assert_close(u, arrays["adv"], **CLOSE)
    for how in VALUE_LOSSES:
        found = value_loss(u, how, float(arrays["cfg_expectile"]))
        torch.testing.assert_close(found, arrays[f"value_loss_{how}"].float(), **CLOSE)


@idql
def test_weights_of_the_policy_are_the_official_ones(arrays: dict[str, Any], learner: IdqlLearner) -> None:
    error = (predicted_noise(arrays) - arrays["eps"]).square().sum(dim=1)
    for official, ours in WEIGHTINGS.items():
        learner.config.weighting = ours
        weight = learner.weight(arrays["adv"])
        torch.testing.assert_close(weight.mean(), arrays[f"mean_weight_{official}"].float(), **CLOSE)
        found = (weight * error).mean()
        torch.testing.assert_close(found, arrays[f"actor_loss_{official}"].float(), **CLOSE)


@idql
def test_a_step_of_v_then_q_then_the_target_copy_is_the_official_one(
    arrays: dict[str, Any], learner: IdqlLearner
) -> None:
    batch = batch_of(arrays)
    out = learner.step(batch, learner.draw(len(batch), torch.Generator().manual_seed(0)))
    torch.testing.assert_close(out["value/loss"], arrays["value_loss"].float(), **CLOSE)
    torch.testing.assert_close(out["critic/loss"], arrays["critic_loss"].float(), **CLOSE)
    torch.testing.assert_close(learner.value_of(batch.next_cond), arrays["next_v_new"], **CLOSE)
    pairs = [
        (learner.value, value_layers(arrays, "after_value")),
        (learner.critic, critic_layers(arrays, "after_critic")),
        (learner.target_critic, critic_layers(arrays, "after_target_critic")),
    ]
    for net, layers in pairs:
        for i, layer in enumerate(layers):
            torch.testing.assert_close(net.weight[i].detach(), layer.kernel, **CLOSE)
            torch.testing.assert_close(net.bias[i].detach(), layer.bias.unsqueeze(-2), **CLOSE)


@idql
def test_the_choice_is_the_official_one(arrays: dict[str, Any], learner: IdqlLearner) -> None:
    load_critic(learner.target_critic, critic_layers(arrays, "after_target_critic"))
    actions, cond = arrays["act_candidates"][None], arrays["act_obs"][None]
    assert learner.policy.critic is learner.target_critic and learner.policy.wrapper.aggregate == "min"
    with torch.no_grad():
        worth = aggregate(ranked(learner.policy.critic, cond, actions), "min")
    torch.testing.assert_close(worth[0], arrays["act_q"], **CLOSE)
    assert int(worth.argmax()) == int(arrays["act_best_index"])
    torch.testing.assert_close(select(actions, worth)[0], arrays["act_best"], **CLOSE)
