"""One rule decides whether policies, data and tasks fit each other."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from messages import mentions
from point_env import PointEnv

from envs.fit import differing_options, require_dataset_of, require_fit, task_text
from envs.make import env
from envs.spec import EnvConfig
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


RECORDED: dict[str, tuple[str, dict[str, Any], str]] = {
    "the same": ("pointmaze-umaze", {"name": "pointmaze-umaze", "start_cell": [], "demonstrator": {}}, ""),
    "another name": ("walker2d", {"name": "halfcheetah"}, "env=walker2d env=halfcheetah"),
    "other actions": (
        "pointmaze-umaze",
        {"name": "pointmaze-umaze", "control": "waypoint"},
        "env.control=force env.control=waypoint",
    ),
    "another rate": ("pointmaze-umaze", {"name": "pointmaze-umaze", "hold": 5}, "env.hold=1 env.hold=5"),
    "another version": ("hopper", {"name": "hopper", "version": "v4"}, "env.version=v4 env.version=v5"),
    "another variant": ("metaworld", {"name": "metaworld", "task": "push"}, "env.task=reach env.task=push"),
    "conditions only": ("hopper", {"name": "hopper", "max_episode_steps": 10, "healthy_reward": 0.5}, ""),
    "options of another version": ("hopper", {"name": "hopper", "gone": 1}, ""),
    "no task of ours": ("hopper", {"name": "unknown"}, ""),
    "an expert that does its task": ("cube-single", {"name": "cube-single", "task": 2}, "env.task=1 2"),
    "an expert that plays": (
        "cube-single",
        {"name": "cube-single", "task": 2, "expert": {"mode": "play"}},
        "",
    ),
    "a goal that is observed": (
        "og-pointmaze-medium",
        {"name": "og-pointmaze-medium", "task": 2, "goal": "separate"},
        "",
    ),
}


def recorded(task: EnvConfig, meta: dict[str, Any]) -> Any:
    return SimpleNamespace(
        obs_dim=task.spec.obs_dim, action_dim=task.spec.action_dim, meta=meta, source="data"
    )


@pytest.mark.parametrize("case", RECORDED)
def test_a_dataset_of_another_task_is_refused(case: str, caplog: pytest.LogCaptureFixture) -> None:
    name, meta, both = RECORDED[case]
    task = env(name)
    for place in ({"env": meta}, {"env_args": {"env_name": meta["name"], "env_kwargs": dict(meta)}}):
        data = recorded(task, place)
        if not both:
            require_dataset_of(task, data)
            continue
        with pytest.raises(ConfigError, match=mentions(f"{both} allow_other_task=true")):
            require_dataset_of(task, data)
        assert not caplog.records
        require_dataset_of(task, data, allow_other_task=True)
        assert len(caplog.records) == 1
        caplog.clear()


def test_an_option_that_changes_the_width_is_named() -> None:
    name = "og-pointmaze-medium"
    data = recorded(env(name, goal="appended"), {"env": {"name": name, "goal": "appended"}})
    with pytest.raises(ConfigError, match=mentions("observation width env.goal=appended env.goal=fixed")):
        require_dataset_of(env(name), data)


def test_tasks_of_robomimic_and_minari_are_known_by_their_own_names() -> None:
    of_minari = {"env_spec": {"id": "HalfCheetah-v5", "kwargs": {}, "max_episode_steps": 1000}}
    of_robomimic = {"env_args": {"env_name": "Lift", "env_kwargs": {"control_freq": 20}}}
    for meta, name, other in ((of_minari, "halfcheetah", "walker2d"), (of_robomimic, "lift", "can")):
        require_dataset_of(env(name), recorded(env(name), meta))
        with pytest.raises(ConfigError, match=mentions(f"env={name} env={other}")):
            require_dataset_of(env(other), recorded(env(other), meta))


def test_files_of_a_task_are_compared_by_content(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("other" if name == "c" else "same")
    one, same, other = (env("adroit-door", starts=str(tmp_path / name)) for name in ("a", "b", "c"))
    assert differing_options(one, same) == [] and differing_options(one, other) == ["starts"]


def test_a_task_is_named_with_the_options_that_select_it() -> None:
    assert task_text(env("cube-single", task=3, max_episode_steps=7)) == "env=cube-single env.task=3"
    assert task_text(env("cube-single"), ["task"]) == "env=cube-single env.task=1"
