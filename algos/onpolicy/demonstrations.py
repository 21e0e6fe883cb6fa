"""Demonstrations in an on-policy update: losses of actor and critic on recorded chunks beside their own.

loss = surrogate + w mean loss(chunk | observation), by the loss that cloned the policy: minus the log-density
of a normal policy, the error of a denoiser at drawn times and noises. Every minibatch draws its own rows.

Source: the demonstration-augmented policy gradient, arXiv 1709.10087, for the sum. Deviation: the weight of
demonstrations is constant. `bc_weight` holds a policy to its initial self instead.

The critic also learns the values of recorded chunks, by their temporal difference::

    loss = losses of the rollout + w mean (V(s) - (r + gamma V(s')))^2 / 2

Source: the critic of hybrid natural policy gradients, arXiv 2311.08384, which fits rollouts and data
together. Deviations: V instead of Q, so that recorded chunks have the value of who recorded them; no rows of
data in the actor's step; the target moves with every minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from algos.cloning.batches import CloningBatch, WindowSampler
from algos.cloning.validation import matching_of
from algos.onpolicy.losses import value_losses
from algos.transitions import Rewarding, tabulate
from envs.datasets.episodes import EpisodeDataset
from policies.policy import Policy
from policies.protocols import TE

ROWS = 256  # chunks per minibatch


class Demonstrations:
    """Draws recorded chunks and returns their loss under a policy."""

    def __init__(self, dataset: EpisodeDataset, policy: Policy) -> None:
        self.policy, self._matching = policy, matching_of(policy)
        self._windows = WindowSampler(
            dataset.to(policy.device),
            policy.chunk,
            pad_end=True,
            goal_dim=policy.goal_dim,
            cameras=policy.images,
        )

    def draw(self, generator: torch.Generator) -> partial[Tensor]:
        """Return the mean loss of ROWS drawn chunks, as a function without arguments."""
        index = torch.randint(self._windows.num, (ROWS,), generator=generator, device=generator.device)
        te = self._matching.sample_te(ROWS, generator=generator)
        return partial(self.loss, self._windows.gather(index.to(self._windows.device)), te)

    def loss(self, batch: CloningBatch, te: TE) -> Tensor:
        """Return the mean loss over recorded actions, a scalar."""
        cond, action = self.policy.encode(batch.obs), self.policy.normalize_action(batch.action)
        loss = self._matching.matching_loss(cond, action, te, reduce="step")
        return (loss * batch.mask).sum() / batch.mask.sum()  # one rank computes it for all


class RecordedValues:
    """Draws recorded chunks and returns their loss under a critic that reads the policy's conditions.

    Args:
        dataset, policy: What was recorded, and who encodes it.
        gamma: Discount per chunk.
        scaled: Scales rewards of chunks (B,) as those of rollouts are.
    """

    def __init__(
        self, dataset: EpisodeDataset, policy: Policy, gamma: float, scaled: Callable[[Tensor], Tensor]
    ) -> None:
        self._table = tabulate(dataset.to(policy.device), policy, Rewarding(gamma=1.0))
        self._gamma, self._scaled = gamma, scaled

    def draw(self, critic: nn.Module, generator: torch.Generator) -> Callable[[], Tensor]:
        """Return half the squared errors of ROWS drawn chunks, (ROWS,), as a function without arguments."""
        batch = self._table.gather(self._table.draw(ROWS, generator))
        with torch.no_grad():
            target = self._scaled(batch.reward) + self._gamma * batch.discount * critic(batch.next_cond)
        return lambda: value_losses(critic(batch.cond), target, target)
