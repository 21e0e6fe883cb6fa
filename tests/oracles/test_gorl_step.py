"""GoRL against the released program: the loss of the encoder, decoding, the refit.

Not compared: the step of the encoder, whose deviations are of another form here, and advantages at truncated
steps, which the release sets to 0; the test takes them as the release does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from official_critics import CLOSE
from torch import Tensor, nn

from algos.onpolicy.advantages import Experience
from algos.onpolicy.gorl import LatentRatio, log_density
from algos.onpolicy.losses import SURROGATES, normalize_advantage
from algos.onpolicy.ratios import Rows
from algos.optim import descend
from policies.build import build_policy
from policies.policy import PolicyConfig
from policies.processes import RectifiedFlow
from policies.protocols import TE, BoundField, Cond
from policies.samplers.ode import Euler
from policies.wrappers.noise_policy import SteeredPolicy, Steering

gorl = pytest.mark.golden("gorl_*.npz")


class Layers(nn.Module):
    """Dense layers of a file with SiLU between them."""

    def __init__(self, arrays: dict[str, Any], net: str, when: str = "param") -> None:
        super().__init__()
        names = [f"{when}_{net}.{i}" for i in range(sum(f"{when}_{net}." in name for name in arrays) // 2)]
        self.kernels = nn.ParameterList([arrays[f"{name}.kernel"].clone() for name in names])
        self.biases = nn.ParameterList([arrays[f"{name}.bias"].clone() for name in names])

    def forward(self, h: Tensor) -> Tensor:
        for i, (kernel, bias) in enumerate(zip(self.kernels, self.biases, strict=True)):
            h = torch.nn.functional.silu(h) if i else h
            h = h @ kernel + bias
        return h


class Field(nn.Module):
    """Minus the released field, whose time runs from action to noise."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.octaves = Layers(arrays, "flow"), int(arrays["cfg_embed"]) // 2

    def embedded(self, t: Tensor) -> Tensor:
        phase = t * 2.0 ** torch.arange(self.octaves)
        return torch.cat([phase.cos(), phase.sin()], dim=1)

    def forward(self, x: Tensor, time: Tensor, cond: Cond, *_: Any, **__: Any) -> Tensor:
        t = (1 - time).expand(len(x))[:, None]
        return -self.net(torch.cat([cond.vec, x.flatten(1), self.embedded(t)], dim=1)).view_as(x)

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> BoundField:
        return lambda k, x: self(x, times[k], cond)


class FieldConfig:
    """Builds the field of a file."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def build(self, *_: Any, **__: Any) -> Field:
        return Field(self.arrays)


class Encoder(nn.Module):
    """The released encoder."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        super().__init__()
        self.net = Layers(arrays, "policy")

    def forward(self, vec: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = self.net(vec).chunk(2, dim=1)
        return mean, (torch.nn.functional.softplus(raw) + 1e-3).clamp(1e-3, 10).log()


@pytest.fixture
def policy(arrays: dict[str, Any]) -> SteeredPolicy:
    config = PolicyConfig(
        process=RectifiedFlow(time_scale=1.0),
        backbone=FieldConfig(arrays),
        sampler=Euler(steps=int(arrays["cfg_flow_steps"]), clip_action=None),
        horizon=1,
        act_steps=1,
        normalizer={"state": "identity", "action": "identity"},
        observation_clip=None,
    )
    decoder = build_policy(config, obs_dim=arrays["obs"].shape[-1], action_dim=arrays["z"].shape[-1])
    made = Steering(bound=1.0, density="gaussian", hidden_dims=(8,)).wrap(decoder)
    made.actor = Encoder(arrays)
    return made


def seen(arrays: dict[str, Any], obs: Tensor) -> Tensor:
    return (obs - arrays["obs_mean"]) / arrays["obs_std"]


def advantages(arrays: dict[str, Any]) -> Tensor:
    """Return the advantages (T, B) of the release, which are 0 at truncated steps."""
    gamma, lam = float(arrays["cfg_discounting"]), float(arrays["cfg_gae_lambda"])
    net = Layers(arrays, "value")
    with torch.no_grad():
        value = net(seen(arrays, arrays["obs"]))[..., 0]
        last = net(seen(arrays, arrays["next_obs"][-1:]))[..., 0]
    goes_on = 1 - arrays["truncation"]
    discount = gamma * (1 - (1 - arrays["discount"]) * goes_on)
    reward = float(arrays["cfg_reward_scaling"]) * arrays["reward"]
    delta = (reward + discount * torch.cat([value[1:], last]) - value) * goes_on
    carry, target = torch.zeros_like(value[0]), value.clone()
    for t in reversed(range(len(delta))):
        carry = delta[t] + discount[t] * goes_on[t] * lam * carry
        target[t] += carry
    return (reward + discount * torch.cat([target[1:], last]) - value) * goes_on


@gorl
def test_losses_of_the_encoder_are_the_official_ones(arrays: dict[str, Any], policy: SteeredPolicy) -> None:
    advantage = advantages(arrays)
    torch.testing.assert_close(advantage.mean(), arrays["out_advantages_mean"], **CLOSE)
    torch.testing.assert_close(advantage.std(correction=0), arrays["out_advantages_std"], **CLOSE)
    record = {"latent": arrays["z"].flatten(0, 1), "log_prob": arrays["old_log_prob"].flatten()}
    none = torch.zeros(advantage.numel())
    cond = Cond(seen(arrays, arrays["obs"]).flatten(0, 1))
    rows = Rows.sorted_from(torch.arange(advantage.numel()), 1)
    ratio = LatentRatio(policy, float(arrays["cfg_z_regularization"]))
    score = ratio.score(Experience(cond, record, none, none, none), rows)
    clip = torch.full_like(none, float(arrays["cfg_clipping_epsilon"]))
    scaled = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    loss = SURROGATES["ppo"](score.log_ratio.exp(), scaled.flatten(), clip).mean()
    torch.testing.assert_close(loss, arrays["out_policy_loss"], **CLOSE)
    torch.testing.assert_close(score.entropy.mean(), arrays["out_entropy"], **CLOSE)
    assert score.penalty is not None
    torch.testing.assert_close(score.penalty.mean(), arrays["out_z_reg_loss"], **CLOSE)
    own = normalize_advantage(advantage.flatten())  # by the sample deviation
    torch.testing.assert_close(own, scaled.flatten(), rtol=0.05, atol=0)


@gorl
def test_the_density_of_latents_is_that_of_a_normal_distribution(arrays: dict[str, Any]) -> None:
    mean, std, z = (arrays[name].flatten(0, 1) for name in ("mean", "std", "z"))
    wanted = torch.distributions.Normal(mean, std).log_prob(z).sum(dim=1)
    torch.testing.assert_close(log_density(z, mean, std.log()), wanted)


@gorl
def test_decoding_is_the_official_one(arrays: dict[str, Any], policy: SteeredPolicy) -> None:
    vec = seen(arrays, arrays["decode_obs"])
    found = policy.chunk_of(vec, arrays["decode_z"])[:, 0]
    torch.testing.assert_close(found, arrays["decode_action"], **CLOSE)


@gorl
def test_the_refit_is_the_official_one(arrays: dict[str, Any], policy: SteeredPolicy) -> None:
    samples = int(arrays["cfg_samples"])
    decoder: Any = policy.base.train().requires_grad_(True)
    cond = decoder.condition(seen(arrays, arrays["decode_obs"]).repeat_interleave(samples, dim=0))
    chunk = arrays["fm_actions"].repeat_interleave(samples, dim=0)[:, None]
    te = TE(1 - arrays["fm_t"].flatten(), arrays["fm_eps"].flatten(0, 1)[:, None], None)
    loss = decoder.matching_loss(cond, chunk, te, reduce="sample")
    torch.testing.assert_close(loss, arrays["fm_loss_each"].flatten(), **CLOSE)
    torch.testing.assert_close(loss.mean(), arrays["fm_loss"], **CLOSE)
    descend(torch.optim.Adam(decoder.field.parameters(), lr=float(arrays["cfg_learning_rate"])), loss.mean())
    after = Layers(arrays, "flow", "after")
    for own, official in zip(decoder.field.net.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(own, official, **CLOSE)
