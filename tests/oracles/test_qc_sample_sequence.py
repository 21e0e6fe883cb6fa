"""Stretches of steps against Q-chunking's own sampler.

Not compared: `next_actions`, the actions of the next row, which nothing uses and which are another episode's
at its end; and which rows are drawn, because generators differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envs.datasets.episodes import EpisodeDataset
from envs.datasets.sequences import Sequences

NAMES = {
    "actions": "out_actions",
    "rewards": "out_rewards",
    "next_observations": "out_next_observations",
    "masks": "out_masks",
    "ends": "out_terminals",
    "valid": "out_valid",
    "observations": "out_full_observations",
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
    given = {name for name in golden.files if name.startswith("out_")}
    assert given == {*NAMES.values(), "out_observations", "out_next_actions"}


@qc
def test_stretches_across_episodes_equal_the_official_ones(golden: Any, dataset: EpisodeDataset) -> None:
    sequences = Sequences(dataset, int(golden["cfg_H"]), float(golden["cfg_discount"]), across_episodes=True)
    got = sequences.gather(torch.as_tensor(golden["idxs"]))
    assert golden["idxs"].max() < sequences.num
    for key, name in NAMES.items():
        np.testing.assert_allclose(getattr(got, key).numpy(), golden[name], rtol=1e-6, atol=1e-7, err_msg=key)
    np.testing.assert_array_equal(got.observations[:, 0].numpy(), golden["out_observations"])


@qc
def test_by_default_valid_rows_are_the_same_and_others_repeat_the_last(
    golden: Any, dataset: EpisodeDataset
) -> None:
    got = Sequences(dataset, int(golden["cfg_H"]), float(golden["cfg_discount"])).gather(
        torch.as_tensor(golden["idxs"])
    )
    valid = golden["out_valid"] == 1
    np.testing.assert_array_equal(got.valid.numpy(), valid)
    for key, name in NAMES.items():
        ours, theirs = getattr(got, key).numpy(), golden[name]
        np.testing.assert_allclose(ours[valid], theirs[valid], rtol=1e-6, atol=1e-7, err_msg=key)
    for row, number in zip(*np.nonzero(~valid), strict=True):
        last = int(valid[row].sum()) - 1
        for key in ("observations", "actions", "next_observations", "rewards"):
            assert torch.equal(getattr(got, key)[row, number], getattr(got, key)[row, last]), key


@qc
def test_every_frame_can_be_drawn_by_default(golden: Any, dataset: EpisodeDataset) -> None:
    sequences = Sequences(dataset, int(golden["cfg_H"]), 0.9)
    assert sequences.num == dataset.num_frames
    drawn = sequences.sample(500, generator=torch.Generator().manual_seed(0))
    assert len(torch.unique(drawn.observations[:, 0], dim=0)) == dataset.num_frames
