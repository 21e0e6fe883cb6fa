"""Checkpoints of ReinFlow (arXiv 2505.22094), cloned or fine-tuned: its shortcut flow on states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from policies.backbones.mlp import MlpConfig
from policies.bounds import bounded
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.importing.formats import Network
from policies.importing.networks import outputs, shape, trunk_of
from policies.importing.reinflow import ReinflowSource
from policies.processes.shortcut import Shortcut
from policies.registry import register
from policies.samplers.ode import Euler


@register("source", "reinflow_shortcut")
@dataclass(frozen=True)
class ReinflowShortcutSource(ReinflowSource):
    """ReinFlow: its shortcut flow (`ShortCutFlowMLP`) on states, cloned or fine-tuned.

    Attributes:
        max_steps: A power of two above `steps`: the finest step that further training here learns.

    Source:
        The released code with `embed_combination_type: add`, as all published configurations have it; step
        k is at k / steps and asks for the length 1 / steps. Deviation: a step of 1 / max_steps would be
        asked for as 0, which its training means by 0 as well.
    """

    max_steps: int = bounded(32, ge=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("max_steps", self.max_steps > self.steps, f"above source.steps={self.steps}")

    def network(self, weights: Mapping[str, Tensor], action_dim: int | None) -> Network:
        if not any(name.startswith("vel_head.") for name in weights):
            some = ", ".join(sorted(weights)[:4])
            raise CheckpointError(f"the tensors must be those of the program's ShortCutFlowMLP; got {some}.")
        if self.activation is None:
            raise ConfigError(
                "source.activation is in no tensor; give the one that the weights were trained with."
            )
        return shortcut_mlp(weights, self.activation)

    def parts(self) -> tuple[Any, Any]:
        return Shortcut(time_scale=1.0, max_steps=self.max_steps), Euler(steps=self.steps)


def shortcut_mlp(
    weights: Mapping[str, Tensor], activation: str, *, cond_activation: str | None = None
) -> Network:
    """Read the MLP of a shortcut network, by the names of `ShortCutFlowMLP`."""
    time_dim = shape(weights, "t_emb.2.weight", 2)[0]
    cond_dims = outputs(weights, "cond_emb.moduleList.{}.linear_1.weight")
    trunk, first, chunk_size = trunk_of(weights, "vel_head.")
    if shape(weights, first, 2)[1] != chunk_size + time_dim:
        raise CapabilityError(
            "only shortcut networks that add the condition to the times can be imported "
            "(embed_combination_type: add)."
        )
    encoder = "cond_emb.moduleList.0.linear_1.weight"
    cond_dim = shape(weights, encoder, 2)[1] if cond_dims else time_dim
    config = MlpConfig(
        activation=activation, time_dim=time_dim, times="joint", cond_dims=cond_dims,
        cond_activation=cond_activation, add_cond=True, **trunk,
    )  # fmt: skip
    return Network(config, config.official_keys(), cond_dim, chunk_size=chunk_size)
