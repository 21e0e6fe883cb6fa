"""Averages of weights against closed forms: linear, spherical, towards the start, folded, iterated.

Not compared: `ema50`, an average while training, and `slerp_whole`, one angle for all tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from official_critics import arrays_of
from torch import Tensor

from policies.composition.merging import angle, linear, spherical

files = pytest.mark.golden("warp_merge*.npz")
EXACT = {"rtol": 0.0, "atol": 1e-12}
NAMES = ("w", "b", "par", "zero")


@pytest.fixture
def arrays(golden_path: Path) -> dict[str, Any]:
    return arrays_of(golden_path)


def members(arrays: dict[str, Any], name: str) -> list[Tensor]:
    return [arrays[f"member{m}_{name}"] for m in range(3)]


@files
@pytest.mark.parametrize("name", NAMES)
def test_linear_means_and_the_way_from_the_start(arrays: dict[str, Any], name: str) -> None:
    found = linear(members(arrays, name), arrays["lerp_weights"].tolist())
    torch.testing.assert_close(found, arrays[f"lerp_{name}"], **EXACT)
    base = arrays[f"init_{name}"]
    for i, eta in enumerate(arrays["liti_etas"].tolist()):
        torch.testing.assert_close(base + eta * (found - base), arrays[f"liti_{name}"][i], **EXACT)


@files
@pytest.mark.parametrize("name", NAMES)
def test_spherical_means_of_two_tensors(arrays: dict[str, Any], name: str) -> None:
    base, two = arrays[f"init_{name}"], members(arrays, name)[:2]
    omega = angle(two[0] - base, two[1] - base)
    torch.testing.assert_close(omega, arrays[f"omega_tensor_{name}"], rtol=0, atol=1e-7)
    for i, share in enumerate(arrays["slerp_lambdas"].tolist()):
        found = spherical(two, (1 - share, share), base, name)
        torch.testing.assert_close(found, arrays[f"slerp_tensor_{name}"][i], rtol=0, atol=1e-10)


@files
@pytest.mark.parametrize("name", NAMES)
def test_more_than_two_are_folded_in_order(arrays: dict[str, Any], name: str) -> None:
    found = spherical(members(arrays, name), (1 / 3, 1 / 3, 1 / 3), arrays[f"init_{name}"], name)
    torch.testing.assert_close(found, arrays[f"slerp_seq_tensor_{name}"], rtol=0, atol=1e-10)


@files
@pytest.mark.parametrize("name", NAMES)
def test_rounds_of_means_from_the_start_of_the_next(arrays: dict[str, Any], name: str) -> None:
    base, eta = arrays[f"init_{name}"], float(arrays["iter_eta"])
    for i in range(2):
        trained = [base + arrays[f"iter{i}_delta{m}_{name}"] for m in range(2)]
        base = base + eta * (spherical(trained, (0.5, 0.5), base, name) - base)
        torch.testing.assert_close(base, arrays[f"iter{i}_init_next_{name}"], rtol=0, atol=1e-10)


@files
def test_spherical_means_keep_the_length_of_orthogonal_changes(arrays: dict[str, Any]) -> None:
    two, base = (
        [torch.tensor([2.0, 0.0]).double(), torch.tensor([0.0, 2.0]).double()],
        torch.zeros(2).double(),
    )
    torch.testing.assert_close(linear(two, (0.5, 0.5)).norm(), arrays["ortho_lerp_norm"], **EXACT)
    torch.testing.assert_close(
        spherical(two, (0.5, 0.5), base, "x").norm(), arrays["ortho_slerp_norm"], **EXACT
    )
