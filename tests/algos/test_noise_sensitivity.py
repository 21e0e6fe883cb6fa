"""How much a frozen policy depends on its noise: known for one whose chunks are state plus scaled noise."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from messages import mentions
from point_steering import changed, flow, start
from torch import Tensor

from algos.dsrl import noise_sensitivity
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError
from policies.wrappers.noise_policy import SteeredPolicy


class Additive:
    """chunk = state + scale * noise."""

    latent_dim = 3

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def warmup_latent(self, cond: Tensor, eps: Tensor) -> Tensor:
        return eps

    def chunk(self, cond: Tensor, latent: Tensor) -> Tensor:
        return cond + self.scale * latent


@pytest.mark.parametrize(("scale", "is_little"), [(0.5, False), (0.08, False), (0.01, True)])
def test_deviations_over_noises_and_over_states_are_told_apart(
    scale: float, is_little: bool, caplog: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    cond = torch.linspace(-1, 1, 64)[:, None].expand(-1, 3)
    with caplog.at_level(logging.WARNING, logger="algos.dsrl"):
        found = noise_sensitivity(Additive(scale), cond, generator)  # type: ignore[arg-type]
    assert float(found["frozen/noise_spread"]) == pytest.approx(scale, rel=0.1)
    assert float(found["frozen/state_spread"]) == pytest.approx(float(cond[:, 0].std()), rel=0.1)
    assert ("nearly the same from every noise" in caplog.text) == is_little


@pytest.mark.parametrize("variant", ["na", "sac"])
def test_a_run_looks_once_before_its_first_update(variant: str) -> None:
    run = start(changed(variant=variant))
    reports = []
    while run.progress < run.total:
        reports.append(run.advance())
    run.close()
    told = [report for report in reports if "frozen/noise_spread" in report]
    assert len(told) == 1 and told[0]["frozen/noise_spread"] > 0
    assert "critic/loss" in told[0] and not any("critic/loss" in r for r in reports[: reports.index(told[0])])


@pytest.mark.parametrize("scale", [0.0, 1e-8])
def test_the_same_from_every_noise_up_to_rounding_is_refused(scale: float) -> None:
    cond = torch.linspace(-1, 1, 64)[:, None].expand(-1, 3)
    with pytest.raises(CapabilityError, match=mentions("noise states")):
        noise_sensitivity(Additive(scale), cond, torch.Generator().manual_seed(0))  # type: ignore[arg-type]


class Deaf(DenoisingPolicy):
    """Says that noise decides, and begins at zero."""

    def decode(self, cond: Any, noise: Tensor, **options: Any) -> Tensor:
        return super().decode(cond, torch.zeros_like(noise), **options)


@pytest.mark.parametrize("variant", ["na", "sac"])
def test_a_policy_that_is_deaf_to_its_noise_without_saying_so_is_refused_before_anything_is_learned(
    variant: str,
) -> None:
    deaf = Deaf(flow().config, obs_dim=2, action_dim=2)
    run = start(changed(variant=variant), init=deaf)
    assert deaf.noise_sensitive and deaf.is_deterministic
    with pytest.raises(CapabilityError, match=mentions("noise")):
        while run.progress < run.total:
            run.advance()
    assert run._steps == 0
    run.close()


def test_an_actor_that_hardly_draws_does_not_make_the_policy_behind_it_deaf() -> None:
    """Training goes on from a steered policy whose latents are all at the bound."""
    init = start().snapshot()
    assert isinstance(init, SteeredPolicy)
    with torch.no_grad():
        init.actor.trunk.layers[0].bias[:6] = 99.0  # type: ignore[union-attr, index, operator]
    run = start(init=init)
    spread: list[Any] = []
    while not spread:
        spread += [value for name, value in run.advance().items() if name == "frozen/noise_spread"]
    assert spread[0] > 0.01 and bool(
        (run.replay.gather(torch.arange(4), run.config.discounting).latent == 1).all()
    )
    run.close()
