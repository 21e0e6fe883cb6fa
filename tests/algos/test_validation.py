"""Validation: errors of sampled actions in physical units, the same whenever it is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_cloning import tiny
from two_modes import two_mode_setup

from algos.cloning.batches import WindowSampler
from algos.cloning.quality import quality
from algos.cloning.validation import Validation


def test_validation_is_in_physical_units_and_best_is_not_above_mean() -> None:
    setup = two_mode_setup()
    policy = tiny().build(setup).snapshot()
    source = WindowSampler(setup.dataset, policy.chunk, pad_end=True)
    found = Validation(source, num_windows=50, num_samples=3, seed=0).measure(policy)
    assert 0.0 < found["validation/action_mse_best"] <= found["validation/action_mse"]
    again = Validation(source, num_windows=50, num_samples=3, seed=0).measure(policy)
    assert found == again


def test_validation_of_the_demonstrator_itself_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = two_mode_setup()
    policy = tiny().build(setup).snapshot()
    validation = Validation(
        WindowSampler(setup.dataset, policy.chunk, pad_end=True), num_windows=9, num_samples=2, seed=0
    )
    truth = policy.normalize_action(validation._data.action).repeat_interleave(2, dim=0)
    truth[1::2] += 1.0  # the second sample of every window is one normalised unit off
    padding = ~validation._data.mask.repeat_interleave(2, dim=0)
    assert padding.any()
    truth[padding] += 5.0  # where nothing was recorded, nothing is wrong
    monkeypatch.setattr(policy, "decode", lambda cond, noise: truth)
    found = validation.measure(policy)
    unit = 1.0 / policy.normalizer.action_scale.item()
    assert float(found["validation/action_mse_best"]) == pytest.approx(0.0, abs=1e-10)
    assert float(found["validation/action_mse"]) == pytest.approx(unit**2 / 2.0, rel=1e-5)


def test_data_are_as_good_as_what_they_recorded() -> None:
    data = two_mode_setup().dataset
    assert data is not None
    silent = replace(data, rewards=torch.zeros_like(data.rewards), episode_extras={})
    assert quality(silent) == {}
    success = torch.arange(data.num_episodes) == 0
    told = replace(silent, rewards=torch.ones_like(data.rewards), episode_extras={"success": success})
    count = data.num_episodes
    assert quality(told) == {"episodes": count, "return": len(data) / count, "success": 1 / count}
    assert quality(replace(told, extras={"masks": torch.ones(len(data))})) == {}
