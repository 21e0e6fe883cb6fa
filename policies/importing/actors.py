"""Fully connected actors of other programs: a stack of layers from one observation to one action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policies.backbones.mlp import MlpConfig
from policies.errors import CapabilityError, CheckpointError
from policies.importing.files import Tensors
from policies.networks.activations import ACTIVATIONS
from policies.policy_config import PolicyConfig
from policies.processes.deterministic import DeterministicProcess
from policies.processes.gaussian import GaussianProcess, Mean
from policies.processes.squashed import TanhGaussianProcess

Layer = tuple[Tensor, Tensor]
"""Weight (out, in) and bias (out,)."""


def layer(tensors: Tensors, name: str) -> Layer:
    """Take one linear layer."""
    return tensors.take(f"{name}.weight"), tensors.take(f"{name}.bias")


def layers(tensors: Tensors, prefix: str) -> list[Layer]:
    """Take the linear layers of a `Sequential`, in order; other modules between them have no weights."""
    numbers = sorted(
        int(name.removeprefix(prefix).removesuffix(".weight"))
        for name in tensors.left
        if name.startswith(prefix) and name.removeprefix(prefix).removesuffix(".weight").isdigit()
    )
    return [layer(tensors, f"{prefix}{number}") for number in numbers]


def joined(*parts: Layer) -> Layer:
    """Stack the outputs of layers with the same input."""
    weights, biases = zip(*parts, strict=True)
    return torch.cat(weights), torch.cat(biases)


def stacked(stack: Sequence[Layer], prefix: str) -> dict[str, Tensor]:
    """Return a stack of layers by the names of a `PlainTrunk`."""
    names = ["inlet", *(f"layers.{i}" for i in range(len(stack) - 1))]
    return {
        f"{prefix}{name}.{kind}": tensor
        for name, one in zip(names, stack, strict=True)
        for kind, tensor in zip(("weight", "bias"), one, strict=True)
    }


def activation_of(name: str) -> str:
    """Return our name of an activation, given its class or its text, e.g. `<class 'torch.nn…ReLU'>`."""
    short = name.strip("<>'() ").rpartition(".")[2].lower()
    short = {"gelu": "gelu_erf", "leakyrelu": "leaky_relu"}.get(short, short)
    if short not in ACTIVATIONS:
        raise CapabilityError(f"activation {short} cannot be imported; {', '.join(ACTIVATIONS)} can.")
    return short


def backbone_of(stack: Sequence[Layer], activation: str) -> MlpConfig:
    """Return the backbone whose trunk is the stack."""
    if len(stack) < 2:
        raise CheckpointError(f"an actor must have at least one hidden layer; got {len(stack)} layers.")
    hidden = tuple(len(bias) for _, bias in stack[:-1])
    return MlpConfig(residual=False, hidden_dims=hidden, activation=activation)


def deterministic(stack: Sequence[Layer], activation: str) -> tuple[PolicyConfig, dict[str, Tensor]]:
    """Return tanh of a stack."""
    config = one_step(stack, activation, process=DeterministicProcess())
    return config, stacked(stack, "trunk.")


def squashed(
    stack: Sequence[Layer], mean: Layer, log_std: Layer, activation: str, **limits: float
) -> tuple[PolicyConfig, dict[str, Tensor]]:
    """Return tanh of a normal distribution whose mean and log deviation are layers on a stack."""
    whole = [*stack, joined(mean, log_std)]
    config = one_step(whole, activation, process=TanhGaussianProcess(**limits))
    return config, stacked(whole, "head.trunk.")


def gaussian(
    stack: Sequence[Layer], log_std: Tensor, activation: str, *, clip: float | None, squash: bool
) -> tuple[PolicyConfig, dict[str, Tensor]]:
    """Return a normal distribution whose mean is a stack, with one log deviation (Da,) per dimension."""
    process = GaussianProcess(init_std=1.0, min_std=1e-6, max_std=1e6, squash=squash)
    config = one_step(stack, activation, process=process, sampler=Mean(clip_action=clip))
    return config, {"head.log_var": 2 * log_std, **stacked(stack, "head.trunk.")}


def one_step(stack: Sequence[Layer], activation: str, **parts: Any) -> PolicyConfig:
    """Return the configuration of a policy that sees one observation and gives one action."""
    backbone = backbone_of(stack, activation)
    return PolicyConfig(**parts, backbone=backbone, horizon=1, act_steps=1, observation_clip=None)


def gaussian_statistics(
    statistics: Mapping[str, Any], deviation: str, epsilon: float, *, variance: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the map (x - mean) / std of `obs_mean` and `obs_std` or `obs_var` with `epsilon` added.

    Raises:
        CheckpointError: If one of the arrays is missing.
    """
    if missing := [name for name in ("obs_mean", deviation) if name not in statistics]:
        known = ", ".join(sorted(statistics)) or "none"
        raise CheckpointError(f"the normalization file has no array '{missing[0]}'; its arrays are: {known}.")
    mean, spread = (torch.as_tensor(statistics[name]).double() for name in ("obs_mean", deviation))
    scale = 1 / ((spread + epsilon).sqrt() if variance else spread + epsilon)
    return scale.float(), (-mean * scale).float()
