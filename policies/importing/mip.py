"""Checkpoints of MIP, *Much Ado About Noising* (arXiv 2512.01809): its MLP and its U-Net on states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.backbones.mlp import MlpConfig
from policies.backbones.unet1d import Unet1dConfig
from policies.bounds import bounded
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.importing.actors import Layer, layer, stacked
from policies.importing.dppo import limits_in, maps_of
from policies.importing.files import Files, Tensors, read_statistics
from policies.importing.formats import AffineMap, Description, Network, PolicySource
from policies.importing.networks import outputs, renamed, shape, unet
from policies.policy_config import PolicyConfig
from policies.processes.regression import Mip, Regression
from policies.registry import register
from policies.samplers.direct import Direct

_NET, _ENCODER = "flow_map.net.", "encoder."
_KINDS = ("weight", "bias")
_GROUPS = 8  # of channels that the U-Net normalises together
_UNET = {
    r"^downs\.": "down_modules.", r"^mids\.": "mid_modules.", r"^ups\.": "up_modules.",
    r"\.conv1\.": ".blocks.0.block.", r"\.conv2\.": ".blocks.1.block.",
    r"^map_emb\.0": "diffusion_step_encoder.1", r"^map_emb\.2": "diffusion_step_encoder.3",
    r"^final_conv\.([01])\.": r"final_conv.0.block.\1.", r"^final_conv\.3": "final_conv.1",
}  # fmt: skip
"""Names of `ChiUNet` -> those of Diffusion Policy's U-Net."""


@register("source", "mip")
@dataclass(frozen=True)
class MipSource(PolicySource):
    """MIP: its MLP or its U-Net (`ChiUNet`) on states, with or without its encoder of states (`mlp`).

    Attributes:
        loss: Objective that it was trained with: `mip` (two evaluations) or `regression` (one).
        horizon: Actions that the policy predicts. The U-Net needs it; null: from the tensors of the MLP.

    Source:
        The released code, its evaluation. Both times of its networks are equal in these objectives, so the
        weights that read them are added up. A checkpoint lacks the normaliser: give `normalization=` an npz
        file of `obs_min`, `obs_max`, `action_min` and `action_max` of the dataset. Deviation: no dropout.
    """

    loss: str = bounded("mip", choices=("mip", "regression"))
    refine_time: float = bounded(0.9, gt=0, lt=1)  # its `t_two_step`
    horizon: int | None = bounded(None, ge=1)
    act_steps: int = bounded(8, ge=1)  # actions that are executed; published are 8

    def read(self, files: Files) -> Description:
        if files.normalization is None:
            raise ConfigError("give normalization=<npz file of obs_min, obs_max, action_min and action_max>.")
        maps = _maps(read_statistics(files.normalization))
        obs_dim, action_dim = len(maps["state"][0]), len(maps["action"][0])
        entry, tensors = _tensors(files)
        encoder, released = _encoder(tensors), tensors.cut(_NET)
        backbone: Any
        if "input_proj.weight" in released:
            backbone, weights, cond_dim = _mlp(released, encoder)
            chunk_size = len(weights["trunk.outlet.bias"])
        elif "map_emb.0.weight" in released:
            backbone, weights, cond_dim = _unet(released, encoder)
            chunk_size = (self.horizon or 0) * action_dim
        else:
            some = ", ".join(sorted(released)[:4]) or "none"
            raise CheckpointError(f"the tensors must be those of the program's MLP or ChiUNet; got {some}.")
        obs_steps = _quotient("condition", cond_dim, "observations", obs_dim)
        horizon = _quotient("chunk", chunk_size, "actions", action_dim)
        if not horizon or self.horizon not in (None, horizon):
            raise ConfigError(f"source.horizon={self.horizon} must be the horizon that it was trained with.")
        start = obs_steps - 1
        config = PolicyConfig(
            self._process(), None, backbone, Direct(),
            obs_steps=obs_steps, horizon=horizon, act_steps=min(self.act_steps, horizon - start),
            action_start=start, observation_clip=None,
        )  # fmt: skip
        field = {f"field.{name}": value for name, value in weights.items()}
        return Description(config, obs_dim, action_dim, field, tensors, maps, entry=entry)

    def _process(self) -> Mip | Regression:
        if self.loss == "regression":
            return Regression(time_scale=1.0)
        return Mip(refine_time=self.refine_time, time_scale=1.0)


def _maps(statistics: Mapping[str, np.ndarray]) -> dict[str, AffineMap]:
    """Return the maps of its `MinMaxNormalizer`: a number that never moved has a range of 1."""
    limits = limits_in(statistics)
    spans = [limits[f"{name}_max"] - limits[f"{name}_min"] for name in ("obs", "action")]
    return maps_of(limits, *(np.where(span == 0, 1.0, span) for span in spans))


def _tensors(files: Files) -> tuple[str, Tensors]:
    """Return the name of the network's entry, and the tensors of network and encoder."""
    whole, entry = files.whole(), files.entry or "flow_map_ema"
    if entry not in whole or not entry.startswith("flow_map"):
        raise CheckpointError(f"entry={entry} must be flow_map_ema or flow_map, and in the checkpoint.")
    parts = {_NET: whole[entry], _ENCODER: whole.get(entry.replace("flow_map", "encoder"))}
    tables = all(isinstance(part, Mapping) for part in parts.values())
    if not tables or not all(isinstance(one, Tensor) for part in parts.values() for one in part.values()):
        raise CheckpointError(f"'{entry}' and its encoder must be there and hold tensors alone.")
    tensors = Tensors(
        {
            f"{prefix}{name.removeprefix('net.')}": value.float()
            for prefix, part in parts.items()
            for name, value in part.items()
        }
    )
    tensors.skip(f"{_NET}scalar_output", "the scalar that losses of flow maps read")
    return entry, tensors


def _encoder(tensors: Tensors) -> list[Layer]:
    """Take the layers of its encoder of states; none if it has no weights."""
    if not tensors.under(_ENCODER):
        return []
    if not tensors.under(f"{_ENCODER}mlp.mlp."):
        some = next(name for name in tensors.left if name.startswith(_ENCODER))
        raise CapabilityError(f"'{some}': only encoder_type=mlp and identity, on states, can be imported.")
    names = (f"{_ENCODER}mlp.mlp.{i}" for i in count())
    hidden = [f"{name}.0" for name in takewhile(lambda name: f"{name}.0.weight" in tensors, names)]
    return [_layer(tensors, name) for name in (*hidden, f"{_ENCODER}mlp.mlp.{len(hidden)}")]


def _layer(tensors: Tensors, name: str) -> Layer:
    """Take a linear layer whose shapes are those of one."""
    out, _ = shape(tensors.left, f"{name}.weight", 2)
    if shape(tensors.left, f"{name}.bias", 1) != (out,):
        raise CheckpointError(f"'{name}.bias' must have {out} numbers, the rows of '{name}.weight'.")
    return layer(tensors, name)


def _mlp(weights: Mapping[str, Tensor], encoder: Sequence[Layer]) -> tuple[MlpConfig, dict[str, Tensor], int]:
    """Read its MLP: our configuration, weights by our names, width of the condition."""
    (frequencies,), (width, inputs) = shape(weights, "frequencies", 1), shape(weights, "input_proj.weight", 2)
    if not torch.allclose(weights["frequencies"], torch.linspace(0, 100, frequencies)):
        raise CapabilityError("only frequencies of times from 0 to 100 (max_freq) can be imported.")
    chunk_size = shape(weights, "main_output.weight", 2)[0]
    cond_dim = inputs - chunk_size - 4 * frequencies
    if cond_dim < 1:
        raise CheckpointError(
            f"'input_proj.weight' must read chunk, two times and condition; got {inputs} columns."
        )
    names = {"input_proj": "inlet", "input_norm": "norm", "final_norm": "last_norm", "main_output": "outlet"}
    blocks = len(outputs(weights, "residual_blocks.{}.linear1.weight"))
    for i, part in product(range(blocks), ("norm1", "linear1", "norm2", "linear2")):
        names[f"residual_blocks.{i}.{part}"] = f"blocks.{i}.{part}"
    config = MlpConfig(
        width=width, num_blocks=blocks, activation="gelu_erf", layer_norm=True, times="uniform",
        expansion=shape(weights, "residual_blocks.0.linear1.weight", 2)[0] // width,
        time_dim=2 * frequencies, **_cond(encoder),
    )  # fmt: skip
    keys = {f"{theirs}.{kind}": f"trunk.{ours}.{kind}" for theirs, ours in names.items() for kind in _KINDS}
    known = {name: value for name, value in weights.items() if name != "frequencies"}
    ours = Network(config, keys, cond_dim).placed(known, "")
    chunk, first, second, cond = ours["trunk.inlet.weight"].split(
        (chunk_size, 2 * frequencies, 2 * frequencies, cond_dim), dim=1
    )
    ours["trunk.inlet.weight"] = torch.cat([chunk, first + second, cond], dim=1)
    read = encoder[0][0].shape[1] if encoder else cond_dim
    return config, ours | (stacked(encoder, "cond_encoder.") if encoder else {}), read


def _unet(
    weights: Mapping[str, Tensor], encoder: Sequence[Layer]
) -> tuple[Unet1dConfig, dict[str, Tensor], int]:
    """Read its U-Net: our configuration, weights by our names, width of the condition."""
    rest = Tensors(weights)
    if not rest.under("global_cond_encoder."):
        raise CapabilityError("only a ChiUNet with obs_as_global_cond=true can be imported.")
    stack = [*encoder[:-1], _product(_layer(rest, "global_cond_encoder"), *encoder[-1:])]
    weights = renamed(rest.left, _UNET)
    network = unet(weights, "diffusion_policy", groups=_GROUPS, activation="gelu_erf")
    if network.backbone.widths[0] < 4 * _GROUPS:
        raise CapabilityError(f"only a ChiUNet with model_dim={4 * _GROUPS} or more can be imported.")
    ours = network.placed(weights, "")
    first, second = ours["time_embedding.linear1.weight"].chunk(2, dim=1)
    ours["time_embedding.linear1.weight"] = first + second
    config = replace(network.backbone, times="positional", **_cond(stack))
    return config, ours | stacked(stack, "cond_encoder."), stack[0][0].shape[1]


def _product(last: Layer, before: Layer | None = None) -> Layer:
    """Return one linear layer that is two in succession."""
    if before is None:
        return last
    (weight, bias), (inner, offset) = last, before
    if weight.shape[1] != len(offset):
        raise CheckpointError(
            f"'global_cond_encoder.weight' must have {len(offset)} columns; got {weight.shape[1]}."
        )
    return weight @ inner, bias + weight @ offset


def _cond(stack: Sequence[Layer]) -> dict[str, Any]:
    """Return the fields of a condition encoder made of these layers."""
    dims = tuple(len(bias) for _, bias in stack)
    return {"cond_dims": dims, "cond_activation": "leaky_relu" if stack else None}


def _quotient(what: str, whole: int, rows: str, width: int) -> int:
    if whole % width:
        raise ConfigError(
            f"its {what} of {whole} numbers must be whole {rows} of {width}, as in the statistics."
        )
    return whole // width
