"""Episodes that a policy plays, as they are recorded in datasets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from envs.datasets.episode import Episode
from envs.datasets.windows import DECISION
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings
from envs.rollouts.episodes import EpisodeRow
from envs.rollouts.fleet import LOCAL, Fleet
from envs.rollouts.player import EvaluatedPolicy
from envs.spec import EnvConfig

TOGETHER = 20  # episodes that a process plays side by side


def policy_episodes(
    policy: EvaluatedPolicy,
    env: EnvConfig,
    *,
    first_seed: int,
    num_workers: int = 0,
    fleet: Fleet = LOCAL,
    skip: int = 0,
) -> Iterator[Episode]:
    """Play a policy without end, one episode per seed from `first_seed` on; equal for any workers.

    With `skip` the first episodes are left out, and the others are the same.

    Actions are those that were executed, inside the task's box. The noise of an episode depends on its place
    in the order alone. Every step is stored with whether the policy decided there or went on with a chunk,
    and with the goal that stands beside the state, if any.

    Raises:
        ConfigError: If policy and task do not fit.
    """
    parts = max(1, num_workers)
    for part in count(skip // TOGETHER, parts):
        settings = EvaluationSettings(
            episodes=parts * TOGETHER,
            first_seed=first_seed + part * TOGETHER,
            noise_seed=part,
            num_envs=parts * TOGETHER,
        )
        rows = evaluate(
            policy,
            env,
            settings,
            num_workers=num_workers,
            fleet=fleet,
            keep_observations=True,
            noise_span=TOGETHER,
        ).rows
        for row in rows[max(skip - part * TOGETHER, 0) :]:
            yield _episode(row, env, policy.chunk.act_steps)


def _episode(row: EpisodeRow, env: EnvConfig, act_steps: int) -> Episode:
    assert row.observations is not None and row.actions is not None and row.rewards is not None
    return Episode(
        observations=row.observations,
        actions=np.clip(row.actions, env.spec.action_low, env.spec.action_high).astype(np.float32),
        rewards=row.rewards,
        terminated=row.terminated,
        truncated=row.truncated,
        success=row.success,
        seed=row.seed,
        extras={DECISION: np.arange(row.length) % act_steps == 0, **_goals(row, env)},
    )


def _goals(row: EpisodeRow, env: EnvConfig) -> dict[str, Any]:
    """Return the goal of every step, which is that of the episode; empty without separate goals."""
    if not env.spec.goal_dim:
        return {}
    vector = env.make_vector(1)
    try:
        vector.reset([row.seed])
        return {"goal": np.repeat(vector.goals()["goal"], row.length, axis=0)}
    finally:
        vector.close()
