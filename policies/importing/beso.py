"""Checkpoints of BESO (arXiv 2304.02532): its `DiffusionGPT` over a window of states and actions, with goals.

Legend: W states of the window, G goals, O and A widths of state and action, D of a token, L blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from policies.backbones.gpt import GptConfig
from policies.bounds import bounded
from policies.errors import CheckpointError, ConfigError
from policies.importing.files import Files, Tensors, read_statistics
from policies.importing.formats import AffineMap, Description, PolicySource
from policies.importing.networks import outputs, shape
from policies.networks.attention import causal_mask
from policies.policy_config import PolicyConfig
from policies.processes.edm import Edm
from policies.registry import register
from policies.samplers.ode import Ancestral

_NET = "inner_model."
_KINDS = ("weight", "bias")
_LAYERS = {"tok_emb": "obs_inlet", "sigma_emb": "time_embedding", "ln_f": "norm"}
_BLOCK = {
    "ln1": "norm1", "ln2": "norm2", "attn.proj": "attention.outlet", "mlp.0": "ffn.linear1",
    "mlp.2": "ffn.linear2",
}  # fmt: skip
_BLOCK_PUSH, _UNREAD = 10, (2, 5, 6, 7, 8, 9)  # width of its goals, and the entries that it sets to zero
_BOUND = 1.1  # of actions, over the largest of the data


@register("source", "beso")
@dataclass(frozen=True)
class BesoSource(PolicySource):
    """BESO: a window of states and actions towards goals, whose last action is executed.

    Attributes:
        heads: Attention heads. Must be given (published: 6 in the kitchen, 12 in block push).
        window: States that it sees, at most those of training; null: all. With 1 it needs no memory.
        noise_min: Smallest noise level (published: 0.005 in the kitchen, 0.05 in block push).
        goal_dropout: Fraction of goals that training dropped (published: 0.1 for CFG-BESO).

    Source:
        The released code, its agent. There, actions of earlier steps begin as they were executed and are
        denoised along; here they begin as noise, as in its training and validation. Deviation: further
        training drops whole goals instead of entries of them, and has no dropout.
    """

    heads: int | None = bounded(None, ge=1)
    window: int | None = bounded(None, ge=1)
    data_std: float = bounded(0.5, gt=0)  # its `sigma_data`
    noise_min: float = bounded(0.005, gt=0)
    noise_max: float = bounded(1.0, gt=0)  # largest noise level
    goal_dropout: float = bounded(0.0, ge=0, lt=1)
    guidance: float = bounded(1.0, ge=0)  # weight of the goal, its `cond_lambda`

    def read(self, files: Files) -> Description:
        if self.heads is None:
            raise ConfigError("give source.heads=<attention heads>, `n_heads` of its training configuration.")
        entry, tensors = files.tensors()
        obs_dim = shape(tensors.left, f"{_NET}tok_emb.weight", 2)[1]
        action_dim = shape(tensors.left, f"{_NET}action_emb.weight", 2)[1]
        window, goals = _window(tensors)
        if not 1 <= (states := self.window or window) <= window:
            raise ConfigError(f"source.window must be 1 to {window}, that of training; got {self.window}.")
        backbone, weights = self._network(tensors, obs_dim, states, goals)
        statistics = {} if files.normalization is None else read_statistics(files.normalization)
        config = PolicyConfig(
            Edm(self.data_std, self.noise_min, self.noise_max, time_scale=1.0), None, backbone,
            Ancestral(
                steps=3, grid="linear", clip_x0=None, noise_clip=None,
                clip_action=_BOUND if "action_min" in statistics else None,
            ),
            obs_steps=states, horizon=states, act_steps=1, action_start=states - 1, observation_clip=None,
            goal_dropout=self.goal_dropout, guidance=self.guidance,
        )  # fmt: skip
        return Description(
            config, obs_dim, action_dim, {f"field.{name}": value for name, value in weights.items()},
            tensors, _maps(statistics, goals), goal_dim=goals * obs_dim, entry=entry,
        )  # fmt: skip

    def _network(
        self, tensors: Tensors, obs_dim: int, states: int, goals: int
    ) -> tuple[GptConfig, dict[str, Tensor]]:
        """Take the network: our configuration, and weights by our names."""
        depth = len(outputs(tensors.left, _NET + "blocks.{}.ln1.weight"))
        blocks = [f"blocks.{i}." for i in range(depth)]
        names = _LAYERS | {f"{block}{a}": f"{block}{b}" for block in blocks for a, b in _BLOCK.items()}
        hidden = "action_pred.0.weight"
        if _NET + hidden in tensors:
            names |= {f"action_pred.{i}": f"outlet.{i}" for i in (0, 2)}
            width = shape(tensors.left, _NET + hidden, 2)[0]
        else:
            names, width = names | {"action_pred": "outlet"}, None
        weights = tensors.taken({f"{_NET}{a}.{k}": f"{b}.{k}" for a, b in names.items() for k in _KINDS})
        weights["positions"] = tensors.take(f"{_NET}pos_emb")[:, : goals + states]
        weights["inlet.weight"] = tensors.take(f"{_NET}action_emb.weight") / self.data_std
        weights["inlet.bias"] = tensors.take(f"{_NET}action_emb.bias")
        for block, kind in product(blocks, _KINDS):
            parts = [f"{_NET}{block}attn.{part}.{kind}" for part in ("query", "key", "value")]
            weights[f"{block}attention.inlet.{kind}"] = torch.cat([tensors.take(part) for part in parts])
        config = GptConfig(
            width=len(weights["norm.weight"]), depth=depth, heads=self.heads or 1, obs_tokens=states + goals,
            goal_tokens=goals, goal_unread=_UNREAD if obs_dim == _BLOCK_PUSH else (), outlet_width=width,
        )  # fmt: skip
        return config, weights


def _window(tensors: Tensors) -> tuple[int, int]:
    """Return W and G of masks (2 W + G + 1 tokens) and positions (W + G + 1), and leave the masks out."""
    tokens = shape(tensors.left, f"{_NET}blocks.0.attn.mask", 4)[-1]
    positions = shape(tensors.left, f"{_NET}pos_emb", 3)[1]
    window = tokens - positions
    goals = positions - window - 1
    if window < 1 or goals < 0:
        raise CheckpointError(
            f"{tokens} tokens and {positions} positions must be those of a window and goals."
        )
    for name, mask in tensors.left.items():
        if name.endswith(".attn.mask"):
            if not torch.equal(mask, causal_mask(tokens).to(mask)[None, None]):
                raise CheckpointError(f"'{name}' differs from that of the released network.")
            tensors.skip(name, "rebuilt, and equal")
    return window, goals


def _maps(statistics: Mapping[str, np.ndarray], goals: int) -> dict[str, AffineMap]:
    """Return the maps of its scalers: states by mean and deviation, actions by limits or as states."""
    given = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in statistics.items()}
    if "action_min" in given and "action_max" in given:
        low, high = given["action_min"], given["action_max"]
        given |= {"action_mean": (low + high) / 2, "action_std": (high - low) / 2}
    maps: dict[str, AffineMap] = {}
    for feature, theirs in (("state", "obs"), ("action", "action")):
        mean, std = given.get(f"{theirs}_mean"), given.get(f"{theirs}_std")
        if mean is None or std is None:
            continue
        if not (std > 0).all():
            raise CheckpointError(f"the range of {theirs} must be above 0: its program divides by it.")
        maps[feature] = ((1 / std).float(), (-mean / std).float())
    if goals and "state" in maps:
        scale, offset = maps["state"]
        maps["goal"] = (scale.repeat(goals), offset.repeat(goals))
    return maps
