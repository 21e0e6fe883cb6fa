"""Losses of value networks.

Legend: E critics, B rows, kappa in (0, 1), l logits, y targets in [0, 1] of those by logits; K bins of
width d around centres c_k; n fractions tau of weights w, quantiles z at them, n samples y of a target.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

VALUE_LOSSES = ("expectile", "quantile", "exponential")
_MOST_EXPONENT = math.log(6)


def histogram(value: Tensor, centres: Tensor, sigma: float) -> Tensor:
    """Return the probabilities (..., K) of bins for values (...), clipped to the bins: HL-Gauss or two-hot.

    The mass in every bin of a normal distribution around the value, of deviation sigma d, over the mass in
    all of them; of sigma = 0 the two centres around the value share one, so that its mean is the value.

    Source: arXiv 2403.03950, section 3.
    """
    width = centres[1] - centres[0]
    half, value = width * (0.5 if sigma else 0.0), value.unsqueeze(-1)
    value = torch.minimum(torch.maximum(value, centres[0] - half), centres[-1] + half)
    if not sigma:
        return (1 - (value - centres).abs() / width).clamp(min=0)
    edges = torch.cat([centres - half, centres[-1:] + half])
    mass = torch.special.ndtr((edges - value) / (sigma * width)).diff(dim=-1)
    return mass / mass.sum(dim=-1, keepdim=True)


def cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Return -mean sum_k p_k log softmax(l)_k of logits (E, B, K) and probabilities (B, K) or (E, B, K)."""
    return -(probs * logits.log_softmax(dim=-1)).sum(dim=-1).mean()


def fractions(u: Tensor) -> tuple[Tensor, Tensor]:
    """Return fractions tau (B, n), the middles of random parts of (0, 1), and the parts' lengths w (B, n).

    The lengths are u + 0.1 for uniform numbers u (B, n), over their sum.
    """
    share = (u + 0.1) / (u + 0.1).sum(dim=-1, keepdim=True)
    return share.cumsum(dim=-1) - share / 2, share


def quantile_loss(z: Tensor, target: Tensor, tau: Tensor, weight: Tensor) -> Tensor:
    """Return the loss of quantiles z (E, B, n) at tau (B, n) by y (E, B, n') of weights (B, n').

    Its sum over critics, its mean over rows and i of sum_j w_j |tau_i - 1[y_j < z_i]| huber(z_i - y_j).

    Source: implicit quantiles, arXiv 1806.06923, weighted as in the released code of CFPI.
    """
    error = z.unsqueeze(-1) - target.unsqueeze(-2)
    slope = (tau.unsqueeze(-1) - (error.sign() + 1) / 2).abs()
    each = slope * F.huber_loss(error, torch.zeros_like(error), reduction="none")
    return (each * weight.unsqueeze(-2)).sum(dim=-1).mean(dim=(1, 2)).sum()


def value_loss(advantage: Tensor, how: str, kappa: float) -> Tensor:
    """Return the loss of V by advantages u = Q - V (B,).

    `expectile`: mean |kappa - 1[u < 0]| u^2. `quantile`: mean |kappa - 1[u < 0]| |u|. `exponential`:
    mean (exp(kappa u) - 1) u with a constant weight, its exponent at most log 6.

    Source: IDQL, arXiv 2304.10573, section 4.
    """
    share = torch.where(advantage > 0, kappa, 1 - kappa)
    if how == "expectile":
        return (share * advantage.square()).mean()
    if how == "quantile":
        return (share * advantage.abs()).mean()
    weight = (kappa * advantage.detach()).clamp(max=_MOST_EXPONENT).exp() - 1
    return (weight * advantage).mean()


def bce(logit: Tensor, target: Tensor) -> Tensor:
    """Return -(y log sigmoid(l) + (1 - y) log sigmoid(-l)), entry by entry."""
    return F.softplus(logit) - target * logit


def implicit_loss(logit: Tensor, target: Tensor, how: str, kappa: float) -> Tensor:
    """Return the loss, entry by entry, that moves sigmoid(l) to an upper expectile or quantile of targets.

    Its weight is kappa where y >= sigmoid(l), else 1 - kappa, without gradient. `expectile` weighs the cross
    entropy, `quantile` the distance of logits.

    Source: decoupled Q-chunking (DQC), released code.
    """
    weight = torch.where(target >= logit.detach().sigmoid(), kappa, 1 - kappa)
    if how == "expectile":
        return weight * bce(logit, target)
    return weight * (logit - torch.logit(target, eps=1e-5)).abs()
