"""A policy beside recorded episodes, without a simulator: what it would do where something else was done.

At every decision the policy sees the recorded observations; the actions that it would execute are compared
with the recorded ones. Errors do not add up over time as they do when the policy acts, and where several
ways are right another one counts as an error: this is a check of a policy, not a measure of success.

Legend: E episodes, F frames, B decisions, Ta executed steps, Da action width; j an entry of an action::

    unexplained variance of an episode = mean over j of  mean (a_j - b_j)^2 / variance of b_j

with b the recorded actions; their variance is that of all that are compared, every episode counting alike.
The mean action reaches 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.datasets.episodes import EpisodeDataset
from envs.datasets.goals import with_goals_in_states
from envs.datasets.windows import DECISION, Windows
from envs.evaluation.comparison import Comparison
from envs.evaluation.intervals import Interval, bootstrap_mean, paired_difference
from envs.evaluation.protocol import with_settings
from envs.evaluation.settings import EvaluationSettings
from envs.fit import require_fit
from envs.rollouts.player import EpisodeRunner
from envs.spec import Array
from policies.errors import ConfigError

QUANTITY = "unexplained variance"
_DECISIONS = 256  # at once
_CONSTANT = 1e-6  # deviation of an entry that does not vary, relative to its size


@dataclass(frozen=True)
class OpenLoop:
    """Errors of a policy on recorded episodes.

    Shapes:
        squared: (E, Da) mean squared error of every episode, squared physical units.
        deviation: (Da,) standard deviation of the recorded actions; 0 where they do not vary.
    """

    squared: Array
    deviation: Array

    @property
    def rmse(self) -> Array:
        """Root of the mean squared error over episodes, (Da,), physical units."""
        return np.sqrt(self.squared.mean(axis=0))

    @property
    def unexplained(self) -> Array:
        """Unexplained variance of every entry, (Da,); NaN where the recorded actions do not vary."""
        return np.where(self.deviation > 0, self.rmse**2 / np.maximum(self.deviation, 1e-30) ** 2, np.nan)

    def by_episode(self) -> Array:
        """Return the unexplained variance of every episode, (E,)."""
        varies = self.deviation > 0
        share: Array = (self.squared[:, varies] / self.deviation[varies] ** 2).mean(axis=1)
        return share

    def summary(self) -> Interval:
        """Return the mean over episodes with its interval."""
        return bootstrap_mean(self.by_episode())


def open_loop(
    policy: Any,
    dataset: EpisodeDataset,
    settings: EvaluationSettings,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> OpenLoop:
    """Compare a policy with the first `settings.episodes` episodes of a dataset.

    Args:
        policy: The policy; unchanged.
        dataset: Episodes, of the observations, goals and images that the policy reads.
        settings: Noise, steps and guidance; seeds of episodes have no use. The noise of an episode depends on
            its place alone.
        on_progress: Called with (decisions that were made, all).

    Raises:
        ConfigError: If policy and data do not fit, no recorded action varies, the data lack goals that the
            policy reads, or a setting needs episodes that are played.
        DatasetError: If the data lack a camera that the policy reads.
    """
    view = with_recorded(policy, settings)
    dataset = as_seen(policy, dataset)
    runner = EpisodeRunner(
        view, settings.first_seed, settings.noise_seed, settings.start_noise, settings.sampling_noise, False
    )
    windows = Windows(dataset, view.chunk, cameras=tuple(getattr(policy, "images", None) or ()))
    decides = windows.steps % view.chunk.act_steps == 0
    episode = torch.searchsorted(dataset.episode_start, windows.frames, right=True) - 1
    index = (decides & (episode < settings.episodes)).nonzero().squeeze(1)
    episode, goal = episode[index], None
    if getattr(policy, "goal_dim", 0):
        goal = dataset.storage.take(dataset.extras["goal"], windows.frames[index]).float()
    found: list[Tensor] = []
    made = 0
    generators = {place: runner.generator(place) for place in episode.unique().tolist()}
    for rows in torch.arange(len(index)).split(_DECISIONS):
        batch = windows.gather(index[rows])
        obs = {"state": batch.obs, **batch.images} | ({} if goal is None else {"goal": goal[rows]})
        noise = [runner.noise(generators[place]) for place in episode[rows].tolist()]
        with torch.inference_mode():
            action = view.act(obs, noise=torch.stack(noise)).cpu()
        real, wanted = batch.mask[:, view.chunk.executed], batch.action[:, view.chunk.executed]
        of = episode[rows, None].expand_as(real)[real]
        found.append(torch.column_stack([of, (action - wanted)[real].square(), wanted[real]]).double())
        made += len(rows)
        if on_progress is not None:
            on_progress(made, len(index))
    errors = _summed_up(torch.cat(found).numpy(), dataset.action_dim)
    if not (errors.deviation > 0).any():
        raise ConfigError(f"{dataset.source}: no entry of the recorded actions varies; nothing to compare.")
    return errors


def _summed_up(rows: Array, action_dim: int) -> OpenLoop:
    """Return the errors of executed actions: rows of episode, Da squared errors, and Da recorded entries."""
    episodes = np.split(rows[:, 1:], np.flatnonzero(np.diff(rows[:, 0])) + 1)
    squared, recorded = zip(*(np.split(part, [action_dim], axis=1) for part in episodes), strict=True)
    mean = np.mean([part.mean(axis=0) for part in recorded], axis=0)
    deviation = np.sqrt(np.mean([((part - mean) ** 2).mean(axis=0) for part in recorded], axis=0))
    deviation[deviation <= _CONSTANT * np.abs(np.concatenate(recorded)).max(axis=0)] = 0.0
    return OpenLoop(np.stack([part.mean(axis=0) for part in squared]), deviation)


def with_recorded(policy: Any, settings: EvaluationSettings) -> Any:
    """Return the policy with the settings' steps and guidance; see `envs.evaluation.protocol.with_settings`.

    Raises:
        ConfigError: If a setting does not fit the policy, or needs episodes that are played.
    """
    if settings.warm_start.is_on or settings.steer.is_on:
        raise ConfigError("warm_start and steer need episodes that are played. Leave them out with dataset.")
    return with_settings(policy, settings)


def compare_open_loop(before: OpenLoop, after: OpenLoop) -> Comparison:
    """Compare two policies on the same recorded episodes."""
    a, b = before.by_episode(), after.by_episode()
    return Comparison(QUANTITY, float(a.mean()), float(b.mean()), paired_difference(a, b), len(a), True)


def as_seen(policy: Any, dataset: EpisodeDataset) -> EpisodeDataset:
    """Return the dataset in the policy's observations, deciding anywhere; goals may end the states.

    Raises:
        ConfigError: If policy and data do not fit.
    """
    extras = {key: value for key, value in dataset.extras.items() if key != DECISION}
    goals, width = extras.get("goal"), getattr(policy, "goal_dim", 0)
    dataset = replace(dataset, extras=extras)
    if not width and goals is not None and goals.shape[1:] == (policy.obs_dim - dataset.obs_dim,):
        dataset = with_goals_in_states(dataset)
    require_fit("the policy", policy, dataset.source, dataset, advice="Use data of the same robot.")
    if width and (goals is None or goals.shape[1:] != (width,)):
        found = "none" if goals is None else f"goals of shape {tuple(goals.shape[1:])}"
        raise ConfigError(
            f"the policy reads goals of width {width}, but {dataset.source} has {found}: give every frame "
            f"a 'goal' ({width},)."
        )
    return dataset
