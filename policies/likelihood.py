"""What policies share whose network returns the density of a whole chunk: there is no loop to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policies.errors import CapabilityError, ConfigError
from policies.policy import Policy, PolicyConfig
from policies.protocols import TE, SampleHook
from policies.registry import name_of
from policies.trunk import TrunkConfig


def trunk_of(config: PolicyConfig) -> TrunkConfig:
    """Return the backbone as the shape of a fully connected network from the condition to a density.

    Raises:
        ConfigError: If the backbone is another network, or encodes the condition.
    """
    process, backbone = name_of("process", config.process), config.backbone
    if not isinstance(backbone, TrunkConfig):
        raise ConfigError(
            f"process={process} needs a fully connected backbone (backbone=mlp); got "
            f"{type(backbone).__name__}."
        )
    if ignored := getattr(backbone, "cond_dims", ()):
        raise ConfigError(
            f"process={process} has no encoder of the condition; got backbone.cond_dims={list(ignored)}. "
            f"Set backbone.cond_dims=[]."
        )
    return backbone


def require_own_sampler(process: Any, sampler: Any) -> None:
    """Refuse a sampler that is not of the kind of the process's default.

    Raises:
        ConfigError: If it is another one.
    """
    own = type(process.default_sampler())
    if not isinstance(sampler, own):
        raise ConfigError(
            f"process={name_of('process', process)} needs sampler={name_of('sampler', own)}, its default; "
            f"got sampler={name_of('sampler', sampler)}. Leave the sampler out, or use a process that takes "
            f"steps (diffusion, flow)."
        )


def require_one_step(process: Any, start: tuple[Tensor, float] | None, hooks: Sequence[SampleHook]) -> None:
    """Refuse what changes a loop.

    Raises:
        CapabilityError: If a start or hooks are given.
    """
    if hooks or start is not None:
        raise CapabilityError(
            f"a policy with process={name_of('process', process)} acts in one step, so it takes no hooks and "
            f"no start state. Leave them out, or use a policy with process=diffusion or process=flow."
        )


def no_draws(policy: Policy, n: int) -> TE:
    """Return empty draws: a likelihood needs none."""
    return TE(torch.zeros(n, device=policy.device), torch.zeros(n, *policy.chunk.shape, device=policy.device))
