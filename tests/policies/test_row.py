"""Chunks on a CPU, sampled with fewer calls: the numbers of the loop, one to rounding, several to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_policies import observations, small_policy
from torch import Tensor

from policies.backbones.mlp import MlpConfig
from policies.backbones.switched import SwitchedField
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.networks import mlp_blocks
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.processes.shortcut import Shortcut
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.loop import denoise
from policies.samplers.ode import Euler, Heun
from policies.samplers.row import takes_row

EPS = VPDiffusion(num_levels=10, prediction="eps")
CASES: dict[str, tuple[Any, Any]] = {
    "ddpm": (EPS, DDPM()),
    "ddpm, x0": (VPDiffusion(num_levels=10, prediction="x0"), DDPM()),
    "ddpm, v, bounds": (
        VPDiffusion(num_levels=10, prediction="v"),
        DDPM(noise_clip=0.5, clip_action=0.6, final_std=None, min_std=0.1),
    ),
    "ddpm, unbounded": (EPS, DDPM(clip_x0=None, noise_clip=None)),
    "ddim": (EPS, DDIM(steps=5)),
    "ddim, eta": (EPS, DDIM(steps=5, eta=0.7)),
    "euler": (RectifiedFlow(), Euler(steps=4)),
    "euler, unbounded": (RectifiedFlow(), Euler(steps=4, clip_x0=None)),
}


def policy_of(case: str = "ddpm", **backbone: Any) -> DenoisingPolicy:
    process, sampler = CASES[case]
    policy = small_policy(process, sampler)
    assert isinstance(policy, DenoisingPolicy)
    if backbone:
        config = MlpConfig(**{"width": 16, "time_dim": 8} | backbone)
        policy.field = config.build(policy.chunk.shape, policy.encoder.cond_dim)
    with torch.no_grad():
        for weight in policy.field.parameters():
            weight.mul_(3.0)  # far from where all of them are nearly linear
    return policy


def drawn(policy: DenoisingPolicy, seed: int = 0, rows: int = 1) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cond = policy.encode(policy.observation(observations(rows, seed=seed)))
    return cond, policy.sample_noise(rows, generator=generator)


@torch.no_grad()
def require_equal(policy: DenoisingPolicy, *, start: Any = None) -> None:
    """Compare one chunk and three with the loop on tensors."""
    for rows in (1, 3):
        cond, noise = drawn(policy, rows=rows)
        assert takes_row(policy.table, noise) and policy.bind_row(cond) is not None
        begin = None if start is None else (start[0].expand(rows, -1, -1), start[1])
        given = noise.clone()
        out = policy.decode(cond, noise, start=begin)
        assert torch.equal(noise, given)
        first = 0 if begin is None else policy.table.step_at(begin[1])
        x = None if begin is None else begin[0]
        plain = denoise(policy.bind(cond), policy.table, noise, start=x, first_step=first).action
        assert out.shape == plain.shape and out.dtype == plain.dtype
        rounding = 0.0 if rows > 1 else 2e-5 * max(1.0, plain.abs().max().item())
        torch.testing.assert_close(out, plain, rtol=0, atol=rounding)
        assert not torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("case", CASES)
def test_one_chunk_equals_the_loop_on_tensors(case: str) -> None:
    require_equal(policy_of(case))


@pytest.mark.parametrize(
    "backbone",
    [
        {"activation": "mish"},
        {"activation": "tanh", "cond_dims": (9, 4)},
        {"cond_dims": (9, 8), "add_cond": True},
        {"width": 8, "time_dim": 4},
    ],
    ids=str,
)
def test_it_does_for_every_network_of_one_block(backbone: dict[str, Any]) -> None:
    require_equal(policy_of(**backbone))


def test_large_matrices_are_multiplied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_blocks, "ROW_NUMBERS", 100)  # 6 of 16 rows
    require_equal(policy_of())


def test_a_warm_start_enters_at_its_step() -> None:
    policy = policy_of("ddim")
    require_equal(policy, start=(torch.full((1, *policy.chunk.shape), 0.3), 0.5))


def test_times_of_average_velocities_reach_the_network() -> None:
    policy = small_policy(Shortcut(), None)
    assert isinstance(policy, DenoisingPolicy) and policy.table.second_time is not None
    require_equal(policy)


def test_frozen_and_tuned_steps_have_their_networks() -> None:
    policy = policy_of()
    base = policy.clone().field
    policy.field = SwitchedField(base, policy.field, switch_time=4)
    with torch.no_grad():
        policy.field.tuned.trunk.outlet.bias += 0.2
    require_equal(policy)


def test_it_follows_the_weights() -> None:
    policy = policy_of()
    require_equal(policy)
    optimizer = torch.optim.SGD(policy.field.parameters(), lr=0.1)
    for weight in policy.field.parameters():
        weight.grad = torch.ones_like(weight)
    cond, noise = drawn(policy)
    before = policy.decode(cond, noise)
    optimizer.step()
    assert not torch.allclose(policy.decode(cond, noise), before, atol=1e-3)
    require_equal(policy)


def test_the_seed_gives_the_noise_of_the_loop() -> None:
    policy, obs = policy_of(), observations(1)
    one = policy.act(obs, generator=torch.Generator().manual_seed(3))
    noise = policy.sample_noise(1, generator=torch.Generator().manual_seed(3)).expand(2, -1, -1, -1)
    pair = policy.act(obs.expand(2, -1, -1), noise=noise)
    torch.testing.assert_close(one, pair[:1], rtol=1e-5, atol=1e-5)


def test_one_condition_for_several_chunks_takes_the_loop_on_tensors() -> None:
    policy = policy_of()
    cond, noise = drawn(policy)
    with torch.no_grad():
        several = policy.decode(cond, noise.expand(3, -1, -1, -1))
        torch.testing.assert_close(several[:1], policy.decode(cond, noise), rtol=0, atol=1e-4)


def test_gradients_hooks_and_other_networks_take_the_loop_on_tensors() -> None:
    policy = policy_of()
    cond, noise = drawn(policy)
    with torch.no_grad():
        assert not takes_row(policy.table, noise.double())
        assert policy.decode(*drawn(policy, rows=0)).shape == (0, *policy.chunk.shape)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not takes_row(policy.table, noise)
        assert not takes_row(replace(policy.table, eps_clip=1.0), noise)
        assert not takes_row(Heun(steps=3).table(RectifiedFlow()), noise)
        assert policy_of(layer_norm=True).bind_row(cond) is None
        assert policy_of(num_blocks=2).bind_row(cond) is None
        assert policy_of(residual=False, width=512, hidden_dims=(8,)).bind_row(cond) is None
    assert not takes_row(policy.table, noise)
    assert policy.decode(cond, noise, grad=True).requires_grad


def test_noise_of_another_sampler_is_refused() -> None:
    policy = policy_of()
    cond, noise = drawn(policy)
    with pytest.raises(ConfigError, match="noise of this sampler must have shape"), torch.no_grad():
        policy.decode(cond, noise[:, 1:])
