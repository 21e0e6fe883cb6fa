"""FamO2O against the released learner: embedding, balance model, values, weights, one step of all of it.

The released actor is rebuilt as a flow of one step whose noise is that of its normal distribution. The step
of its own network is not compared: it regresses on the density, and weighs rows by a batch mean.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from official_critics import CLOSE, Layer, batch_of, layers_of, load_critic
from torch import Tensor, nn

from algos.critics.famo2o import Famo2oConfig, Famo2oLearner
from algos.critics.idql import exponential_weight
from algos.transitions import Batch
from policies.build import build_policy
from policies.networks.critics import Ensemble
from policies.policy import PolicyConfig
from policies.processes import RectifiedFlow
from policies.protocols import BoundField, Cond
from policies.samplers.ode import Euler
from policies.wrappers.balance import EMBEDDED, Balance, embedded

famo2o = pytest.mark.golden("famo2o_*.npz")


class Actor(nn.Module):
    """Velocity whose one Euler step from eps ends at tanh(mean) + std eps."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        super().__init__()
        self.layers = (*layers_of(arrays, "param_actor.MLP_0"), *layers_of(arrays, "param_actor"))
        self.std = arrays["param_actor.log_stds"].clamp(min=-5).exp()

    def mean(self, vec: Tensor) -> Tensor:
        h = vec
        for layer in self.layers[:-1]:
            h = torch.relu(h @ layer.kernel + layer.bias)
        return torch.tanh(h @ self.layers[-1].kernel + self.layers[-1].bias)

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> BoundField:
        return lambda k, x: self.mean(cond.vec)[:, None] + (self.std - 1) * x


class ActorConfig:
    """Builds the actor of a file."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def build(self, *_: Any, **__: Any) -> Actor:
        return Actor(self.arrays)


def wide(layers: tuple[Layer, ...], state: int) -> tuple[Layer, ...]:
    """Return layers that read zeros between the state and the action."""
    first = layers[0]
    zeros = first.kernel.new_zeros(len(first.kernel), EMBEDDED, first.kernel.shape[2])
    kernel = torch.cat([first.kernel[:, :state], zeros, first.kernel[:, state:]], dim=1)
    return (replace(first, kernel=kernel), *layers[1:])


def ensemble_layers(arrays: dict[str, Any], *nets: str) -> tuple[Layer, ...]:
    parts = zip(*(layers_of(arrays, f"{net}.MLP_0") for net in nets), strict=True)
    stacked = [(torch.stack([p.kernel for p in one]), torch.stack([p.bias for p in one])) for one in parts]
    layers = tuple(Layer(kernel, bias, None, None) for kernel, bias in stacked)
    return wide(layers, arrays["batch_observations"].shape[1])


def critics(arrays: dict[str, Any], name: str) -> tuple[Layer, ...]:
    return ensemble_layers(arrays, f"{name}.Critic_0", f"{name}.Critic_1")


def chooser_layers(arrays: dict[str, Any], name: str) -> list[Layer]:
    net = f"{name}_hierarchical_actor"
    return [*layers_of(arrays, f"{net}.MLP_0"), *layers_of(arrays, net)]


def linear_parts(net: nn.Module) -> list[nn.Linear]:
    return [part for part in net.modules() if isinstance(part, nn.Linear)]


@pytest.fixture
def learner(arrays: dict[str, Any]) -> Famo2oLearner:
    layers = critics(arrays, "param_critic")
    low, high = arrays["cfg_range"].tolist()
    dims = tuple(layer.kernel.shape[2] for layer in layers[:-1])
    config = Famo2oConfig(
        critic_dims=dims,
        balance_dims=tuple(layer.kernel.shape[1] for layer in chooser_layers(arrays, "param")[:-1]),
        expectile=float(arrays["cfg_expectile"]),
        critic_lr=float(arrays["cfg_lr"]),
        actor_lr=float(arrays["cfg_lr"]),
        tau=float(arrays["cfg_tau"]),
        min_coefficient=low,
        max_coefficient=high,
        init_alpha=math.exp(float(arrays["param_hierarchical_temp.log_temp"])),
    )
    policy_config = PolicyConfig(
        process=RectifiedFlow(time_scale=1.0),
        backbone=ActorConfig(arrays),
        sampler=Euler(steps=1, clip_action=None),
        horizon=1,
        act_steps=1,
        normalizer={"state": "identity", "action": "identity", "goal": "identity"},
        observation_clip=None,
    )
    sizes = {"obs_dim": arrays["batch_observations"].shape[1], "action_dim": arrays["batch_actions"].shape[1]}
    inner = build_policy(policy_config, **sizes, goal_dim=EMBEDDED)
    made = Famo2oLearner(Balance(low, high, config.balance_dims).wrap(inner), config)
    load_critic(made.critic, layers)
    load_critic(made.target_critic, critics(arrays, "param_target_critic"))
    load_critic(made.value, ensemble_layers(arrays, "param_value"))
    pairs = zip(linear_parts(made.policy.chooser), chooser_layers(arrays, "param"), strict=True)
    with torch.no_grad():
        made.policy.log_std.copy_(arrays["param_hierarchical_actor.log_stds"])
        for own, layer in pairs:
            own.weight.copy_(layer.kernel.T)
            own.bias.copy_(layer.bias)
    return made


def rows(arrays: dict[str, Any]) -> Batch:
    """Return the batch with zeros where the embedding stands."""
    batch = batch_of(arrays)
    pad = torch.zeros(len(batch.row), EMBEDDED)
    cond, later = (torch.cat([part, pad], dim=1) for part in (batch.cond, batch.next_cond))
    return replace(batch, cond=cond, next_cond=later)


def draws_of(arrays: dict[str, Any]) -> dict[str, Tensor]:
    choice = (arrays["meta_tanh_sample"].double().atanh() - arrays["meta_mean"]) / arrays["meta_std"]
    return {"choice": choice.float(), "acting": arrays["meta_action_eps"][:, None]}


@famo2o
def test_the_embedding_is_the_official_one(arrays: dict[str, Any]) -> None:
    torch.testing.assert_close(embedded(arrays["embed_in"].flatten()), arrays["embed_out"], **CLOSE)


@famo2o
def test_the_draw_of_a_coefficient_is_the_official_one(
    arrays: dict[str, Any], learner: Famo2oLearner
) -> None:
    found, log_prob = learner.policy.drawn(rows(arrays).cond, draws_of(arrays)["choice"])
    torch.testing.assert_close(found, arrays["meta_beta"][:, 0], **CLOSE)
    torch.testing.assert_close(log_prob, arrays["meta_log_prob"], rtol=1e-5, atol=1e-5)


@famo2o
def test_losses_of_balance_and_temperature_are_the_official_ones(
    arrays: dict[str, Any], learner: Famo2oLearner
) -> None:
    batch, draws = rows(arrays), draws_of(arrays)
    coefficient = arrays["meta_beta"][:, 0]
    action = learner.chunk(learner.base, learner.policy.at(batch.cond, coefficient), draws["acting"])
    torch.testing.assert_close(action, arrays["meta_action"], **CLOSE)
    torch.testing.assert_close(learner.worth(batch.cond, action), arrays["meta_q"], **CLOSE)
    loss, log_prob, _ = learner.balance_loss(batch, draws)
    torch.testing.assert_close(loss, arrays["out_hierarchical_loss"], **CLOSE)
    torch.testing.assert_close(-log_prob.mean(), arrays["out_hierarchical_entropy"], **CLOSE)
    torch.testing.assert_close(learner.temperature_loss(log_prob), arrays["out_temp_loss"], **CLOSE)


@famo2o
def test_a_step_of_v_balance_temperature_q_and_target_copies_is_the_official_one(
    arrays: dict[str, Any], learner: Famo2oLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, seen = rows(arrays), []
    monkeypatch.setattr(learner, "coefficients", lambda *_: arrays["actor_beta"][:, 0])

    def update_base(_: Batch, __: Any, weight: Tensor | None = None) -> dict[str, Tensor]:
        seen.append(weight)
        return {}

    monkeypatch.setattr(learner, "update_base", update_base)
    out = learner.step(batch, draws_of(arrays) | {"subset": torch.arange(2)})
    torch.testing.assert_close(out["value/loss"], arrays["out_value_loss"], **CLOSE)
    mean = arrays["out_critic_loss"] / 2  # the release sums over its critics
    torch.testing.assert_close(out["critic/loss"], mean, **CLOSE)
    torch.testing.assert_close(seen[0], arrays["weights"].diagonal(), rtol=2e-5, atol=0)
    pairs: list[tuple[Ensemble, tuple[Layer, ...]]] = [
        (learner.value, ensemble_layers(arrays, "after_value")),
        (learner.critic, critics(arrays, "after_critic")),
        (learner.target_critic, critics(arrays, "after_target_critic")),
    ]
    for net, layers in pairs:
        for i, layer in enumerate(layers):
            torch.testing.assert_close(net.weight[i].detach(), layer.kernel, **CLOSE)
            torch.testing.assert_close(net.bias[i].detach(), layer.bias.unsqueeze(-2), **CLOSE)
    chosen = zip(linear_parts(learner.policy.chooser), chooser_layers(arrays, "after"), strict=True)
    for own, layer in chosen:
        torch.testing.assert_close(own.weight.detach().T, layer.kernel, **CLOSE)
        torch.testing.assert_close(own.bias.detach(), layer.bias, **CLOSE)
    torch.testing.assert_close(
        learner.policy.log_std.detach(), arrays["after_hierarchical_actor.log_stds"], **CLOSE
    )
    wanted = arrays["after_hierarchical_temp.log_temp"]
    torch.testing.assert_close(learner.log_alpha.detach().squeeze(), wanted, **CLOSE)


@famo2o
def test_the_matrix_of_weights_and_its_loss_are_the_official_ones(arrays: dict[str, Any]) -> None:
    """The release weighs every row by the coefficients of all: the defect that is not copied."""
    beta, adv = arrays["actor_beta"], arrays["out_adv"]
    weights = exponential_weight(adv[None], beta)
    torch.testing.assert_close(weights, arrays["weights"], rtol=1e-5, atol=0)
    actor = Actor(arrays)
    vec = torch.cat([arrays["batch_observations"], embedded(beta[:, 0])], dim=1)
    density = torch.distributions.Normal(actor.mean(vec), actor.std)
    log_prob = density.log_prob(arrays["batch_actions"]).sum(dim=1)
    torch.testing.assert_close(-(weights * log_prob).mean(), arrays["out_actor_loss"], **CLOSE)


@famo2o
def test_coefficients_are_uniform_on_data_and_chosen_in_the_task(
    arrays: dict[str, Any], learner: Famo2oLearner
) -> None:
    batch, eps = rows(arrays), torch.zeros(len(arrays["batch_rewards"]), 1)
    uniform = torch.linspace(0, 1, len(eps))
    draws = {"uniform": uniform, "coefficient": eps}
    low, high = arrays["cfg_range"].tolist()
    torch.testing.assert_close(learner.coefficients(batch, draws), low + uniform * (high - low))
    own = replace(batch, row=torch.full_like(batch.row, -1))
    chosen = learner.policy.drawn(batch.cond, eps)[0].detach()
    assert torch.equal(learner.coefficients(own, draws), chosen)
