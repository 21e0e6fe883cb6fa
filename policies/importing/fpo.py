"""Policies of FPO's released JAX program (arXiv 2507.21053): a plain network on states, one action at a time.

Legend: C observation width, Da action width, T width of the time features, H first hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.backbones.mlp import MlpConfig
from policies.bounds import bounded
from policies.errors import CheckpointError
from policies.importing.formats import AffineMap, Contents, ForeignSource, Network
from policies.importing.networks import shape
from policies.networks.mlp_blocks import official_plain_keys
from policies.processes.flow import RectifiedFlow
from policies.registry import register
from policies.samplers.ode import Euler

_POLICY, _CRITIC = "policy.", "value."
_STATISTICS = ("obs_mean", "obs_std")


@register("source", "fpo")
@dataclass(frozen=True)
class FpoSource(ForeignSource):
    """FPO's JAX program: layers W0, b0, W1, … under "policy.", and `obs_mean`, `obs_std` of its statistics.

    Source:
        The released code: inputs [observation, x, cosines and sines of t, 2 t, 4 t, …], SiLU between layers.
        Its time runs from noise at 1 to the action at 0, ours the other way: v(x, t) = -u(x, 1 - t). Sign,
        scale and the reversed features become part of the weights. Deviation: none in what is computed.
    """

    steps: int = 10  # Euler steps; published are 10
    time_features: int = bounded(8, ge=4, even=True)  # width of the time features; published are 8
    output_scale: float = 0.25  # factor of the network's output; published is 0.25

    def contents(self, tensors: Mapping[str, Tensor]) -> Contents:
        """Separate network, statistics and critic; the layers are converted to our direction of time."""
        skipped = {name: "the critic" for name in tensors if name.startswith(_CRITIC)}
        rest = {name: value for name, value in tensors.items() if name not in skipped}
        maps: dict[str, AffineMap] = {}
        if all(name in rest for name in _STATISTICS):
            mean, std = (rest.pop(name) for name in _STATISTICS)
            maps["state"] = (1 / std, -mean / std)
        layers = self._reversed({name.removeprefix(_POLICY): value for name, value in rest.items()})
        width = len(layers[f"W{_depth(layers) - 1}"])
        maps["action"] = (torch.ones(width), torch.zeros(width))
        return Contents(layers, maps=maps, skipped=skipped)

    def _reversed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the layers (out, in) of -u(x, 1 - t) with inputs [x, time features, observation]."""
        depth = _depth(weights)
        last, features = depth - 1, self.time_features
        action_dim = shape(weights, f"W{last}", 2)[1]
        cond_dim = shape(weights, "W0", 2)[0] - action_dim - features
        if cond_dim < 1:
            raise CheckpointError(
                f"'W0' must have more than {action_dim + features} rows (action and time features); got "
                f"{len(weights['W0'])}. Give source.time_features=<number>."
            )
        layers = {f"b{i}": weights[f"b{i}"] for i in range(depth)}
        for name in (f"W{i}" for i in range(depth)):
            shape(weights, name, 2)
            layers[name] = weights[name].T.contiguous()
        cond, x, waves = layers["W0"].split([cond_dim, action_dim, features], dim=1)
        layers["W0"] = torch.cat([x, _reversed_features(waves), cond], dim=1)
        for name in (f"W{last}", f"b{last}"):
            layers[name] = -self.output_scale * layers[name]
        return layers

    def network(self, weights: Mapping[str, Tensor], action_dim: int | None) -> Network:
        depth = _depth(weights)
        sizes = [shape(weights, f"W{i}", 2) for i in range(depth)]
        config = MlpConfig(
            residual=False,
            hidden_dims=tuple(size[0] for size in sizes[:-1]),
            activation="silu",
            time_dim=self.time_features,
            times="octaves",
        )
        ours = list(official_plain_keys(depth, "", "trunk.").values())
        keys = {f"{kind}{i}": ours[2 * i + j] for i in range(depth) for j, kind in enumerate("Wb")}
        width = sizes[-1][0]
        cond_dim = sizes[0][1] - width - self.time_features
        return Network(config, keys, cond_dim, action_dim=width, horizon=1, obs_steps=1)

    def parts(self) -> tuple[Any, Any]:
        return RectifiedFlow(time_scale=1.0), Euler(steps=self.steps, clip_action=None)


def _depth(weights: Mapping[str, Tensor]) -> int:
    depth = sum(re.fullmatch(r"W\d+", name) is not None for name in weights)
    expected = {f"{kind}{i}" for i in range(depth) for kind in "Wb"}
    if depth < 2 or set(weights) != expected:
        raise CheckpointError(
            "the tensors are not the layers of FPO's network (policy.W0, policy.b0, policy.W1, …); got "
            f"{', '.join(sorted(weights)[:4]) or 'none'}."
        )
    return depth


def _reversed_features(waves: Tensor) -> Tensor:
    """Return weights (H, T) of cosines and sines of f t that do what `waves` do with those of f (1 - t)."""
    cosines, sines = waves.double().chunk(2, dim=1)
    frequency = 2.0 ** torch.arange(cosines.shape[1], dtype=torch.float64)
    c, s = frequency.cos(), frequency.sin()
    return torch.cat([c * cosines + s * sines, s * cosines - c * sines], dim=1).to(waves.dtype)
