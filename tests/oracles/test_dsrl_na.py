"""Noise-aliased DSRL against the released program: one whole update, weights included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_dsrl import (
    NUMBER,
    Arrays,
    actor_of,
    batch_of,
    config_of,
    draws_of,
    ensemble_of,
    read,
    same_actor,
    same_ensemble,
    same_losses,
    same_temperature,
)

from algos.dsrl import NoiseAliasedUpdate

files = pytest.mark.golden("dsrl_na_*.npz")


def learner_of(arrays: Arrays) -> NoiseAliasedUpdate:
    learner = NoiseAliasedUpdate(
        actor_of(arrays, "actor_before"),
        ensemble_of(arrays, "critic_before"),
        ensemble_of(arrays, "noise_critic_before"),
        config_of(arrays),
    )
    learner.target_critic.load_state_dict(ensemble_of(arrays, "critic_target_before").state_dict())
    return learner


@files
def test_targets_and_values_are_those_of_the_released_program(golden_path: Path) -> None:
    arrays = read(golden_path)
    learner, batch = learner_of(arrays), batch_of(arrays)
    target = learner.target(batch, draws_of(arrays), learner.temperature.value)
    torch.testing.assert_close(target, arrays["q_target"].squeeze(1), **NUMBER)
    values = learner.critic(batch.cond, batch.action)
    torch.testing.assert_close(values.t(), arrays["q_pred"], **NUMBER)


@files
def test_a_whole_update_is_that_of_the_released_program(golden_path: Path) -> None:
    arrays = read(golden_path)
    learner, distilled = learner_of(arrays), batch_of(arrays, "distill")
    found = learner.step(batch_of(arrays), draws_of(arrays))
    same_losses(found, arrays)
    same_ensemble(learner.critic, arrays, "critic_after")
    same_actor(learner.actor, arrays, "actor_after")
    same_ensemble(learner.target_critic, arrays, "critic_target_after")
    same_temperature(learner, arrays)

    latent = arrays["distill_noise_w"].flatten(1) / float(arrays["cfg_bw"])
    values = learner.noise_critic(distilled.cond, latent)
    target = learner.distillation_target(distilled.cond, latent)
    torch.testing.assert_close(values.t(), arrays["distill_pred"], **NUMBER)
    torch.testing.assert_close(target.t(), arrays["distill_target"], **NUMBER)
    found = learner.distill(distilled, {"latent": latent})
    assert float(found["noise_critic/loss"]) == pytest.approx(
        float(arrays["logged_noise_critic_loss"]), abs=1e-5
    )
    same_ensemble(learner.noise_critic, arrays, "noise_critic_after")
    same_ensemble(learner.critic, arrays, "critic_after")
