"""Checkpoints of DPPO on images (arXiv 2409.00588), cloned or fine-tuned: its ViT and its MLP."""

from __future__ import annotations

from dataclasses import dataclass

from policies.bounds import bounded
from policies.importing.files import Files
from policies.importing.formats import Description
from policies.importing.vision import VisionSource, describe_vision
from policies.processes.diffusion import VPDiffusion
from policies.registry import register
from policies.samplers.ddpm import DDIM

_FROZEN = {
    "network.": "the frozen network under its other name", "actor.": "the frozen network",
    "critic.": "the critic", "eta.": "noise that was learned for DDIM; evaluation has none",
}  # fmt: skip


@register("source", "dppo_image")
@dataclass(frozen=True)
class DppoImageSource(VisionSource):
    """DPPO on images and states: its ViT with spatial embedding and its MLP.

    Source:
        The released code and its evaluation. Published image configurations fine-tune all of their 5 DDIM
        steps, so the frozen network of a fine-tuned checkpoint is left out.
    """

    num_levels: int = bounded(100, ge=2)  # denoising levels that it was trained on
    steps: int = bounded(5, ge=1)  # DDIM steps; published are 5

    def read(self, files: Files) -> Description:
        process = VPDiffusion(num_levels=self.num_levels, prediction="eps")
        return describe_vision(self, files, "actor_ft.", _FROZEN, process, DDIM(steps=self.steps))
