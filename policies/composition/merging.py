"""Averages of weights: several policies of one architecture become one of the same size.

Legend: theta_0 weights of the policy that all were trained from, delta_m = theta_m - theta_0, w_m weights of
policies, sum 1, Omega the angle between two tensors, lambda_j = w_j / (w_0 + ... + w_j), eta the scale::

    linear      theta = sum w_m theta_m
    spherical   d <- sin((1 - lambda_j) Omega) / sin Omega d + sin(lambda_j Omega) / sin Omega delta_j,
                d = delta_0, then j = 1, 2, ...;  theta = theta_0 + d
    result      theta_0 + eta (theta - theta_0)

Spherical averages are taken tensor by tensor and depend on the order of more than two policies. They are
linear where Omega is below 1e-6, a delta is 0, or a tensor has one number. All is computed in float64.
Buffers (normalisers) must agree and are copied.

Source: WARP, arXiv 2406.16768, from its description.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policies.composition.compose import compose
from policies.errors import BurnishError, ConfigError
from policies.policy import Policy
from policies.storage.config_json import describe

METHODS = ("linear", "spherical")
_SMALLEST_ANGLE = _BUFFERS_AGREE = 1e-6

Weights = Mapping[str, Tensor]


def merge(
    policies: Sequence[Policy],
    *,
    init: Policy | None = None,
    method: str = "linear",
    weights: Sequence[float] | None = None,
    scale: float = 1.0,
) -> Policy:
    """Return one policy with averaged weights, on the device of the first, in evaluation mode.

    Args:
        policies: M policies of one architecture with equal normalisers.
        init: Policy that all were trained from; needed by `spherical` and by a scale other than 1.
        method: `linear` or `spherical`.
        weights: w, M numbers of at least 0; None: equal.
        scale: eta, 0 for `init`, 1 for the average, above 1 for an extrapolation.

    Raises:
        ConfigError: If a policy differs in more than its weights, or an argument does not fit.
    """
    shares = _shares(policies, weights)
    if method not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(METHODS)}; got '{method}'.")
    if not (math.isfinite(scale) and scale >= 0):
        raise ConfigError(f"scale must be at least 0; got {scale}.")
    if init is None and (method == "spherical" or scale != 1):
        raise ConfigError(
            f"method={method} with scale={scale:g} needs init=<policy that all were trained from>."
        )
    for i, other in enumerate([*policies[1:], *([] if init is None else [init])], start=1):
        _require_alike(policies[0], other, f"policies[{i}]" if i < len(policies) else "init")
    members = [_weights_of(policy) for policy in policies]
    start = None if init is None else _weights_of(init)
    merged = policies[0].without_provenance().clone().eval()
    with torch.no_grad():
        for name, weight in merged.named_parameters():
            tensors, base = [one[name] for one in members], None if start is None else start[name]
            if method == "linear" or base is None:
                found = linear(tensors, shares)
            else:
                found = spherical(tensors, shares, base, name)
            weight.copy_(found if scale == 1 or base is None else base + scale * (found - base))
            if not weight.isfinite().all():
                raise ConfigError(f"scale={scale:g} gives '{name}' numbers beyond {weight.dtype}; lower it.")
    return merged


def linear(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the weighted mean of tensors."""
    return torch.stack([share * one for share, one in zip(shares, tensors, strict=True)]).sum(dim=0)


def spherical(tensors: Sequence[Tensor], shares: Sequence[float], base: Tensor, name: str) -> Tensor:
    """Return the spherical mean of tensors around `base`, folded in order."""
    found, total = tensors[0], shares[0]
    for one, share in zip(tensors[1:], shares[1:], strict=True):
        total += share
        if share:
            found = _between(found, one, share / total, base, name)
    return found


def _between(one: Tensor, other: Tensor, share: float, base: Tensor, name: str) -> Tensor:
    """Return the tensor at `share` of the arc from one to another, around `base`."""
    if share == 1:
        return other
    a, b = one - base, other - base
    omega = float(angle(a, b))
    if omega < _SMALLEST_ANGLE or base.numel() == 1:
        return one + share * (other - one)
    if omega > math.pi - _SMALLEST_ANGLE:
        raise ConfigError(
            f"method=spherical has no mean of opposite changes; those of '{name}' point apart. "
            "Use method=linear."
        )
    return base + (math.sin((1 - share) * omega) * a + math.sin(share * omega) * b) / math.sin(omega)


def angle(a: Tensor, b: Tensor) -> Tensor:
    """Return the angle between two tensors; 0 if one of them is 0."""
    lengths = a.norm(), b.norm()
    if not all(lengths):
        return a.new_zeros(())
    u, v = a / lengths[0], b / lengths[1]
    return 2 * torch.atan2((u - v).norm(), (u + v).norm())  # exact near 0 and pi, unlike acos


def _weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: weight.detach().cpu().double() for name, weight in policy.named_parameters()}


def _shares(policies: Sequence[Policy], weights: Sequence[float] | None) -> list[float]:
    if not policies:
        raise ConfigError("policies must name at least one policy.")
    given = [1.0] * len(policies) if weights is None else [float(weight) for weight in weights]
    if len(given) != len(policies) or not all(math.isfinite(w) and w >= 0 for w in given) or not any(given):
        raise ConfigError(
            f"weights must be {len(policies)} numbers of at least 0, one each, not all 0; got {weights}."
        )
    shares = [weight / max(given) for weight in given]  # their sum is finite
    return [share / sum(shares) for share in shares]


def _require_alike(first: Policy, other: Policy, key: str) -> None:
    """Refuse a policy whose parts, sizes or buffers differ from the first one's (ConfigError)."""
    described = describe(first), describe(other)
    wrapped, wraps = (", ".join(one["name"] for one in each["wrappers"]) or "none" for each in described)
    if wrapped != wraps:
        raise ConfigError(
            f"{key} differs from policies[0] in wrappers: {wraps} and {wrapped}. {_advice(first, other)}"
        )
    own, others = (dict(_leaves(each)) for each in described)
    for name in sorted(own.keys() | others.keys(), key=lambda name: (not name.endswith(".name"), name)):
        if own.get(name) != others.get(name):
            raise ConfigError(
                f"{key} differs from policies[0] in {name}: {others.get(name)} and {own.get(name)}. "
                f"{_advice(first, other)}"
            )
    if type(first) is not type(other):
        raise ConfigError(f"{key} is a {type(other).__name__}, policies[0] a {type(first).__name__}.")
    theirs = dict(other.named_buffers())
    for name, buffer in first.named_buffers():
        if not torch.allclose(buffer, theirs[name].to(buffer), rtol=_BUFFERS_AGREE, atol=_BUFFERS_AGREE):
            raise ConfigError(
                f"{key} differs from policies[0] in '{name}': they were fitted to different data. Train all "
                "from one policy (init=<policy>), which keeps its normalisation."
            )


def _advice(first: Policy, other: Policy) -> str:
    """Return what to do with two policies whose weights cannot be averaged: some can be composed."""
    rule = "Weights are averaged of one architecture."
    try:
        compose([first, other], [0.5, 0.5])
    except BurnishError as error:
        return f"{rule} Composing these is refused, too: {error}"
    return f"{rule} Compose different policies (burnish eval compose=[a,b])."


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every entry of a description, without provenance."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None or not value:
        yield path, value
        return
    for key, inner in items:
        if key != "provenance":
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
