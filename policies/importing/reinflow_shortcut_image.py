"""Checkpoints of ReinFlow on images (arXiv 2505.22094), cloned or fine-tuned: its shortcut flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from policies.bounds import bounded
from policies.errors import CheckpointError
from policies.importing.files import Files
from policies.importing.formats import Description, Network
from policies.importing.reinflow_image import FROZEN, TUNED
from policies.importing.reinflow_shortcut import shortcut_mlp
from policies.importing.vision import VisionSource, describe_vision
from policies.processes.shortcut import Shortcut
from policies.registry import register
from policies.samplers.ode import Euler

_NAMES = {"td_emb.": "t_emb.", "cond_embed.0.": "cond_emb.moduleList.0.linear_1.",
          "cond_embed.2.": "cond_emb.moduleList.1.linear_1."}  # fmt: skip
"""Layers of the network on images -> the same layers of the network on states."""


@register("source", "reinflow_shortcut_image")
@dataclass(frozen=True)
class ReinflowShortcutImageSource(VisionSource):
    """ReinFlow's shortcut flow on images and states: its ViT with spatial embedding and its MLP.

    Attributes:
        max_steps: A power of two above `steps`: the finest step that further training here learns.

    Source:
        The released code (`ShortCutFlowViT`) with `embed_combination_type: add`, as all published
        configurations have it. Deviations: see `ReinflowShortcutSource`.
    """

    steps: int = bounded(4, ge=1)  # Euler steps; published are 1 (can, square) and 4 (transport)
    max_steps: int = bounded(32, ge=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("activation", self.activation == "mish", "mish")
        self.require("max_steps", self.max_steps > self.steps, f"above source.steps={self.steps}")

    def network(self, weights: Mapping[str, Tensor]) -> Network:
        if not any(name.startswith("vel_head.") for name in weights):
            some = ", ".join(sorted(weights)[:4])
            raise CheckpointError(f"the tensors must be those of the program's ShortCutFlowViT; got {some}.")
        short = {_on_states(name): name for name in weights}
        known = {ours: weights[theirs] for ours, theirs in short.items()}
        found = shortcut_mlp(known, self.activation, cond_activation="relu")
        keys = {short.get(name, name): ours for name, ours in found.keys.items()}
        return replace(found, keys=keys)

    def read(self, files: Files) -> Description:
        process = Shortcut(time_scale=1.0, max_steps=self.max_steps)
        return describe_vision(self, files, TUNED, FROZEN, process, Euler(steps=self.steps))


def _on_states(name: str) -> str:
    for theirs, ours in _NAMES.items():
        if name.startswith(theirs):
            return name.replace(theirs, ours)
    return name
