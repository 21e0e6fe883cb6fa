"""The critic and the Gaussian actor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from policies.backbones.mlp import MlpConfig
from policies.errors import ConfigError
from policies.networks.heads import CriticConfig, GaussianHead, GaussianHeadConfig
from policies.networks.mlp_blocks import PlainTrunk
from policies.protocols import Cond

CRITICS = {
    "residual": CriticConfig(width=8),
    "two-blocks-norm": CriticConfig(width=8, num_blocks=2, layer_norm=True, activation="relu"),
    "plain": CriticConfig(residual=False, hidden_dims=(8, 6)),
}


def textbook(trunk: nn.Module, x: Tensor, activation: str) -> Tensor:
    act = torch.relu if activation == "relu" else torch.nn.functional.mish
    h = trunk.inlet(x)
    if isinstance(trunk, PlainTrunk):
        for layer in trunk.layers:
            h = layer(act(h))
        return h
    for block in trunk.blocks:
        norm1, norm2 = block.norm1 or nn.Identity(), block.norm2 or nn.Identity()
        h = h + block.linear2(act(norm2(block.linear1(act(norm1(h))))))
    return trunk.outlet(h)


@pytest.mark.parametrize("config", CRITICS.values(), ids=CRITICS.keys())
def test_critic_and_its_gradients_equal_the_textbook_network(config: CriticConfig) -> None:
    critic = config.build(6).double()
    obs = torch.randn(5, 2, 3, dtype=torch.float64)
    ours, theirs = critic(obs), textbook(critic.trunk, obs.flatten(1), config.activation).squeeze(1)
    assert ours.shape == (5,)
    torch.testing.assert_close(ours, theirs)
    weights = list(critic.parameters())
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), weights),
        torch.autograd.grad(theirs.square().sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_critic_accepts_an_encoded_observation() -> None:
    critic, vec = CriticConfig(width=8).build(6), torch.randn(5, 6)
    assert torch.equal(critic(Cond(vec)), critic(vec))


@pytest.mark.parametrize("fused", [False, True])
def test_critic_values_follow_the_weights(fused: bool) -> None:
    critic, obs = CriticConfig(width=8).build(6), torch.randn(4, 6)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=0.1, fused=fused)
    for _ in range(2):
        critic(obs).square().sum().backward()
        with torch.no_grad():
            critic(obs)
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(critic(obs), textbook(critic.trunk, obs, "mish").squeeze(1))


def test_gaussian_mean_is_the_squashed_trunk_and_the_deviation_is_per_dimension() -> None:
    head = GaussianHeadConfig(width=8, init_std=0.15).build((4, 3), 5)
    vec = torch.randn(2, 5)
    mean, std = head(vec)
    torch.testing.assert_close(mean, torch.tanh(textbook(head.trunk, vec, "mish")).view(2, 4, 3))
    torch.testing.assert_close(std, torch.full((2, 4, 3), 0.15))
    with torch.no_grad():
        head.log_var[1] = 2 * math.log(0.05)
    torch.testing.assert_close(head(vec)[1][0, 0], torch.tensor([0.15, 0.05, 0.15]))


@pytest.mark.parametrize(("log_var", "limit"), [(-50.0, 0.01), (50.0, 0.2)])
def test_deviation_stays_within_its_limits_without_gradient(log_var: float, limit: float) -> None:
    head = GaussianHeadConfig(width=8).build((4, 3), 5)
    nn.init.constant_(head.log_var, log_var)
    std = head(torch.randn(2, 5))[1]
    torch.testing.assert_close(std, torch.full((2, 4, 3), limit))
    std.sum().backward()
    assert not head.log_var.grad.any()


def test_fixed_deviation_is_saved_but_not_trained() -> None:
    head = GaussianHeadConfig(width=8, learn_std=False).build((4, 3), 5)
    assert "log_var" in head.state_dict()
    assert "log_var" not in dict(head.named_parameters())
    torch.testing.assert_close(head(torch.randn(2, 5))[1], torch.full((2, 4, 3), 0.1))


def test_head_takes_its_trunk_from_a_backbone_and_its_deviation_from_a_process() -> None:
    @dataclass
    class Deviation:
        init_std: float = 0.05
        min_std: float = 0.02
        max_std: float = 0.3
        learn_std: bool = False
        squash: bool = False

    head = GaussianHeadConfig.from_parts(MlpConfig(width=12, num_blocks=2, layer_norm=True), Deviation())
    assert head == GaussianHeadConfig(
        width=12,
        num_blocks=2,
        activation="relu",
        layer_norm=True,
        init_std=0.05,
        min_std=0.02,
        max_std=0.3,
        learn_std=False,
        squash=False,
    )


@pytest.mark.parametrize(
    "stds", [{"init_std": 0.5}, {"min_std": 0.0}, {"min_std": 0.15}, {"max_std": 0.05}], ids=str
)
def test_contradicting_deviations_are_refused(stds: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="std must be"):
        GaussianHeadConfig(**stds)


@pytest.mark.parametrize(
    "config", [*CRITICS.values(), GaussianHeadConfig(width=8), GaussianHeadConfig(learn_std=False)]
)
def test_official_keys_name_every_parameter_once(config: CriticConfig | GaussianHeadConfig) -> None:
    net = config.build((4, 3), 5) if isinstance(config, GaussianHeadConfig) else config.build(5)
    assert sorted(config.official_keys().values()) == sorted(dict(net.named_parameters()))
    assert isinstance(net, GaussianHead) == isinstance(config, GaussianHeadConfig)
