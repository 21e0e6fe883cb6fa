"""The rule by which a hand-over moves back, against a public port of jump-start RL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from envs.rollouts.starts import HandOver


@pytest.mark.parametrize("case", ["plain", "window3", "tolerant"])
@pytest.mark.golden("jsrl_curriculum*.npz")
def test_the_hand_over_moves_where_theirs_does(golden_path: Path, case: str) -> None:
    """Ours takes the mean return; theirs a moving one, unknown while its window fills.

    Not implemented: the port's guide, which acts one step too many, and its draws without the longest way.
    """
    with np.load(golden_path) as arrays:
        get = {k.removeprefix(f"curriculum/{case}/"): v for k, v in arrays.items() if f"/{case}/" in k}
    rule = HandOver(len(get["horizons"]) - 1, float(get["tolerance"]))
    means = get["moving_mean"]
    for i in np.flatnonzero(np.isfinite(means)).tolist():
        rule.note(float(means[i]))
        assert get["horizons"][rule.stage] == get["horizon_after"][i], i
        assert rule.best == pytest.approx(get["best"][i], rel=1e-6)
        assert rule.tolerated == pytest.approx(get["tolerated"][i], rel=1e-6)
