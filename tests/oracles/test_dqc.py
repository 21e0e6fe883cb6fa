"""Decoupled Q-chunking against the released program: long chunks, both critics, V, and the choice."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from official_critics import (
    STATED,
    arrays_of,
    assert_critic_gradient,
    flow_policy,
    layers_of,
    load_critic,
)
from torch import Tensor

from algos.critics.dqc import DqcConfig, DqcLearner
from algos.transitions import Batch, Rewarding, tabulate
from envs.datasets.episodes import EpisodeDataset
from policies.build import build_policy
from policies.networks.critics import aggregate
from policies.policy import PolicyConfig
from policies.protocols import Cond
from policies.wrappers.candidates import ranked, select

losses = pytest.mark.golden("dqc_losses*.npz")
sample = pytest.mark.golden("dqc_sample*.npz")


@pytest.fixture
def arrays(golden_path: Path) -> dict[str, Any]:
    return arrays_of(golden_path)


@pytest.fixture
def learner(arrays: dict[str, Any]) -> DqcLearner:
    """Critics read observation and goal; the policy of the release reads the observation alone."""
    layers = layers_of(arrays, "param_action_critic.value_net")
    config = DqcConfig(
        critics=layers[0].kernel.shape[0],
        critic_dims=tuple(layer.kernel.shape[2] for layer in layers[:-1]),
        aggregate=arrays["cfg_q_agg"],
        critic_horizon=int(arrays["cfg_H"]),
        distill_loss=arrays["cfg_distill_method"],
        distill_expectile=float(arrays["cfg_kappa_d"]),
        value_loss=arrays["cfg_implicit_backup"],
        value_expectile=float(arrays["cfg_kappa_b"]),
        refit=False,
    )
    chunk = int(arrays["cfg_HA"])
    sizes = PolicyConfig(
        horizon=chunk, act_steps=chunk, normalizer={"state": "identity", "action": "identity"}
    )
    width = sum(arrays[f"batch_{name}"].shape[1] for name in ("observations", "high_value_goals"))
    base = build_policy(sizes, obs_dim=width, action_dim=int(arrays["cfg_action_dim"]))
    made = DqcLearner(base.requires_grad_(False), config)
    for net, name in (
        (made.chunk_critic, "chunk_critic"),
        (made.critic, "action_critic"),
        (made.target_critic, "target_action_critic"),
    ):
        load_critic(net, layers_of(arrays, f"param_{name}.value_net"))
    load_critic(made.value, one_member(arrays, "param_value"))
    return made


def one_member(arrays: dict[str, Any], name: str) -> Any:
    """Return the layers of a single network as those of an ensemble of one."""
    parts = {key: value[None] for key, value in arrays.items() if key.startswith(f"{name}.") and value.ndim}
    return layers_of(parts, f"{name}.value_net")


def batch_of(arrays: dict[str, Any]) -> Batch:
    goals = arrays["batch_high_value_goals"]
    rows, steps = len(goals), arrays["batch_high_value_backup_horizon"]
    discount = float(arrays["cfg_discount"]) ** steps * arrays["batch_high_value_masks"]
    action = arrays["batch_high_value_action_chunks"]
    return Batch(
        cond=torch.cat([arrays["batch_observations"], goals], 1),
        action=action,
        reward=arrays["batch_high_value_rewards"],
        next_cond=torch.cat([arrays["batch_high_value_next_observations"], goals], 1),
        discount=discount,
        next_action=torch.zeros_like(action),
        has_next=torch.zeros(rows),
        plan=action,
        real=torch.ones(rows, 1),
        row=torch.arange(rows),
    )


def kept(arrays: dict[str, Any], batch: Batch) -> tuple[Batch, float]:
    """Return the rows that the release does not mask, and their share."""
    valid = arrays["batch_valids"][:, int(arrays["cfg_mask_index"])] == 1
    columns = {one.name for one in fields(Batch)} - {"images", "next_images"}
    rows = {name: getattr(batch, name)[valid] for name in columns}
    return replace(batch, **rows), float(valid.double().mean())


DRAWS = {"subset": torch.arange(2)}


@losses
def test_target_and_loss_of_long_chunks_are_the_official_ones(
    arrays: dict[str, Any], learner: DqcLearner
) -> None:
    batch = batch_of(arrays)
    torch.testing.assert_close(learner.value_logit(batch.next_cond), arrays["next_v_logit"], **STATED)
    y = learner.target(batch, DRAWS)
    torch.testing.assert_close(y.clamp(0, 1), arrays["chunk_target"], **STATED)
    values = learner.chunk_critic(batch.cond, batch.action)
    torch.testing.assert_close(values, arrays["chunk_logit"], **STATED)
    torch.testing.assert_close(learner.probed(batch.cond, batch.action), values.sigmoid())
    loss = learner.losses(batch, DRAWS, y.detach())["chunk"]
    torch.testing.assert_close(loss, arrays["chunk_critic_loss"], **STATED)
    loss.backward()
    assert_critic_gradient(learner.chunk_critic, arrays, "grad_chunk_critic.value_net", close=STATED)


@losses
def test_distilled_critic_and_values_are_the_official_ones(
    arrays: dict[str, Any], learner: DqcLearner
) -> None:
    whole = batch_of(arrays)
    executed = whole.action[:, : learner.base.chunk.width]
    torch.testing.assert_close(learner.critic(whole.cond, executed), arrays["partial_logit"], **STATED)
    later = learner.target_critic(whole.cond, executed)
    torch.testing.assert_close(later, arrays["target_partial_logit"], **STATED)
    torch.testing.assert_close(learner.value_logit(whole.cond), arrays["v_logit"], **STATED)
    batch, share = kept(arrays, whole)
    found = learner.losses(batch, DRAWS, learner.target(batch, DRAWS).detach())
    torch.testing.assert_close(share * found["distill"], arrays["distill_loss"], **STATED)
    torch.testing.assert_close(share * found["value"], arrays["value_loss"], **STATED)
    (found["distill"] + found["value"]).backward()
    assert all(weight.grad is None for weight in learner.chunk_critic.parameters())
    assert_critic_gradient(learner.critic, arrays, "grad_action_critic.value_net", share, STATED)
    assert_critic_gradient(learner.value, gradient_of_values(arrays), "grad_value.value_net", share, STATED)


def gradient_of_values(arrays: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value[None] for key, value in arrays.items() if key.startswith("grad_value.")}


@losses
def test_the_choice_is_the_official_one(arrays: dict[str, Any], learner: DqcLearner) -> None:
    policy = flow_policy(arrays, "actor_bc", int(arrays["cfg_HA"]))
    state, noise = arrays["batch_observations"], arrays["bon_noises"]
    count = len(noise)
    flat = noise.transpose(0, 1).reshape(-1, *policy.chunk.shape)
    plans = policy.decode(Cond(state.repeat_interleave(count, 0)), flat).flatten(1).unflatten(0, (-1, count))
    torch.testing.assert_close(plans.transpose(0, 1), arrays["bon_candidates"], **STATED)
    worth = aggregate(ranked(learner.critic, batch_of(arrays).cond, plans), arrays["cfg_q_agg"])
    torch.testing.assert_close(worth.t(), arrays["bon_scores"], **STATED)
    assert torch.equal(worth.argmax(1), arrays["bon_best_index"].long())
    torch.testing.assert_close(select(plans, worth), arrays["bon_action"], **STATED)


@sample
def test_long_chunks_of_a_task_that_ends_at_its_goal_are_the_official_ones(arrays: dict[str, Any]) -> None:
    """Reaching the goal is worth 1 in the state after; our reward belongs to the step before it."""
    gamma, steps = float(arrays["cfg_discount"]), int(arrays["cfg_H"])
    sizes = PolicyConfig(horizon=2, act_steps=2, normalizer={"state": "identity", "action": "identity"})
    policy, compared = build_policy(sizes, obs_dim=3, action_dim=2), 0
    for j, (start, goal) in enumerate(
        zip(arrays["idxs"].tolist(), arrays["goal_idxs"].tolist(), strict=True)
    ):
        length = int(arrays["out_high_value_backup_horizon"][j])
        if length == 0:  # at the goal already: the task has ended
            continue
        data, first = episode_of(arrays, start, goal)
        table = tabulate(data, policy, Rewarding(gamma, scale=gamma), steps=steps)
        assert table.frame is not None
        batch = table.gather((table.frame == start - first).nonzero()[:, 0])
        assert len(batch) == 1
        torch.testing.assert_close(batch.reward.double(), arrays["out_high_value_rewards"][j : j + 1])
        mask = arrays["out_high_value_masks"][j : j + 1]
        torch.testing.assert_close(batch.discount.double(), gamma**length * mask)
        torch.testing.assert_close(batch.cond[0], arrays["out_observations"][j])
        torch.testing.assert_close(batch.next_cond[0], arrays["out_high_value_next_observations"][j])
        chunk = arrays["out_high_value_action_chunks"][j].view(steps, -1)
        torch.testing.assert_close(batch.action.view(steps, -1)[:length], chunk[:length])
        compared += 1
    assert compared >= len(arrays["idxs"]) // 2


def episode_of(arrays: dict[str, Any], start: int, goal: int) -> tuple[EpisodeDataset, int]:
    """Return the episode of a row, cut where it reaches a goal that comes later, and its first row."""
    last = arrays["ds_terminals"].nonzero()[:, 0].tolist()
    end = next(row for row in last if row >= start)
    first = max((row + 1 for row in last if row < start), default=0)
    reached = start < goal <= end
    rows = slice(first, goal if reached else end)  # the last row has an action but no successor
    count = rows.stop - rows.start
    over = torch.zeros(count, dtype=torch.bool)
    over[-1] = reached
    following = arrays["ds_observations"][first + 1 : rows.stop + 1]
    data = EpisodeDataset(
        observations=arrays["ds_observations"][rows],
        actions=arrays["ds_actions"][rows],
        rewards=over.float(),
        terminated=over,
        truncated=torch.zeros_like(over) if reached else one_hot_end(count),
        episode_start=torch.tensor([0, count]),
        next_observations=following,
        meta={"source": "reference"},
    )
    return data, first


def one_hot_end(count: int) -> Tensor:
    end = torch.zeros(count, dtype=torch.bool)
    end[-1] = True
    return end
