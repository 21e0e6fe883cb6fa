"""Numpy's global generator is seeded for a while, and then as it was."""

from __future__ import annotations

import numpy as np
import pytest

from envs.engine.seeding import seeded_globally


def test_draws_follow_the_seed_and_leave_no_trace() -> None:
    before = np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    drawn = []
    for seed in (5, 5, (5, 2), 6):
        with seeded_globally(seed):
            drawn.append(np.random.uniform())
    with pytest.raises(KeyError), seeded_globally(7):
        raise KeyError
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index,union-attr]
