"""DSRL by plain soft actor-critic against the released program: one whole update, weights included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_dsrl import (
    NUMBER,
    WEIGHT,
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

from algos.offpolicy.sac_update import SacUpdate

files = pytest.mark.golden("dsrl_sac_*.npz")


@files
def test_a_whole_update_is_that_of_the_released_program(golden_path: Path) -> None:
    arrays = read(golden_path)
    learner = SacUpdate(
        actor_of(arrays, "actor_before"), ensemble_of(arrays, "critic_before"), config_of(arrays)
    )
    learner.target_critic.load_state_dict(ensemble_of(arrays, "critic_target_before").state_dict())
    batch, draws = batch_of(arrays), draws_of(arrays)
    target = learner.target(batch, draws, learner.temperature.value)
    torch.testing.assert_close(target, arrays["q_target"].squeeze(1), **NUMBER)
    torch.testing.assert_close(learner.critic(batch.cond, batch.latent).t(), arrays["q_pred"], **NUMBER)

    found = learner.step(batch, draws)
    same_losses(found, arrays)
    same_ensemble(learner.critic, arrays, "critic_after")
    same_actor(learner.actor, arrays, "actor_after")
    same_ensemble(learner.target_critic, arrays, "critic_target_after")
    same_temperature(learner, arrays)


@files
def test_what_is_executed_is_the_base_policy_at_the_bounded_noise(golden_path: Path) -> None:
    arrays = read(golden_path)
    policy, latent = actor_of(arrays, "actor_before").policy, arrays["td_action"]
    torch.testing.assert_close(policy.noise_of(latent).flatten(1), arrays["td_noise_w_env"], **WEIGHT)
    torch.testing.assert_close(policy.chunk_of(arrays["td_obs"], latent), arrays["executed_action"], **WEIGHT)
