"""Observations as algorithms remember them: one record of state, goal and images.

A record is a `policies.protocols.Observation` with leading axes: `state` (..., To, Do), `goal` (..., Dg),
images (..., To, H, W, 3) uint8 by camera. What networks read of it are its conditions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from policies.policy import Policy
from policies.protocols import Cond, Observation

_IMAGE_ROWS = 512  # rows with images encoded at once, so that activations fit into memory


def mapped(obs: Observation, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the record with every part changed, e.g. flattened or indexed."""
    return {name: change(part) for name, part in obs.items()}


@torch.no_grad()
def encode(policy: Policy, obs: Observation) -> Cond:
    """Return the conditions of physical observations, M rows; images are encoded in pieces."""
    rows = len(obs["state"])
    if not policy.images or rows <= _IMAGE_ROWS:
        return policy.encode(policy.observation(obs))
    pieces = [mapped(obs, lambda part, i=i: part[i : i + _IMAGE_ROWS]) for i in range(0, rows, _IMAGE_ROWS)]
    return Cond.concatenated([policy.encode(policy.observation(piece)) for piece in pieces])
