"""Resume invariants: facts of a run that must stay equal when it is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from policies.errors import CheckpointError
from policies.policy import Policy
from policies.storage.config_json import describe

_NAMES = {  # of facts, in messages
    "seed": "seed",
    "init": "the weights of the policy to start from (init)",
    "teacher": "the weights of the policy to learn from (algo.teacher)",
    "dataset": "the content of the dataset",
    "total": "the length of the run (algo.steps)",
    "algo.return_range": "algo.normalize_returns",
    "inner_steps": "the number of trained inner steps (algo.tuned_steps)",
    "variant": "the variant (algo.variant)",
    "bound": "the bound of stored latents (algo.steering.bound)",
    "adapter": "the map from latents to noise (algo.steering.adapter)",
    "rank": "the rank of a latent (algo.steering.rank)",
    "density": "the distribution of the actor (algo.steering.density)",
    "activation": "the activation of the actor (algo.steering.activation)",
    "critic_activation": "the activation of the critics (algo.critic_activation)",
    "sampler": "the sampler of the frozen policy (algo.denoising_steps, its sampler)",
    "switch_time": "the trained noise levels (algo.sampler, algo.denoising_steps, algo.tuned_steps)",
}
_SHA256_LENGTH = 64


def require_unchanged(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Compare the facts of a run with those of its training state; missing ones are not compared.

    Raises:
        CheckpointError: If a fact differs.
    """
    for name, value in present.items():
        if name in saved and saved[name] != value:
            raise CheckpointError(
                f"{_NAMES.get(name, name)} must stay what it was when a run is continued: "
                f"{_short(saved[name])}; got {_short(value)}. Undo the change, or start a new run with it."
            )


def digest_of(module: nn.Module | None) -> str | None:
    """Return the SHA-256 of a module's weights, names, dtypes and shapes; None for None."""
    if module is None:
        return None
    seen = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        seen.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        seen.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return seen.hexdigest()


def facts_of(name: str, policy: nn.Module | None) -> dict[str, Any]:
    """Return the digest and settings of an initial policy or teacher, e.g. `init.parts.sampler.steps`."""
    facts: dict[str, Any] = {name: digest_of(policy)}
    return facts | settings_of(name, describe(policy)) if isinstance(policy, Policy) else facts


def init_facts(init: Policy | None, policy: Policy) -> dict[str, Any]:
    """Return the resume invariants of `init`, or without it the settings of the policy in training."""
    if init is not None:
        return facts_of("init", init)
    return {"init": None, **settings_of("policy", describe(policy))}


def settings_of(name: str, value: Any) -> dict[str, Any]:
    """Return the settings of a description by path, prefixed with `name`, without the format version."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {name: value}
    parts = (settings_of(f"{name}.{key}", inner) for key, inner in value.items() if key != "format")
    return {place: setting for part in parts for place, setting in part.items()}


def _short(value: Any) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == _SHA256_LENGTH else str(value)
