"""A chain of Bellman updates against the released learner: fourteen updates of all heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from official_critics import arrays_of
from torch import Tensor, nn

from algos.critics.learner import iterate

LAYERS = ("Dense_0", "Dense_1", "Dense_2")


class Heads(nn.Module):
    """The networks of a file, stacked: values (K, B, actions) of states (B, S)."""

    def __init__(self, arrays: dict[str, Any], prefix: str) -> None:
        super().__init__()
        parts = [arrays[f"{prefix}/params/{layer}/{what}"] for layer in LAYERS for what in ("kernel", "bias")]
        self.parts = nn.ParameterList(nn.Parameter(part.clone()) for part in parts)

    def forward(self, state: Tensor) -> Tensor:
        h = state
        for kernel, bias in zip(self.parts[::2], self.parts[1::2], strict=True):
            h = torch.matmul(h if h is state else h.relu(), kernel) + bias[:, None]
        return h


@pytest.mark.golden("iterated_q_*.npz")
def test_heads_and_their_targets_move_as_released(golden_path: Path) -> None:
    arrays = arrays_of(golden_path)
    with np.load(golden_path) as file:
        cfg = dict(zip(file["cfg_names"].tolist(), file["cfg"].tolist(), strict=True))
    online, target = (Heads(arrays, "init") for _ in range(2))
    optimizer = torch.optim.Adam(online.parameters(), lr=cfg["lr"], eps=1e-8)
    for step in range(1, 1 + sum(key.endswith("/reward") for key in arrays)):
        own = {
            key: arrays[f"step{step}/{key}"] for key in ("state", "action", "reward", "next_state", "loss")
        }
        over = arrays[f"step{step}/is_terminal"].float()
        with torch.no_grad():
            wanted = own["reward"] + cfg["gamma"] * (1 - over) * target(own["next_state"]).amax(dim=2)
        chosen = online(own["state"])[:, torch.arange(len(over)), own["action"].long()]
        loss = (chosen - wanted).square().mean(dim=1)
        torch.testing.assert_close(loss.detach(), own["loss"], rtol=2e-5, atol=4e-6)
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        iterate(online, target, step, int(cfg["T"]), int(cfg["D"]))  # type: ignore[arg-type]
    for heads, prefix in ((online, "after"), (target, "after_target")):
        for ours, theirs in zip(heads.parts, Heads(arrays, prefix).parts, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)
