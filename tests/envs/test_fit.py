"""One rule decides whether policies, data and tasks fit each other."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
from messages import mentions
from point_env import PointEnv

from envs.fit import require_fit
from envs.make import env
from policies.build import build_policy
from policies.errors import ConfigError
from policies.policy import PolicyConfig

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
            "3 2 width",
        ),
        ({"obs_dim": 2, "action_dim": 5}, "5 2 width"),
        (
            {"obs_dim": 2, "action_dim": 2, "goal_dim": 1},
            "1 0 goal width",
        ),
    ],
)
def test_another_width_is_named(sizes: dict[str, int], match: str) -> None:
    policy = build_policy(PolicyConfig(), **sizes)
    for other in (SPEC, POLICY):
        with pytest.raises(ConfigError, match=mentions(match)):
            require_fit("one", policy, "other", other, advice="Try.")


RECORDED = {
    "the same": ("pointmaze-umaze", {"name": "pointmaze-umaze", "start_cell": [], "demonstrator": {}}, ""),
    "another name": ("walker2d", {"name": "halfcheetah"}, "was recorded in env=halfcheetah, not in one"),
    "other actions": (
        "pointmaze-umaze",
        {"name": "pointmaze-umaze", "control": "waypoint"},
        "what actions are differs, 'wanted x [m]' there and 'x force [100 N]' here",
    ),
    "another rate": ("pointmaze-umaze", {"name": "pointmaze-umaze", "hold": 5}, "20.0 there and 100.0 here"),
    "limits only": ("hopper", {"name": "hopper", "max_episode_steps": 10, "version": "v4"}, ""),
    "options of another version": ("hopper", {"name": "hopper", "gone": 1, "version": "v0"}, ""),
    "no task of ours": ("hopper", {"name": "unknown"}, ""),
}


@pytest.mark.parametrize("case", RECORDED)
def test_a_dataset_of_another_task_is_told(case: str, caplog: pytest.LogCaptureFixture) -> None:
    task, meta, told = RECORDED[case]
    spec = env(task).spec
    for place in ({"env": meta}, {"env_args": {"env_name": meta["name"], "env_kwargs": dict(meta)}}):
        caplog.clear()
        data = SimpleNamespace(obs_dim=spec.obs_dim, action_dim=spec.action_dim, meta=place)
        require_fit("one", spec, "data", data, advice="")
        assert told in caplog.text and len(caplog.records) == bool(told)


def test_tasks_of_robomimic_and_minari_are_known_by_their_own_names(caplog: pytest.LogCaptureFixture) -> None:
    of_minari = {"env_spec": {"id": "HalfCheetah-v5", "kwargs": {}, "max_episode_steps": 1000}}
    of_robomimic = {"env_args": {"env_name": "Lift", "env_kwargs": {"control_freq": 20}}}
    for meta, task, other in ((of_minari, "halfcheetah", "walker2d"), (of_robomimic, "lift", "can")):
        for name in (task, other):
            caplog.clear()
            spec = env(name).spec
            data = SimpleNamespace(obs_dim=spec.obs_dim, action_dim=spec.action_dim, meta=meta)
            require_fit("one", spec, "data", data, advice="")
            assert [task in record.getMessage() for record in caplog.records] == [True] * (name == other)
