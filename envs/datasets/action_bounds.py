"""Actions within bounds: those of a task, of a policy, or of the data themselves."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from envs.datasets.episodes import EpisodeDataset
from policies.normalizer import box_statistics
from policies.policy import Policy

_log = logging.getLogger(__name__)
_ROUNDING = 1e-5  # tolerance outside the action bounds for rounding, relative to their width
_CLIPPED = {
    True: ("the task", "as the simulator does"),
    False: ("the policy of init", "for there is no task with action limits. Give env=<task>"),
}


def box_of(dataset: EpisodeDataset, spec: Any) -> dict[str, Tensor]:
    """Return statistics of the action bounds: the task's, or the data's without a task.

    Without a task, bounds are [-1, 1] if the data fit, else the data's range, with a warning.
    """
    low, high = dataset.actions.amin(0), dataset.actions.amax(0)
    if spec is not None:
        low, high = (torch.tensor(side, dtype=low.dtype) for side in (spec.action_low, spec.action_high))
    elif bool((low >= -1).all() & (high <= 1).all()):
        low, high = -torch.ones_like(low), torch.ones_like(high)
    else:
        outside = int((dataset.actions.abs() > 1).sum())
        _log.warning(
            "%s: %d action entries (%.2g %%) lie outside [-1, 1], and there is no task whose box they "
            "fill; the range of the data is taken for it, and nothing is clipped. Give env=<task>.",
            dataset.source, outside, 100 * outside / dataset.actions.numel(),
        )  # fmt: skip
    return box_statistics(low, high)


def actions_for(dataset: EpisodeDataset, policy: Policy, spec: Any) -> EpisodeDataset:
    """Return the dataset with actions clipped to the task's bounds or, without a task, to the policy's.

    Policies with mean-std action normalisation have no bounds: actions are unchanged.
    """
    if spec is not None:
        return clipped_actions(dataset, box_of(dataset, spec))
    normalizer = policy.normalizer
    if normalizer.modes["action"] != "limits":
        return dataset
    one = torch.ones(dataset.action_dim, device=policy.device)
    low, high = (normalizer.decode("action", side).cpu() for side in (-one, one))
    margin = _ROUNDING * (high - low)
    return clipped_actions(dataset, box_statistics(low - margin, high + margin), of_task=False)


def clipped_actions(
    dataset: EpisodeDataset, box: dict[str, Tensor], *, of_task: bool = True
) -> EpisodeDataset:
    """Return the dataset with actions in a box, of the task or of `init`; warns if any were outside."""
    low, high = box["min"].to(dataset.actions), box["max"].to(dataset.actions)
    inside = dataset.actions.clamp(low, high)
    outside = int((inside != dataset.actions).sum())
    if not outside:
        return dataset
    share, (whose, why) = 100 * outside / dataset.actions.numel(), _CLIPPED[of_task]
    _log.warning(
        "%s: %d action entries (%.2g %%) lie outside the box of %s; they are clipped to it, %s.",
        dataset.source, outside, share, whose, why,
    )  # fmt: skip
    return replace(dataset, actions=inside)


def warn_of_actions_outside(dataset: EpisodeDataset, low: Any, high: Any) -> None:
    """Warn once if actions lie outside of limits (Da,), which training does not read."""
    low, high = (torch.tensor(side, dtype=dataset.actions.dtype) for side in (low, high))
    margin = _ROUNDING * (high - low)
    outside = (dataset.actions < low - margin) | (dataset.actions > high + margin)
    if share := float(outside.any(dim=1).double().mean()):
        _log.warning(
            "%s: %.3g %% of the actions lie outside action_low and action_high; training does not clip them, "
            "a robot would. Are they in the same units, such as radians?", dataset.source, 100 * share,
        )  # fmt: skip
