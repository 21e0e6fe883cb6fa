"""A policy as actor-critic methods on a fixed dataset use it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from policies.policy import Policy
from policies.protocols import Cond


class Actor:
    """A policy as actor-critic methods use it: encoded observation in, flat executed chunk out.

    Args:
        policy: Any policy; one that ignores noise is deterministic.
        limit: L; learner actions are the normalised ones times L.
    """

    def __init__(self, policy: Policy, limit: float = 1.0) -> None:
        self._policy, self.limit = policy, limit

    @property
    def policy(self) -> Policy:
        """The policy that acts."""
        return self._policy

    @property
    def network(self) -> nn.Module:
        """What is trained."""
        return self.policy

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return the noise that n actions start from; zeros where it has no influence."""
        if not self.policy.noise_sensitive:
            return torch.zeros(n, *self.policy.noise_shape, device=self.policy.device)
        return self.policy.sample_noise(n, generator=generator)

    def __call__(self, cond: Tensor, noise: Tensor, *, grad: bool = True) -> Tensor:
        """Return actions (B, A) in [-L, L] for conditions (B, C)."""
        chunk = self.policy.decode(Cond(cond), noise, grad=grad)
        action = chunk[:, self.policy.chunk.executed].flatten(1)
        return action if self.limit == 1.0 else action * self.limit
