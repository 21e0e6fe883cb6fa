"""What the key `device` takes, wherever it is a key."""

from __future__ import annotations

import pytest
import torch
from messages import mentions

from algos.base import device_of
from burnish.commands.serve import ServeConfig, served_by
from policies.errors import ConfigError


def test_the_cpu_is_always_there() -> None:
    assert device_of("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "device cuda gpu"),
        ("meta", "device cuda meta"),
        ("", "device cuda"),
        ("cuda:99", "device=cuda:99 device=cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_a_policy_is_served(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        served_by(ServeConfig(policy="runs/base", device=name))


def test_a_build_without_cuda_is_no_place_to_serve_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=mentions("device=cuda")):
        served_by(ServeConfig(policy="runs/base", device="cuda"))
