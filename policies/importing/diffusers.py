"""A `UNet1DModel` of diffusers with its scheduler: `config.json`, safetensors and `scheduler_config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from policies.bounds import bounded
from policies.errors import CapabilityError, ConfigError
from policies.importing.dppo import limits_of
from policies.importing.files import Files, read_statistics
from policies.importing.formats import Description, PolicySource
from policies.importing.networks import renamed, unet
from policies.importing.schedulers import process_of, sampler_of
from policies.policy_config import PolicyConfig
from policies.registry import register
from policies.samplers.diffusers import DIFFUSION_SCHEDULERS, Diffusers

_FIXED = {
    "_class_name": "UNet1DModel", "mid_block_type": "MidResTemporalBlock1D",
    "out_block_type": "OutConv1DBlock", "time_embedding_type": "positional", "use_timestep_embedding": True,
    "flip_sin_to_cos": False, "freq_shift": 1, "extra_in_channels": 0, "layers_per_block": 1,
    "downsample_each_block": False, "act_fn": "mish",
}  # fmt: skip
"""Settings of its `config.json` -> the values of the temporal U-Net of Diffuser, which is ours."""
_NAMES = {
    r"^(down|up)_blocks\.(\d+)\.resnets\.": r"\1_modules.\2.", r"^mid_block\.resnets\.": "mid_modules.",
    r"^(down|up)_blocks\.(\d+)\.(down|up)sample\.": r"\1_modules.\2.2.",
    r"\.conv_in\.": ".blocks.0.block.", r"\.conv_out\.": ".blocks.1.block.",
    r"\.conv1d\.": ".0.", r"\.group_norm\.": ".1.", r"\.time_emb\.": ".cond_encoder.1.",
    r"^time_mlp\.linear_1\.": "diffusion_step_encoder.1.",
    r"^time_mlp\.linear_2\.": "diffusion_step_encoder.3.",
    r"^out_block\.final_conv1d_1\.": "final_conv.0.block.0.",
    r"^out_block\.final_conv1d_gn\.": "final_conv.0.block.1.",
    r"^out_block\.final_conv1d_2\.": "final_conv.1.",
}  # fmt: skip
"""Its names -> those of Diffusion Policy's U-Net."""
_PLACES = ("scheduler_config.json", "../scheduler/scheduler_config.json")
_STEPS = 20  # of schedulers other than DDPM and DDIM
_OF_PROCESS = {"num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "prediction_type"}


@register("source", "diffusers")
@dataclass(frozen=True)
class DiffusersSource(PolicySource):
    """The temporal U-Net (`UNet1DModel` of residual blocks) and the scheduler of a diffusers pipeline.

    It sees no observation. Here it gets weights for one, which are zero: its chunks stay those of the file
    until training gives the observation a meaning.

    Attributes:
        obs_dim: Width of the `state` of the task. Must be given.
        horizon: Rows of a chunk. Must be given.
        steps: Sampling steps; null: one per level for DDPM and DDIM, 20 for other schedulers.

    Source:
        diffusers 0.42; its other blocks, which are made for sound, and its schedulers of flows are refused.
    """

    obs_dim: int | None = bounded(None, ge=1)
    horizon: int | None = bounded(None, ge=1)
    act_steps: int | None = bounded(None, ge=1)  # actions that are executed; null: the whole chunk
    obs_steps: int = bounded(1, ge=1)  # observations that the policy sees
    steps: int | None = bounded(None, ge=1)

    def read(self, files: Files) -> Description:
        config = files.beside("config.json")
        for name, value in _FIXED.items():
            if config.get(name) != value:
                raise CapabilityError(f"only {name}={value} can be imported; got {config.get(name)}.")
        if config["in_channels"] != config["out_channels"]:
            raise CapabilityError("only networks with equal in_channels and out_channels can be imported.")
        if self.obs_dim is None or self.horizon is None:
            raise ConfigError(
                "give source.obs_dim=<width of the state> and source.horizon=<rows of a chunk>."
            )
        place = next((name for name in _PLACES if (files.path.parent / name).is_file()), _PLACES[0])
        process, sampler = self._parts(files.beside(place, finite=False))
        entry, tensors = files.tensors()
        released = renamed(tensors.cut(""), _NAMES)
        for name in [name for name in released if name.endswith("cond_encoder.1.weight")]:
            released[name] = F.pad(released[name], (0, self.obs_steps * self.obs_dim))
        network = unet(released, "diffusion_policy", groups=8, final_groups=config["norm_num_groups"])
        policy = PolicyConfig(
            process, None, network.backbone, sampler,
            obs_steps=self.obs_steps, horizon=self.horizon, act_steps=self.act_steps or self.horizon,
            observation_clip=None,
        )  # fmt: skip
        maps = {} if files.normalization is None else limits_of(read_statistics(files.normalization))
        weights, sizes = network.placed(released, "field."), (self.obs_dim, config["out_channels"])
        return Description(policy, *sizes, weights, tensors, maps, entry=entry)

    def _parts(self, settings: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the process and the sampler of a scheduler."""
        name = settings.get("_class_name", "")
        if name in ("DDPMScheduler", "DDIMScheduler"):
            return process_of(settings), sampler_of(name.removesuffix("Scheduler"), settings, self.steps)
        if name not in DIFFUSION_SCHEDULERS:
            raise CapabilityError(
                f"scheduler {name} cannot be imported; DDPMScheduler, {', '.join(DIFFUSION_SCHEDULERS)} can."
            )
        others = {key: one for key, one in settings.items() if key[0] != "_" and key not in _OF_PROCESS}
        own = {key: one for key, one in others.items() if one != -math.inf}  # which stands for no bound
        steps = self.steps or _STEPS
        return process_of(settings), Diffusers(scheduler=name, steps=steps, clip_action=None, options=own)
