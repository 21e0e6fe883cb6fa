"""One rule decides whether policies, data and tasks fit each other."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
from point_env import PointEnv

from envs.fit import require_fit
from policies.errors import ConfigError
from policies.policy import PolicyConfig, build_policy

SPEC = PointEnv().spec
POLICY = build_policy(PolicyConfig(), obs_dim=2, action_dim=2)
DATA = SimpleNamespace(obs_dim=2, action_dim=2)  # goals are not known by a width


def fit(one: Any, other: Any) -> bool:
    try:
        require_fit("one", one, "other", other, advice="")
    except ConfigError:
        return False
    return True


def test_things_of_equal_widths_fit_and_no_others() -> None:
    wider = SimpleNamespace(obs_dim=3, action_dim=2)
    for one, other in permutations((SPEC, POLICY, DATA), 2):
        assert fit(one, other) and not fit(one, wider) and not fit(wider, other)


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        (
            {"obs_dim": 3, "action_dim": 2},
            "one has observation width 3, but other has observation width 2",
        ),
        ({"obs_dim": 2, "action_dim": 5}, "one has action width 5, but other has action width 2"),
        (
            {"obs_dim": 2, "action_dim": 2, "goal_dim": 1},
            "one has goal width 1, but other has goal width 0",
        ),
    ],
)
def test_another_width_is_named(sizes: dict[str, int], match: str) -> None:
    policy = build_policy(PolicyConfig(), **sizes)
    for other in (SPEC, POLICY):
        with pytest.raises(ConfigError, match=match):
            require_fit("one", policy, "other", other, advice="Try.")
