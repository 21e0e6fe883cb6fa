"""EXPO against the released agent: candidates, both choices of critics, target, edits, temperature.

The base policy of the file is a black box: its actions stand for chunks that ignore their noise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from official_critics import (
    STATED,
    assert_editor_gradient,
    batch_of,
    critic_layers,
    install_editor,
    layers_of,
    load_critic,
)
from torch import Tensor

from algos.critics.edits import EditLearner
from algos.critics.expo import ExpoConfig
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.networks.critics import aggregate
from policies.policy import PolicyConfig
from policies.processes import RectifiedFlow
from policies.protocols import Cond
from policies.wrappers.candidates import ranked, select

expo = pytest.mark.golden("expo_*.npz")


@pytest.fixture
def learner(arrays: dict[str, Any]) -> EditLearner:
    layers, hidden = critic_layers(arrays, "param_critic"), layers_of(arrays, "param_edit_actor.MLP_0")
    config = ExpoConfig(
        num_candidates=int(arrays["cfg_N"]),
        num_edited=int(arrays["cfg_NE"]),
        critics=int(arrays["cfg_num_qs"]),
        subset=int(arrays["cfg_num_min_qs"]),
        critic_dims=tuple(layer.kernel.shape[2] for layer in layers[:-1]),
        edit_dims=tuple(layer.kernel.shape[1] for layer in hidden),
        edit_scale=float(arrays["cfg_edit_scale"]),
        edit_bound=None,
        target_entropy=float(arrays["target_entropy"]),
        init_alpha=float(arrays["temperature"]),
        learn_alpha=False,  # the released target is beyond what edits of this scale reach
    )
    small = PolicyConfig(
        process=RectifiedFlow(), backbone=MlpConfig(width=8), horizon=1, act_steps=1, observation_clip=None
    )
    sizes = {"obs_dim": arrays["batch_observations"].shape[1], "action_dim": arrays["batch_actions"].shape[1]}
    made = config.learner_of(build_policy(small, **sizes), 0)
    load_critic(made.critic, layers)
    load_critic(made.target_critic, critic_layers(arrays, "param_target_critic"))
    install_editor(made, arrays, hidden)
    return made


def candidates_of(
    learner: EditLearner, arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """Make the base act as in the file; return the draws whose edits are those of the file."""
    policy, base = learner.policy, arrays["otf_base_actions"]
    monkeypatch.setattr(type(learner.base), "decode", lambda *_, **__: base.flatten(0, 1)[:, None])
    mean, std = arrays["otf_edit_mean"], arrays["otf_edit_std"]
    eps = (torch.atanh(arrays["otf_edit_tanh"].double()) - mean) / std
    count = policy.wrapper.num_candidates
    noise = torch.zeros(len(base), *policy.noise_shape)
    noise[:, count:] = eps.float().unsqueeze(2)
    return {
        "next": noise,
        "choosing": arrays["otf_ensemble_idx"].long(),
        "subset": arrays["backup_ensemble_idx"].long(),
    }


@expo
def test_candidates_choice_and_target_are_the_official_ones(
    arrays: dict[str, Any], learner: EditLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, batch = candidates_of(learner, arrays, monkeypatch), batch_of(arrays)
    with torch.no_grad():
        _, actions = learner.acting.candidates(Cond(batch.next_cond), draws["next"])
        values = ranked(learner.target_critic, batch.next_cond, actions)
    torch.testing.assert_close(actions, arrays["otf_candidates"], **STATED)
    worth = aggregate(values, "subset_min", subset=draws["choosing"])
    torch.testing.assert_close(worth, arrays["otf_q"], **STATED)
    assert torch.equal(worth.argmax(dim=1), arrays["otf_best_index"].long())
    torch.testing.assert_close(select(actions, worth), arrays["otf_action"], **STATED)
    target = learner.target(batch, draws)
    torch.testing.assert_close(target, arrays["target_q"].float(), **STATED)
    learner.critic_optimizer.param_groups[0]["lr"] = 0.0
    out = learner.update_critic(batch, target.detach())
    torch.testing.assert_close(out["critic/loss"], arrays["critic_loss"].float(), **STATED)
    torch.testing.assert_close(learner.critic(batch.cond, batch.action), arrays["q_pred"], **STATED)


@expo
def test_edits_their_loss_and_gradient_are_the_official_ones(
    arrays: dict[str, Any], learner: EditLearner
) -> None:
    batch, draws = batch_of(arrays), {"edit": arrays["edit_eps"], "subset": torch.arange(2)}
    loss, log_prob, u = learner.edit_loss(batch, draws)
    torch.testing.assert_close(u, arrays["edit_tanh"], **STATED)
    torch.testing.assert_close(log_prob, arrays["edit_log_prob_scaled"], **STATED)
    torch.testing.assert_close(learner.policy.edited(batch.action, u), arrays["edited_actions"], **STATED)
    torch.testing.assert_close(loss, arrays["edit_actor_loss"].float(), **STATED)
    loss.backward()
    assert_editor_gradient(learner, arrays, **STATED)


@expo
def test_temperature_is_the_official_one(arrays: dict[str, Any], learner: EditLearner) -> None:
    log_prob = arrays["edit_log_prob_scaled"]
    torch.testing.assert_close(-log_prob.mean(), arrays["edit_entropy"].float(), **STATED)
    found = learner.temperature_loss(log_prob)
    torch.testing.assert_close(found, arrays["temperature_loss"].float(), **STATED)
