"""Groups of starts by value against exact clusters of a line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from envs.rollouts.value_clusters import even_shares, value_clusters


@pytest.mark.golden("snapshot_starts*.npz")
def test_clusters_and_shares_are_the_exact_ones(golden_path: Path) -> None:
    """Not implemented: the released call's own labels, which are not the best ones."""
    with np.load(golden_path) as arrays:
        found = dict(arrays)
    value = found["value"]
    for k in sorted(int(key[1 : key.index("/")]) for key in found if key.endswith("exact_label")):
        label = value_clusters(value, k)
        assert np.array_equal(label, found[f"k{k}/exact_label"])
        spread = sum(np.square(value[label == one] - value[label == one].mean()).sum() for one in range(k))
        assert spread == pytest.approx(float(found[f"k{k}/exact_inertia"]), rel=1e-9)
        np.testing.assert_allclose(even_shares(label), found[f"k{k}/exact_probability"], rtol=1e-12)
