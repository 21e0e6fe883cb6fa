"""Policies that are steered through their noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from messages import mentions
from pairwise import repeated
from small_policies import observations, small_policy
from torch import Tensor

from policies.composition.compose import compose
from policies.errors import CapabilityError, ConfigError
from policies.export.export import export_onnx
from policies.policy import Policy
from policies.processes.deterministic import DeterministicProcess
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.samplers.ddpm import DDIM
from policies.samplers.ode import Euler
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.noise_policy import ADAPTERS, SteeredPolicy, Steering, interpolation

SMALL = Steering(hidden_dims=(16, 16))


def base(kind: str = "flow") -> Policy:
    if kind == "flow":
        return small_policy(RectifiedFlow(), Euler(steps=2))
    if kind == "ddim":
        return small_policy(VPDiffusion(num_levels=6), DDIM(steps=3))
    members = [base(), small_policy(VPDiffusion(num_levels=6), DDIM(steps=3))]
    return compose(members, (0.5, 0.5))


def steered(config: Steering = SMALL, kind: str = "flow") -> SteeredPolicy:
    torch.manual_seed(0)
    return config.wrap(base(kind)).eval()


def act(policy: Policy, n: int = 5) -> Tensor:
    noise = torch.randn(n, *policy.noise_shape, generator=torch.Generator().manual_seed(1))
    return policy.act(observations(n), noise=noise)


@pytest.mark.parametrize("kind", ["flow", "ddim", "composed"])
def test_an_untrained_gaussian_actor_leaves_the_policy_as_it_is_noise_by_noise(kind: str) -> None:
    policy = steered(replace(SMALL, zero_init=True, density="gaussian", bound=1.0), kind)
    torch.testing.assert_close(act(policy), act(policy.base), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bound", [0.5, 2.5])
def test_the_bound_holds_for_the_noise_that_the_policy_is_given(bound: float) -> None:
    policy = steered(replace(SMALL, bound=bound))
    cond = torch.randn(400, policy.encoder.cond_dim, generator=torch.Generator().manual_seed(0))
    eps = 10 * torch.randn(400, policy.latent_dim, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        noise = policy.noise_of(policy.latent(cond, eps))
    assert noise.shape == (400, *policy.chunk.shape)
    assert 0.99 * bound < float(noise.abs().max()) <= bound * (1 + 1e-6)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", ["flow", "composed"])
def test_decoding_is_the_inner_policy_at_the_chosen_noise(adapter: str, kind: str) -> None:
    policy = steered(replace(SMALL, adapter=adapter), kind)
    cond = policy.encode(policy.observation(observations(4)))
    eps = torch.randn(4, *policy.noise_shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        latent = policy.latent(cond.vec, eps.flatten(1))
    chosen = policy.base.decode(cond, policy.noise_of(latent))
    assert torch.equal(policy.decode(cond, eps), chosen)
    torch.testing.assert_close(policy.chunk_of(cond.vec, latent), chosen, rtol=1e-6, atol=1e-6)


def test_one_row_is_repeated_and_as_many_as_there_are_stay() -> None:
    assert torch.equal(interpolation(5, 1), torch.ones(5, 1))
    assert torch.equal(interpolation(4, 4), torch.eye(4))
    middle = interpolation(3, 2)
    torch.testing.assert_close(middle, torch.tensor([[1.0, 0.0], [0.5**0.5, 0.5**0.5], [0.0, 1.0]]))
    torch.testing.assert_close(interpolation(16, 5).norm(dim=1), torch.ones(16))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_policy_in_double_precision_is_steered_in_it(adapter: str) -> None:
    policy = replace(SMALL, adapter=adapter).wrap(base().double())
    noise = torch.zeros(5, *policy.noise_shape, dtype=torch.float64)
    assert policy.act(observations(5), noise=noise).dtype == torch.float64


def test_an_actor_without_draws_acts_by_its_mean() -> None:
    policy = steered(replace(SMALL, stochastic=False))
    assert not policy.noise_sensitive
    obs = observations(3)
    one, other = (policy.act(obs, noise=torch.full((3, *policy.noise_shape), value)) for value in (0.0, 2.0))
    assert torch.equal(one, other)
    assert torch.equal(one, steered().act(obs, noise=torch.zeros(3, *policy.noise_shape)))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_steered_policy_is_saved_and_acts_the_same(adapter: str, tmp_path: Path) -> None:
    policy = steered(replace(SMALL, adapter=adapter, stochastic=adapter != "full"), "composed")
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    assert isinstance(loaded, SteeredPolicy) and loaded.wrapper == policy.wrapper
    assert torch.equal(act(loaded), act(policy))


@pytest.mark.parametrize(("kind", "adapter"), repeated([("flow", "low_rank"), ("composed", "row_repeat")]))
def test_a_steered_policy_is_exported_as_one_graph(kind: str, adapter: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    policy = steered(replace(SMALL, adapter=adapter), kind)
    report = export_onnx(policy, tmp_path / "exported", latency_batches=())
    assert report.parity and max(row["max_abs_difference"] for row in report.parity) < 1e-5
    assert len(list((tmp_path / "exported").rglob("*.onnx"))) == 1


@pytest.mark.parametrize("kind", ["flow", "ddim", "composed"])
def test_a_start_beside_the_chosen_noise_is_refused(kind: str) -> None:
    """A deterministic policy would begin there, and no latent would matter."""
    policy = steered(kind=kind)
    cond, noise = policy.encode(policy.observation(observations(4))), policy.sample_noise(4)
    begin = (torch.zeros(4, *policy.chunk.shape), 0.0)
    policy.base.decode(cond, torch.zeros(4, *policy.chunk.shape), start=begin)
    with pytest.raises(CapabilityError, match=mentions("policy")):
        policy.decode(cond, noise, start=begin)


def test_policies_that_noise_does_not_decide_are_refused() -> None:
    with pytest.raises(CapabilityError, match=mentions("DeterministicProcess")):
        SMALL.wrap(small_policy(DeterministicProcess()))
    with pytest.raises(CapabilityError, match=mentions("VPDiffusion eta=0")):
        SMALL.wrap(small_policy(VPDiffusion(num_levels=6), DDIM(steps=3, eta=1.0)))
    with pytest.raises(CapabilityError, match=mentions("VPDiffusion eta=0")):
        steered(kind="ddim").with_sampler(DDIM(steps=3, eta=1.0))
    assert steered(kind="ddim").with_sampler(DDIM(steps=2)).sampler.steps == 2
    with pytest.raises(ConfigError, match=mentions("steering.rank 3 4")):
        Steering(adapter="low_rank", rank=4).wrap(base())


def test_only_the_actor_learns() -> None:
    policy = steered()
    assert {name.split(".")[0] for name, p in policy.named_parameters() if p.requires_grad} == {"actor"}
