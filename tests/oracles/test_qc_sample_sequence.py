"""Transitions of chunks against Q-chunking's own sampler of sequences.

The release draws H steps from any row, continues into the next episode and gives such rows weight 0
(`out_valid`); a transition of ours ends with the task, and none leaves an episode. Not compared: states and
flags inside a chunk, and `next_actions`, the actions of the next row, which nothing uses; and which rows are
drawn, because generators differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algos.transitions import Rewarding, tabulate
from envs.datasets.episodes import EpisodeDataset
from policies.build import build_policy
from policies.policy import PolicyConfig

UNUSED = {"out_full_observations", "out_terminals", "out_next_actions"}
COMPARED = {
    *("out_observations", "out_actions", "out_rewards"),
    *("out_next_observations", "out_masks", "out_valid"),
}
qc = pytest.mark.golden("qc_sample_sequence*.npz")


@pytest.fixture
def golden(golden_path: Path) -> Any:
    return np.load(golden_path)


@pytest.fixture
def dataset(golden: Any) -> EpisodeDataset:
    ends, terminated = golden["ds_terminals"] == 1, golden["ds_masks"] == 0
    return EpisodeDataset.from_arrays(
        golden["ds_observations"],
        golden["ds_actions"],
        golden["ds_rewards"],
        terminated,
        ends & ~terminated,
        np.concatenate([[0], np.flatnonzero(ends) + 1]),
        next_observations=golden["ds_next_observations"],
    )


@qc
def test_every_array_is_compared_or_known_to_be_unused(golden: Any) -> None:
    assert {name for name in golden.files if name.startswith("out_")} == COMPARED | UNUSED


@qc
def test_transitions_of_chunks_are_the_official_ones(golden: Any, dataset: EpisodeDataset) -> None:
    horizon, gamma = int(golden["cfg_H"]), float(golden["cfg_discount"])
    normalizer = {"state": "identity", "action": "identity"}
    config = PolicyConfig(horizon=horizon, act_steps=horizon, normalizer=normalizer, observation_clip=None)
    policy = build_policy(config, obs_dim=dataset.obs_dim, action_dim=dataset.action_dim)
    table, kinds = tabulate(dataset, policy, Rewarding(gamma)), []
    assert table.frame is not None
    for j, frame in enumerate(golden["idxs"].tolist()):
        length = int(golden["out_valid"][j].sum())
        last, found = length - 1, (table.frame == frame).nonzero()[:, 0]
        mask = golden["out_masks"][j, last]
        kinds.append("whole" if length == horizon else "left" if mask else "ended")
        assert len(found) == (kinds[-1] != "left")
        if kinds[-1] == "left":
            continue
        batch = table.gather(found)
        actions = batch.action.view(horizon, -1)[:length]
        for ours, theirs in (
            (batch.cond[0], golden["out_observations"][j]),
            (actions, golden["out_actions"][j, :length]),
            (batch.reward[0], golden["out_rewards"][j, last]),
            (batch.discount[0], gamma**length * mask),
            (batch.next_cond[0], golden["out_next_observations"][j, last]),
        ):
            torch.testing.assert_close(ours, torch.as_tensor(theirs).float(), rtol=1e-6, atol=1e-7)
    assert set(kinds) == {"whole", "ended", "left"}
