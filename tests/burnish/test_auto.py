"""`experiment=auto`: sizes that follow from task and data, as plain keys; a typed key wins."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import mentions
from pairwise import each_value

import burnish
from algos.dppo import DppoConfig
from burnish.config.overrides import Overrides, RunContext, quoted
from burnish.config.schema import compose_config
from burnish.runs.auto import Facts, choose
from burnish.runs.resolve import resolve
from policies import registry
from policies.errors import ConfigError

LONG = Facts(length=1000, hz=125.0, frames=100_000, episodes=100)
SHORT = Facts(length=100, hz=20.0, has_success=True, frames=1_000, episodes=20)
TINY = Facts(length=1)
TUNED = Facts(length=4000, act_steps=1, is_new=False, has_steps=True)
ON_POLICY = ("dppo", "reinflow", "fpo", "awm", "ppo", "policyflow")
ALGORITHMS = ("bc", *ON_POLICY, "dsrl", "sac", "rlpd")


def values(algo: str, facts: Facts, *typed: str) -> dict[str, Any]:
    config, fixed = compose_config("train", [f"algo={algo}", *typed]), Overrides.parse(typed).keys
    return {one.key: one.value for one in choose(config.algo, facts, fixed) if one.key not in fixed}


@pytest.mark.parametrize(("algo", "facts"), each_value(ALGORITHMS, [TINY, TUNED]))
def test_what_is_chosen_composes(algo: str, facts: Facts) -> None:
    written = [f"{key}={quoted(value)}" for key, value in values(algo, facts).items()]
    config = compose_config("train", [f"algo={algo}", *written])
    assert 20 <= config.evaluation.episodes <= 100
    assert registry.name_of("algo", config.algo) == algo
    assert facts.is_new or not any(key.startswith("policy.") for key in values(algo, facts))


@pytest.mark.parametrize("algo", ON_POLICY)
def test_an_iteration_holds_whole_episodes_where_they_are_short(algo: str) -> None:
    short, long = values(algo, SHORT), values(algo, LONG)
    act_steps = short["policy.act_steps"]
    assert (
        short["algo.steps_per_iteration"] * act_steps >= SHORT.length and short["algo.reset_each_iteration"]
    )
    assert long["algo.steps_per_iteration"] * long["policy.act_steps"] < LONG.length
    assert "algo.reset_each_iteration" not in long
    rows = short["algo.num_envs"] * short["algo.steps_per_iteration"] * (10 if algo == "dppo" else 1)
    assert short["algo.batch_size"] == rows // 4


def test_the_budget_follows_from_a_typed_number_of_environments() -> None:
    free, typed = values("dppo", SHORT), values("dppo", SHORT, "algo.num_envs=10")
    assert free["algo.num_envs"] == 2 * 10
    assert typed["algo.env_steps"] * 2 == free["algo.env_steps"]
    assert typed["algo.batch_size"] * 2 == free["algo.batch_size"]


@pytest.mark.parametrize("steps", [3_000, 40_000])
def test_a_typed_budget_shortens_what_depends_on_its_length(steps: int) -> None:
    clone = replace(SHORT, is_new=False, act_steps=4)
    free = values("dppo", clone)
    typed = values("dppo", clone, f"algo.env_steps={steps}")
    chunks = free["algo.num_envs"] * free["algo.steps_per_iteration"]
    iterations = math.ceil(steps / (4 * chunks))
    assert typed["algo.critic_warmup_iterations"] <= min(2, iterations / 5)
    assert typed["algo.actor_lr_cycle"] == iterations + 5 < free["algo.actor_lr_cycle"]


def test_a_typed_budget_of_off_policy_learning_shortens_its_warm_up() -> None:
    free, typed = values("dsrl", SHORT), values("dsrl", SHORT, "algo.total_steps=600")
    assert free["algo.warmup_steps"] * 10 == free["algo.total_steps"] and typed["algo.warmup_steps"] == 60


def test_a_clone_of_a_task_with_success_may_move_further_once_its_critic_has_learned() -> None:
    clone, new = values("dppo", replace(SHORT, is_new=False, act_steps=4)), values("dppo", SHORT)
    published = DppoConfig()
    assert clone["algo.clip_range"] == clone["algo.clip_range_base"] > published.clip_range
    assert clone["algo.critic_warmup_iterations"] >= clone["algo.actor_lr_warmup"] > 0
    for other in (new, values("dppo", TUNED), values("reinflow", replace(SHORT, is_new=False))):
        assert "algo.clip_range" not in other and "algo.critic_warmup_iterations" not in other


def test_more_data_means_more_steps_within_bounds() -> None:
    sizes = (500, 3_000, 8_000, 10**7)
    steps = [values("bc", Facts(length=100, frames=n, episodes=60))["algo.steps"] for n in sizes]
    assert steps[0] == 5_000 and steps[-1] == 20_000 and steps == sorted(steps) and len(set(steps)) == 3


def test_discounts_reach_over_an_episode() -> None:
    assert values("dppo", SHORT)["algo.gamma"] == 0.99
    assert values("ppo", SHORT)["process"] == "gaussian"
    assert "process" not in values("ppo", replace(SHORT, is_new=False)) | values("dppo", SHORT)
    assert values("dppo", TUNED)["algo.gamma"] == 0.999
    assert values("sac", Facts(length=200))["algo.gamma"] == pytest.approx(1 - 1 / 200)


def test_choices_are_told_stored_as_plain_keys_and_give_way_to_typed_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data = (np.random.default_rng(0).normal(size=(60, 4)), np.zeros((60, 2)))
    run = burnish.clone(
        data, "experiment=auto", "env=avoid", "algo.steps=3", "policy.horizon=8", "evaluation.episodes=0",
        "backbone.width=8", "num_workers=0", "progress=false", directory=tmp_path / "run",
    )  # fmt: skip
    typed = run.directory.overrides
    assert not [text for text in typed if "auto" in text]
    assert typed.index("algo.batch_size=128") < typed.index("algo.steps=3")
    assert sum(text.startswith("algo.steps=") for text in typed) == 1
    config = run.directory.config
    assert (config["algo"]["steps"], config["algo"]["batch_size"]) == (3, 128)
    assert (config["policy"]["horizon"], config["policy"]["act_steps"]) == (8, 4)
    assert "auto: algo.batch_size=128: 60 frames." in caplog.messages
    assert not any(line.startswith("auto: algo.steps=") for line in caplog.messages)


def test_a_typed_number_of_iterations_is_not_replaced_by_a_budget(tmp_path: Path) -> None:
    typed = ["experiment=auto", "algo=dppo", "env=avoid", "algo.iterations=3"]
    found = resolve(compose_config("train", typed), RunContext(tmp_path, Overrides.parse(typed)))
    assert (found.config.algo.iterations, found.config.algo.env_steps) == (3, None)


def test_without_task_and_data_there_is_nothing_to_derive_from(tmp_path: Path) -> None:
    typed = ["experiment=auto"]
    with pytest.raises(ConfigError, match=mentions("experiment=auto env=<task> dataset=<file>")):
        resolve(compose_config("train", typed), RunContext(tmp_path, Overrides.parse(typed)))
