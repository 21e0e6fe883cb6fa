"""Sensitivity of a frozen policy to its start noise, relative to its sensitivity to states."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from algos.base import Quantities
from algos.offpolicy.sac_update import LatentActor
from policies.errors import CapabilityError

_log = logging.getLogger(__name__)

NOISES = 16  # noise samples per condition
LITTLE = 0.05  # ratio of the std over noises to the std over states, below which a warning is logged
ROUNDING = 16  # units in the last place of the largest entry, tolerated as equal


@torch.no_grad()
def look_at_noise(actor: LatentActor, cond: Tensor, generator: torch.Generator) -> Quantities:
    """Return the std of executed chunks over noises and over states, normalised units; warns if low.

    Args:
        actor: Actor around the frozen policy; its warm-up noise is used.
        cond: Visited conditions (B, C), at least two.
        generator: Draws standard normal noise.

    Raises:
        CapabilityError: If chunks are independent of the noise.
    """
    seen = cond.repeat(NOISES, 1)
    eps = torch.randn(len(seen), actor.latent_dim, generator=generator, device=generator.device)
    chunks = actor.chunk(seen, actor.warmup_latent(seen, eps.to(seen.device)))
    chunks = chunks.view(NOISES, -1, chunks.shape[1])
    over_noise = chunks.std(dim=0).mean()
    over_states = chunks.mean(dim=0).std(dim=0).mean()
    if over_noise <= ROUNDING * torch.finfo(chunks.dtype).eps * chunks.abs().max():
        raise CapabilityError(
            f"steering chooses the noise of a policy, and this one executes the same from every noise: its "
            f"chunks deviate by {over_noise:.3g} over noises, by {over_states:.3g} over states. Use a policy "
            f"whose executed rows depend on its noise."
        )
    if over_noise < LITTLE * over_states:
        _log.warning(
            "the frozen policy does nearly the same from every noise: chunks deviate by %.3g over noises, by "
            "%.3g over states. Steering has little to choose from; clone demonstrations that differ more.",
            over_noise, over_states,
        )  # fmt: skip
    return {"frozen/noise_spread": over_noise, "frozen/state_spread": over_states}
