"""What decides, and the way between LeRobot's batches and its inputs; needs burnish, not LeRobot.

Legend: B batch, To observation history, Ta executed steps, Do and Da widths, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from policies.errors import CapabilityError, ConfigError
from policies.export.folder import Surroundings
from policies.export.signature import is_exported, read_signature
from policies.policy import Policy
from policies.runner import Limits, draw_noise
from policies.serving.client import Client
from policies.serving.messages import Schema
from policies.serving.served_policy import STATE, ServedFolder, ServedPolicy
from policies.storage.policy_folder import load_policy

OBSERVED, ACTION = "observation.state", "action"
CAMERA, SINGLE_CAMERA = "observation.images.", "observation.image"
LAST_POLICY = Path("checkpoints", "last", "policy")  # of a run directory

Arrays = Mapping[str, np.ndarray]
Key = tuple[int, int, int]
"""Seed, episode and number of a decision; its noise is drawn from them."""


@dataclass(frozen=True)
class Source:
    """A policy by its inputs and outputs.

    Attributes:
        schema: Inputs, action, rate and limits.
        decide: Histories (B, To, ...) by name and a key -> physical actions (B, Ta, Da) within the limits.
        policy: The policy in this process, which can be trained; None: an export or a server.
        action_names: The action's entries without units, keys of LeRobot's robots; None: unknown.
    """

    schema: Schema
    decide: Callable[[Arrays, Key], np.ndarray]
    policy: Policy | None = None
    action_names: tuple[str, ...] | None = None


def open_source(place: str, *, device: str = "cpu", timeout_s: float = 1.0) -> Source:
    """Open a policy directory, a run (its last policy), an exported folder, or a server at `tcp://…`.

    Raises:
        BurnishError: If there is none, or it needs goals, which LeRobot's robots do not give.
    """
    if place.startswith("tcp://"):
        client = Client(place, timeout_s=timeout_s)
        found = Source(client.schema, _limited(client, _asking(client)))
    elif is_exported(Path(place)):
        folder = ServedFolder(place)
        names = read_signature(Path(place)).facts["outputs"]["action"].get("names")
        found = Source(folder.schema, _limited(folder, _drawing(folder)), None, _bare(names))
    else:
        last = Path(place) / LAST_POLICY
        policy = load_policy(last if last.is_dir() else place).to(device)
        facts = policy.provenance.get("interface") or {}
        limits = {key: facts.get(key) for key in ("action_low", "action_high")}
        served = ServedPolicy(policy, Surroundings(control_hz=facts.get("control_hz"), **limits))
        decide = _limited(served, _drawing(served))
        found = Source(served.schema, decide, policy, _bare(facts.get("action_names")))
    if "goal" in found.schema.inputs:
        raise CapabilityError(f"{place} needs a goal beside the observation; LeRobot's robots give none.")
    return found


def _drawing(served: ServedPolicy | ServedFolder) -> Callable[[Arrays, Key], np.ndarray]:
    """Return decisions with noise drawn here; row b of a batch has the key of decision B n + b."""

    def decide(inputs: Arrays, key: Key) -> np.ndarray:
        rows = [draw_noise(one, served.noise_shape) for one in _keys(inputs, key)]
        return served.decide(inputs, np.stack(rows))

    return decide


def _asking(client: Client) -> Callable[[Arrays, Key], np.ndarray]:
    """Return decisions of a server, which draws the noise from the key; one request per row."""

    def decide(inputs: Arrays, key: Key) -> np.ndarray:
        rows = [{name: value[b] for name, value in inputs.items()} for b in range(len(inputs[STATE]))]
        return np.stack([client.decide(row, one) for row, one in zip(rows, _keys(inputs, key), strict=True)])

    return decide


def _keys(inputs: Arrays, key: Key) -> list[Key]:
    seed, episode, decision = key
    count = len(inputs[STATE])
    return [(seed, episode, count * decision + row) for row in range(count)]


def _limited(
    source: ServedPolicy | ServedFolder | Client, decide: Callable[[Arrays, Key], np.ndarray]
) -> Callable[[Arrays, Key], np.ndarray]:
    """Return decisions within the limits that the source has by then: a server may have another policy."""

    def limited(inputs: Arrays, key: Key) -> np.ndarray:
        chunk = decide(inputs, key)
        if not np.isfinite(chunk).all():
            raise ConfigError("the policy gave actions that are not finite; nothing was commanded.")
        sides = (source.schema.action_low, source.schema.action_high)
        low, high = (None if side is None else np.asarray(side, np.float32) for side in sides)
        return np.asarray(Limits(low, high).apply(chunk, None), np.float32)

    return limited


def _bare(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(name.partition(" [")[0] for name in names)


def features_of(schema: Schema, *, single_camera: bool = False) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return LeRobot's kind and shape of every input and of the action, by its feature names.

    Args:
        schema: Inputs of the policy.
        single_camera: Whether a camera named `image` is `observation.image` or `observation.images.image`.
    """
    found = {OBSERVED: ("STATE", (schema.inputs[STATE].shape[-1],))}
    for name, feature in schema.inputs.items():
        if name != STATE:
            height, width, channels = feature.shape[1:]
            key = SINGLE_CAMERA if single_camera and name == "image" else f"{CAMERA}{name}"
            found[key] = ("VISUAL", (channels, height, width))
    return found | {ACTION: ("ACTION", (schema.action.shape[-1],))}


def inputs_of(
    batch: Mapping[str, Any], schema: Schema, state_keys: Sequence[str] = (OBSERVED,)
) -> dict[str, np.ndarray]:
    """Return the policy's inputs for a batch of LeRobot, with whatever axes stand before the feature's own.

    Args:
        batch: Tensors by feature: vectors (..., D), images (..., 3, H, W), float in [0, 1] or bytes.
        schema: Inputs of the policy.
        state_keys: Features of the state, in order.

    Raises:
        ConfigError: If a feature is missing or of another size.
    """
    parts = [_given(batch, (key,)).float() for key in state_keys]
    found = {STATE: torch.cat(parts, dim=-1).cpu().numpy()}
    for name in schema.inputs:
        if name != STATE:
            keys = (f"{CAMERA}{name}", *((SINGLE_CAMERA,) if name == "image" else ()))
            found[name] = _pixels(_given(batch, keys))
    for name, feature in schema.inputs.items():
        width = feature.shape[1:]
        if found[name].shape[-len(width) :] != width:
            raise ConfigError(
                f"the policy's input '{name}' has the size {width}; LeRobot gives {found[name].shape}. Give "
                "state_keys, or cameras of that size."
            )
    return found


def _given(batch: Mapping[str, Any], keys: Sequence[str]) -> torch.Tensor:
    for key in keys:
        if key in batch:
            return torch.as_tensor(batch[key])
    raise ConfigError(f"the policy needs '{keys[0]}'; the observation has {sorted(map(str, batch))}.")


def _pixels(image: torch.Tensor) -> np.ndarray:
    """Convert images (..., 3, H, W), float in [0, 1] or uint8, to (..., H, W, 3) uint8."""
    if image.is_floating_point():
        image = (255 * image).round().clamp(0, 255).to(torch.uint8)
    return image.movedim(-3, -1).cpu().numpy()
