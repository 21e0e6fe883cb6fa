"""Checkpoints as other programs write them, around the weights of the reference files.

A reference file holds the tensors of a released network, its inputs and its output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.importing.diffusion_policy import DiffusionPolicySource
from policies.importing.dppo import DppoSource
from policies.importing.formats import ForeignSource
from policies.importing.reinflow import ReinflowSource
from policies.importing.reinflow_shortcut import ReinflowShortcutSource

GOLDEN = Path(__file__).resolve().parents[1] / "assets" / "golden"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@dataclass
class Example:
    """A released network: its tensors, the source that imports it, and what it gives.

    Shapes:
        x, out: (B, Th, Da). time, length: (B,). obs: (B, To, Do).
    """

    source: ForeignSource
    weights: dict[str, Tensor]
    x: Tensor
    time: Tensor
    obs: Tensor
    out: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
    length: Tensor | None = None  # second time of the network, where it has one

    @property
    def maps(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Awkward maps of observations and actions, by Diffusion Policy's names."""
        widths = {"obs": self.obs.shape[2], "action": self.x.shape[2]}
        return {
            name: (0.5 + torch.arange(width) / width, torch.linspace(-2, 1, width))
            for name, width in widths.items()
        }

    def limits(self) -> dict[str, np.ndarray]:
        """Return awkward limits of observations and actions, by DPPO's names."""
        widths = {"obs": self.obs.shape[2], "action": self.x.shape[2]}
        low = {f"{name}_min": -1.0 - np.arange(width) for name, width in widths.items()}
        return low | {f"{name}_max": 2.0 + np.arange(width) / 3 for name, width in widths.items()}


def arrays_of(name: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(np.asarray(arrays[key])) for key in arrays.files}


def diffusion_policy(name: str) -> Example:
    arrays = arrays_of(name)
    weights = {key[2:]: value for key, value in arrays.items() if key.startswith("w/")}
    if name == "dp_transformer":
        source, obs = DiffusionPolicySource(heads=2), arrays["cond"]
    else:
        source = DiffusionPolicySource(horizon=arrays["x"].shape[1], groups=4)
        obs = arrays["global_cond"].unflatten(1, (2, -1))
    return Example(source, weights, arrays["x"], arrays["t"], obs, arrays["y"])


def dppo(name: str) -> Example:
    arrays = arrays_of(name)
    weights = {key[2:]: value for key, value in arrays.items() if key.startswith("w.")}
    small = {"groups": 4, "norm_eps": 1e-4} if name == "dppo_net_unet3_small" else {}
    source = DppoSource(
        activation="relu" if "relu" in name else "mish", horizon=arrays["in.x"].shape[1], **small
    )
    return Example(source, weights, arrays["in.x"], arrays["in.t"], arrays["in.state"], arrays["out0"])


def reinflow(name: str) -> Example:
    arrays = arrays_of(name)
    weights = {key[4:]: value for key, value in arrays.items() if key.startswith("net.")}
    return Example(
        ReinflowSource(activation="relu"), weights, arrays["xt"], arrays["t"], arrays["obs"], arrays["v_hat"],
        extras=arrays,
    )  # fmt: skip


def shortcut(name: str) -> Example:
    arrays = arrays_of(name)
    weights = {key[4:]: value for key, value in arrays.items() if key.startswith("net.")}
    inputs = [arrays[f"full_{key}"] for key in ("x_t", "t")]
    return Example(
        ReinflowShortcutSource(activation="relu"), weights, *inputs, arrays["obs"], arrays["v_pred"],
        extras=arrays, length=arrays["full_d"],
    )  # fmt: skip


EXAMPLES = {
    "dp_unet1d_film": diffusion_policy,
    "dp_transformer": diffusion_policy,
    "dppo_net_mlp_plain": dppo,
    "dppo_net_mlp_res_relu": dppo,
    "dppo_net_mlp_res_mish_cond_ln": dppo,
    "dppo_net_unet": dppo,
    "dppo_net_unet3_small": dppo,
    "reinflow_reflow_loss": reinflow,
    "reinflow_shortcut_loss": shortcut,
}


def example(name: str) -> Example:
    """Return an example by the name of its reference file."""
    return EXAMPLES[name](name)


def under(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in weights.items()}


def shaken(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return other weights of the same shapes (masks and what is empty stay as they are)."""
    fixed = ("mask", "memory_mask")
    return {name: value if name in fixed else value + 0.25 for name, value in weights.items()}


def workspace(of: Example) -> dict[str, Any]:
    """Return the payload of Diffusion Policy's workspace, without the configuration that needs code."""
    state = under("model.", of.weights) | {"_dummy_variable": torch.zeros(0)}
    for name, (scale, offset) in of.maps.items():
        statistics = {key: torch.zeros(len(scale)) for key in ("min", "max", "mean", "std")}
        state |= under(f"normalizer.params_dict.{name}.", {"scale": scale, "offset": offset})
        state |= under(f"normalizer.params_dict.{name}.input_stats.", statistics)
    raw = state | under("model.", shaken(of.weights))
    return {"state_dicts": {"model": raw, "ema_model": state}, "pickles": {"epoch": b"\x80\x04K\x01."}}


def pretrained(of: Example) -> dict[str, Any]:
    """Return the checkpoint of DPPO's or ReinFlow's cloning."""
    raw = under("network.", shaken(of.weights))
    return {"epoch": 3, "model": raw, "ema": under("network.", of.weights)}


def write(of: Example, folder: Path) -> dict[str, Any]:
    """Write an example as its program does; returns the arguments of `import_policy`."""
    path = folder / "state_3.pt"
    if isinstance(of.source, DiffusionPolicySource):
        torch.save(workspace(of), path)
        return {"path": path, "source": of.source}
    torch.save(pretrained(of), path)
    np.savez(folder / "normalization.npz", **of.limits())
    return {"path": path, "source": of.source, "normalization": folder / "normalization.npz"}
