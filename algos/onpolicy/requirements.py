"""What the online algorithms require of a policy, and what they name instead.

Requirements are protocols (`policies.protocols`) and properties of a process; no process is named here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from algos.base import require_one_policy
from policies.composition.policy import ComposedPolicy
from policies.errors import CapabilityError
from policies.policy import Policy
from policies.protocols import has_density, has_field, has_steps
from policies.wrappers.base import WrappedPolicy


def has_straight_paths(policy: Any) -> bool:
    """Whether the policy follows velocities of x = t x0 + (1 - t) eps from noise to chunk, without noise."""
    if not (has_field(policy) and policy.process.kind == "velocity" and policy.is_deterministic):
        return False
    t = torch.linspace(0, 1, 5)
    alpha, sigma = policy.process.alpha_sigma(t)
    return torch.allclose(alpha, t) and torch.allclose(sigma, 1 - t)


def algorithms_for(policy: Any) -> str:
    """Return the algorithms that improve this policy, as text for an error."""
    if isinstance(policy, ComposedPolicy):
        return "the algorithms of its members"
    if has_steps(policy):
        return "algo=dppo or algo=reinflow"
    if has_density(policy):
        return "algo=ppo"
    if policy.noise_sensitive and getattr(policy, "is_deterministic", False):
        return "algo=dsrl"
    return f"algo={'residual' if isinstance(policy, WrappedPolicy) else 'td3_bc'} with dataset=<file>"


def require(policy: Policy, algo: str, fits: Callable[[Any], bool], why: str) -> Any:
    """Return the policy if it fits.

    Raises:
        CapabilityError: If not, or if the policy is a composition; names what is missing and an algorithm
            that takes this policy.
    """
    require_one_policy(policy, algo)
    if not fits(policy):
        raise CapabilityError(
            f"algo={algo} {why}; got {type(policy).__name__} with process "
            f"'{type(policy.config.process).__name__}'. Use {algorithms_for(policy)} for this policy."
        )
    return policy
