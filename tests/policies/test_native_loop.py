"""The denoising loop in C: the numbers of the other one to rounding, the same for any number of chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_policies import observations, small_policy
from torch import Tensor, nn
from torch.nn.utils import parametrize

from policies.backbones.mlp import MlpConfig
from policies.backbones.switched import SwitchedField
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.networks import native
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.processes.shortcut import Shortcut
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.loop import denoise
from policies.samplers.native_loop import denoise_chunks, takes
from policies.samplers.ode import Euler, Heun

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
    "ddim, eps as predicted": (EPS, DDIM(steps=5, recompute_eps=False)),
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


def plain_field(policy: DenoisingPolicy, cond: Any) -> Any:
    """Bind the network by plain operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "serves", lambda *_, **__: False)
        bound = policy.bind(cond)
    return bound


@torch.no_grad()
def require_equal(policy: DenoisingPolicy, *, start: Any = None, alone: bool = True) -> None:
    """Compare some chunks with the loop on tensors, and with those of fewer rows, to the last bit."""
    rows = 101  # more than are kept in a cache
    cond, noise = drawn(policy, rows=rows)
    assert takes(policy.table, noise) and policy.bind_packed(cond) is not None
    begin = None if start is None else (start[0].expand(rows, -1, -1), start[1])
    given = noise.clone()
    out = policy.decode(cond, noise, start=begin)
    assert torch.equal(noise, given)
    first = 0 if begin is None else policy.table.step_at(begin[1])
    x = None if begin is None else begin[0]
    plain = denoise(plain_field(policy, cond), policy.table, noise, start=x, first_step=first).action
    assert out.shape == plain.shape and out.dtype == plain.dtype
    torch.testing.assert_close(out, plain, rtol=0, atol=2e-5 * max(1.0, plain.abs().max().item()))
    assert not torch.equal(out, torch.zeros_like(out))
    for some in (slice(0, 1), slice(3, 10), slice(99, 101)) if alone else ():
        begin = None if start is None else (start[0].expand(some.stop - some.start, -1, -1), start[1])
        picked = cond.rows(torch.arange(rows)[some])
        assert torch.equal(policy.decode(picked, noise[some], start=begin), out[some])


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
    require_equal(policy_of(**backbone), alone="cond_dims" not in backbone)  # encoded by another library


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


def test_several_chunks_may_share_a_condition() -> None:
    policy = policy_of()
    cond, noise = drawn(policy)
    with torch.no_grad():
        several = policy.decode(cond, noise.expand(3, -1, -1, -1))
        assert torch.equal(several, policy.decode(cond, noise).expand(3, -1, -1))


def test_threads_of_torch_serve_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of()
    _, noise = drawn(policy, rows=65)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with torch.no_grad():
        assert not takes(policy.table, noise) and takes(policy.table, noise[:64])


def test_there_may_be_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of()
    cond, noise = drawn(policy)
    with torch.no_grad():
        compiled = policy.decode(cond, noise)
        monkeypatch.setattr(native, "library", lambda: None)
        assert not takes(policy.table, noise)
        torch.testing.assert_close(policy.clone().decode(cond, noise), compiled, rtol=0, atol=2e-5)


def test_what_is_no_number_stays_in_its_row() -> None:
    policy = policy_of()
    cond, noise = drawn(policy, rows=9)
    noise[4, 0, 0, 0] = torch.nan
    with torch.no_grad():
        out = policy.decode(cond, noise)
    assert out[4].isnan().any() and out[[*range(4), *range(5, 9)]].isfinite().all()


def test_gradients_hooks_and_other_networks_take_the_loop_on_tensors() -> None:
    policy = policy_of()
    cond, noise = drawn(policy)
    with torch.no_grad():
        assert not takes(policy.table, noise.double())
        assert policy.decode(*drawn(policy, rows=0)).shape == (0, *policy.chunk.shape)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not takes(policy.table, noise)
        assert not takes(replace(policy.table, eps_clip=1.0), noise)
        assert not takes(Heun(steps=3).table(RectifiedFlow()), noise)
        assert policy_of(layer_norm=True).bind_packed(cond) is None
        assert policy_of(num_blocks=2).bind_packed(cond) is None
        assert policy_of(residual=False, width=512, hidden_dims=(8,)).bind_packed(cond) is None
    assert not takes(policy.table, noise)
    assert policy.decode(cond, noise, grad=True).requires_grad


@torch.no_grad()
@pytest.mark.parametrize("case", ["ddpm", "ddpm, v, bounds", "ddim, eta"])
def test_recorded_chains_are_those_of_the_loop(case: str) -> None:
    policy = policy_of(case)
    cond, noise = drawn(policy, rows=50)
    record_from = policy.table.num_steps - 3
    nets = policy.bind_packed(cond)
    assert nets is not None
    kept = denoise_chunks(nets, policy.table, noise, record_from=record_from)
    plain = denoise(plain_field(policy, cond), policy.table, noise, record_from=record_from)
    for name, one, other in zip(kept._fields, kept, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5, msg=name)
    assert kept.chain is not None and torch.equal(kept.chain[:, -1], kept.action)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_networks_outside_of_the_program_take_the_same_steps(case: str) -> None:
    policy = policy_of(case)
    cond, noise = drawn(policy, rows=50)
    nets = policy.bind_packed(cond)
    assert nets is not None
    expected = denoise_chunks(nets, policy.table, noise).action
    assert torch.equal(denoise_chunks(policy.bind(cond), policy.table, noise).action, expected)


def test_a_bound_network_has_gradients_where_they_are_enabled() -> None:
    policy = policy_of()
    cond, noise = drawn(policy, rows=4)
    with torch.no_grad():
        bound = policy.bind(cond)
        alone = bound(2, noise[:, 0])
    x = noise[:, 0].clone().requires_grad_()
    out = bound(2, x)
    torch.testing.assert_close(out, alone, rtol=0, atol=2e-5)
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert slope.abs().sum() > 0


@torch.no_grad()
def test_what_does_not_fit_is_refused_as_by_the_loop_on_tensors() -> None:
    policy = policy_of("ddim")
    cond, noise = drawn(policy, rows=3)
    for shape in ((3, 3, 3), (3, 8, 2), (3, 1, 2), (2, 3, 2)):
        with pytest.raises(RuntimeError):
            policy.decode(cond, torch.zeros(shape))
    for start in (torch.zeros(1, 3, 2), torch.zeros(5, 3, 2)):
        with pytest.raises(RuntimeError):
            policy.decode(cond, noise, start=(start, 0.5))
    for vec in (cond.vec.double(), cond.vec.half(), cond.vec[:, :-1]):
        with pytest.raises(RuntimeError):
            policy.decode(replace(cond, vec=vec), noise)
    bound = policy.bind(cond)
    for x in (torch.zeros(3, 4, 2), torch.zeros(2, 3, 2)):
        with pytest.raises(RuntimeError):
            bound(0, x)
    with pytest.raises(IndexError):
        bound(9, noise)


@torch.no_grad()
def test_a_network_may_return_fewer_rows() -> None:
    policy = policy_of("euler")
    _, noise = drawn(policy, rows=50)
    expected = denoise(lambda _, x: torch.full_like(x, 0.5), policy.table, noise).action
    for pred in (torch.full((1, 3, 2), 0.5), torch.tensor(0.5), torch.full((2,), 0.5)):
        found = denoise_chunks(lambda *_, pred=pred: pred, policy.table, noise).action
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_transforms_and_default_types_leave_no_trace() -> None:
    policy = small_policy(VPDiffusion(num_levels=7, prediction="eps"), DDIM(steps=6))  # a table of its own
    assert isinstance(policy, DenoisingPolicy)
    cond, noise = drawn(policy, rows=3)
    torch.func.grad(lambda z: policy.decode(cond, z, grad=True).sum())(noise)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad():
            out = policy.decode(cond, noise)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        plain = denoise(plain_field(policy, cond), policy.table, noise).action
    torch.testing.assert_close(out, plain, rtol=0, atol=2e-5)


def test_switched_networks_may_be_nested() -> None:
    policy = policy_of()
    inner = SwitchedField(policy.clone().field, policy.clone().field, switch_time=7)
    policy.field = SwitchedField(inner, policy.field, switch_time=3)
    with torch.no_grad():
        inner.tuned.trunk.outlet.bias += 0.3
        policy.field.tuned.trunk.outlet.bias += 0.2
    require_equal(policy)
    with torch.no_grad():
        nets = policy.bind_packed(drawn(policy)[0])
    assert nets is not None and [len(one.table) for one in nets] == [3, 4, 3]


def test_weights_may_depend_on_buffers() -> None:
    class Scaled(nn.Module):
        factor: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.tensor(1.0))

        def forward(self, weight: Tensor) -> Tensor:
            return weight * self.factor

    policy, scaled = policy_of(), Scaled()
    parametrize.register_parametrization(policy.field.trunk.last_block.linear1, "weight", scaled)
    require_equal(policy)
    scaled.factor.fill_(0.1)
    require_equal(policy)


def test_noise_of_another_sampler_is_refused() -> None:
    policy = policy_of()
    cond, noise = drawn(policy)
    with pytest.raises(ConfigError, match="noise of this sampler must have shape"), torch.no_grad():
        policy.decode(cond, noise[:, 1:])
