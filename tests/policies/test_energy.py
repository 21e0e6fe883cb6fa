"""An energy and its gradient belong together, in every network, and tell likely chunks from others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairwise import each_value, repeated
from small_cloning import finish
from small_policies import observations, small_policy
from torch import Tensor
from two_modes import LEVEL, two_mode_setup

from algos.bc import BcConfig
from policies.backbones.dp_transformer import DpTransformerConfig
from policies.backbones.mlp import MlpConfig
from policies.backbones.switched import SwitchedField
from policies.backbones.transformer import TransformerConfig
from policies.backbones.unet1d import Unet1dConfig
from policies.networks.energy import EnergyField
from policies.processes.energy import ScoreEnergy
from policies.protocols import Cond
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.descent import EnergyPolicy

BACKBONES = {
    "mlp-relu": MlpConfig(width=8, time_dim=4),
    "mlp-mish": MlpConfig(width=8, time_dim=4, activation="mish", cond_dims=(6, 3)),
    "mlp-deep": MlpConfig(width=8, time_dim=4, activation="mish", num_blocks=2, layer_norm=True),
    "mlp-plain": MlpConfig(residual=False, hidden_dims=(8, 8), time_dim=4, activation="mish"),
    "unet1d": Unet1dConfig(widths=(4, 8), groups=2, time_dim=4),
    "transformer": TransformerConfig(width=8, depth=1, heads=2, time_dim=4),
    "dp_transformer": DpTransformerConfig(width=8, depth=1, heads=2, obs_tokens=1),
}
every_backbone = pytest.mark.parametrize("name", BACKBONES)
every_form = pytest.mark.parametrize("form", ["dot", "dae", "mean"])
SHAPE, COND, TIMES = (4, 2), 5, torch.tensor([3.0, 0.0, 1.0], dtype=torch.float64)


def field_of(name: str, form: str) -> EnergyField:
    """Build a field with weights away from where they start, in double precision."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        field = EnergyField(BACKBONES[name].build(SHAPE, COND), form).double().eval()
        with torch.no_grad():
            for weight in field.parameters():
                weight.add_(0.3 * torch.randn_like(weight))
    return field


def inputs(n: int = 3, seed: int = 0) -> tuple[Tensor, Cond]:
    generator = torch.Generator().manual_seed(seed)
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(n, *SHAPE), Cond(draw(n, COND))


def differences(energy: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-6) -> Tensor:
    """Return the gradient of energies (B,) of rows x (B, ...), by central differences."""
    flat = x.flatten(1)
    columns = []
    for i in range(flat.shape[1]):
        move = torch.zeros_like(flat)
        move[:, i] = step
        high, low = (energy((flat + s * move).view_as(x)) for s in (1, -1))
        columns.append((high - low) / (2 * step))
    return torch.stack(columns, dim=1).view_as(x)


@every_backbone
@every_form
def test_the_field_is_the_gradient_of_the_energy(name: str, form: str) -> None:
    field, (x, cond) = field_of(name, form), inputs()
    with torch.no_grad():
        wanted = differences(lambda y: field.energy(y, TIMES, cond), x)
        assert wanted.abs().max() > 1e-3
        torch.testing.assert_close(field(x, TIMES, cond), wanted, rtol=1e-5, atol=1e-7)
        bound = field.bind_energy(cond, TIMES)
        for k in range(3):
            value, gradient = bound(k, x)
            torch.testing.assert_close(value[k], field.energy(x, TIMES, cond)[k])
            torch.testing.assert_close(gradient[k], wanted[k], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "form"), each_value(list(BACKBONES), ["dot", "dae"]))
def test_the_loss_is_differentiable_to_every_weight(name: str, form: str) -> None:
    field, (x, cond) = field_of(name, form), inputs()
    weights = list(field.parameters())

    def loss() -> Tensor:
        return (field(x, TIMES, cond) - 1.0).square().mean()

    gradients = torch.autograd.grad(loss(), weights)
    assert all(gradient.any() for gradient in gradients)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):  # any wrong gradient shows along a drawn direction
        direction = [torch.randn(weight.shape, generator=generator).double() for weight in weights]
        sides = []
        for side in (1e-6, -2e-6, 1e-6):  # ahead, behind, and back
            with torch.no_grad():
                for weight, d in zip(weights, direction, strict=True):
                    weight.add_(side * d)
            sides.append(float(loss()))
        slope = sum((gradient * d).sum() for gradient, d in zip(gradients, direction, strict=True))
        wanted = torch.tensor((sides[0] - sides[1]) / 2e-6, dtype=torch.float64)
        torch.testing.assert_close(slope, wanted, rtol=1e-4, atol=1e-7)


@every_backbone
def test_gradients_are_the_same_in_every_mode(name: str) -> None:
    field, (x, cond) = field_of(name, "dot"), inputs()
    kept = x.clone().requires_grad_()
    wanted = field(kept, TIMES, cond)
    assert wanted.requires_grad
    (curvature,) = torch.autograd.grad(wanted.sum(), kept)
    assert curvature.abs().sum() > 0
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            again = (part.clone() for part in (x, TIMES, cond.vec))
            y, time, vec = again  # tensors of inference mode, where it is on
            found = field(y, time, Cond(vec)), field.bind(Cond(vec), time)(1, y)
        assert not any(part.requires_grad for part in found)
        torch.testing.assert_close(found[0], wanted.detach())
        torch.testing.assert_close(found[1][1], field.bind(cond, TIMES)(1, x)[1].detach())


@every_form
def test_rows_do_not_see_each_other(form: str) -> None:
    field, (x, cond) = field_of("mlp-mish", form), inputs(3)
    alone = [field(x[i : i + 1], TIMES[i : i + 1], Cond(cond.vec[i : i + 1])) for i in range(3)]
    torch.testing.assert_close(torch.cat(alone), field(x, TIMES, cond))
    row = torch.tensor([2, 0, 0, 1])
    shared = field(x[row], TIMES, cond, row, row)
    torch.testing.assert_close(shared, field(x, TIMES, cond)[row])


def test_two_networks_have_the_energy_of_the_one_whose_time_it_is() -> None:
    base = field_of("mlp-mish", "dot")
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight.mul_(1.3)
    field, (x, cond) = SwitchedField(base, tuned, switch_time=1.5), inputs()
    for whole, part in ((field, lambda net: net), (field.energy, lambda net: net.energy)):
        found = whole(x, TIMES, cond)
        torch.testing.assert_close(found[0], part(base)(x, TIMES, cond)[0])
        torch.testing.assert_close(found[1:], part(tuned)(x, TIMES, cond)[1:])
    with torch.no_grad():
        torch.testing.assert_close(field.bind(cond, TIMES)(1, x)[1], tuned(x, TIMES, cond)[1])


def test_the_last_steps_of_a_chain_are_tuned_alone() -> None:
    policy: Any = small_policy(ScoreEnergy(num_levels=5), DDPM(min_std=0.1, final_std=None))
    policy.field = SwitchedField(policy.field, copy.deepcopy(policy.field), switch_time=2.5)
    policy = policy.with_sampler(policy.sampler, tuned_steps=3)
    cond = policy.encode({"state": observations(4)})
    with torch.no_grad():
        chain = policy.sample_chain(cond, generator=torch.Generator().manual_seed(0))
    log_prob, _ = policy.chain_log_prob(cond, chain.x)
    torch.testing.assert_close(log_prob, chain.log_prob, rtol=0, atol=1e-5)
    log_prob.sum().backward()
    for name, weight in policy.field.named_parameters():
        assert (weight.grad is not None) is name.startswith("tuned."), name


def test_the_score_is_the_slope_of_the_log_density_that_the_energy_gives() -> None:
    policy = small_policy(ScoreEnergy(num_levels=5), DDPM()).double()
    assert isinstance(policy, EnergyPolicy)
    cond = policy.encode({"state": observations(3).double()})
    x = torch.randn(3, *policy.chunk.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    t = policy.process.levels(dtype=torch.float64)[torch.tensor([0, 2, 4])]
    sigma = policy.process.alpha_sigma(t)[1]
    with torch.no_grad():
        slope = differences(lambda y: -policy.energy(y, t, cond) / sigma, x)
        score = policy.predict(x, t, cond, kind="score")
    torch.testing.assert_close(score, slope, rtol=1e-5, atol=1e-6)


CLEARLY = 0.8
"""Least share of 200 cases: by chance it is 0.5 with a deviation of 0.035, and trained with another rounding
or seed it was 0.93 to 1."""


@pytest.mark.slow
@pytest.mark.parametrize("form", repeated(["dot", "dae"]))
def test_both_modes_are_learned_and_ranked_above_what_lies_between(form: str) -> None:
    config = BcConfig(steps=300, batch_size=64, lr=3e-3, log_every=300, validation_fraction=0.0)
    algorithm = config.build(two_mode_setup(0, process=ScoreEnergy(form=form), width=32))
    finish(algorithm)
    policy = algorithm.snapshot().with_sampler(DDIM(steps=10))  # type: ignore[attr-defined]
    x = torch.linspace(-0.9, 0.9, 200)
    obs = torch.stack([x, torch.ones_like(x)], dim=1).unsqueeze(1)
    action = policy.act(obs, generator=torch.Generator().manual_seed(0)).squeeze(-1)
    level = (LEVEL + 0.2 * x).unsqueeze(1)
    assert (action.abs() - level).abs().median() < 0.4
    assert 0.25 < (action[:, 0] > 0).float().mean() < 0.75
    assert (action[:, 0].sign() == action[:, 1].sign()).float().mean() > CLEARLY
    cond, t = policy.encode({"state": obs}), policy.process.levels()[0].expand(200)

    def energy(first: Tensor, second: Tensor) -> Tensor:
        chunk = policy.normalize_action(torch.stack([first, second], dim=1))
        return policy.energy(chunk, t, cond).detach()

    for sign in (1.0, -1.0):
        right = energy(sign * level, sign * level)
        for wrong in (energy(0 * level, 0 * level), energy(level, -level), energy(1.5 * level, 1.5 * level)):
            assert (right < wrong).float().mean() > CLEARLY
