"""PROPS: the collecting policy's steps against the released program (NicholasCorrado/PROPS d5d91bd)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from algos.onpolicy.props import move_away


class Permutations:
    """The released program's own, one per epoch."""

    def __init__(self, drawn: np.ndarray) -> None:
        self.drawn = iter(drawn)

    def permutation(self, n: int) -> Tensor:
        return torch.from_numpy(next(self.drawn))


@pytest.mark.parametrize("case", ["plain", "kl_stop", "clip"])
@pytest.mark.golden("props_update*.npz")
def test_the_collecting_policy_moves_as_theirs_does(golden_path: Path, case: str) -> None:
    """Not implemented: choices among counted actions (`tabular`), which is their picture of the idea."""
    with np.load(golden_path) as arrays:
        get = {key.removeprefix(f"{case}/"): value for key, value in arrays.items() if key.startswith(case)}
    settings = dict(zip(get["cfg_names"].tolist(), get["cfg"].tolist(), strict=True))
    obs, action, target = (torch.from_numpy(get[key]) for key in ("obs", "action", "target_log_prob"))
    weights = [torch.from_numpy(get[f"init/{key}"]).requires_grad_() for key in ("w", "b")]
    assert settings["adam_eps"] == 1e-5

    def log_prob(index: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(obs[index], *weights)
        return logits.log_softmax(-1).gather(1, action[index, None]).squeeze(1)

    steps = move_away(
        lambda index: log_prob(index) - target[index],
        weights,
        len(obs),
        Permutations(get["permutations"]),  # type: ignore[arg-type]
        bound=settings["target_kl"] if math.isfinite(settings["target_kl"]) else None,
        lr=settings["lr"],
        clip=settings["clip"],
        epochs=int(settings["epochs"]),
        minibatches=int(settings["minibatches"]),
        max_grad_norm=settings["max_grad_norm"],
    )
    assert steps == get["minibatches"]
    for weight, key in zip(weights, ("w", "b"), strict=True):
        np.testing.assert_allclose(weight.detach(), get[f"after/{key}"], atol=2e-6)
    np.testing.assert_allclose(log_prob(torch.arange(len(obs))).detach(), get["log_prob_after"], atol=2e-6)
