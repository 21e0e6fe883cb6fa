"""The networks of the released DSRL program as ours, its batches, and a base policy of one linear layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from typing import Any

import numpy as np
import pytest
import torch
from official_networks import stored
from torch import Tensor

from algos.dsrl import DsrlConfig, SteeredActor
from algos.offpolicy.replay_buffer import ChunkBatch
from algos.offpolicy.sac_update import SacUpdate
from policies.build import complete
from policies.networks.critics import Ensemble, EnsembleConfig
from policies.policy import Policy, PolicyConfig
from policies.processes.deterministic import DeterministicProcess
from policies.protocols import Cond, Hook
from policies.wrappers.noise_policy import Steering

Arrays = Mapping[str, Tensor]
NUMBER = {"rtol": 0.0, "atol": 1e-5}
WEIGHT = {"rtol": 0.0, "atol": 1e-6}


def read(path: Any) -> dict[str, Any]:
    """Return the arrays of a file as tensors, and texts as they are."""
    return {name: _value(array) for name, array in stored(path).items()}


def _value(array: np.ndarray) -> Any:
    return str(array) if array.dtype.kind == "U" else torch.from_numpy(array)


class LinearBase(Policy):
    """a = tanh([s, w] W + b), decided by its noise alone."""

    is_deterministic = True

    def __init__(self, weight: Tensor, bias: Tensor, horizon: int, action_dim: int) -> None:
        config = PolicyConfig(
            process=DeterministicProcess(), horizon=horizon, act_steps=horizon,
            normalizer={"state": "identity", "action": "identity"}, observation_clip=None,
        )  # fmt: skip
        width = weight.shape[1] - horizon * action_dim
        super().__init__(complete(config), obs_dim=width, action_dim=action_dim)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def decode(
        self,
        cond: Cond,
        noise: Tensor,
        *,
        grad: bool = False,
        start: tuple[Tensor, float] | None = None,
        hooks: Sequence[Hook] = (),
    ) -> Tensor:
        """Return the chunk (B, Th, Da)."""
        inputs = torch.cat([cond.vec, noise.flatten(1)], dim=1)
        weight, bias = self.get_buffer("weight"), self.get_buffer("bias")
        return torch.tanh(inputs @ weight.T + bias).view(-1, *self.chunk.shape)


def actor_of(arrays: Arrays, prefix: str) -> SteeredActor:
    """Return the actor of a file, around its base policy."""
    horizon, action_dim = (int(n) for n in arrays["cfg_T_A"])
    base = LinearBase(arrays["base_W"], arrays["base_b"], horizon, action_dim)
    widths = tuple(
        len(arrays[f"{prefix}.latent_pi.{i}.bias"]) for i in _linears(arrays, f"{prefix}.latent_pi")
    )
    policy = Steering(bound=float(arrays["cfg_bw"]), hidden_dims=widths).wrap(base)
    policy.actor.trunk.load_state_dict(_trunk_weights(arrays, prefix))
    return SteeredActor(policy, form="floored")


def _trunk_weights(arrays: Arrays, prefix: str) -> dict[str, Tensor]:
    names, hidden = {}, _linears(arrays, f"{prefix}.latent_pi")
    for number, place in enumerate(hidden):
        names[f"latent_pi.{place}"] = "inlet" if number == 0 else f"layers.{number - 1}"
        names[f"latent_pi.{place + 1}"] = f"norms.{number}"
    kinds = ("weight", "bias")
    found = {
        f"{ours}.{kind}": arrays[f"{prefix}.{theirs}.{kind}"]
        for theirs, ours in names.items()
        for kind in kinds
    }
    heads = {
        f"layers.{len(hidden) - 1}.{kind}": torch.cat(
            [arrays[f"{prefix}.{head}.{kind}"] for head in ("mu", "log_std")]
        )
        for kind in kinds
    }
    return found | heads


def ensemble_of(arrays: Arrays, prefix: str) -> Ensemble:
    """Return the critics of a file."""
    members = [_layers(arrays, f"{prefix}.qf{e}") for e in range(arrays["q_pred"].shape[1])]
    hidden = tuple(len(layer["bias"]) for layer in members[0][:-1])
    config = EnsembleConfig(len(members), hidden, activation="tanh", layer_norm=True)
    net = Ensemble(config, members[0][0]["weight"].shape[1])
    net.load_members(members)
    return net


def _layers(arrays: Arrays, prefix: str) -> list[dict[str, Tensor]]:
    layers, linears = [], _linears(arrays, prefix)
    for place in linears:
        layer = {kind: arrays[f"{prefix}.{place}.{kind}"] for kind in ("weight", "bias")}
        if place != linears[-1]:
            norm = f"{prefix}.{place + 1}"
            layer |= {"scale": arrays[f"{norm}.weight"], "shift": arrays[f"{norm}.bias"]}
        layers.append(layer)
    return layers


def _linears(arrays: Arrays, prefix: str) -> list[int]:
    """Return the places of linear layers; after each but an output come a normalisation and a tanh."""
    return list(takewhile(lambda place: f"{prefix}.{place}.weight" in arrays, count(0, 3)))


def config_of(arrays: Mapping[str, Any]) -> DsrlConfig:
    """Return the constants of a file."""
    before, after = arrays.get("log_ent_coef_before"), arrays.get("log_ent_coef_after")
    alpha, rate = float(arrays["logged_ent_coef"]), float(arrays["cfg_lr"])
    combine = arrays.get("cfg_combine", "min")
    return DsrlConfig(
        tau=float(arrays["cfg_tau"]), target_entropy=float(arrays["cfg_target_entropy"]),
        init_alpha=alpha, learn_alpha=before is not None and after is not None,
        aggregate=combine, actor_aggregate=combine, actor_lr=rate, critic_lr=rate, alpha_lr=rate,
    )  # fmt: skip


def batch_of(arrays: Arrays, name: str = "td") -> ChunkBatch:
    """Return a batch of a file; what it calls the action stands for latent and chunk."""
    reward, done = (arrays[f"{name}_{what}"].squeeze(1) for what in ("reward", "done"))
    action, gamma = arrays[f"{name}_action"], arrays["cfg_gamma"].float()
    discount = (1 - done) * gamma
    return ChunkBatch(arrays[f"{name}_obs"], action, action, reward, discount, arrays[f"{name}_next_obs"])


def draws_of(arrays: Arrays) -> dict[str, Tensor]:
    """Return the random numbers of a step."""
    return {
        "eps": arrays["eps_pi_obs"],
        "next_eps": arrays["eps_pi_next_obs"],
        "subset": torch.arange(arrays["q_pred"].shape[1]),
    }


def same_losses(found: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Compare what a step reports."""
    told = {"critic/loss": "critic_loss", "actor/loss": "actor_loss", "actor/alpha_loss": "ent_coef_loss"}
    for ours, theirs in told.items():
        assert ours in found or theirs == "ent_coef_loss"
        if ours in found and f"logged_{theirs}" in arrays:
            assert float(found[ours]) == pytest.approx(float(arrays[f"logged_{theirs}"]), abs=1e-5), ours
    assert float(found["actor/alpha"]) == pytest.approx(float(arrays["logged_ent_coef"]), abs=1e-6)


def same_temperature(learner: SacUpdate, arrays: Arrays) -> None:
    """Compare the logarithm of alpha after a step, where it learns."""
    assert ("log_ent_coef_after" in arrays) == learner.config.learn_alpha
    if learner.config.learn_alpha:
        torch.testing.assert_close(learner.temperature.log.detach(), arrays["log_ent_coef_after"], **WEIGHT)


def same_actor(actor: SteeredActor, arrays: Arrays, prefix: str) -> None:
    """Compare weights after a step."""
    expected = actor_of(arrays, prefix).policy.state_dict()
    for name, value in actor.policy.state_dict().items():
        torch.testing.assert_close(value, expected[name], **WEIGHT)


def same_ensemble(net: Ensemble, arrays: Arrays, prefix: str) -> None:
    """Compare weights after a step."""
    expected = ensemble_of(arrays, prefix).state_dict()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, expected[name], **WEIGHT)
