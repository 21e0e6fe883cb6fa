"""Regression and MIP equal the released losses, their gradients and samplers, on recorded noise.

The losses of flows and flow maps in the same files (flow, lmd, ctm, psd, lsd, esd, mf) and their samplers
(ode, flow_map) belong to `test_flow_map_losses`. Beyond that nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from official_networks import read
from torch import Tensor, nn

from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.policy import PolicyConfig
from policies.processes import Mip, Regression
from policies.processes.regression import ERRORS
from policies.protocols import TE, Cond

Arrays = dict[str, Tensor]

TAU = 0.9  # t* of every number in the files
PROCESSES: dict[str, Callable[..., Any]] = {
    "regression": Regression,
    "straight_flow": lambda **own: Regression(start_noise=True, **own),
    "mip": lambda **own: Mip(refine_time=TAU, **own),
    "mip_origin": lambda **own: Mip("origin", TAU, **own),
    "tsd": lambda **own: Mip("tsd", TAU, **own),
}
DRAWS = {
    "regression": (),
    "straight_flow": ("eps",),
    "mip": ("eps",),
    "mip_origin": ("eps",),
    "tsd": ("start", "eps"),
}
"""What the recorded draws are, in their order."""


@dataclass(frozen=True)
class ToyConfig:
    """Builds a `Toy`."""

    hidden: int

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> Toy:
        return Toy(shape[1], cond_dim, self.hidden)


class Toy(nn.Module):
    """f(x, s, t) = tanh(x A + s p + t q + cond W + b) C + d for every row of a chunk, with s = t."""

    def __init__(self, action_dim: int, cond_dim: int, hidden: int) -> None:
        super().__init__()
        shapes = {"A": (action_dim, hidden), "p": (hidden,), "q": (hidden,), "W": (cond_dim, hidden)}
        shapes |= {"b": (hidden,), "C": (hidden, action_dim), "d": (action_dim,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor, time: Tensor, cond: Cond, **_: Any) -> Tensor:
        row = time[:, None] * self.p + time[:, None] * self.q + cond.vec @ self.W + self.b
        return torch.tanh(x @ self.A + row[:, None]) @ self.C + self.d

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> Callable[[int, Tensor], Tensor]:
        return lambda k, x: self(x, times[k].expand(len(x)), cond)


def policy_of(arrays: Arrays, process: Any) -> DenoisingPolicy:
    """The toy network as a policy that normalises nothing."""
    _, horizon, action_dim = arrays["act"].shape
    config = PolicyConfig(
        process=process,
        backbone=ToyConfig(len(arrays["net_b"])),
        horizon=horizon,
        act_steps=1,
        normalizer={"state": "identity", "action": "identity"},
    )
    policy: Any = build_policy(config, obs_dim=arrays["cond"].shape[1], action_dim=action_dim)
    policy.field.load_state_dict(
        {name: arrays[f"net_{name}"] for name in ("A", "p", "q", "W", "b", "C", "d")}
    )
    return policy


def recorded(arrays: Arrays) -> list[tuple[str, str, str]]:
    """Return (key, loss, measure) of every loss of a file that is ours."""
    keys = [(f"loss_{name}_linear_{error}", name, error) for name in PROCESSES for error in ERRORS]
    return [row for row in keys if row[0] in arrays]


def draws_of(arrays: Arrays, key: str, names: tuple[str, ...]) -> TE:
    drawn = {name: arrays[f"{key}__draw{i}_n"] for i, name in enumerate(names)}
    eps = drawn.pop("eps", torch.zeros_like(arrays["act"]))
    return TE(torch.full((len(eps),), TAU), eps, more=drawn)


@pytest.mark.golden("mip_losses*.npz")
def test_losses_and_gradients_equal_the_released_ones(golden_path: Path) -> None:
    arrays = read(golden_path)
    found = recorded(arrays)
    assert {name for _, name, _ in found} == set(PROCESSES)
    for key, name, error in found:
        policy = policy_of(arrays, PROCESSES[name](error=error, time_scale=1.0))
        cond = policy.encode({"state": arrays["cond"][:, None]})
        te = draws_of(arrays, key, DRAWS[name])
        loss = policy.matching_loss(cond, arrays["act"], te, reduce="mean") * arrays["act"].shape[-1]
        torch.testing.assert_close(loss.double(), arrays[key], rtol=1e-5, atol=0)
        loss.backward()
        grads = [gradient for gradient in arrays if gradient.startswith(f"{key}__grad_")]
        assert grads
        for gradient in grads:
            weight = policy.field.get_parameter(gradient.rpartition("_")[2])
            torch.testing.assert_close(weight.grad, arrays[gradient], rtol=1e-4, atol=1e-5)


@pytest.mark.golden("mip_losses*.npz")
@pytest.mark.parametrize("name", ["regression", "mip", "mip_origin"])
def test_samples_equal_the_released_ones(golden_path: Path, name: str) -> None:
    arrays = read(golden_path)
    policy = policy_of(arrays, PROCESSES[name](time_scale=1.0))
    obs = {"state": arrays["cond"][:, None]}
    for seed in (0, 1):  # the noise has no influence
        noise = policy.sample_noise(len(arrays["cond"]), generator=torch.Generator().manual_seed(seed))
        chunk = policy.decode(policy.encode(obs), noise)
        torch.testing.assert_close(chunk, arrays[f"sample_{name}"], rtol=0, atol=1e-5)
