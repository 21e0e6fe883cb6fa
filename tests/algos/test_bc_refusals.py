"""What cloning refuses before it trains: data, policies and numbers that cannot be meant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from messages import mentions
from point_steering import composed
from point_steering import dataset as demonstrations
from small_algorithms import dataset, init, setup, small
from small_cloning import finish, tiny
from two_modes import two_mode_dataset, two_mode_setup

from algos.base import Setup
from algos.cloning.planners import DecisionDiffuserConfig, DiffuserConfig
from algos.cloning.recap import with_goal
from envs.spec import EnvSpec
from policies.errors import CapabilityError, ConfigError, DatasetError
from policies.policy_config import ChunkSpec
from policies.wrappers.advantage import Advantage


@dataclass(frozen=True)
class NamedEnv:
    """An environment that is only described."""

    obs_dim: int = 2
    action_dim: int = 1

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            name="toy",
            family="toy",
            obs_dim=self.obs_dim,
            action_dim=self.action_dim,
            action_low=(-1.0,) * self.action_dim,
            action_high=(1.0,) * self.action_dim,
            max_episode_steps=10,
            control_hz=10.0,
            obs_names=("x",) * self.obs_dim,
            action_names=("a",) * self.action_dim,
        )

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> Any:
        raise AssertionError("cloning needs no simulator")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (NamedEnv(action_dim=3), "env=toy 3 1"),
        (NamedEnv(obs_dim=5), "env=toy 5 2"),
    ],
)
def test_dataset_of_another_task_is_refused(env: NamedEnv, message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        tiny().build(replace(two_mode_setup(), env=env))


def test_dataset_that_does_not_fit_the_initial_policy_is_refused() -> None:
    base = tiny().build(two_mode_setup()).snapshot()
    data = two_mode_dataset()
    wide = replace(data, actions=data.actions.expand(-1, 2).contiguous())
    with pytest.raises(ConfigError, match=mentions("1 2 policy init width")):
        tiny().build(replace(two_mode_setup(), init=base, dataset=wide))


def test_episodes_shorter_than_a_chunk_are_refused_without_padding() -> None:
    setup = two_mode_setup(length=1)
    with pytest.raises(DatasetError, match=mentions("2 chunk")):
        tiny(pad_end=False).build(setup)
    finish(tiny(pad_end=True).build(setup))


def test_nan_in_the_data_is_refused_before_training() -> None:
    data = two_mode_dataset()
    actions = data.actions.clone()
    actions[7] = torch.nan
    with pytest.raises(DatasetError, match=mentions("actions finite 7")):
        tiny().build(replace(two_mode_setup(), dataset=replace(data, actions=actions)))


def test_policy_without_a_matching_loss_is_refused() -> None:
    class Silent(torch.nn.Module):
        obs_dim, goal_dim, chunk = 2, 0, ChunkSpec(1, 2, 2)

        def clone(self) -> Silent:
            return self

    with pytest.raises(CapabilityError, match=mentions("process=diffusion")):
        tiny().build(replace(two_mode_setup(), init=Silent()))  # type: ignore[arg-type]


def test_a_wrapped_policy_is_not_cloned_on() -> None:
    wrapped = Advantage().wrap(with_goal(init("flow"), 1, 0.1))
    with pytest.raises(CapabilityError, match=mentions("AdvantagePolicy made from")):
        tiny().build(setup("flow", init=wrapped))


def test_a_composition_is_not_cloned_on() -> None:
    with pytest.raises(
        CapabilityError, match=r"algo=bc trains one policy; init is a composition\. Train its mem"
    ):
        tiny().build(Setup(dataset=demonstrations(), init=composed()))


def test_a_planner_is_not_cloned_on() -> None:
    planner = small(DiffuserConfig).build(setup("diffusion", init=None)).snapshot()
    with pytest.raises(CapabilityError, match=mentions("algo=bc planner algo=diffuser")):
        tiny().build(setup("diffusion", init=planner))


@pytest.mark.parametrize(
    ("made_by", "continued_by", "words"),
    [
        ({"part": DiffuserConfig}, {"part": DecisionDiffuserConfig}, "algo=decision_diffuser inverse lacks"),
        ({"part": DecisionDiffuserConfig}, {"part": DiffuserConfig}, "algo=diffuser inverse has"),
        (
            {"part": DiffuserConfig},
            {"part": DiffuserConfig, "value_widths": (), "plans": 1},
            "value_widths has",
        ),
        ({"part": DecisionDiffuserConfig}, {"part": DecisionDiffuserConfig, "returns": False}, "returns has"),
    ],
    ids=["states", "actions", "value", "returns"],
)
def test_a_planner_of_other_networks_is_not_continued(
    made_by: dict[str, Any], continued_by: dict[str, Any], words: str
) -> None:
    init = planner_of(**made_by).build(setup("diffusion", init=None)).snapshot()
    with pytest.raises(CapabilityError, match=mentions(words)):
        planner_of(**continued_by).build(setup("diffusion", init=init))


def test_a_value_of_plans_needs_more_than_one_frame() -> None:
    alone = setup("diffusion", init=None, dataset=dataset(episodes=1, length=1))
    with pytest.raises(DatasetError, match=mentions("one frame algo.value_widths=[]")):
        planner_of(DiffuserConfig, pad_end=True).build(alone)
    assert planner_of(DiffuserConfig, pad_end=True, value_widths=(), plans=1).build(alone).total


def test_a_continued_planner_acts_by_the_new_settings_and_the_new_returns() -> None:
    first = planner_of(DecisionDiffuserConfig).build(setup("diffusion", init=None)).snapshot()
    given = {"temperature": 0.25, "wanted": 0.3, "guidance": 3.0}
    run = planner_of(DecisionDiffuserConfig, **given).build(setup("diffusion", init=first))
    fresh = planner_of(DecisionDiffuserConfig, **given).build(setup("diffusion", init=None)).policy
    assert run.policy.wrapper == fresh.wrapper != first.wrapper
    assert run.policy.base.config.guidance == 3.0


def planner_of(part: type, **values: Any) -> Any:
    return replace(small(part), **values)


def test_the_least_learning_rate_is_not_above_the_peak() -> None:
    with pytest.raises(ConfigError, match=mentions("algo.min_lr")):
        tiny(min_lr=1.0)
