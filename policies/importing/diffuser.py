"""Checkpoints of Diffuser (arXiv 2205.09991): its temporal U-Net, and the value that guides it.

Legend: O and A widths of state and action, D = O + A numbers of a row, K denoising levels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from policies.bounds import bounded
from policies.errors import CheckpointError, ConfigError
from policies.importing.files import Files, Tensors, read_entry, read_statistics
from policies.importing.formats import AffineMap, Description, PolicySource
from policies.importing.networks import outputs, renamed, shape, unet
from policies.paths import path_field
from policies.policy_config import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.registry import register
from policies.samplers.ddpm import DDPM
from policies.wrappers.planner import Planner

_NETWORK = "model."
_SCHEDULE = ("betas", "alphas_", "sqrt_", "log_one_", "posterior_", "loss_fn.")
_NAMES = {
    r"^time_mlp\.": "diffusion_step_encoder.",
    r"^(down|up)s\.(\d+)\.3\.": r"\1_modules.\2.2.",
    r"^(down|up)s\.(\d+)\.": r"\1_modules.\2.",
    r"^mid_block1\.": "mid_modules.0.",
    r"^mid_block2\.": "mid_modules.1.",
    r"\.time_mlp\.": ".cond_encoder.",
    r"\.block\.2\.": ".block.1.",
}
"""Its names -> those of Diffusion Policy's U-Net."""
_BLOCK = {
    "blocks.0.block.0": "first.conv", "blocks.0.block.2": "first.norm", "blocks.1.block.0": "second.conv",
    "blocks.1.block.2": "second.norm", "time_mlp.1": "film.layers.0", "residual_conv": "shortcut",
}  # fmt: skip
_ENDS = {
    "time_mlp.1": "time_embedding.linear1", "time_mlp.3": "time_embedding.linear2",
    "final_block.0": "inner", "final_block.2": "outlet",
}  # fmt: skip
"""Its names of the value -> ours, `policies.networks.plan_value`; blocks are counted by `_of_value`."""


@register("source", "diffuser")
@dataclass(frozen=True)
class DiffuserSource(PolicySource):
    """A planner of Diffuser: rows of actions and states, guided by a value where its checkpoint is given.

    Attributes:
        action_dim: A. Must be given.
        horizon: Rows of a plan. Must be given.
        value: Checkpoint of the value; null: one plan, without guide.
        plans: Plans per decision, of which the most valuable is executed (published: 64); 1 without value.
        clip: Bound on clean plans; null: none (locomotion). Mazes have 1.
        prediction: What the network says: `x0` (published) or `eps`.

    Source:
        The released code, branch main; networks with attention are refused.
    """

    action_dim: int | None = bounded(None, ge=1)
    horizon: int | None = bounded(None, ge=1)
    act_steps: int = bounded(1, ge=1)  # actions that are executed before it plans again
    value: str | None = path_field()
    plans: int = bounded(64, ge=1)
    guide_scale: float = bounded(0.1, ge=0)
    guide_repeats: int = bounded(2, ge=0)
    guide_rest: int = bounded(2, ge=0)
    clip: float | None = bounded(None, gt=0)
    prediction: str = bounded("x0", choices=("x0", "eps"))

    def read(self, files: Files) -> Description:
        if self.action_dim is None or self.horizon is None:
            raise ConfigError(
                "give source.action_dim=<width of an action> and source.horizon=<rows of a plan>."
            )
        entry, tensors = files.tensors()
        levels = shape(tensors.left, "betas", 1)[0]
        released = renamed(_network(tensors), _NAMES)
        network = unet(released, "diffusion_policy", groups=8)
        width = network.action_dim or 0
        if width <= self.action_dim:
            raise ConfigError(
                f"source.action_dim must be below the {width} numbers of a row; got {self.action_dim}."
            )
        config = PolicyConfig(
            VPDiffusion(num_levels=levels, prediction=self.prediction), None, network.backbone,
            DDPM(clip_x0=self.clip, clip_action=None, noise_clip=None, min_std=0.0),
            horizon=self.horizon, act_steps=self.act_steps, observation_clip=None,
        )  # fmt: skip
        weights = network.placed(released, "base.field.")
        value_widths: tuple[int, ...] = ()
        if self.value is not None:
            value_widths, more = _value(Path(self.value))
            weights |= more
        planner = Planner(
            obs_dim=width - self.action_dim, action_dim=self.action_dim, value_widths=value_widths,
            plans=self.plans if value_widths else 1, guide_scale=self.guide_scale,
            guide_repeats=self.guide_repeats, guide_rest=self.guide_rest,
        )  # fmt: skip
        maps = {} if files.normalization is None else maps_of(read_statistics(files.normalization))
        return Description(config, 0, width, weights, tensors, maps, entry=entry, wrapper=planner)


def maps_of(statistics: Mapping[str, object]) -> dict[str, AffineMap]:
    """Return the maps of `obs_mean`, `obs_std`, `action_mean` and `action_std`."""
    maps = {}
    for feature, theirs in (("state", "obs"), ("action", "action")):
        names = [f"{theirs}_{kind}" for kind in ("mean", "std")]
        if missing := [name for name in names if name not in statistics]:
            raise CheckpointError(f"the file of statistics has no {', '.join(missing)}.")
        mean, std = (torch.as_tensor(statistics[name], dtype=torch.float64) for name in names)
        maps[feature] = ((1 / std).float(), (-mean / std).float())
    return maps


def _network(tensors: Tensors) -> dict[str, Tensor]:
    """Take the tensors of the network; those of schedule and loss follow from the settings."""
    for prefix in _SCHEDULE:
        tensors.skip(prefix, "schedule and weights of the loss")
    return tensors.cut(_NETWORK)


def _value(path: Path) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Return the widths of a value's levels, and its weights by our names."""
    released = _network(Tensors(read_entry(path)[1]))
    widths = outputs(released, "blocks.{}.0.blocks.0.block.0.weight")
    return widths, {f"value.{_of_value(name, len(widths))}": value for name, value in released.items()}


def _of_value(name: str, levels: int) -> str:
    place, kind = name.rsplit(".", 1)
    if place in _ENDS:
        return f"{_ENDS[place]}.{kind}"
    if found := re.fullmatch(r"blocks\.(\d+)\.\d+\.conv|mid_down(\d)\.conv", place):
        return f"downs.{found[1] or levels + int(found[2]) - 1}.{kind}"
    found = re.fullmatch(r"(blocks\.\d+\.\d+|mid_block\d)\.(.*)", place)
    if found is None or found[2] not in _BLOCK:
        raise CheckpointError(f"'{name}' is no tensor of a value of Diffuser.")
    numbers = [int(part) for part in re.findall(r"\d+", found[1])]
    number = 2 * levels + numbers[0] - 1 if len(numbers) == 1 else 2 * numbers[0] + numbers[1]
    return f"blocks.{number}.{_BLOCK[found[2]]}.{kind}"
