"""Diffusion whose predicted noise is the gradient of an energy.

Legend: x noisy chunk, E (B,) energy, f the backbone, t sampling time, sigma noise amplitude.

A network that predicts noise need not be a gradient field; the gradient of an energy also yields densities::

    eps = grad_x E(x, t)                     score = -eps / sigma, so density(x, t) ~ exp(-E / sigma)

Training and sampling are as for diffusion. An evaluation is a forward and a backward pass of the backbone; a
training step differentiates through both.

Source: arXiv 2302.11552.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from policies.bounds import bounded
from policies.processes.diffusion import VPDiffusion
from policies.registry import register


@register("process", "energy")
@dataclass(frozen=True)
class ScoreEnergy(VPDiffusion):
    """Denoising diffusion by the gradient of an energy, on K levels.

    Source: arXiv 2302.11552. Deviation: the loss is that of diffusion, not contrastive.
    """

    policy_class: ClassVar[str] = "energy"

    prediction: str = bounded("eps", choices=("eps",))  # energy gradient; others: process=diffusion
    form: str = bounded("dot", choices=("dot", "dae"))  # energy: <x, f> or |x - f|^2 / 2, f the network

    def field_of(self, backbone: Any) -> Any:
        from policies.networks.energy import EnergyField

        return EnergyField(backbone, self.form)
