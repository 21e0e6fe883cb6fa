"""Running reward scaling against reference numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from algos.onpolicy.losses import RewardScaler


def _time_first(array: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(array).T


@pytest.mark.golden("dppo_reward_scaler*.npz")
def test_reward_scaler_matches_reference(golden_path: Path) -> None:
    data = np.load(golden_path)
    calls = sorted({name.split("_")[0] for name in data.files if name.endswith("_rms")})
    scaler = RewardScaler(len(data[f"{calls[0]}_ret"]), gamma=0.99, clip=10.0)
    for call in calls:
        out = scaler(_time_first(data[f"{call}_reward"]), _time_first(data[f"{call}_first"]))
        np.testing.assert_allclose(out.T, data[f"{call}_out"], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(scaler.carried, data[f"{call}_ret"], rtol=1e-12)
        np.testing.assert_allclose([scaler.mean, scaler.var, scaler.count], data[f"{call}_rms"], rtol=1e-12)


@pytest.mark.golden("dppo_reward_scaler*.npz")
def test_reward_scaler_clips_outliers_as_reference(golden_path: Path) -> None:
    data = np.load(golden_path)
    scaler = RewardScaler(len(data["spike_reward"]), gamma=0.99, clip=10.0)
    out = scaler(_time_first(data["spike_reward"]), _time_first(data["spike_first"]))
    assert out.max() == 10.0
    assert out.min() == -10.0
    np.testing.assert_allclose(out.T, data["spike_out"], rtol=1e-12, atol=1e-12)
