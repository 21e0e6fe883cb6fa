"""Checkpoints of ReinFlow on images (arXiv 2505.22094), cloned or fine-tuned: its ViT and its MLP."""

from __future__ import annotations

from dataclasses import dataclass

from policies.bounds import bounded
from policies.importing.files import Files
from policies.importing.formats import Description
from policies.importing.vision import VisionSource, describe_vision
from policies.processes.flow import RectifiedFlow
from policies.registry import register
from policies.samplers.ode import Euler

TUNED = "actor_ft.policy."
FROZEN = {
    "actor_ft.explore_noise_net.": "actor_ft, of training", "actor_old.": "actor_old, of training",
    "critic.": "critic, of training",
}  # fmt: skip


@register("source", "reinflow_image")
@dataclass(frozen=True)
class ReinflowImageSource(VisionSource):
    """ReinFlow's rectified flow on images and states: its ViT with spatial embedding and its MLP.

    Source:
        The released code (`VisionFlowMLP`). Deviation: step k is at k / steps, see `ReinflowSource`.
    """

    steps: int = bounded(4, ge=1)  # Euler steps; published are 4 and 1

    def read(self, files: Files) -> Description:
        process = RectifiedFlow(time_scale=1.0)
        return describe_vision(self, files, TUNED, FROZEN, process, Euler(steps=self.steps))
