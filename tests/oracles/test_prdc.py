"""PRDC against the released program: whole steps, weights included, and its neighbour search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from official_td3 import (
    actor_of,
    actor_weights,
    batch_of,
    check_number,
    check_weights,
    config_of,
    ensemble_of,
    ensemble_weights,
    limit_of,
    names,
    num_steps,
    read,
    shapes_of,
    sine_weights,
    under,
)
from torch import Tensor

from algos.offline.neighbors import BruteSearch, ListSearch, TreeSearch
from algos.offline.td3_update import Td3Learner
from algos.prdc import NearestRow

MEMBERS = (names(1, 3), names(4, 6))


def initial(arrays: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the weights before the first step, stored or by formula."""
    parts = ("actor", "critic", "actor_target", "critic_target")
    if any(name.startswith("init/") for name in arrays):
        return {part: under(arrays, f"init/{part}/") for part in parts}
    state, action = arrays["states"].shape[1], arrays["actions"].shape[1]
    width = int(arrays["cfg/hidden"])
    actor = shapes_of("l", [state, width, width, action])
    critic = [state + action, width, width, 1]
    shapes = {"actor": actor, "critic": shapes_of("l", critic) | shapes_of("l", critic, 4)}
    online = {"actor": sine_weights(shapes["actor"], 14), "critic": sine_weights(shapes["critic"], 15)}
    targets = {
        f"{part}_target": {k: v * np.float32(0.95) for k, v in weights.items()}
        for part, weights in online.items()
    }
    return online | targets


def learner_of(arrays: dict[str, Tensor]) -> Td3Learner:
    """Return our learner at the start of a file, with the released tree."""
    weights, limit = initial(arrays), limit_of(arrays)
    beta, rank = float(arrays["cfg/beta"]), int(arrays["cfg/k"])
    search = TreeSearch(arrays["states"], arrays["actions"], beta, rank=rank)
    learner = Td3Learner(
        actor_of(weights["actor"], limit),
        ensemble_of(weights["critic"], MEMBERS),
        NearestRow(search, arrays["actions"]),
        config_of(arrays),
    )
    target = actor_of(weights["actor_target"], limit).policy
    learner.target_actor.policy.load_state_dict(target.state_dict())
    learner.target_critic.load_state_dict(ensemble_of(weights["critic_target"], MEMBERS).state_dict())
    return learner


def weights_of(learner: Td3Learner) -> dict[str, dict[str, Tensor]]:
    """Return all weights by their released names."""
    return {
        "actor": actor_weights(learner.actor),
        "actor_target": actor_weights(learner.target_actor),
        "critic": ensemble_weights(learner.critic, MEMBERS),
        "critic_target": ensemble_weights(learner.target_critic, MEMBERS),
    }


def draws_of(step: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the random numbers of a step."""
    none = torch.zeros(len(step["action"]), 0)
    return {"target": step["noise_raw"], "next_start": none, "start": none}


@pytest.mark.golden("prdc_*.npz", but="prdc_knn*.npz")
def test_steps(golden_path: Path) -> None:
    arrays = read(golden_path)
    learner, discount = learner_of(arrays), float(arrays["cfg/discount"])
    for t in range(1, num_steps(arrays) + 1):
        step = under(arrays, f"step{t}/")
        batch, draws = batch_of(step, discount), draws_of(step)
        check_number("target_q", learner.backup(batch, draws).target, step["target_q"].squeeze(1))
        values = learner.critic(batch.cond, batch.action)
        for i in (1, 2):
            check_number(f"current_q{i}", values[i - 1], step[f"current_q{i}"].squeeze(1))
        action = learner.actor(batch.cond, draws["start"]).detach()
        out = learner.step(batch, draws)
        check_number("critic_loss", out["critic/loss"], step["critic_loss"].float().squeeze())
        if "pi" in step:
            check_number("pi", action, step["pi"])
            names_of = {"value": "Q_value", "value_loss": "actor_loss", "constraint": "dc_loss"}
            for ours, theirs in names_of.items():
                check_number(theirs, out[f"actor/{ours}"], step[theirs].float().squeeze())
        check_weights(weights_of(learner), step)


@pytest.mark.golden("prdc_*.npz", but="prdc_knn*.npz")
def test_every_exact_search_finds_the_released_neighbours(golden_path: Path) -> None:
    arrays = read(golden_path)
    state, action, beta = arrays["states"], arrays["actions"], float(arrays["cfg/beta"])
    rank = int(arrays["cfg/k"])
    searches = [TreeSearch(state, action, beta, rank=rank)]
    if rank == 1:
        searches += [ListSearch(state, action, beta, length=n) for n in (2, 16, 600)]
        searches += [BruteSearch(state, action, beta)]
    moves = [step for t in range(1, num_steps(arrays) + 1) if "pi" in (step := under(arrays, f"step{t}/"))]
    assert moves
    for step in moves:
        for search in searches:
            found = search.nearest(step["batch_indices"].long().flatten(), step["state"], step["pi"])
            assert torch.equal(action[found.row], step["neighbour_action"])


@pytest.mark.golden("prdc_knn*.npz")
def test_the_tree_counts_neighbours_as_the_released_one(golden_path: Path) -> None:
    with np.load(golden_path) as file:
        arrays = {name: file[name] for name in file.files}
    data = torch.from_numpy(arrays["data"])
    none = torch.zeros(len(data), 0)
    gaps = np.diff(arrays["k_int3_dist"], axis=1)
    for rank in (1, 2, 3):
        tree = TreeSearch(data, none, 1.0, rank=rank)
        distance, index = tree.query(arrays["queries"])
        np.testing.assert_allclose(distance, arrays[f"k_list{rank}_dist"][:, 0], rtol=1e-12, atol=1e-12)
        lonely = (gaps > 1e-9).all(axis=1)
        assert lonely.any()
        if rank < 3:  # the neighbour after the third is not in the file
            np.testing.assert_array_equal(index[lonely], arrays[f"k_list{rank}_idx"][lonely, 0])
