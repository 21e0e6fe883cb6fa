"""Sets of rollouts against enumeration."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from official_networks import read

from algos.onpolicy.polychromic import set_advantages, variety


@pytest.mark.golden("polychromic_sets*.npz")
def test_variety_and_advantages_of_all_sets(golden_path: Path) -> None:
    """Not implemented: partitions into disjoint sets; pass@k is a measure, not a part of learning."""
    data = read(golden_path)
    n, sets = int(data["set_size"]), data["all_sets"]
    torch.testing.assert_close(variety(data["label"][:, sets]).double(), data["diversity"])
    found = set_advantages(data["return"], data["label"], n)
    torch.testing.assert_close(found, data["marginal_advantage_all_sets"], rtol=1e-12, atol=1e-12)


@pytest.mark.golden("polychromic_sets*.npz")
def test_advantages_give_the_gradient_of_the_objective(golden_path: Path) -> None:
    """Over all groups of four rollouts of a bandit, by their probabilities."""
    data = read(golden_path)
    logits = data["bandit/logits"].clone().requires_grad_()
    log_prob = logits.log_softmax(0)
    groups = torch.tensor(list(product(range(3), repeat=2 * int(data["bandit/set_size"]))))
    advantage = set_advantages(data["bandit/reward"][groups], groups, int(data["bandit/set_size"]))
    weight = log_prob[groups].sum(dim=1).exp().detach()
    expected = (weight[:, None] * advantage * log_prob[groups]).sum()
    (gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(gradient, data["bandit/gradient"], rtol=1e-9, atol=1e-12)
