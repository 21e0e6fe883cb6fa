"""The mixture policy: its density, the division of its loss, and which mode acts."""

from __future__ import annotations

import math

import pytest
import torch
from pairwise import everything
from small_cloning import finish
from small_policies import ACTION_DIM, OBS_DIM, observations, small_policy
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from two_modes import LEVEL, two_mode_setup

from algos.bc import BcConfig
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError, ConfigError
from policies.networks.heads import Mixture, MixtureHeadConfig
from policies.policy import PolicyConfig
from policies.processes.gaussian import GaussianProcess
from policies.processes.mixture import MixturePolicy, MixtureProcess, ModeMean, drawn_mode, elementwise_nll
from policies.protocols import Cond, has_density

SHAPE = (4, 3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def head_in_general_position(**changes: object) -> nn.Module:
    """A double-precision head whose modes, shares and deviations all differ."""
    config = MixtureHeadConfig(**({"width": 8, "num_modes": 3, "init_std": 0.5, "max_std": 1.0} | changes))
    head, generator = config.build(SHAPE, 5).double(), seeded(1)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            start = weight if name == "log_var" else 0.0
            weight.copy_(start + 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return head


def inputs(batch: int = 6) -> tuple[Tensor, Tensor]:
    generator = seeded(2)
    vec = torch.randn(batch, 5, generator=generator, dtype=torch.float64)
    return vec, torch.rand(batch, *SHAPE, generator=generator, dtype=torch.float64) * 2 - 1


def textbook(mixture: Mixture) -> MixtureSameFamily:
    modes = Independent(Normal(mixture.mean, mixture.std.expand_as(mixture.mean)), 2)
    return MixtureSameFamily(Categorical(logits=mixture.log_weight), modes)


# -- density --------------------------------------------------------------------------------------------


def test_the_elements_of_the_loss_add_up_to_the_joint_density() -> None:
    head, (vec, action) = head_in_general_position(), inputs()
    loss = elementwise_nll(head(vec), action)
    assert loss.shape == action.shape
    torch.testing.assert_close(loss.sum(dim=(1, 2)), -textbook(head(vec)).log_prob(action))


def test_the_gradient_of_the_loss_is_that_of_the_joint_density() -> None:
    head, (vec, action) = head_in_general_position(), inputs()
    weights = list(head.parameters())
    ours = torch.autograd.grad(elementwise_nll(head(vec), action).sum(), weights)
    theirs = torch.autograd.grad(-textbook(head(vec)).log_prob(action).sum(), weights)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_one_mode_is_a_gaussian() -> None:
    head, (vec, action) = head_in_general_position(num_modes=1), inputs()
    mixture = head(vec)
    gaussian = -Normal(mixture.mean[:, 0], mixture.std[0]).log_prob(action)
    torch.testing.assert_close(elementwise_nll(mixture, action), gaussian)


def test_modes_far_away_leave_finite_gradients() -> None:
    head = MixtureHeadConfig(width=8, num_modes=3).build(SHAPE, 5)
    loss = elementwise_nll(head(torch.randn(2, 5, generator=seeded())), torch.full((2, *SHAPE), 100.0))
    loss.mean().backward()
    assert loss.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in head.parameters())


def test_rows_left_out_matter_only_by_whose_chunk_it_is() -> None:
    log_weight = torch.tensor([[0.2, 0.5, 0.3]]).log()
    mean = torch.tensor([-0.6, 0.0, 0.6]).view(1, 3, 1, 1).expand(1, 3, *SHAPE)
    mixture = Mixture(log_weight, mean, torch.full((3, 1, SHAPE[1]), 0.1))
    action = 0.05 * torch.randn(1, *SHAPE, generator=seeded())  # the second mode's beyond doubt
    padded = action.clone()
    padded[:, 2:] = action[:, 1:2]
    gaussian = -Normal(0.0, 0.1).log_prob(action[:, :2])
    for chunk in (action, padded):
        recorded = elementwise_nll(mixture, chunk)[:, :2]
        torch.testing.assert_close(recorded, gaussian - log_weight[0, 1] / action[0].numel())


# -- acting ---------------------------------------------------------------------------------------------


def test_modes_are_drawn_as_often_as_their_shares_say() -> None:
    share = torch.tensor([0.5, 0.0, 0.15, 0.35])
    noise = torch.randn(200_000, generator=seeded())
    drawn = drawn_mode(share.log().expand(len(noise), -1), noise)
    frequency = drawn.bincount(minlength=4) / len(noise)
    torch.testing.assert_close(frequency, share, atol=4 * 0.5 / len(noise) ** 0.5, rtol=0.0)
    assert frequency[1] == 0


def test_the_furthest_draws_are_modes_too() -> None:
    log_weight = torch.full((2, 7), 1.0 / 7).log()
    assert drawn_mode(log_weight, torch.tensor([-40.0, 40.0])).tolist() == [0, 6]


def test_a_chunk_is_the_mean_of_the_mode_that_its_noise_draws() -> None:
    policy = small_policy(MixtureProcess())
    cond, noise = policy.encode({"state": observations(40)}), policy.sample_noise(40, generator=seeded())
    mixture, chunk = policy.head(cond.vec), policy.decode(cond, noise)
    mode = drawn_mode(mixture.log_weight, noise[:, 0, 0])
    assert len(mode.unique()) == 5
    assert torch.equal(chunk, mixture.mean[torch.arange(40), mode])
    other = noise.clone()
    other.flatten(1)[:, 1:] = 0.0
    assert policy.is_deterministic and torch.equal(policy.decode(cond, other), chunk)


def test_the_likeliest_mode_ignores_noise() -> None:
    policy = small_policy(MixtureProcess(), ModeMean(likeliest=True))
    cond = policy.encode({"state": observations(9)})
    mixture, chunk = policy.head(cond.vec), policy.decode(cond, policy.sample_noise(9))
    assert torch.equal(chunk, mixture.mean[torch.arange(9), mixture.log_weight.argmax(dim=1)])
    assert not policy.noise_sensitive


def test_a_temperature_of_one_draws_from_the_mixture() -> None:
    policy = small_policy(MixtureProcess(init_std=0.2), ModeMean(temperature=1.0)).double()
    cond = policy.encode({"state": observations(1).double()})
    chunk = policy.decode(cond.repeat(50_000), policy.sample_noise(50_000, generator=seeded()))
    assert policy.noise_shape == (2, *policy.chunk.shape) and not policy.is_deterministic
    density = textbook(policy.head(cond.vec))
    torch.testing.assert_close(chunk.mean(dim=0), density.mean[0], atol=0.005, rtol=0.0)
    torch.testing.assert_close(chunk.var(dim=0), density.variance[0], atol=0.001, rtol=0.0)
    first = chunk[:, 0, 0].sort().values
    marginal = MixtureSameFamily(
        Categorical(density.mixture_distribution.probs[0]),
        Normal(policy.head(cond.vec).mean[0, :, 0, 0], policy.head(cond.vec).std[:, 0, 0]),
    )
    steps = (torch.arange(len(first)) + 0.5) / len(first)
    assert (marginal.cdf(first) - steps).abs().max() < 1.63 / len(first) ** 0.5  # Kolmogorov-Smirnov, 1 %


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_temperature_is_times_the_deviation_of_the_mode(temperature: float) -> None:
    policy = small_policy(MixtureProcess(init_std=0.2), ModeMean(temperature=temperature))
    cond, noise = policy.encode({"state": observations(40)}), policy.sample_noise(40, generator=seeded())
    mixture, row = policy.head(cond.vec), torch.arange(40)
    mode = drawn_mode(mixture.log_weight, noise[:, 0, 0, 0])
    expected = mixture.mean[row, mode] + temperature * mixture.std[mode] * noise[:, 1]
    torch.testing.assert_close(policy.decode(cond, noise), expected)


def test_a_view_samples_otherwise_with_the_same_weights() -> None:
    policy = small_policy(MixtureProcess())
    view = policy.with_sampler(ModeMean(likeliest=True))
    assert view.head is policy.head and policy.noise_sensitive and not view.noise_sensitive
    assert policy.sampler == ModeMean()


# -- learning -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not everything, reason="with --all: without it other processes keep them")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cloning_keeps_both_modes_of_the_demonstrations(seed: int) -> None:
    config = BcConfig(steps=400, batch_size=64, lr=3e-3, validation_fraction=0.1, ema_decay=0.99)
    algorithm = config.build(two_mode_setup(seed, process=MixtureProcess()))
    last = finish(algorithm)[-1]
    x = torch.linspace(-0.9, 0.9, 200)
    obs = torch.stack([x, torch.ones_like(x)], dim=1).unsqueeze(1)
    action = algorithm.snapshot().act(obs, generator=seeded(seed)).squeeze(-1)
    error = (action.abs() - (LEVEL + 0.2 * x).unsqueeze(1)).abs()
    assert error.median() < 0.15
    assert 0.3 < (action[:, 0] > 0).float().mean() < 0.7
    assert (action[:, 0].sign() == action[:, 1].sign()).float().mean() > 0.95
    assert last["validation/action_mse_best"] < 0.5


# -- exploration --------------------------------------------------------------------------------------


def test_the_density_of_a_draw_is_that_of_the_executed_rows() -> None:
    policy = small_policy(MixtureProcess(num_modes=3), horizon=4, act_steps=2).double()
    assert isinstance(policy, MixturePolicy) and has_density(policy)
    cond = policy.encode(policy.observation(observations(5)))
    chain = policy.sample_chain(cond, generator=seeded(1))
    mixture = policy.head(cond.vec)
    components = Independent(Normal(mixture.mean[:, :, :2], mixture.std.expand(-1, 2, -1)), 2)
    law = MixtureSameFamily(Categorical(logits=mixture.log_weight), components)
    shares = chain.log_prob[:, 0, :2]
    torch.testing.assert_close(shares.sum(dim=(1, 2)), law.log_prob(chain.action[:, :2]))
    assert bool((shares == shares[:, :1, :1]).all())
    scored, entropy = policy.transition_log_prob(cond, chain.x[:, 0], chain.x[:, 1], torch.zeros(5))
    assert torch.equal(scored, chain.log_prob[:, 0]) and not entropy.any() and not policy.has_entropy


def test_draws_are_of_one_mode_each_by_share() -> None:
    policy = small_policy(MixtureProcess(num_modes=2, init_std=0.01, min_std=0.005))
    assert isinstance(policy, MixturePolicy)
    cond = policy.encode(policy.observation(observations(1))).repeat(4000)
    mixture = policy.head(cond.vec)
    action = policy.sample_chain(cond, generator=seeded(2)).action
    distance = (action.unsqueeze(1) - mixture.mean).abs().amax(dim=(-2, -1))
    assert float(distance.min(dim=1).values.max()) < 6 * 0.01
    drawn = (distance.argmin(dim=1) == 0).double().mean()
    share = mixture.log_weight[0, 0].exp()
    assert abs(float(drawn - share)) < 4 * math.sqrt(0.25 / 4000)


# -- refusals -------------------------------------------------------------------------------------------


def test_a_start_or_hooks_are_refused() -> None:
    policy = small_policy(MixtureProcess())
    cond, noise = Cond(torch.zeros(2, OBS_DIM)), policy.sample_noise(2)
    for options in ({"hooks": [object()]}, {"start": (noise, 0.5)}):
        with pytest.raises(CapabilityError, match="process=mixture acts in one step"):
            policy.decode(cond, noise, **options)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"process": MixtureProcess(num_modes=0)}, "process.num_modes must be at least 1; got 0"),
        (
            {"process": MixtureProcess(min_std=0.3)},
            "process.init_std must be between min_std=0.3 and max_std=0.2",
        ),
        ({"backbone": object()}, r"process=mixture needs a fully connected backbone \(backbone=mlp\)"),
        ({"backbone": MlpConfig(cond_dims=(8, 4))}, r"process=mixture has no .*cond_dims=\[8, 4\]"),
        ({"process": GaussianProcess(), "sampler": ModeMean()}, "process=gaussian needs sampler=mean"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(parts: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config = PolicyConfig(**({"process": MixtureProcess()} | parts))
        build_policy(config, obs_dim=OBS_DIM, action_dim=ACTION_DIM)


@pytest.mark.parametrize("temperature", [-0.1, 1.1, float("nan")])
def test_a_temperature_beyond_the_mixture_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"sampler\.temperature must be in \[0, 1\]"):
        ModeMean(temperature=temperature)
