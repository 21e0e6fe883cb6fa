"""Actors of CORL (arXiv 2210.07105): the `checkpoint_*.pt` files of its PyTorch programs, on states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from policies.bounds import bounded
from policies.errors import CheckpointError
from policies.importing.actors import (
    deterministic,
    gaussian,
    gaussian_statistics,
    layer,
    layers,
    squashed,
)
from policies.importing.files import Files, Tensors, read_entry, read_statistics
from policies.importing.formats import AffineMap, Description, PolicySource
from policies.registry import register

_SAC, _CQL, _AWAC = "trunk.", "base_network.", "_mlp."
_PLAIN = ("net.net.", "net.")  # IQL; TD3+BC and behaviour cloning


class _Scalar:
    """Stands for a module that CQL and Cal-QL store beside the actor: it holds numbers and runs nothing."""


@register("source", "corl")
@dataclass(frozen=True)
class CorlSource(PolicySource):
    """Actors of CORL: TD3+BC, behaviour cloning, IQL, CQL and Cal-QL, AWAC, EDAC, SAC-N and LB-SAC.

    Attributes:
        max_action: Factor of the actor's output, the bound of the environment's actions.
        epsilon: Added to the deviation of an observation.

    Source:
        CORL's released code, its evaluation. A checkpoint lacks the statistics of observations: give
        `normalization=` an npz file of `obs_mean` and `obs_std` of the dataset, or `identity=[state]` for
        programs that do not normalise. ReBRAC is a program in JAX.
    """

    max_action: float = bounded(1.0, gt=0)
    epsilon: float = bounded(1e-3, ge=0)

    def read(self, files: Files) -> Description:
        with torch.serialization.safe_globals([(_Scalar, "__main__.Scalar")]):
            entry, found = read_entry(files.path, files.entry or "actor")
        tensors = Tensors(found)
        config, weights = _actor(tensors)
        inlet, outlet = (weights[name] for name in _ends(weights))
        action_dim = outlet.shape[0] // (2 if config.process.policy_class == "tanh_gaussian" else 1)
        is_physical = config.process.policy_class == "gaussian" and not config.process.squash  # AWAC
        factor = torch.full((action_dim,), 1.0 if is_physical else 1 / self.max_action)
        maps: dict[str, AffineMap] = {"action": (factor, torch.zeros(action_dim))}
        if files.normalization is not None:
            maps["state"] = gaussian_statistics(read_statistics(files.normalization), "obs_std", self.epsilon)
        sizes = inlet.shape[1], action_dim
        return Description(config, *sizes, weights, tensors, maps, entry=entry, beside=("state",))


def _actor(tensors: Tensors) -> Any:
    """Take the actor of whichever program the names belong to."""
    if tensors.under(_SAC):
        stack = layers(tensors, _SAC)
        mean, spread = layer(tensors, "mu"), layer(tensors, "log_sigma")
        return squashed(stack, mean, spread, "relu", min_log_std=-5.0, max_log_std=2.0)
    if tensors.under(_CQL):
        *stack, (weight, bias) = layers(tensors, _CQL)
        factor = tensors.take("log_std_multiplier.constant")
        shift = tensors.take("log_std_offset.constant")
        (of_mean, of_std), (centre, width) = weight.chunk(2), bias.chunk(2)
        scaled = (factor * of_std, factor * width + shift)
        return squashed(stack, (of_mean, centre), scaled, "relu", min_log_std=-20.0, max_log_std=2.0)
    if tensors.under(_AWAC):
        fixed_std = tensors.take("_log_std").clamp(-20.0, 2.0)
        return gaussian(layers(tensors, _AWAC), fixed_std, "relu", clip=None, squash=False)
    prefix = next((prefix for prefix in _PLAIN if tensors.under(prefix)), None)
    if prefix is None:
        some = ", ".join(sorted(tensors.left)[:4]) or "none"
        raise CheckpointError(f"the tensors must be those of an actor of CORL; got {some}.")
    stack = layers(tensors, prefix)
    if "log_std" in tensors:
        log_std = tensors.take("log_std").clamp(-20.0, 2.0)
        return gaussian(stack, log_std, "relu", clip=None, squash=True)
    return deterministic(stack, "relu")


def _ends(weights: Any) -> tuple[str, str]:
    """Return the names of the first and the last layer of a trunk."""
    names = [name for name in weights if name.endswith(".weight")]
    return names[0], names[-1]
