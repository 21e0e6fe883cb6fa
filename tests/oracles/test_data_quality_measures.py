"""Measures of data quality, against sums over all pairs of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from envs.datasets.episodes import EpisodeDataset
from envs.datasets.quality import Limits, disagreement, distinct_pairs, trajectory_quality


@pytest.mark.golden("data_quality_measures.npz")
def test_measures_are_those_of_all_pairs(golden_path: Path) -> None:
    z = np.load(golden_path)
    episode, states, actions = z["episode"], z["state"].astype(float), z["action"].astype(float)
    for k in (1, 5):
        found = disagreement(states, actions, episode, k)
        np.testing.assert_allclose(found, z[f"action_disagreement/k{k}"], rtol=1e-9, atol=1e-12)
    mean = np.bincount(episode, found) / np.bincount(episode)
    assert np.argsort(mean, kind="stable").tolist() == z["keep_order"].tolist()
    returns = np.bincount(episode, z["reward"].astype(float))
    assert trajectory_quality(returns, float(z["tq_min"]), float(z["tq_max"])) == pytest.approx(
        float(z["tq"])
    )
    limits = Limits(z["reference"].min(axis=0).astype(float), z["reference"].max(axis=0).astype(float))
    counts = [
        distinct_pairs(flat(rows[:, :3], rows[:, 3:]), limits)
        for rows in (np.hstack([z["state"], z["action"]]), z["reference"])
    ]
    assert counts == z["saco/100/unique"].tolist()


def flat(states: np.ndarray, actions: np.ndarray) -> EpisodeDataset:
    none = np.zeros(len(states))
    return EpisodeDataset.from_arrays(states, actions, none, none, None, [0, len(states)])
