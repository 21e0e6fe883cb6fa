"""Actors of d3rlpy: the `.d3` file of `algo.save`, on states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.errors import CapabilityError, CheckpointError
from policies.importing.actors import activation_of, deterministic, gaussian, layer, layers, squashed
from policies.importing.files import Files, Tensors, read_plain_pickle
from policies.importing.formats import AffineMap, Description, PolicySource
from policies.registry import register

_LIMITS = {
    "td3": (), "td3_plus_bc": (), "ddpg": (), "rebrac": (), "sac": (-20.0, 2.0), "cql": (-20.0, 2.0),
    "cal_ql": (-20.0, 2.0), "bc": (-4.0, 15.0), "iql": (-5.0, 2.0), "awac": (-6.0, 0.0),
}  # fmt: skip
"""Algorithms whose actor is known -> limits of its log deviation."""

_STD_EPS = 1e-3  # added to the deviation of an observation
_OTHER_LAYERS = ("use_batch_norm", "use_layer_norm", "exclude_last_activation", "last_activation")
"""Settings of an encoder, off by default, that make it another network."""


@register("source", "d3rlpy")
@dataclass(frozen=True)
class D3rlpySource(PolicySource):
    """Actors of d3rlpy on states, with their scalers: TD3, TD3+BC, ReBRAC, DDPG, SAC, CQL, IQL, AWAC and BC.

    Source:
        d3rlpy 2.x, `predict`. The file is a pickle of plain data; one with anything else is refused.
    """

    def read(self, files: Files) -> Description:
        whole = read_plain_pickle(files.path)
        if not isinstance(whole, Mapping) or not {"torch", "config"} <= set(whole):
            raise CheckpointError(f"{files.path} is not what d3rlpy's save writes: 'torch' and 'config'.")
        settings = files.json(whole["config"], "config")
        config, params = settings["config"], settings["config"]["params"]
        if config["type"] not in _LIMITS or len(settings["observation_shape"]) != 1:
            raise CapabilityError(
                f"actors of {config['type']} on observations {settings['observation_shape']} cannot be "
                f"imported; those of {', '.join(_LIMITS)} on states can."
            )
        modules = files.loaded(whole["torch"])
        entry = "imitator" if config["type"] == "bc" else "policy"
        tensors = Tensors(modules[entry])
        names = ("actor_encoder_factory", "encoder_factory")
        encoder = next(params[name] for name in names if name in params)
        if others := [name for name in _OTHER_LAYERS if encoder["params"].get(name)]:
            raise CapabilityError(f"encoders with {', '.join(others)} cannot be imported.")
        activation = activation_of(f"torch.{encoder['params'].get('activation', 'relu')}")
        stack = layers(tensors, "_encoder._layers.")
        policy, weights = _actor(stack, tensors, activation, _LIMITS[config["type"]])
        maps: dict[str, AffineMap] = {}
        for theirs, ours in (("observation_scaler", "state"), ("action_scaler", "action")):
            scaler = params[theirs]
            if scaler["type"] != "none":
                maps[ours] = _map(scaler["type"], scaler["params"], theirs)
        sizes = settings["observation_shape"][0], settings["action_size"]
        fixed = tuple(name for name in ("state", "action") if name not in maps)
        return Description(policy, *sizes, weights, tensors, maps, entry=entry, fixed=fixed, beside=())


def _actor(stack: Any, tensors: Tensors, activation: str, limits: tuple[float, ...]) -> Any:
    if "_fc.weight" in tensors:
        return deterministic([*stack, layer(tensors, "_fc")], activation)
    mean = layer(tensors, "_mu")
    low, high = limits
    if "_logstd" in tensors:
        log_std = low + (high - low) * torch.sigmoid(tensors.take("_logstd")).flatten()
        return gaussian([*stack, mean], log_std, activation, clip=None, squash=True)
    return squashed(stack, mean, layer(tensors, "_logstd"), activation, min_log_std=low, max_log_std=high)


def _map(kind: str, values: Mapping[str, Any], name: str) -> AffineMap:
    """Return the map of a scaler."""
    if kind == "standard":
        scale = 1 / (_number(values["std"]) + values.get("eps", _STD_EPS))
        return scale.float(), (-_number(values["mean"]) * scale).float()
    if kind != "min_max":
        raise CapabilityError(f"{name} {kind} cannot be imported; min_max, standard and none can.")
    low, high = _number(values["minimum"]), _number(values["maximum"])
    scale = 2 / (high - low)
    return scale.float(), (-1 - scale * low).float()


def _number(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
