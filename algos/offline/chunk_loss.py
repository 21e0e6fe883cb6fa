"""Matching loss of a policy at the chunks of a batch of transitions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from algos.cloning.validation import matching_of
from algos.transitions import Batch
from policies.policy import Policy
from policies.protocols import TE


class ChunkLoss:
    """Matching loss of a policy at the recorded chunks of a batch, with the dropout of its network.

    Raises:
        CapabilityError: If the policy has no matching loss.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy, self._matching = policy, matching_of(policy)
        self._dropping = [part for part in policy.modules() if _rate(part)]

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the random numbers for n rows; names begin with `te/`."""
        te = self._matching.sample_te(n, generator=generator)
        level = {} if te.level is None else {"te/level": te.level}
        return {"te/t": te.t, "te/eps": te.eps, **level, **{f"te/more/{k}": v for k, v in te.more.items()}}

    def __call__(self, batch: Batch, draws: Mapping[str, Tensor]) -> Tensor:
        """Return the loss (B, Th) per row of the chunks."""
        more = {k.removeprefix("te/more/"): v for k, v in draws.items() if k.startswith("te/more/")}
        te = TE(draws["te/t"], draws["te/eps"], draws.get("te/level"), more)
        cond = self._policy.condition(batch.cond)
        chunk = batch.plan.view(-1, *self._policy.chunk.shape)
        try:
            self._drop(True)
            return self._matching.matching_loss(cond, chunk, te, reduce="step")
        finally:
            self._drop(False)  # decoded chunks are a function of their noise

    def _drop(self, drops: bool) -> None:
        for part in self._dropping:
            part.training = drops


def _rate(part: nn.Module) -> float:
    """Return the share of features that a module itself drops in training."""
    found = part.p if isinstance(part, nn.Dropout) else getattr(part, "dropout", 0.0)
    return found if isinstance(found, float) else 0.0
