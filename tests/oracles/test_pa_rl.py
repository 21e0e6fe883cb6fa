"""PA-RL against the released program: ranks, ascent, the set that is cloned, target, loss and gradient.

Critics of one value and of a histogram (HL-Gauss). Members of the release share their last layer: here each
holds a copy of it, and its gradient is the sum of theirs. The released gradient includes the penalty of
Cal-QL, which these tests add. Its HL-Gauss is wider than the formula by the root of two.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from official_critics import CLOSE, Layer, arrays_of, assert_critic_gradient, layers_of, load_critic
from torch import Tensor

from algos.critics.losses import cross_entropy, histogram
from algos.critics.pa_rl import PaRlConfig, PaRlLearner
from policies.build import build_policy
from policies.networks.critics import aggregate
from policies.policy import PolicyConfig
from policies.wrappers.candidates import ascend, ranked, select

official = pytest.mark.golden("parl_*.npz")
SIGMA = 0.75 * 2**0.5


@pytest.fixture
def arrays(golden_path: Path) -> dict[str, Any]:
    return arrays_of(golden_path)


@pytest.fixture
def learner(arrays: dict[str, Any]) -> PaRlLearner:
    hidden = layers_of(arrays, "param_critic.network")
    config = PaRlConfig(
        gamma=float(arrays["cfg_gamma"]),
        critics=hidden[0].kernel.shape[0],
        critic_dims=tuple(layer.kernel.shape[2] for layer in hidden),
        num_candidates=int(arrays["cfg_m"]),
        num_ascended=int(arrays["cfg_k"]),
        ascent_steps=int(arrays["cfg_steps"]),
        ascent_lr=float(arrays["cfg_step_size"]),
        critic_bins=int(arrays["cfg_bins"]) if arrays["cfg_distributional"] else 0,
        bin_sigma=SIGMA,
        value_min=float(arrays["cfg_q_min"]),
        value_max=float(arrays["cfg_q_max"]),
        refit=False,
    )
    sizes = PolicyConfig(horizon=1, act_steps=1, normalizer={"state": "identity", "action": "identity"})
    base = build_policy(sizes, obs_dim=arrays["obs"].shape[1], action_dim=arrays["actions"].shape[1])
    made = PaRlLearner(base.requires_grad_(False), config)
    for net, name in ((made.critic, "param_critic"), (made.target_critic, "param_target_critic")):
        load_critic(net, (*layers_of(arrays, f"{name}.network"), shared_head(arrays, name, config.critics)))
    return made


def shared_head(arrays: dict[str, Any], name: str, members: int) -> Layer:
    """Return the last layer, which the members of the release share, once per member."""
    (head,) = layers_of(arrays, name)
    return Layer(head.kernel.expand(members, -1, -1), head.bias.expand(members, -1), None, None)


def kept(learner: PaRlLearner, state: Tensor, actions: Tensor) -> Tensor:
    policy = learner.policy
    return policy.best(actions[:, :, None], actions, policy.worth(state, actions))[1]


def climbed(
    arrays: dict[str, Any], learner: PaRlLearner, state: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Return improved actions and their values; the box of the file is not that of our policies."""
    config, box = learner.config, (arrays["low"], arrays["high"])
    return ascend(
        lambda points: learner.policy.worth(state, points),
        start,
        steps=config.ascent_steps,
        lr=config.ascent_lr,
        box=box,
    )


@official
def test_the_kept_actions_are_the_official_ones(arrays: dict[str, Any], learner: PaRlLearner) -> None:
    state, actions = arrays["obs"], arrays["base_actions"]
    worth = learner.policy.worth(state, actions)
    torch.testing.assert_close(worth, arrays["rank_q"], **CLOSE)
    rows = torch.arange(len(state))[:, None]
    wanted = actions[rows, arrays["rank_index"].long()]
    found = kept(learner, state, actions)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(learner.policy.worth(state, found), arrays["act_kept_q"], **CLOSE)


@official
def test_what_climbs_ends_where_the_official_ones_do(arrays: dict[str, Any], learner: PaRlLearner) -> None:
    state = arrays["obs"]
    actions, worth = climbed(arrays, learner, state, kept(learner, state, arrays["base_actions"]))
    torch.testing.assert_close(actions, arrays["act_candidates"], **CLOSE)
    torch.testing.assert_close(worth.log_softmax(1), arrays["act_logits"], **CLOSE)
    torch.testing.assert_close(select(actions, worth), arrays["act_argmax"], **CLOSE)
    moved = (actions - kept(learner, state, arrays["base_actions"])).abs().amax(2) > 0
    assert torch.equal(moved, arrays["act_best_visited_index"] > 0)


@official
def test_the_set_that_is_cloned_is_the_official_one(arrays: dict[str, Any], learner: PaRlLearner) -> None:
    """The recorded action takes the place of the worst kept one."""
    state = arrays["obs"]
    start = torch.cat([kept(learner, state, arrays["base_actions"])[:, 1:], arrays["actions"][:, None]], 1)
    actions, worth = climbed(arrays, learner, state, start)
    torch.testing.assert_close(actions, arrays["refit_candidates"], **CLOSE)
    torch.testing.assert_close(worth.log_softmax(1), arrays["refit_logits"], **CLOSE)
    torch.testing.assert_close(worth.softmax(1), arrays["refit_probs"], **CLOSE)


@official
def test_target_and_loss_are_the_official_ones(arrays: dict[str, Any], learner: PaRlLearner) -> None:
    state = arrays["next_obs"]
    actions, worth = climbed(arrays, learner, state, kept(learner, state, arrays["next_base_actions"]))
    following = select(actions, worth)
    torch.testing.assert_close(following, arrays["td_next_actions"], **CLOSE)
    values = learner.target_critic(state, following)
    torch.testing.assert_close(values, arrays["td_target_qs"], **CLOSE)
    later = aggregate(values, "subset_min", subset=arrays["td_subset"].long())
    target = arrays["rewards"] + learner.config.gamma * arrays["masks"] * later
    torch.testing.assert_close(target, arrays["target_q"], **CLOSE)
    found = learner.critic(arrays["obs"], arrays["actions"])
    torch.testing.assert_close(found, arrays["q_pred"], **CLOSE)
    torch.testing.assert_close(td_loss(arrays, learner), arrays["td_loss"], **CLOSE)


def td_loss(arrays: dict[str, Any], learner: PaRlLearner) -> Tensor:
    """Return the loss of the critics at the target of the file."""
    outputs, centres = learner.critic.outputs(arrays["obs"], arrays["actions"]), learner.critic.centres
    if centres is None:
        return (outputs - arrays["target_q"]).square().mean()
    return cross_entropy(outputs, histogram(arrays["target_q"], centres, SIGMA))


def cal_ql(arrays: dict[str, Any], learner: PaRlLearner) -> Tensor:
    """Return logsumexp of the values of actions not in the data, less that of the data, (2, B)."""
    copies = int(arrays["cfg_cql_n"])
    policies = [arrays[f"cql_{name}_action"][:, None].expand(-1, copies, -1) for name in ("next", "current")]
    actions = torch.cat([*policies, arrays["cql_random_actions"], arrays["actions"][:, None]], dim=1)
    values = ranked(learner.critic, arrays["obs"], actions)[arrays["cql_subset"].long()]
    own, other = values[..., : 2 * copies], values[..., 2 * copies :]
    raised = torch.cat([torch.maximum(own, arrays["mc_returns"][:, None]), other], dim=-1)
    return raised.logsumexp(dim=-1) - math.log(actions.shape[1]) - values[..., -1]


@official
def test_the_gradient_of_the_critics_is_the_official_one(
    arrays: dict[str, Any], learner: PaRlLearner
) -> None:
    penalty = cal_ql(arrays, learner)
    torch.testing.assert_close(penalty, arrays["cql_q_diff"], **CLOSE)
    loss = td_loss(arrays, learner) + float(arrays["cfg_cql_alpha"]) * penalty.mean()
    torch.testing.assert_close(loss, arrays["critic_loss"], **CLOSE)
    loss.backward()
    assert_critic_gradient(learner.critic, arrays, "grad_critic.network")
    for own, name in ((learner.critic.weight, "kernel"), (learner.critic.bias, "bias")):
        shared = own[-1].grad
        assert shared is not None
        torch.testing.assert_close(shared.sum(0).squeeze(0), arrays[f"grad_critic.Dense_0.{name}"], **CLOSE)


@pytest.mark.golden("parl_hlgauss*.npz")
def test_histograms_of_values_are_the_official_ones(arrays: dict[str, Any], learner: PaRlLearner) -> None:
    centres = learner.critic.centres
    assert centres is not None
    logits = learner.critic.outputs(arrays["obs"], arrays["actions"])
    torch.testing.assert_close(logits, arrays["pred_logits"], **CLOSE)
    for values, probs in (("target_q", "target_probs"), ("demo_scalars", "demo_probs")):
        torch.testing.assert_close(histogram(arrays[values], centres, SIGMA), arrays[probs], **CLOSE)
