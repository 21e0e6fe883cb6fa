"""The networks of the released PRDC and A2PR programs as ours, and their batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from official_networks import stored
from torch import Tensor, nn

from algos.a2pr import ActionVae
from algos.offline.td3_update import Actor
from algos.td3_bc import Td3BcConfig
from algos.transitions import Batch
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.networks.critics import Ensemble, EnsembleConfig
from policies.policy import PolicyConfig
from policies.processes.deterministic import DeterministicPolicy, DeterministicProcess

Arrays = Mapping[str, Tensor]

ROUNDING = 1e-5
"""Of the largest operand: a sum of n products rounds by about eps / 2 * sqrt(n / 2) of its size, 1.2e-6 at
the n = 750 of the full width, and five layers follow each other, in both programs."""
WEIGHT = {"rtol": 0.0, "atol": 1e-6}


def read(path: Any) -> dict[str, Tensor]:
    """Return the arrays of a file; settings by `cfg/<name>`."""
    arrays = stored(path)
    settings = dict(zip(arrays.pop("cfg_names").tolist(), arrays.pop("cfg").tolist(), strict=True))
    numbers = {name: torch.from_numpy(np.asarray(value)) for name, value in arrays.items()}
    return numbers | {
        f"cfg/{name}": torch.tensor(value, dtype=torch.float64) for name, value in settings.items()
    }


def under(arrays: Arrays, prefix: str) -> dict[str, Tensor]:
    """Return the arrays below a prefix."""
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def num_steps(arrays: Arrays) -> int:
    """Return how many steps a file holds."""
    return max(int(name.split("/")[0].removeprefix("step")) for name in arrays if name.startswith("step"))


def linear(arrays: Arrays, name: str) -> dict[str, Tensor]:
    """Return weight and bias of a layer."""
    return {kind: arrays[f"{name}.{kind}"] for kind in ("weight", "bias")}


def names(first: int, last: int) -> list[str]:
    """Return `l<first>` ... `l<last>`."""
    return [f"l{i}" for i in range(first, last + 1)]


def actor_of(arrays: Arrays, limit: float) -> Actor:
    """Return an actor with the weights `l1...`, each (out, in)."""
    layers = [linear(arrays, name) for name in names(1, len(arrays) // 2)]
    policy = build_policy(
        PolicyConfig(
            process=DeterministicProcess(),
            backbone=MlpConfig(residual=False, hidden_dims=tuple(len(x["bias"]) for x in layers[:-1])),
            horizon=1, act_steps=1, normalizer={"state": "identity", "action": "identity"},
        ),
        obs_dim=layers[0]["weight"].shape[1], action_dim=len(layers[-1]["bias"]),
    )  # fmt: skip
    assert isinstance(policy, DeterministicPolicy)
    with torch.no_grad():
        for module, layer in zip(modules_of(policy), layers, strict=True):
            module.weight.copy_(layer["weight"])
            module.bias.copy_(layer["bias"])
    return Actor(policy, limit)


def modules_of(policy: DeterministicPolicy) -> list[nn.Linear]:
    """Return the layers of an actor in order."""
    return [policy.trunk.inlet, *policy.trunk.layers]  # type: ignore[list-item]


def ensemble_of(arrays: Arrays, members: Sequence[Sequence[str]]) -> Ensemble:
    """Return an ensemble whose members have the named layers."""
    layers = [[linear(arrays, name) for name in member] for member in members]
    hidden = tuple(len(layer["bias"]) for layer in layers[0][:-1])
    net = Ensemble(EnsembleConfig(members=len(layers), hidden_dims=hidden), layers[0][0]["weight"].shape[1])
    net.load_members(layers)
    return net


def vae_of(arrays: Arrays, limit: float) -> ActionVae:
    """Return the auto-encoder with the weights `e1`, `e2`, `mean`, `log_std`, `d1`, `d2`, `d3`."""
    action, width = len(arrays["d3.bias"]), len(arrays["e1.bias"])
    vae = ActionVae(arrays["e1.weight"].shape[1] - action, action, width, limit)
    vae.load_state_dict({ours: arrays[theirs] for ours, theirs in vae_keys().items()})
    return vae


def vae_keys() -> dict[str, str]:
    """Map the parameters of our auto-encoder to the released names."""
    modules = {
        "encoder.0": "e1", "encoder.2": "e2", "mean": "mean", "log_std": "log_std",
        "decoder.0": "d1", "decoder.2": "d2", "outlet": "d3",
    }  # fmt: skip
    return {
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }


def actor_weights(actor: Actor) -> dict[str, Tensor]:
    """Return the weights of an actor by their released names."""
    policy = actor.policy
    assert isinstance(policy, DeterministicPolicy)
    pairs = enumerate(modules_of(policy), start=1)
    return {f"l{i}.{kind}": getattr(m, kind).detach() for i, m in pairs for kind in ("weight", "bias")}


def ensemble_weights(net: Ensemble, members: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """Return the weights of an ensemble by their released names."""
    found = {}
    for e, layer_names in enumerate(members):
        for name, layer in zip(layer_names, net.layers_of(e), strict=True):
            found |= {f"{name}.{kind}": layer[kind].detach() for kind in ("weight", "bias")}
    return found


def sine_weights(
    shapes: Mapping[str, tuple[int, ...]], seed: int, *, scale: float = 1.0
) -> dict[str, Tensor]:
    """Return the weights that the files of full width give by formula, for parameters in order."""
    out, fan_in = {}, 0
    for p, (name, shape) in enumerate(shapes.items()):
        fan_in = shape[1] if len(shape) == 2 else fan_in
        j = np.arange(int(np.prod(shape)), dtype=np.float64)
        value = np.sin(0.7 * j + 1.3 * p + 0.37 * seed + 0.1) / np.sqrt(fan_in)
        out[name] = torch.from_numpy(value.astype(np.float32)).reshape(shape) * np.float32(scale)
    return out


def shapes_of(prefix: str, sizes: Sequence[int], first: int = 1) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a stack of layers."""
    out: dict[str, tuple[int, ...]] = {}
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes), start=first):
        out |= {f"{prefix}{i}.weight": (fan_out, fan_in), f"{prefix}{i}.bias": (fan_out,)}
    return out


def digests(weights: Arrays) -> dict[str, Tensor]:
    """Return the digests that files of full width store."""
    out = {}
    for name, value in weights.items():
        flat = value.detach().flatten()
        out[f"sum/{name}"] = torch.stack([flat.double().sum(), flat.double().norm()])
        out[f"head/{name}"] = flat[:: max(1, len(flat) // 32)][:32]
    return out


def limit_of(arrays: Arrays) -> float:
    """Return L of a file."""
    return float(arrays["cfg/max_action"])


def config_of(arrays: Arrays) -> Td3BcConfig:
    """Return the constants of a file."""
    cfg = {name: float(value) for name, value in under(arrays, "cfg/").items()}
    limit = cfg["max_action"]
    return Td3BcConfig(
        alpha=cfg["alpha"], tau=cfg["tau"], policy_noise=cfg["policy_noise"] / limit,
        noise_clip=cfg["noise_clip"] / limit, policy_delay=int(cfg["policy_freq"]),
        actor_lr=cfg["lr"], critic_lr=cfg["lr"],
    )  # fmt: skip


def batch_of(step: Arrays, discount: float) -> Batch:
    """Return the batch of a step."""
    action = step["action"]
    return Batch(
        cond=step["state"], action=action, reward=step["reward"].squeeze(1), next_cond=step["next_state"],
        discount=(discount * step["not_done"]).squeeze(1), next_action=torch.zeros(len(action), 0),
        has_next=torch.zeros(len(action)), plan=action, real=torch.ones(len(action), 1),
        row=step.get("batch_indices", torch.arange(len(action))).long().flatten(),
    )  # fmt: skip


def check_number(name: str, found: Tensor, expected: Tensor, *operands: Tensor) -> None:
    """Compare a quantity to the rounding of its largest number and of what it is a difference of."""
    size = max(float(one.abs().max()) for one in (expected, *operands))
    torch.testing.assert_close(
        found.view_as(expected), expected, rtol=0, atol=1e-6 + ROUNDING * size, msg=lambda m: f"{name}: {m}"
    )


def check_weights(found: Mapping[str, Arrays], step: Arrays) -> None:
    """Compare the weights of every network, or their digests, with those after a step."""
    for part, weights in found.items():
        stored = under(step, f"after/{part}/")
        for name, value in stored.items():
            torch.testing.assert_close(weights[name], value, **WEIGHT)
        for name, value in digests(weights).items():
            kind, _, parameter = name.partition("/")
            key = f"{kind}/{part}/{parameter}"
            if key in step:
                loose = {"rtol": 1e-5, "atol": 1e-4} if kind == "sum" else WEIGHT
                torch.testing.assert_close(value.to(step[key].dtype), step[key], **loose)
        assert stored or f"sum/{part}/{next(iter(weights))}" in step, "the file must say how weights end"
