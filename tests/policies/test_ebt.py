"""Energy descent: every row walks by itself, its draws are arguments, and it ends between the modes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from messages import mentions
from pairwise import everything
from small_cloning import finish
from small_policies import observations, small_policy
from torch import Tensor
from two_modes import LEVEL, two_mode_setup

from algos.bc import BcConfig
from policies.backbones.mlp import MlpConfig
from policies.errors import CapabilityError, ConfigError
from policies.processes.ebt import EnergyDescent
from policies.protocols import TE, ChainPolicy, Cond
from policies.samplers.descent import Descent, DescentPolicy
from policies.samplers.hooks import Guidance


def descent_policy(sampler: Descent | None = None, **settings: Any) -> DescentPolicy:
    """A small policy with slopes that differ between rows."""
    policy = small_policy(EnergyDescent(**settings), sampler or Descent())
    assert isinstance(policy, DescentPolicy)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(2.0)
    return policy.double().eval()


def inputs(policy: DescentPolicy, n: int = 6) -> tuple[Cond, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return policy.encode({"state": observations(n).double()}), policy.sample_noise(n, generator=generator)


def slopes(policy: DescentPolicy, cond: Cond, noise: Tensor, steps: int) -> Tensor:
    """Return the slope (B, steps) that every step of an endless walk meets."""
    energy, x, v = policy.field.bind_energy(cond, torch.zeros(1)), noise, torch.zeros_like(noise)
    found = []
    with torch.no_grad():
        for _ in range(steps):
            x, v, _, gradient = policy.process.step(energy, x, v)
            found.append(policy.process.slope(gradient))
    return torch.stack(found, dim=1)


def test_every_row_stops_by_itself_one_step_after_its_slope_is_flat() -> None:
    policy = descent_policy()
    cond, noise = inputs(policy)
    steep = slopes(policy, cond, noise, 20)
    flat = float(steep.quantile(0.15))
    policy = policy.with_sampler(Descent(20, flat))
    whole = policy.descend(cond, noise)
    is_flat = steep[:, :19] <= flat
    wanted = torch.where(is_flat.any(1), is_flat.int().argmax(1) + 2, 20)
    assert torch.equal(whole.steps, wanted)
    assert len(set(whole.steps.tolist())) > 2, "rows must stop at different steps for this to be a test"
    for i in range(len(noise)):
        row = torch.tensor([i])
        alone = policy.descend(cond.rows(row), noise[row])
        torch.testing.assert_close(alone.action, whole.action[row])
        torch.testing.assert_close(alone.energy, whole.energy[row])
        never = policy.with_sampler(Descent(int(whole.steps[i]), 0.0)).descend(cond.rows(row), noise[row])
        torch.testing.assert_close(never.action, whole.action[row])


def test_coupled_rows_see_each_other_and_stop_together() -> None:
    policy = descent_policy(batch_coupled=True)
    cond, noise = inputs(policy)
    whole = policy.descend(cond, noise)
    assert len(set(whole.steps.tolist())) == 1
    part = policy.descend(cond.rows(torch.arange(2)), noise[:2])
    assert not torch.allclose(part.action, whole.action[:2])


def test_a_walk_ends_below_where_it_began() -> None:
    policy = descent_policy(step_size=0.02, momentum=0.0)
    cond, noise = inputs(policy)
    first, last = (policy.with_sampler(Descent(steps)).descend(cond, noise).energy for steps in (1, 20))
    assert bool((last < first).all())


def test_a_start_replaces_the_noise_and_its_time_leaves_steps_out() -> None:
    policy = descent_policy(Descent(10, 0.0))
    cond, noise = inputs(policy)
    start = torch.flip(noise, (0,))
    torch.testing.assert_close(policy.decode(cond, noise, start=(start, 0.0)), policy.decode(cond, start))
    short = policy.with_sampler(Descent(4, 0.0)).decode(cond, start)
    torch.testing.assert_close(policy.decode(cond, noise, start=(start, 0.55)), short)
    with pytest.raises(ConfigError, match=mentions("0 0.9")):
        policy.decode(cond, noise, start=(start, 0.95))


@pytest.mark.parametrize("truncate", [True, False])
def test_a_row_walks_its_own_number_of_steps(truncate: bool) -> None:
    policy = descent_policy(num_steps=2, extra_steps=3, truncate=truncate)
    cond, noise = inputs(policy)
    te = policy.sample_te(6, generator=torch.Generator().manual_seed(1))
    assert set(te.more["num_steps"].tolist()) > {2}
    losses = policy.matching_loss(cond, torch.zeros_like(noise), te, reduce="none")
    for i, count in enumerate(te.more["num_steps"].tolist()):
        short = descent_policy(num_steps=count, extra_steps=0, truncate=truncate)
        row = torch.tensor([i])
        draws = {name: draw[row] for name, draw in te.more.items()}
        draws = draws | {name: draws[name][:, :count] for name in ("ratio", "langevin")}
        alone = short.matching_loss(
            cond.rows(row),
            torch.zeros_like(noise[row]),
            TE(te.t[row], te.eps[row], more=draws),
            reduce="none",
        )
        torch.testing.assert_close(alone, losses[row])


@pytest.mark.parametrize("truncate", [True, False])
def test_gradients_of_the_loss_are_those_of_finite_differences(truncate: bool) -> None:
    """Of one step, which is all that either loss is differentiated through."""
    policy = descent_policy(num_steps=1, extra_steps=0, truncate=truncate)
    cond, noise = inputs(policy)
    te = policy.sample_te(6, generator=torch.Generator().manual_seed(1))
    weights = list(policy.parameters())

    def loss() -> Tensor:
        return policy.matching_loss(cond, torch.zeros_like(noise), te, reduce="mean")

    for weight, gradient in zip(weights, torch.autograd.grad(loss(), weights), strict=True):
        place = int(gradient.abs().argmax())
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight.view(-1)[place] += step
                values.append(float(loss()))
                weight.view(-1)[place] -= step
        wanted = torch.tensor((values[0] - values[1]) / 2e-6, dtype=torch.float64)
        torch.testing.assert_close(gradient.flatten()[place], wanted, rtol=1e-4, atol=1e-7)


def test_growth_is_bounded() -> None:
    process = EnergyDescent(step_size=1.0, momentum=0.0, max_growth=3.0)
    x, v = torch.ones(3, 2, 1), torch.zeros(3, 2, 1)
    heights = torch.tensor([-1.0, 0.5, 50.0])
    moved, *_ = process.step(lambda k, y: (heights, torch.ones_like(y)), x, v)
    steps = (1.0 - moved[:, 0, 0]) / 2
    torch.testing.assert_close(steps, torch.tensor([-1.0, 0.5, 1.0986123]).exp(), rtol=1e-4, atol=1e-5)


def test_the_steps_of_training_are_drawn_evenly() -> None:
    te = descent_policy().sample_te(5000, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(te.more["num_steps"], minlength=11)
    assert counts[:6].sum() == 0 and counts[6:].min() > 850 and len(counts) == 11


@pytest.mark.slow
@pytest.mark.skipif(not everything, reason="with --all: without it another energy is learned")
def test_walks_end_at_the_conditional_mean_of_two_modes() -> None:
    setup = two_mode_setup(0, process=EnergyDescent())
    setup.policy = replace(setup.policy, backbone=MlpConfig(width=64, activation="mish"))
    config = BcConfig(steps=250, batch_size=128, log_every=250, validation_fraction=0.0)
    algorithm = config.build(setup)
    finish(algorithm)
    x = torch.linspace(-0.9, 0.9, 200)
    obs = torch.stack([x, torch.ones_like(x)], dim=1).unsqueeze(1)
    action = algorithm.snapshot().act(obs, generator=torch.Generator().manual_seed(0))
    assert action.abs().mean() < 0.3 * LEVEL
    assert ((action.abs() - LEVEL).abs() < 0.5).float().mean() < 0.05


def test_what_a_descent_has_not_is_refused() -> None:
    policy = descent_policy()
    cond, noise = inputs(policy)
    assert not isinstance(policy, ChainPolicy)
    with pytest.raises(CapabilityError, match=mentions("process=ebt process=energy")):
        policy.decode(cond, noise, hooks=[Guidance(lambda x0, cond: x0)])


def test_noise_does_not_rise() -> None:
    with pytest.raises(ConfigError, match=mentions("process.noise_max noise_min=0.3")):
        EnergyDescent(noise_min=0.3)
