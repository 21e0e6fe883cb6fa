"""A typed key without effect beside the others is refused by name; a default or an experiment's is not."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from messages import mentions

from algos.ppo import PpoConfig
from burnish.config.overrides import Overrides, RunContext
from burnish.config.schema import compose_command, compose_config, refuse_unused
from burnish.config.train import TrainConfig
from burnish.runs.resolve import resolve
from policies import registry
from policies.errors import ConfigError

KEYS = [
    ("dppo algo.encoder_lr=1e-4", "algo.encoder=trained"),
    ("dppo algo.image_shift=2", "algo.encoder=trained"),
    ("rlpd algo.image_shift=2", "algo.encoder=trained"),
    ("dppo algo.bc_rows=300", "algo.bc_weight"),
    ("dppo algo.surrogate=trpo algo.clip_range=0.1", "algo.surrogate=trpo algo.target_kl"),
    ("dppo algo.surrogate=fixpo algo.clip_range_base=0.1", "algo.surrogate=fixpo"),
    ("awm algo.clip_range=0.1", "algo=awm"),
    ("fpo algo.time_power=2", "algo.times=density"),
    ("ppo algo.env_steps=100 algo.iterations=7", "algo.env_steps=100"),
    ("ppo algo.actor_lr_cycle=70", "algo.actor_min_lr"),
    ("reinflow algo.noise.level=constant algo.noise.hidden_dims=[8]", "algo.noise.level=learned"),
    ("bc algo.epochs=2 algo.steps=10", "algo.epochs=2"),
    ("sac algo.pessimism=1", "algo.aggregate=mean_std"),
    ("dsrl algo.variant=sac algo.distillation_share=1", "algo.variant=na"),
    ("iql algo.online.num_envs=2", "algo.online_steps"),
    ("idql algo.aggregate=mean", "least"),
    ("qc algo.value_min=-1", "algo.critic_bins"),
    ("srpo algo.actor_every=2", "actor"),
    ("bc start.steps=3", "start.guide start.dataset"),
    ("qc algo.refit=false algo.actor_lr=1e-4", "algo.refit"),
    ("pa_rl algo.refit=false algo.actor_every=2", "algo.refit"),
    ("idql algo.refit=false algo.weighting=soft", "algo.refit"),
    ("bc backbone.residual=false backbone.hidden_dims=[8] backbone.width=9", "backbone.residual"),
    ("bc backbone=mlp backbone.cond_activation=relu", "backbone.cond_dims"),
    ("bc backbone=unet1d backbone.groups=0 backbone.norm_eps=1e-6", "backbone.groups"),
    ("bc backbone=gpt backbone.goal_unread=[0]", "backbone.goal_tokens"),
    ("dppo algo.surrogate=trpo algo.actor_lr=1e-3", "algo.surrogate=trpo"),
    ("bc process=edm process.density_mean=1", "process.density=log_logistic"),
    ("bc process=edm process.density=log_uniform process.density_scale=1", "process.density=log_uniform"),
    ("bc process=mixture process.state_std=true process.max_std=0.3", "process.state_std"),
    ("bc env=cube-single env.expert.mode=play env.expert.min_norm=0.2", "env.expert.mode=play"),
    ("bc env=cube-single env.expert.length=9", "env.expert.mode=task"),
    ("ppo algo.critic.residual=false algo.critic.hidden_dims=[8] algo.critic.num_blocks=2", "residual"),
]


@pytest.mark.parametrize(("words", "why"), KEYS, ids=[words for words, _ in KEYS])
def test_a_typed_key_without_effect_is_refused_by_name(words: str, why: str) -> None:
    algo, *typed = words.split()
    composed = compose_command("train", [f"algo={algo}", *typed])
    with pytest.raises(ConfigError, match=mentions(f"{typed[-1].partition('=')[0]} {why}")):
        refuse_unused(*composed)


@pytest.mark.parametrize(
    "words",
    [
        "experiment=avoid_dppo algo.bc_weight=0",  # the experiment has rows of this term
        "experiment=avoid_dppo algo.surrogate=trpo",  # and a clip range
        "algo=dppo algo.surrogate=trpo algo.props_every=10 algo.actor_lr=1e-3",  # the rate of PROPS
        "algo=dppo algo.bc_rows=null",
        "algo=dppo algo.encoder=trained algo.image_shift=2 algo.encoder_lr=1e-4",
        "algo=dqc algo.value_min=-10 algo.value_max=0",
        "algo=bc process=edm process.density=log_normal process.density_mean=1 process.density_scale=1",
        "algo=bc env=cube-single env.expert.min_norm=0.2",
        "algo=iql algo.online_steps=9 algo.online.num_envs=2",
        "algo=residual algo.refit=false algo.actor_lr=1e-4 algo.actor_every=2",
        "algo=qam_edit algo.actor_aggregate=mean_std algo.aggregate=mean algo.pessimism=1",
    ],
)
def test_what_an_experiment_sets_or_another_key_uses_is_accepted(words: str) -> None:
    refuse_unused(*compose_command("train", words.split()))


@pytest.mark.parametrize(
    ("command", "words", "why"),
    [
        ("collect", "env=avoid guidance=3", "guidance model"),
        ("collect", "env=avoid model=runs/x guidance=3", "guidance policy"),
        ("collect", "env=avoid model=runs/x keep_failures=true", "keep_failures model"),
        ("eval", "policy=runs/x steer.strategy=random steer.limit=2", "steer.limit steer.strategy=random"),
        (
            "eval",
            "policy=runs/x steer.strategy=guided_diffusion steer.resample_noise=0.2",
            "resample_noise steer.resample_steps",
        ),
        ("rank", "policy=runs/x score=energy score_draws=3", "score_draws score=density"),
    ],
)
def test_keys_of_other_commands_are_refused_too(command: str, words: str, why: str) -> None:
    with pytest.raises(ConfigError, match=mentions(f"{why} no effect")):
        compose_config(command, words.split())
    kept = "env=avoid model=runs/x policy=runs/y guidance=3"
    assert compose_config("collect", kept.split()).guidance == 3


def test_it_is_refused_before_a_run_begins_and_choices_of_auto_are_not(tmp_path: Path) -> None:
    typed = ["algo=ppo", "env=avoid", "algo.surrogate=trpo", "algo.target_kl=0.01"]
    context = RunContext(tmp_path / "run", Overrides.parse([*typed, "algo.clip_range=0.1"]))
    with pytest.raises(ConfigError, match=mentions("algo.clip_range algo.surrogate=trpo")):
        resolve(TrainConfig(algo=PpoConfig(surrogate="trpo", clip_range=0.1)), context)
    chosen = compose_command("train", ["experiment=auto", *typed, "algo.actor_min_lr=null"])
    assert (
        resolve(chosen.config, RunContext(tmp_path / "run", chosen.overrides)).config.algo.surrogate == "trpo"
    )


@pytest.mark.parametrize("name", registry.names("algo"))
def test_keys_that_may_be_without_effect_exist(name: str) -> None:
    algo = registry.lookup("algo", name)()
    unused = algo.unused()
    for key in unused:
        part: Any = algo
        for step in key.split("."):
            assert step in {one.name for one in fields(part)}, key
            part = getattr(part, step)
