"""Weights of rows by the official program of trajectory weighting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from envs.datasets.curation import SAMPLING_WEIGHT, Curation, advantage_scores
from envs.datasets.episodes import EpisodeDataset


@pytest.mark.golden("harness_weights.npz")
def test_weights_and_selections_are_those_of_the_official_program(golden_path: Path) -> None:
    z = np.load(golden_path)
    start = np.concatenate([[0], z["data/length"].cumsum()])
    parts = [z[f"data/{key}"] for key in ("observations", "actions", "rewards", "terminals", "timeouts")]
    dataset = EpisodeDataset.from_arrays(*parts, start)
    value = dataset.returns.numpy() - advantage_scores(dataset)
    np.testing.assert_allclose(value, z["aw/v0"], rtol=1e-5, atol=1e-6)
    for name, weighting in (("rw", "return"), ("aw", "advantage")):
        for alpha in ("0.05", "0.1", "0.2", "1.0"):
            curated = Curation(weighting=weighting, temperature=float(alpha))(dataset)
            found = curated.extras[SAMPLING_WEIGHT].numpy()
            np.testing.assert_allclose(found, z[f"iql/{name}/{alpha}"], rtol=2e-5, atol=1e-9)
    for share in ("0.1", "0.25", "0.5"):
        kept = Curation(keep="return", share=float(share)).kept(dataset)
        rows = np.isin(z["data/episode"], kept.numpy())
        wanted = z[f"iql/top/{share}"]
        np.testing.assert_allclose(np.where(rows, 1 / rows.sum(), 0), wanted, rtol=1e-9, atol=0)
        assert torch.equal(kept, kept.sort().values)
