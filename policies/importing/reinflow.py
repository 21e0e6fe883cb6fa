"""Checkpoints of ReinFlow (arXiv 2505.22094), cloned or fine-tuned: its rectified flow on states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from policies.errors import CapabilityError
from policies.importing.dppo import limits_of, under, without
from policies.importing.formats import AffineMap, Contents, ForeignSource, Network
from policies.importing.networks import kind_of, mlp
from policies.processes.flow import RectifiedFlow
from policies.registry import register
from policies.samplers.ode import Euler

_TUNED = "actor_ft.policy."


@register("source", "reinflow")
@dataclass(frozen=True)
class ReinflowSource(ForeignSource):
    """ReinFlow: its rectified flow (`FlowMLP`) on states, cloned or fine-tuned.

    Attributes:
        activation: Of the network: `relu` (published for Gym and transport) or `mish` (kitchen). Must be
            given.

    Source:
        The released code: names of the tensors, `normalization.npz`, times in [0, 1] from noise to action.
        Deviation: step k is at k / steps, and only the chunk is bounded; the released evaluation is that of
        `Euler(released_times=True, clip_state=1.0)`.
    """

    activation: str | None = None
    steps: int = 4  # Euler steps; published are 4 and 1

    def contents(self, tensors: Mapping[str, Tensor]) -> Contents:
        """Separate the network from training state; a network alone is accepted too."""
        network = under(_TUNED, tensors)
        if not network:
            return Contents(without("network.", tensors))
        others = [name for name in tensors if not name.startswith(_TUNED)]
        return Contents(network, skipped={name: f"{name.partition('.')[0]}, of training" for name in others})

    def network(self, weights: Mapping[str, Tensor], action_dim: int | None) -> Network:
        if any(name.startswith("vel_head.") for name in weights):
            raise CapabilityError("this is a shortcut network; import it with source=reinflow_shortcut.")
        kind_of(weights, mlp="FlowMLP")
        return mlp(weights, self.activation)

    def parts(self) -> tuple[Any, Any]:
        return RectifiedFlow(time_scale=1.0), Euler(steps=self.steps)

    def maps(self, statistics: Mapping[str, np.ndarray]) -> Mapping[str, AffineMap]:
        return limits_of(statistics)
