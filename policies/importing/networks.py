"""Sizes of the networks that DPPO and Diffusion Policy released, read from their tensors.

Legend: Th rows of a chunk, Da action width, C condition width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor

from policies.backbones.dp_transformer import DpTransformerConfig, memory_mask
from policies.backbones.mlp import MlpConfig
from policies.backbones.unet1d import Unet1dConfig
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.importing.formats import Network
from policies.networks.attention import causal_mask

Weights = Mapping[str, Tensor]

_PREFIXES = {"mlp": "mlp_mean.", "unet": "down_modules.", "transformer": "decoder.layers."}  # of its tensors
_TIME = {"dppo": "time_mlp", "diffusion_policy": "diffusion_step_encoder"}  # of the U-Net


def kind_of(weights: Weights, **released: str) -> str:
    """Return which of some kinds (`mlp`, `unet`, `transformer`; with released names) the tensors are of."""
    if images := [name for name in weights if name.startswith(("backbone.", "compress", "obs_encoder."))]:
        raise CapabilityError(
            f"'{images[0]}' belongs to an encoder of images; only policies on states import."
        )
    for kind in released:
        if any(name.startswith(_PREFIXES[kind]) for name in weights):
            return kind
    known, some = " or ".join(released.values()), ", ".join(sorted(weights)[:4])
    raise CheckpointError(f"the tensors must be those of the program's {known}; got {some}.")


def mlp(weights: Weights, activation: str | None) -> Network:
    """Read an MLP over the flattened chunk (`DiffusionMLP`, `FlowMLP`)."""
    if activation is None:
        raise ConfigError(
            "source.activation is in no tensor; give the one that the weights were trained with (relu for "
            "published Gym policies, mish for others)."
        )
    time_dim = shape(weights, "time_embedding.1.weight", 2)[1]
    cond_dims = outputs(weights, "cond_mlp.moduleList.{}.linear_1.weight")
    trunk, first, chunk_size = trunk_of(weights, "mlp_mean.")
    cond_dim = shape(weights, first, 2)[1] - chunk_size - time_dim
    if cond_dims:
        cond_dim = shape(weights, "cond_mlp.moduleList.0.linear_1.weight", 2)[1]
    config = MlpConfig(activation=activation, time_dim=time_dim, cond_dims=cond_dims, **trunk)
    return Network(config, config.official_keys(), cond_dim, chunk_size=chunk_size)


def trunk_of(weights: Weights, prefix: str) -> tuple[dict[str, Any], str, int]:
    """Read a trunk: fields of `TrunkConfig`, the name of its first layer, and the width of its output."""
    if f"{prefix}layers.0.weight" in weights:
        blocks = len(outputs(weights, prefix + "layers.{}.l1.weight", first=1))
        first, last = f"{prefix}layers.0.weight", f"{prefix}layers.{blocks + 1}.weight"
        trunk: dict[str, Any] = {"width": shape(weights, first, 2)[0], "num_blocks": blocks}
        trunk["layer_norm"] = f"{prefix}layers.1.norm1.weight" in weights
    else:
        dims = outputs(weights, prefix + "moduleList.{}.linear_1.weight")
        first, last = (f"{prefix}moduleList.{i}.linear_1.weight" for i in (0, max(len(dims) - 1, 0)))
        trunk = {"residual": False, "hidden_dims": dims[:-1]}
        trunk["layer_norm"] = f"{prefix}moduleList.0.norm_1.weight" in weights
    return trunk, first, shape(weights, last, 2)[0]


def unet(weights: Weights, program: str, **given: Any) -> Network:
    """Read the temporal U-Net of a program; `given` are fields of `Unet1dConfig` that no tensor holds."""
    widths = outputs(weights, "down_modules.{}.0.blocks.0.block.0.weight")
    inner, time_dim = shape(weights, f"{_TIME[program]}.1.weight", 2)
    layers = 3 if "mid_modules.0.cond_encoder.4.weight" in weights else 1
    first, last = (0, 4) if layers == 3 else (1, 1)
    numbers = shape(weights, f"mid_modules.0.cond_encoder.{last}.weight", 2)[0]
    cond_dim = shape(weights, f"mid_modules.0.cond_encoder.{first}.weight", 2)[1] - time_dim
    cond_dims = _encoder_dims(weights)
    if cond_dims:
        cond_dim = shape(weights, "cond_mlp.layers.0.weight", 2)[1]
    config = Unet1dConfig(
        widths=widths,
        kernel=shape(weights, "mid_modules.0.blocks.0.block.0.weight", 3)[2],
        film="scale" if numbers == 2 * widths[-1] else "bias",
        film_layers=layers,
        time_dim=time_dim,
        time_expansion=inner // time_dim,
        cond_dims=cond_dims,
        **given,
    )
    action_dim = shape(weights, "final_conv.1.weight", 3)[0]
    keys = config.official_keys(program, action_dim=action_dim)
    return Network(config, keys, cond_dim, action_dim=action_dim)


def transformer(weights: Weights, heads: int) -> Network:
    """Read Diffusion Policy's transformer; its masks are rebuilt and compared."""
    _, horizon, width = shape(weights, "pos_emb", 3)
    tokens = shape(weights, "cond_pos_emb", 3)[1]
    causal = "mask" in weights
    masks = {"mask": causal_mask(horizon), "memory_mask": memory_mask(horizon, tokens)} if causal else {}
    config = DpTransformerConfig(
        width=width,
        depth=len(outputs(weights, "decoder.layers.{}.linear1.weight")),
        heads=heads,
        memory_depth=len(outputs(weights, "encoder.layers.{}.linear1.weight")),
        obs_tokens=tokens - 1,
        causal=causal,
    )
    return Network(
        config,
        config.official_keys(),
        cond_dim=(tokens - 1) * shape(weights, "cond_obs_emb.weight", 2)[1],
        action_dim=shape(weights, "head.weight", 2)[0],
        horizon=horizon,
        obs_steps=tokens - 1,
        constants={k: torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) for k, mask in masks.items()},
    )


def shape(weights: Weights, name: str, dims: int) -> torch.Size:
    """Return the shape of a tensor, which must have `dims` dimensions."""
    if name not in weights:
        some = ", ".join(sorted(weights)[:4])
        raise CheckpointError(f"the network has no tensor '{name}'; it has {len(weights)}: {some}, …")
    found = weights[name].shape
    if len(found) != dims or not all(found):
        raise CheckpointError(f"'{name}' must have {dims} dimensions, none empty; got {tuple(found)}.")
    return found


def outputs(weights: Weights, pattern: str, first: int = 0) -> tuple[int, ...]:
    """Return the output widths of layers that are numbered from `first`."""
    names = takewhile(weights.__contains__, (pattern.format(i) for i in count(first)))
    return tuple(weights[name].shape[0] for name in names)


def renamed(weights: Weights, patterns: Mapping[str, str]) -> dict[str, Tensor]:
    """Return weights by other names: every pattern {theirs: ours} is replaced, one after the other."""
    for theirs, ours in patterns.items():
        weights = {re.sub(theirs, ours, name): value for name, value in weights.items()}
    return dict(weights)


def _encoder_dims(weights: Weights) -> tuple[int, ...]:
    if not any(name.startswith("cond_mlp.") for name in weights):
        return ()
    blocks = len(outputs(weights, "cond_mlp.layers.{}.l1.weight", first=1))
    out, width = shape(weights, f"cond_mlp.layers.{blocks + 1}.weight", 2)
    return (*[width] * (2 * blocks + 1), out)
