"""The update for small minibatches: the numbers of PPO's update, and only where it computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from point_env import PointEnv

from algos.base import Setup
from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.ppo_update import PpoUpdate
from algos.onpolicy.short_update import ShortUpdate
from algos.ppo import PpoConfig
from policies.backbones.mlp import MlpConfig
from policies.networks.heads import CriticConfig
from policies.policy import PolicyConfig
from policies.processes.gaussian import GaussianProcess

SMALL: dict[str, Any] = {"num_envs": 4, "steps_per_iteration": 16, "batch_size": 32, "update_epochs": 1}


def run(
    activation: str = "tanh", chunk: tuple[int, int, int] = (1, 1, 0), layers: Any = None, **given: Any
) -> OnPolicy:
    horizon, act_steps, start = chunk
    std = {name: given.pop(name) for name in ("squash", "learn_std", "init_std") if name in given}
    network: dict[str, Any] = layers or {"residual": False, "hidden_dims": (16, 8), "activation": activation}
    policy = PolicyConfig(
        process=GaussianProcess(**std), backbone=MlpConfig(**network),
        horizon=horizon, act_steps=act_steps, action_start=start,
        normalizer={"state": "identity", "action": "limits"},
    )  # fmt: skip
    config = PpoConfig(**{"critic": CriticConfig(**network), "clip_range": 0.1, **SMALL, **given})
    return config.build(Setup(env=PointEnv(), policy=policy, num_workers=0, num_threads=1))


CASES: dict[str, dict[str, Any]] = {
    "tanh": {},
    "relu": {"activation": "relu", "log_prob_reduction": "joint", "log_prob_range": None},
    "part of a chunk": {"chunk": (4, 2, 1), "log_prob_reduction": "per_step", "squash": False},
    "clamped": {"chunk": (2, 2, 0), "log_prob_range": (-0.5, 2.0)},
    "fixed deviation": {"learn_std": False, "normalize_advantage": False, "vf_coef": 2.0},
    "deviation at its bound": {"init_std": 0.2, "log_prob_range": None},
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_metrics_are_those_of_the_update(case: str) -> None:
    trained = run(**CASES[case])
    short = trained.learner
    assert type(short) is ShortUpdate
    plain = PpoUpdate(trained.config, ratio=short.ratio, actor=short.actor, critic=short.critic)
    experience = trained.experience(trained.collect())
    index = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:32]
    with torch.no_grad():  # ratios on both sides of the clip range
        for parameter in short.actor:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    found, metrics = short.actor_gradient(experience, index, draws=trained.draws)
    expected, expected_metrics = plain.actor_gradient(experience, index, draws=trained.draws)
    assert 0 < float(metrics["policy/clip_fraction"]) < 1
    assert (float(metrics["policy/saturated_fraction"]) > 0) == (case == "clamped")
    pairs = [*zip(found, expected, strict=True)]
    values, value_loss = short.critic_gradient(experience, index)
    expected_values, expected_loss = plain.critic_gradient(experience, index)
    for mine, other in [*pairs, *zip(values, expected_values, strict=True), (value_loss, expected_loss)]:
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-6 * float(other.abs().max()))
    assert metrics.keys() == expected_metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(value, expected_metrics[name], msg=name)
    trained.close()


@pytest.mark.parametrize(
    "given",
    [
        {"layers": {"residual": True}},
        {"activation": "mish"},
        {"layers": {"residual": False, "hidden_dims": (16,), "activation": "tanh", "layer_norm": True}},
        {"surrogate": "spo"},
        {"entropy_coef": 0.01},
        {"value_clip": 0.2},
        {"noise_correlation": 0.5, "chunk": (2, 2, 0)},
        {"batch_size": 32, "microbatch_size": 16},
    ],
    ids=str,
)
def test_what_it_does_not_compute_is_left_to_the_update(given: dict[str, Any]) -> None:
    trained = run(**given)
    assert type(trained.learner) is PpoUpdate
    trained.close()
