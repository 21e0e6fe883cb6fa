"""Load the weights of DPPO's released networks into ours and compare outputs and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

OUTPUT = {"rtol": 1e-4, "atol": 1e-5}
"""Tolerance of the reference numbers for float32 network outputs and their gradients."""


@cache
def _stored(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def stored(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a reference file, which is read once; they belong to the test."""
    return {name: array.copy() for name, array in _stored(path).items()}


def read(path: Path) -> dict[str, Tensor]:
    """Return every array of a reference file."""
    return {name: torch.from_numpy(array) for name, array in stored(path).items()}


def official_weights(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the released parameters by their released names."""
    return {name[2:]: value for name, value in arrays.items() if name.startswith("w.")}


def install(net: nn.Module, keys: Mapping[str, str], weights: Mapping[str, Tensor]) -> None:
    """Copy released parameters into a network; every parameter of either side must have a partner."""
    assert set(keys) == set(weights)
    net.load_state_dict({keys[name]: value for name, value in weights.items()}, strict=True)


def assert_gradients(
    net: nn.Module, keys: Mapping[str, str], outputs: list[Tensor], arrays: Mapping[str, Tensor]
) -> None:
    """Compare the gradient of sum(out cos(n)), n the flat index within each output, with every `g.*`."""
    total = sum((out.flatten() * torch.cos(torch.arange(out.numel()).float())).sum() for out in outputs)
    net.zero_grad()
    total.backward()
    ours = dict(net.named_parameters())
    expected = {name[2:]: value for name, value in arrays.items() if name.startswith("g.")}
    assert {keys[name] for name in expected} == set(ours)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            ours[keys[name]].grad, gradient, **OUTPUT, msg=lambda m, n=name: f"g.{n}: {m}"
        )


def residual_dims(weights: Mapping[str, Tensor], prefix: str) -> dict[str, int | bool]:
    """Read width, number of blocks and normalisation of a released residual MLP from its weights."""
    last = max(int(name.removeprefix(prefix).split(".")[1]) for name in weights if name.startswith(prefix))
    return {
        "width": weights[f"{prefix}layers.0.weight"].shape[0],
        "num_blocks": last - 1,
        "layer_norm": f"{prefix}layers.1.norm1.weight" in weights,
    }


def plain_dims(weights: Mapping[str, Tensor], prefix: str) -> tuple[int, ...]:
    """Read the output widths of a released plain MLP from its weights."""
    names = [
        name for name in weights if name.startswith(f"{prefix}moduleList.") and "linear_1.weight" in name
    ]
    return tuple(weights[name].shape[0] for name in sorted(names, key=lambda n: int(n.split(".")[-3])))
