"""Demonstrations in an on-policy update: the matching loss of recorded chunks beside the surrogate.

loss = surrogate + w mean loss(chunk | observation), by the loss that cloned the policy: minus the log-density
of a normal policy, the error of a denoiser at drawn times and noises. Every minibatch draws its own rows.

Source: the demonstration-augmented policy gradient, arXiv 1709.10087, for the sum. Deviation: the weight of
demonstrations is constant. `bc_weight` holds a policy to its initial self instead.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from algos.cloning.batches import CloningBatch, WindowSampler
from algos.cloning.validation import masked_mean, matching_of
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
        return masked_mean(self._matching.matching_loss(cond, action, te, reduce="step"), batch.mask)
