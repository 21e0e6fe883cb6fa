"""Balance: a policy conditioned on a coefficient, which a network chooses for every state.

Legend: B rows, s features (B, C), c in (-1, 1), mu and sigma of a network, eps standard normal, beta
coefficient in [low, high], d = 6 numbers of its embedding::

    c          = tanh(mu(s) + sigma eps),   beta = low + (c + 1)/2 (high - low)
    emb(beta)  = sin and cos of beta / 10^(4 2i/d),   i = 0 ... d/2 - 1
    a          = inner(s, emb(beta), w)

The policy acts at eps = 0. The embedding stands where goals stand: it is the goal of the inner policy.

Source: FamO2O (family offline-to-online), released code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.networks.distributions import tanh_draw
from policies.networks.mlp_blocks import TrunkConfig
from policies.policy import Policy
from policies.protocols import Cond, Hooks, Observation, Rng, Start
from policies.registry import register
from policies.wrappers.base import WrappedPolicy

EMBEDDED = 6  # d
_LONGEST = 1e4


@register("wrapper", "balance")
@dataclass(frozen=True)
class Balance(Checked):
    """Range of coefficients, and the network that chooses among them."""

    low: float = bounded(1.0, ge=0)  # smallest coefficient
    high: float = bounded(5.0, ge=0)  # largest coefficient
    hidden_dims: tuple[int, ...] = bounded((256, 256), ge=1)  # hidden widths of the network; ReLU

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("high", self.low <= self.high, f"at least low={self.low}")

    def wrap(self, base: Policy) -> BalancedPolicy:
        """Return the policy that acts at chosen coefficients, with a fresh network."""
        return BalancedPolicy(base, self)


class BalancedPolicy(WrappedPolicy):
    """Acts at the coefficient that its network chooses; observations are those without it.

    Attributes:
        chooser: Features (B, C) to mu (B, 1).
        log_std: log sigma (1,), the same for all states.

    Raises:
        ConfigError: If the inner policy has no place for the embedding, a goal of width 6.
    """

    def __init__(self, base: Policy, wrapper: Balance) -> None:
        if base.goal_dim != EMBEDDED:
            raise ConfigError(
                f"wrapper 'balance' needs a policy with a goal of width {EMBEDDED}; got {base.goal_dim}."
            )
        super().__init__(base, wrapper)
        self.wrapper: Balance = wrapper
        trunk = TrunkConfig(residual=False, hidden_dims=wrapper.hidden_dims)
        self.chooser: nn.Module = trunk.build_trunk(base.encoder.cond_dim - EMBEDDED, 1).to(base.dtype)
        self.log_std = nn.Parameter(torch.zeros(1, dtype=base.dtype))

    @property
    def goal_dim(self) -> int:
        """0: the coefficient is no part of an observation."""
        return 0

    def encode(self, obs: Observation, *, generator: Rng = None) -> Cond:
        """Return the condition with zeros in place of the embedding, which `decode` fills in."""
        nowhere = obs["state"].new_zeros(obs["state"].shape[0], EMBEDDED)
        return self.base.encode({**obs, "goal": nowhere}, generator=generator)

    def drawn(self, vec: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Return coefficients (B,) and log-densities (B,) of c, for conditions (B, C + d) and eps (B, 1)."""
        mean = self.chooser(vec[:, :-EMBEDDED])
        c, log_prob = tanh_draw(mean, self.log_std.expand_as(mean), eps)
        return self.scaled(c[:, 0]), log_prob

    def scaled(self, c: Tensor) -> Tensor:
        """Return the coefficients of c in [-1, 1]."""
        return self.wrapper.low + (c + 1) / 2 * (self.wrapper.high - self.wrapper.low)

    def at(self, vec: Tensor, coefficient: Tensor) -> Tensor:
        """Return conditions (B, C + d) at coefficients (B,)."""
        return torch.cat([vec[:, :-EMBEDDED], embedded(coefficient)], dim=1)

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        coefficient = self.scaled(self.chooser(cond.vec[:, :-EMBEDDED]).tanh()[:, 0])
        at = self.base.condition(self.at(cond.vec, coefficient))
        return self.base.decode(at, noise, grad=grad, start=start, hooks=hooks)


def embedded(coefficient: Tensor) -> Tensor:
    """Return the embeddings (B, d) of coefficients (B,), sines and cosines in turns."""
    i = torch.arange(EMBEDDED // 2, device=coefficient.device).to(coefficient)
    phase = coefficient[:, None] / _LONGEST ** (2 * i / EMBEDDED)
    return torch.stack([phase.sin(), phase.cos()], dim=-1).flatten(1)
