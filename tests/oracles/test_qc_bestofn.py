"""Best of N against Q-chunking: candidates, values, the choice, target, critic loss and gradients, cloning.

Flow and critics are the released networks; the learner is ours. The release draws chunks that leave their
episode with weight 0 and divides by the whole batch; we do not draw them, so losses and gradients are
compared up to the share of the rest.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from official_critics import (
    CLOSE,
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

from algos.critics.qc import QcConfig, QcLearner
from policies.protocols import TE, Cond
from policies.wrappers.candidates import ranked, select

qc = pytest.mark.golden("qc_bestofn_*.npz")


@pytest.fixture
def learner(arrays: dict[str, Any]) -> QcLearner:
    layers = layers_of(arrays, "param_critic.value_net")
    config = QcConfig(
        num_candidates=int(arrays["cfg_N"]),
        **critic_sizes(layers),
        aggregate=arrays["cfg_q_agg"],
    )
    made = QcLearner(flow_policy(arrays, "actor_bc_flow", int(arrays["cfg_H"])).train(), config)
    load_critics(made, arrays)
    return made


@qc
def test_candidates_their_values_and_the_choice_are_the_official_ones(
    arrays: dict[str, Any], learner: QcLearner
) -> None:
    policy, cond = learner.policy, Cond(arrays["batch_next_observations"][:, -1])
    noise = arrays["noises"].unflatten(-1, policy.chunk.shape)
    with torch.no_grad():
        _, actions = policy.candidates(cond, noise)
        values = ranked(policy.critic, cond.vec, actions)
    torch.testing.assert_close(actions, arrays["candidates"], **CLOSE)
    torch.testing.assert_close(values, arrays["q_candidates"], **CLOSE)
    worth = learner.aggregated(values, torch.arange(2))
    torch.testing.assert_close(worth, arrays["q_candidates_agg"], **CLOSE)
    assert torch.equal(worth.argmax(dim=1), arrays["best_index"].long())
    torch.testing.assert_close(select(actions, worth), arrays["next_actions"], **CLOSE)
    torch.testing.assert_close(policy.decode(cond, noise).flatten(1), arrays["next_actions"], **CLOSE)


@qc
def test_target_loss_and_gradient_of_the_critics_are_the_official_ones(
    arrays: dict[str, Any], learner: QcLearner
) -> None:
    batch = batch_of(arrays)
    draws = {"next": arrays["noises"].unflatten(-1, learner.policy.chunk.shape), "subset": torch.arange(2)}
    target = learner.target(batch, draws)
    torch.testing.assert_close(target, arrays["target_q"].float(), **CLOSE)
    kept = valid_rows(batch)
    share = len(kept.row) / len(batch.row)
    learner.critic_optimizer.param_groups[0]["lr"] = 0.0
    out = learner.update_critic(kept, target[kept.row])
    restore_gradients(learner.critic_optimizer)
    torch.testing.assert_close(share * out["critic/loss"], arrays["critic_loss"].float(), **CLOSE)
    torch.testing.assert_close(learner.critic(batch.cond, batch.action), arrays["q_pred"], **CLOSE)
    assert_critic_gradient(learner.critic, arrays, "grad_critic.value_net", share)


@qc
def test_cloning_is_the_official_loss_of_recorded_steps(arrays: dict[str, Any], learner: QcLearner) -> None:
    te = TE(t=arrays["bc_t"][:, 0], eps=arrays["bc_x0"].unflatten(-1, learner.policy.chunk.shape))
    loss = learner.matching(batch_of(arrays), {"te/t": te.t, "te/eps": te.eps})
    torch.testing.assert_close(loss, arrays["bc_flow_loss"].float(), **CLOSE)
    loss.backward()
    assert learner.base_optimizer is not None
    if any(name.startswith("grad_actor_bc_flow") for name in arrays):
        assert_flow_gradient(learner.base.field, arrays, "grad_actor_bc_flow.mlp")
