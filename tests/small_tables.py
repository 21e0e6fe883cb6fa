"""Transitions made of conditions and actions."""

from __future__ import annotations

import torch
from torch import Tensor

from algos.transitions import Batch


def single_steps(cond: Tensor, action: Tensor, *, outcome: float = 0.0) -> Batch:
    """Return a step per row, which leads nowhere else; `outcome` is its reward and discount."""
    number = torch.full((len(cond),), outcome)
    return Batch(
        cond=cond, action=action, reward=number, next_cond=cond, discount=number, next_action=action,
        has_next=0 * number, plan=action, real=torch.ones(len(cond), 1), row=torch.arange(len(cond)),
    )  # fmt: skip
