"""Validation of a cloned policy: error of sampled actions against the demonstrations.

The matching loss of held-out data is reported as well, but is a poor measure of behaviour: it can rise while
the policy improves.

Legend: B windows, n samples per window, Th predicted horizon.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from algos.base import Metrics
from algos.cloning.batches import WindowSampler
from algos.training.ranks import current
from envs.datasets.episodes import EpisodeDataset
from policies.errors import CapabilityError
from policies.policy import Policy
from policies.protocols import MatchingLoss
from policies.seeds import seeded_generator
from policies.wrappers.base import WrappedPolicy

_log = logging.getLogger(__name__)


def held_out(
    dataset: EpisodeDataset, fraction: float, seed: int
) -> tuple[EpisodeDataset, EpisodeDataset | None]:
    """Return the episodes that a run with this seed learns from, and those it is measured on, if any.

    The number of the latter is rounded down.
    """
    count = int(fraction * dataset.num_episodes + 1e-9)  # 0.29 * 100 is 28.999…
    if count:
        return dataset.split(count / dataset.num_episodes, seed=seed)
    if fraction:
        _log.info(
            "no validation: algo.validation_fraction=%g of %d episodes is less than one.",
            fraction, dataset.num_episodes,
        )  # fmt: skip
    return dataset, None


class Validation:
    """At most `num_windows` evenly spaced windows with fixed noise: results of all steps are comparable."""

    def __init__(self, source: WindowSampler, *, num_windows: int, num_samples: int, seed: int) -> None:
        count = min(num_windows, source.num)
        index = torch.linspace(0, source.num - 1, count, dtype=torch.float64).round().long()
        self._data = source.gather(index.to(source.device))
        self._num_samples, self._seed = num_samples, seed

    @torch.no_grad()
    def measure(self, policy: Policy) -> Metrics:
        """Return mean squared errors over recorded actions, in squared physical units.

        `validation/action_mse` averages over all samples. `validation/action_mse_best` takes the sample
        closest to the demonstration per window: low if the demonstrated behaviour is among the policy's
        modes.
        """
        generator = seeded_generator(self._seed, "validation", device=policy.device)
        cond = policy.encode(self._data.obs)
        noise = policy.sample_noise(len(cond) * self._num_samples, generator=generator)
        chunk = policy.physical(policy.decode(cond.repeat(self._num_samples), noise))
        error = self._errors(chunk.unflatten(0, (len(cond), self._num_samples)))  # (B, n)
        matching = matching_of(policy)
        te = matching.sample_te(len(cond), generator=generator)
        action = policy.normalize_action(self._data.action)
        loss = matching.matching_loss(cond, action, te, reduce="step")
        return {
            "validation/action_mse": error.mean(),
            "validation/action_mse_best": error.min(dim=1).values.mean(),
            "validation/loss": masked_mean(loss, self._data.mask),
        }

    def _errors(self, chunk: Tensor) -> Tensor:
        """Return the error (B, n) of sampled chunks (B, n, Th, Da), over recorded actions only."""
        action = self._data.action[..., : chunk.shape[-1]]  # rows of a planner hold states as well
        per_row = (chunk - action.unsqueeze(1)).square().mean(dim=-1)  # (B, n, Th)
        mask = self._data.mask.unsqueeze(1).to(per_row.dtype)
        return (per_row * mask).sum(dim=-1) / mask.sum(dim=-1)


def matching_of(policy: Policy) -> MatchingLoss:
    """Return the policy if it trains by regression.

    Raises:
        CapabilityError: If it does not.
    """
    if not isinstance(policy, MatchingLoss):
        wraps = isinstance(policy, WrappedPolicy)
        advice = (
            "the policy that it was made from" if wraps else "process=diffusion, flow, gaussian or mixture"
        )
        raise CapabilityError(
            f"cloning needs a policy with a matching loss; {type(policy).__name__} has none. Use {advice}."
        )
    return policy


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average values (B, Th) over the true entries of a mask (B, Th), at least one.

    The mean over ranks is that over the entries of all of them.
    """
    return (values * mask).sum() / current().mean(mask.sum().to(values.dtype))
