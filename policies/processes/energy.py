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

from policies.errors import ConfigError
from policies.processes.diffusion import VPDiffusion
from policies.registry import register

FORMS = ("dot", "dae")


@register("process", "energy")
@dataclass(frozen=True)
class ScoreEnergy(VPDiffusion):
    """Denoising diffusion by the gradient of an energy, on K levels.

    Args:
        num_levels: K, at least 2.
        schedule: As for `process=diffusion`.
        prediction: `eps`, the gradient.
        beta_start: First beta of the linear schedules.
        beta_end: Last beta of the linear schedules.
        form: How the energy is read from the backbone: `dot`, <x, f>, or `dae`, |x - f|^2 / 2.

    Raises:
        ConfigError: If a value is unknown or out of range.

    Source:
        arXiv 2302.11552. The loss is that of diffusion, not contrastive.
    """

    policy_class: ClassVar[str] = "energy"

    form: str = "dot"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prediction != "eps":
            raise ConfigError(
                f"process.prediction must be eps with process=energy, whose gradient it is; got "
                f"'{self.prediction}'. For other predictions take process=diffusion."
            )
        if self.form not in FORMS:
            raise ConfigError(f"process.form must be one of {', '.join(FORMS)}; got '{self.form}'.")

    def field_of(self, backbone: Any) -> Any:
        from policies.networks.energy import EnergyField

        return EnergyField(backbone, self.form)
