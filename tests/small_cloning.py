"""Cloning runs of a few gradient steps, for tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algos.bc import Bc, BcConfig
from policies.processes import RectifiedFlow, VPDiffusion
from policies.processes.gaussian import GaussianProcess
from policies.processes.mixture import MixtureProcess

PROCESSES = [
    pytest.param(VPDiffusion(num_levels=10), id="eps"),
    pytest.param(VPDiffusion(num_levels=10, prediction="x0"), id="x0"),
    pytest.param(VPDiffusion(num_levels=10, prediction="v"), id="v"),
    pytest.param(RectifiedFlow(), id="flow"),
    pytest.param(GaussianProcess(), id="gaussian"),
    pytest.param(MixtureProcess(), id="mixture"),
]


def tiny(**changes: Any) -> BcConfig:
    """A run of six gradient steps, reported in pairs."""
    values = {
        "steps": 6,
        "batch_size": 8,
        "log_every": 2,
        "warmup_steps": 2,
        "validation_fraction": 0.0,
        "ema_every": 1,
    }
    return BcConfig(**{**values, **changes})


def weights(module: torch.nn.Module) -> torch.Tensor:
    """Return a copy of all weights as one vector."""
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def finish(algorithm: Bc) -> list[dict[str, Any]]:
    """Train to the end and return the reported rows."""
    rows = []
    while algorithm.progress < algorithm.total:
        rows.append(dict(algorithm.advance()))
    return rows
