"""ReinFlow's reward scaling, advantages and schedules against the released code.

Not covered: `lr_*_used`, rates of an agent whose scheduler was advanced while it drew a picture.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from official_networks import read

from algos.onpolicy.losses import RewardScaler, gae, successor_values
from algos.onpolicy.reinflow_ratio import NoiseConfig
from algos.optim import warmup_cosine

EXACT = {"rtol": 1e-9, "atol": 1e-9}
LAST_VALUE = {"rtol": 1e-6, "atol": 1e-6}
"""Advantages see a value that the file holds in single precision."""

RATES = {"hopper": (4.5e-5, 2e-5), "kitchen": (4.5e-5, 2e-5), "can": (2e-5, 1e-5)}


@pytest.mark.golden("reinflow_gae_schedules*.npz")
def test_scaled_rewards_and_advantages_over_two_iterations(golden_path: Path) -> None:
    arrays = read(golden_path)
    scaler = RewardScaler(arrays["it0_reward_raw"].shape[1], gamma=float(arrays["gamma"]), clip=10.0)
    for name in ("it0", "it1"):
        reward = scaler(arrays[f"{name}_reward_raw"], arrays[f"{name}_firsts"][:-1])
        torch.testing.assert_close(reward, arrays[f"{name}_reward_scaled"], **EXACT)
        state = (scaler.mean, scaler.var, scaler.count)
        expected = [float(arrays[f"{name}_rms_{what}"]) for what in ("mean", "var", "count")]
        np.testing.assert_allclose(state, expected, rtol=1e-9)
        torch.testing.assert_close(scaler.carried, arrays[f"{name}_running_ret"], **EXACT)
        value = arrays[f"{name}_values"]
        advantage, target = gae(
            reward,
            value,
            successor_values(value, arrays[f"{name}_last_value"].double()),
            arrays[f"{name}_terminated"],
            arrays[f"{name}_truncated"],
            gamma=float(arrays["gamma"]),
            lam=float(arrays["lam"]),
            paper_compat=True,
        )
        torch.testing.assert_close(advantage, arrays[f"{name}_adv"], **LAST_VALUE)
        torch.testing.assert_close(target, arrays[f"{name}_returns"], **LAST_VALUE)


@pytest.mark.golden("reinflow_gae_schedules*.npz")
def test_the_bound_of_the_noise_falls_as_published(golden_path: Path) -> None:
    arrays = read(golden_path)
    expected = arrays["noise_max_sched_hopper"]
    config = NoiseConfig(min_std=float(arrays["noise_min_hopper"]), max_std=float(expected[0]))
    ours = [config.max_std_at(i / len(expected)) for i in range(len(expected))]
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), expected, **EXACT)


@pytest.mark.golden("reinflow_gae_schedules*.npz")
def test_learning_rates_rise_and_fall_as_published(golden_path: Path) -> None:
    arrays = read(golden_path)
    for task, (high, low) in RATES.items():
        expected = arrays[f"lr_{task}_actor_fresh"]
        assert float(arrays[f"lr_{task}_actor_initial"]) == pytest.approx(low)
        ours = [warmup_cosine(i + 1, lr=high, min_lr=low, warmup=10, cycle=100) for i in range(len(expected))]
        np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-9)
