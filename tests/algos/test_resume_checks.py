"""A run is continued as what it was: changes that would corrupt it are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from point_env import PointEnv
from two_modes import two_mode_dataset

from algos.base import Setup
from algos.bc import BcConfig
from algos.dppo import DppoConfig
from algos.onpolicy.loop import OnPolicy
from algos.ppo import PpoConfig
from algos.sac import SacConfig
from algos.training.resume_checks import digest_of, facts_of
from algos.training.serialization import from_plain, to_plain
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.composition.compose import compose
from policies.errors import CheckpointError
from policies.networks.heads import CriticConfig
from policies.policy import Policy, PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.processes.gaussian import GaussianProcess
from policies.processes.squashed import TanhGaussianProcess
from policies.samplers.ddpm import DDIM
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.noise_policy import Steering


def make_init(levels: int = 5, seed: int = 3) -> Policy:
    config = PolicyConfig(
        process=VPDiffusion(levels), backbone=MlpConfig(width=8, time_dim=4), horizon=3, act_steps=2
    )
    one = {"min": -torch.ones(2), "max": torch.ones(2), "mean": torch.zeros(2), "std": torch.ones(2)}
    return build_policy(config, obs_dim=2, action_dim=2, statistics={"state": one, "action": one}, seed=seed)


def make_run(init: Policy | None = None, seed: int = 0, **changes: Any) -> OnPolicy:
    values = {"num_envs": 2, "steps_per_iteration": 2, "tuned_steps": 3} | changes
    config = DppoConfig(**values, iterations=1, batch_size=8, critic=CriticConfig(width=8))
    given = {"env": PointEnv(), "init": init or make_init(), "seed": seed}
    return config.build(Setup(**given, num_workers=0, num_threads=1))


def test_another_seed_is_refused_on_policy_too() -> None:
    with pytest.raises(CheckpointError, match=mentions("seed 0 1")):
        make_run(seed=1).load_state_dict(from_plain(to_plain(make_run().state_dict())))


@pytest.mark.parametrize(
    ("init", "changes", "message"),
    [
        (
            {},
            {"tuned_steps": 2},
            "algo.tuned_steps 3 2",
        ),
        ({"levels": 10}, {"sampler": "ddim", "denoising_steps": 4}, "2.5 5.0"),
        ({"seed": 8}, {}, "init"),
    ],
)
def test_changes_that_would_corrupt_a_resumed_run_are_refused(
    init: dict[str, int], changes: dict[str, Any], message: str
) -> None:
    state = from_plain(to_plain(make_run().state_dict()))
    changed = make_run(make_init(**init), **changes)
    with pytest.raises(CheckpointError, match=mentions(message)):
        changed.load_state_dict(state)
    make_run().load_state_dict(state)


def start_from_scratch(algo: Any, process: Any, activation: str) -> Any:
    """Return a run that begins with a new policy."""
    net = MlpConfig(residual=False, hidden_dims=(8,), time_dim=4, activation=activation)
    modes = {"state": "identity", "action": "limits"}
    policy = PolicyConfig(process=process, backbone=net, horizon=1, act_steps=1, normalizer=modes)
    cloning = isinstance(algo, BcConfig)
    setup = {"dataset": two_mode_dataset(4)} if cloning else {"env": PointEnv(), "num_workers": 0}
    return algo.build(Setup(policy=policy, num_threads=1, **setup))


@pytest.mark.parametrize(
    ("algo", "process"),
    [
        (BcConfig(steps=2, warmup_steps=0, batch_size=4), VPDiffusion(5)),
        (PpoConfig(num_envs=2, steps_per_iteration=2, batch_size=2), GaussianProcess()),
        (SacConfig(num_envs=2, steps_per_iteration=2, critic_dims=(8,)), TanhGaussianProcess()),
    ],
)
def test_a_new_policy_stays_what_it_was(algo: Any, process: Any) -> None:
    """Its weights would fit another activation, and mean something else."""
    state = from_plain(to_plain(start_from_scratch(algo, process, "mish").state_dict()))
    with pytest.raises(CheckpointError, match=mentions("policy.parts.backbone.activation relu")):
        start_from_scratch(algo, process, "relu").load_state_dict(state)
    start_from_scratch(algo, process, "mish").load_state_dict(state)


def test_states_without_these_facts_are_continued() -> None:
    first = make_run()
    first.advance()
    state = first.state_dict()
    old = {name: value for name, value in state.items() if name not in ("inner_steps", "switch_time", "init")}
    run = make_run(make_init(seed=8))
    run.load_state_dict(old)
    assert run.progress == first.progress > 0


def test_a_digest_tells_weights_apart() -> None:
    policy = make_init()
    assert digest_of(policy) == digest_of(policy.clone()) != digest_of(make_init(seed=4))
    assert digest_of(policy.clone().to(torch.bfloat16)) != digest_of(policy)
    assert digest_of(None) is None


def composed(*weights: float, operator: str = "convex") -> Policy:
    return compose([make_init(), make_init(seed=4)], weights, operator=operator, sampler=DDIM(steps=3))


def test_facts_tell_policies_apart_whose_weights_are_the_same() -> None:
    one = facts_of("init", composed(0.5, 0.5))
    for other, place in (
        (composed(0.1, 0.9), "composition.weights"),
        (composed(0.5, 0.5, operator="product"), "composition.operator"),
        (composed(0.5, 0.5).with_sampler(DDIM(steps=2)), "parts.sampler.steps"),  # type: ignore[attr-defined]
    ):
        found = facts_of("init", other)
        assert found["init"] == one["init"] and found.keys() == one.keys()
        assert [name for name in one if one[name] != found[name]] == [f"init.{place}"]
    bounds = [facts_of("init", Steering(hidden_dims=(8,), bound=b).wrap(composed(0.5, 0.5))) for b in (1, 2)]
    assert [f["init.wrappers.0.bound"] for f in bounds] == [1, 2]


def test_where_a_policy_comes_from_is_no_fact_of_it(tmp_path: Path) -> None:
    policy = composed(0.5, 0.5)
    loaded = load_policy(save_policy(policy, tmp_path / "policy", provenance={"versions": "1", "run": "a"}))
    facts = facts_of("init", policy)
    assert loaded.provenance and facts_of("init", loaded) == facts
    assert not any(word in name for name in facts for word in ("format", "provenance"))
    assert from_plain(to_plain(facts)) == facts
    assert facts_of("teacher", None) == {"teacher": None}


def test_settings_that_were_not_saved_are_not_compared() -> None:
    """An earlier version saved weights only, or did not know a setting yet."""
    first = make_run()
    state = {name: value for name, value in first.state_dict().items() if not name.startswith("init.")}
    assert state["init"] == first.state_dict()["init"]
    make_run().load_state_dict(state)
