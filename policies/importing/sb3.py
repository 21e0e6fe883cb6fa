"""Actors of Stable-Baselines3: the zip file of `model.save`, for PPO, A2C, SAC, TD3 and DDPG on states."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policies.bounds import bounded
from policies.errors import CapabilityError, CheckpointError
from policies.importing.actors import (
    activation_of,
    deterministic,
    gaussian,
    gaussian_statistics,
    layer,
    layers,
    squashed,
)
from policies.importing.files import Files, Tensors, read_statistics
from policies.importing.formats import AffineMap, Description, PolicySource
from policies.registry import register

_DATA, _WEIGHTS = "data", "policy.pth"
_SKIPPED = {
    "critic": "the critic", "value_net.": "the critic", "mlp_extractor.value_net.": "the critic",
    "vf_features_extractor.": "the critic", "actor_target.": "the delayed actor",
}  # fmt: skip
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf)")


@register("source", "sb3")
@dataclass(frozen=True)
class Sb3Source(PolicySource):
    """Actors of Stable-Baselines3 on states: PPO and A2C, SAC, TD3 and DDPG with `MlpPolicy`.

    Attributes:
        clip_obs: Of `VecNormalize`: bound on a normalised observation.
        epsilon: Of `VecNormalize`: added to the variance.

    Source:
        Stable-Baselines3 2.x, `predict(deterministic=True)`. The archive's `data` holds pickled objects;
        only its plain text is read. `VecNormalize` is a pickle of its own: give `normalization=` an npz file
        of `obs_mean` and `obs_var`, or `identity=[state]`.
    """

    clip_obs: float = bounded(10.0, ge=1)
    epsilon: float = bounded(1e-8, ge=0)

    def read(self, files: Files) -> Description:
        data = files.json(files.member(_DATA), _DATA)
        tensors = Tensors(files.loaded(files.member(_WEIGHTS)))
        if data.get("use_sde"):
            raise CapabilityError("actors with use_sde=True cannot be imported.")
        for prefix, why in _SKIPPED.items():
            tensors.skip(prefix, why)
        kwargs = data.get("policy_kwargs", {})
        on_policy = "action_net.weight" in tensors
        activation = activation_of(str(kwargs.get("activation_fn", "Tanh" if on_policy else "ReLU")))
        low, high = _bounds(data)
        scale = 2 / (high - low)
        maps: dict[str, AffineMap] = {"action": (scale.float(), (-1 - scale * low).float())}
        if on_policy:
            if "log_std" not in tensors:
                raise CapabilityError(
                    "this actor has discrete actions; only continuous ones can be imported."
                )
            stack, log_std = layers(tensors, "mlp_extractor.policy_net."), tensors.take("log_std")
            weight, bias = layer(tensors, "action_net")  # physical, clipped to the bounds
            if len(weight) != len(scale) or log_std.shape != scale.shape:
                raise CheckpointError(f"the actor has {len(weight)} actions, its action space {len(scale)}.")
            last = ((scale[:, None] * weight).float(), (scale * bias - 1 - scale * low).float())
            log_std = log_std + scale.log().float()
            config, weights = gaussian([*stack, last], log_std, activation, clip=1.0, squash=False)
        elif "actor.latent_pi.0.weight" in tensors:
            stack = layers(tensors, "actor.latent_pi.")
            mean, log_std_layer = layer(tensors, "actor.mu"), layer(tensors, "actor.log_std")
            limits = {"min_log_std": -20.0, "max_log_std": 2.0}
            config, weights = squashed(stack, mean, log_std_layer, activation, **limits)
        else:
            config, weights = deterministic(layers(tensors, "actor.mu."), activation)
        if files.normalization is not None:
            statistics = read_statistics(files.normalization)
            maps["state"] = gaussian_statistics(statistics, "obs_var", self.epsilon, variance=True)
            config = replace(config, observation_clip=self.clip_obs)
        obs_dim = next(w.shape[1] for name, w in weights.items() if name.endswith("inlet.weight"))
        sizes = obs_dim, len(low)
        return Description(config, *sizes, weights, tensors, maps, entry=_WEIGHTS, beside=("state",))


def _bounds(data: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the bounds (Da,) of the action space, float64, from its printed form."""
    space = data.get("action_space", {})
    if not isinstance(space, Mapping) or not str(space.get(":type:", "")).endswith("Box'>"):
        raise CapabilityError("only actors with a Box of actions can be imported.")
    bounds = [
        torch.tensor([float(number) for number in _NUMBER.findall(str(space.get(name, "")))]).double()
        for name in ("low", "high")
    ]
    low, high = bounds
    if len(low) != len(high) or not len(low) or not (high - low).isfinite().all() or (high <= low).any():
        raise CheckpointError(
            f"the bounds of the action space must be finite; got {low.tolist()}, {high.tolist()}."
        )
    return low, high
