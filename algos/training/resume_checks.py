"""Facts of a run that must not change when it is continued."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from policies.errors import CheckpointError
from policies.policy import Policy
from policies.storage.config_json import describe

_WHAT = {
    "seed": "seed",
    "init": "the weights of the policy to start from (init)",
    "teacher": "the weights of the policy to learn from (algo.teacher)",
    "dataset": "the content of the dataset",
    "total": "the length of the run (algo.steps)",
    "algo.return_range": "algo.normalize_returns",
    "inner_steps": "the number of trained inner steps (algo.tuned_steps)",
    "variant": "what values are of (algo.variant)",
    "bound": "the unit of remembered latents (algo.steering.bound)",
    "adapter": "the way from latents to noise (algo.steering.adapter)",
    "rank": "the number of rows of a latent (algo.steering.rank)",
    "density": "the kind of actor (algo.steering.density)",
    "activation": "what follows the layers of the actor (algo.steering.activation)",
    "critic_activation": "what follows the layers of the critics (algo.critic_activation)",
    "sampler": "how the frozen policy denoises (algo.denoising_steps, its sampler)",
    "switch_time": "the level below which the network is tuned (algo.sampler, algo.denoising_steps, "
    "algo.tuned_steps)",
}


_DIGEST = 64  # letters of a SHA-256


def require_unchanged(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Compare facts of a run with those of the checkpoint that it continues from.

    Args:
        saved: A training state; facts that it does not hold are not compared.
        present: The facts of this run.

    Raises:
        CheckpointError: If one differs.
    """
    for name, value in present.items():
        if name in saved and saved[name] != value:
            raise CheckpointError(
                f"{_WHAT.get(name, name)} must stay what it was when a run is continued: "
                f"{_short(saved[name])}; got {_short(value)}. Resume without the change, or start a new run "
                f"with it."
            )


def digest_of(module: nn.Module | None) -> str | None:
    """Return the SHA-256 of the weights of a module, with their names, types and shapes; None of None."""
    if module is None:
        return None
    seen = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        seen.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        seen.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return seen.hexdigest()


def facts_of(name: str, policy: nn.Module | None) -> dict[str, Any]:
    """Return the facts of a policy that a run starts or learns from: its weights and its settings.

    Args:
        name: Of the policy; its settings are named by their places in config.json, e.g.
            `init.parts.sampler.steps`. One that an earlier version did not save is not compared.
        policy: The policy; None: there is none.
    """
    facts: dict[str, Any] = {name: digest_of(policy)}
    return facts | settings_of(name, describe(policy)) if isinstance(policy, Policy) else facts


def init_facts(init: Policy | None, policy: Policy) -> dict[str, Any]:
    """Return what must stay of the policy that a run begins with.

    Args:
        init: The policy to start from.
        policy: What the run trains: a new one if there is no `init`, of which the settings must stay.
    """
    if init is not None:
        return facts_of("init", init)
    return {"init": None, **settings_of("policy", describe(policy))}


def settings_of(name: str, value: Any) -> dict[str, Any]:
    """Return the single settings of a description by their places, which begin with `name`.

    The version of its format is no setting.
    """
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {name: value}
    parts = (settings_of(f"{name}.{key}", inner) for key, inner in value.items() if key != "format")
    return {place: setting for part in parts for place, setting in part.items()}


def _short(value: Any) -> str:
    """Return a value for a message; digests are cut."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == _DIGEST else str(value)
