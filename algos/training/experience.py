"""What a rollout leaves to algorithms that learn from a replay: its transitions, and how its episodes went.

Legend: T chunk steps of a collection, N environments, A = Ta Da.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from algos.base import Metrics
from algos.training.observations import encode, flat_state, mapped
from envs.rollouts.episodes import EpisodeRow
from envs.rollouts.rollout import Rollout
from envs.rollouts.starts import LED
from policies.policy import Policy
from policies.protocols import Observation


@torch.no_grad()
def transitions_of(rollout: Rollout, policy: Policy, *, trains_encoder: bool = False) -> dict[str, Any]:
    """Return the T N transitions of a rollout by name, with what its actor recorded.

    Conditions are features; with `trains_encoder` they are states and goals, physical and flat, and images
    are kept beside them.

    A chunk that ends its episode is recorded whole, including actions that were not executed. After
    termination the next condition is that of the next episode; the discount of 0 removes its value.
    """
    read = flat_state if trains_encoder else lambda obs: encode(policy, obs).vec
    cond = read(rollout.obs) if trains_encoder else rollout.record["cond"]
    next_cond = _successors(cond, rollout, read)
    parts = {name: getattr(rollout, name) for name in ("rewards", "length", "terminated", "truncated")}
    parts |= {**rollout.record, "cond": cond, "next_cond": next_cond}
    found: dict[str, Any] = {name: part.flatten(0, 1) for name, part in parts.items()}
    if trains_encoder:
        images = {camera: rollout.obs[camera] for camera in policy.images}
        following = {c: _successors(seen, rollout, itemgetter(c)) for c, seen in images.items()}
        for name, seen in (("images", images), ("next_images", following)):
            found[name] = mapped(seen, lambda part: part.flatten(0, 1))
    return found


def _successors(values: Tensor, rollout: Rollout, read: Callable[[Observation], Tensor]) -> Tensor:
    """Return what follows values (T, N, ...) read from observations."""
    last = read(rollout.next_obs_last).to(values.device)
    following = torch.cat([values[1:], last[None]])
    if len(rollout.final_index):
        final = read(rollout.final_obs).to(values.device)
        following[rollout.final_index[:, 0], rollout.final_index[:, 1]] = final
    return following


def summary(rows: list[EpisodeRow], has_success: bool) -> Metrics:
    """Return the metrics of finished episodes."""
    metrics: Metrics = {"rollout/episodes": float(len(rows))}
    if rows:
        metrics["rollout/return"] = sum(row.return_ for row in rows) / len(rows)
        metrics["rollout/episode_length"] = sum(float(row.length) for row in rows) / len(rows)
    if rows and has_success:
        metrics["rollout/success"] = sum(float(row.success) for row in rows) / len(rows)
    return metrics | led(rows)


def led(rows: list[EpisodeRow]) -> Metrics:
    """Return the mean number of steps before the starts of episodes; nothing where none is led."""
    steps = [row.metrics[LED] for row in rows if LED in row.metrics]
    return {f"rollout/{LED}": sum(steps) / len(steps)} if steps else {}
