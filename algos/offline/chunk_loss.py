"""Matching loss of a policy at the chunks of a batch of transitions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the random numbers for n rows; names begin with `te/`."""
        te = self._matching.sample_te(n, generator=generator)
        level = {} if te.level is None else {"te/level": te.level}
        return {"te/t": te.t, "te/eps": te.eps, **level, **{f"te/more/{k}": v for k, v in te.more.items()}}

    def __call__(self, batch: Batch, draws: Mapping[str, Tensor]) -> Tensor:
        """Return the loss (B, Th) per row of the chunks."""
        more = {k.removeprefix("te/more/"): v for k, v in draws.items() if k.startswith("te/more/")}
        te = TE(draws["te/t"], draws["te/eps"], draws.get("te/level"), more)
        policy, trains = self._policy, self._policy.training
        cond, chunk = policy.condition(batch.cond), batch.plan.view(-1, *policy.chunk.shape)
        try:
            policy.train()  # dropout is for this loss: decoded chunks are a function of their noise
            return self._matching.matching_loss(cond, chunk, te, reduce="step")
        finally:
            policy.train(trains)
