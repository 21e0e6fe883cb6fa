"""What DPPO refuses, before work starts, and what looks odd but is allowed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from messages import mentions
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError
from point_dppo import SMALL, make_init
from point_env import PointEnv
from point_steering import composed

from algos.base import Setup
from algos.dppo import DppoConfig
from algos.reinflow import ReinFlowConfig
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError, ConfigError
from policies.policy import PolicyConfig
from policies.processes.gaussian import GaussianProcess


def test_config_is_a_structured_config() -> None:
    schema = OmegaConf.structured(DppoConfig)
    merged = OmegaConf.merge(schema, {"tuned_steps": 5, "min_sampling_std": 1, "target_kl": None})
    config = OmegaConf.to_object(merged)
    assert isinstance(config, DppoConfig)
    assert isinstance(config.min_sampling_std, float)
    assert config.target_kl is None
    with pytest.raises(ConfigKeyError):
        OmegaConf.merge(schema, {"clip": 0.1})
    with pytest.raises(ValidationError):
        OmegaConf.merge(schema, {"tuned_steps": "ten"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actor_lr": 2e-5, "actor_min_lr": 1e-4}, "actor_min_lr exceed actor_lr"),
        ({"actor_lr_warmup": 10, "actor_lr_cycle": 10, "paper_compat": True}, "actor_lr_warmup lie"),
        ({"advantage_quantiles": (0.9, 0.1)}, "algo.advantage_quantiles"),
        ({"entropy_coef": 0.1}, "algo.entropy_coef 0 0.1"),
        ({"batch_size": 1}, "algo.batch_size 2 algo.normalize_advantage=true"),
        ({"num_envs": 1, "steps_per_iteration": 1}, "algo.steps_per_iteration 2 algo.num_envs=1"),
        ({"advantage_quantiles": (0.5,)}, "algo.advantage_quantiles two"),
        ({"advantage_quantiles": (0.1, 0.2, 0.3)}, "algo.advantage_quantiles two"),
        ({"log_prob_range": (1.0,)}, "algo.log_prob_range two"),
        ({"log_prob_range": (5.0, math.nan)}, "algo.log_prob_range two"),
    ],
)
def test_bad_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        replace(SMALL, **change)


SIZES = [
    *("reward_scale_clip", "reward_scale_const", "gamma", "gae_lambda", "vf_coef", "bc_weight"),
    *("actor_lr", "actor_min_lr", "actor_weight_decay", "critic_lr", "critic_min_lr", "critic_weight_decay"),
]


def test_what_looks_odd_but_can_be_meant_is_allowed() -> None:
    assert replace(SMALL, batch_size=1, normalize_advantage=False).batch_size == 1
    assert replace(SMALL, num_envs=1, steps_per_iteration=1, normalize_advantage=False).num_envs == 1
    assert replace(SMALL, num_envs=2, steps_per_iteration=1).num_envs == 2
    steep = replace(SMALL, reward_scale_clip=math.inf, clip_range_rate=100.0)
    assert bool(steep.clip_range_of(5).isfinite().all())
    assert replace(SMALL, log_prob_range=None).log_prob_range is None


@pytest.mark.parametrize("config", [DppoConfig(), ReinFlowConfig()], ids=["dppo", "reinflow"])
def test_a_composition_is_not_tuned(config: Any) -> None:
    with pytest.raises(
        CapabilityError, match=r"init is a composition\. Train its members, then compose them"
    ):
        config.build(Setup(env=PointEnv(), init=composed()))


def test_rising_rate_is_allowed_for_parity_only() -> None:
    rising = {"actor_lr": 2e-5, "actor_min_lr": 1e-4}
    assert replace(SMALL, paper_compat=True, **rising).actor_min_lr == 1e-4


def test_unfit_setups_are_refused_before_work_starts() -> None:
    class NoEnv(PointEnv):
        def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> Any:
            pytest.fail("environments were made")

    class WideEnv(NoEnv):
        @property
        def spec(self) -> Any:
            return replace(PointEnv().spec, obs_dim=3)

    gaussian = PolicyConfig(process=GaussianProcess(), backbone=MlpConfig(width=8, time_dim=4), act_steps=2)
    for setup, error, message in (
        ({"init": None}, ConfigError, "algo=dppo"),
        ({"init": make_init(), "env": None}, ConfigError, "algo=dppo"),
        ({"init": make_init(), "env": WideEnv()}, ConfigError, "env=point 3 2"),
        (
            {"init": make_init(levels=2)},
            ConfigError,
            "tuned_steps 2 3",
        ),
        (
            {"init": build_policy(gaussian, obs_dim=2, action_dim=2)},
            CapabilityError,
            "GaussianProcess algo=ppo",
        ),
    ):
        with pytest.raises(error, match=mentions(message)):
            SMALL.build(Setup(**({"env": NoEnv(), "num_workers": 0} | setup)))
