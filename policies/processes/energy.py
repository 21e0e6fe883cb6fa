"""Diffusion whose predicted noise is the gradient of an energy.

Legend: x noisy chunk, E (B,) energy, f the backbone, t sampling time, sigma noise amplitude.

A network that predicts the noise need not be the gradient of anything; one that is knows, beside where chunks
are likely, how likely they are::

    eps = grad_x E(x, t)                     score = -eps / sigma, so density(x, t) ~ exp(-E / sigma)

It is trained and sampled as any diffusion; an evaluation costs the backbone forwards and backwards, a
training step a derivative of that.

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

    Args:
        form: How the energy is read from the backbone: `dot`, <x, f>, or `dae`, |x - f|^2 / 2.

    Source:
        arXiv 2302.11552. The loss is that of diffusion, not contrastive.
    """

    policy_class: ClassVar[str] = "energy"

    prediction: str = bounded("eps", choices=("eps",))  # the gradient; for others take process=diffusion
    form: str = bounded("dot", choices=("dot", "dae"))

    def field_of(self, backbone: Any) -> Any:
        from policies.networks.energy import EnergyField

        return EnergyField(backbone, self.form)
