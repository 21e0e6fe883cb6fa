"""Hindsight: copies of transitions whose goal is one that their episode reached later.

Legend: T chunk steps, N environments, n transitions of an episode, k copies, M relabelled transitions,
Ta executed steps, Do state width.

For transition i of a finished episode, the ends of k chunks j >= i are drawn, and the goal reached there
replaces the episode's own. Rewards and ends of the executed steps follow from the task's rule: a chunk ends
where the task would have ended. Latents and chunks stay those that were executed.

Source: hindsight experience replay, arXiv 1707.01495, strategy "future". Deviations: goals are ends of
chunks; copies are stored when an episode ends instead of drawn with each batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from algos.training.serialization import capture_generator, restore_generator
from envs.rollouts.collector import map_leaves
from envs.rollouts.rollout import Rollout
from envs.spec import GoalTask
from policies.errors import CapabilityError, ConfigError
from policies.policy import Policy

_KEPT = ("cond", "next_cond", "latent", "action", "length", "terminated", "truncated")


class Hindsight:
    """Keeps running episodes and relabels finished ones.

    Args:
        env: The task; its goals are beside the state.
        policy: The policy, whose conditions end with the goal.
        copies: k.
        generator: Draws the goals.
        is_flat: Conditions are physical states and goals (`flat_state`), not features.

    Raises:
        ConfigError: If the task has no separate goals, or no rule for others than its own.
        CapabilityError: If the goal is not the end of the policy's condition.
    """

    def __init__(
        self, env: Any, policy: Policy, *, copies: int, generator: torch.Generator, is_flat: bool
    ) -> None:
        if not env.spec.goal_dim or not isinstance(env, GoalTask):
            raise ConfigError(
                f"algo.hindsight needs goals beside the state, and a task that judges any goal (a maze of "
                f"gymnasium-robotics with env.goal=separate); got env={env.spec.name}. Use algo.hindsight=0."
            )
        self.env, self.policy, self.copies, self.is_flat = env, policy, copies, is_flat
        self._generator = generator
        self._running: dict[int, list[dict[str, Any]]] = {}
        _require_goal_at_the_end(policy)

    def relabelled(self, rollout: Rollout, transitions: Mapping[str, Any]) -> dict[str, Any] | None:
        """Add a rollout and its transitions; return copies of what finished, as arguments of `Replay.add`."""
        assert rollout.path is not None
        transitions = map_leaves(transitions, Tensor.cpu)
        steps, num = rollout.length.shape
        copies = []
        for t in range(steps):
            for n in range(num):
                if rollout.first[t, n]:  # a simulator without a state begins anew when a run is resumed
                    self._running.pop(n, None)
                self._running.setdefault(n, []).append(self._row(rollout, transitions, t, n))
                if rollout.terminated[t, n] or rollout.truncated[t, n]:
                    copies.append(self._relabel(_stacked(self._running.pop(n))))
        return _concatenated(copies) if copies else None

    def _row(self, rollout: Rollout, transitions: Mapping[str, Any], t: int, n: int) -> dict[str, Any]:
        place = t * rollout.length.shape[1] + n
        row: dict[str, Any] = {name: transitions[name][place] for name in _KEPT}
        row |= {
            name: {camera: images[place] for camera, images in transitions[name].items()}
            for name in ("images", "next_images")
            if name in transitions
        }
        assert rollout.path is not None
        return row | {"path": rollout.path[t, n]}

    def _relabel(self, episode: dict[str, Any]) -> dict[str, Any]:
        """Return the k n relabelled transitions of an episode."""
        count, path, length = len(episode["length"]), episode["path"], episode["length"]
        row = torch.arange(count).repeat(self.copies)
        share = torch.rand(len(row), generator=self._generator, device=self._generator.device).cpu()
        later = row + (share * (count - row)).long()
        ends = path[torch.arange(count), length - 1]  # (n, Do)
        goal = torch.from_numpy(self.env.achieved_goal(ends.double().numpy())).float()[later]
        copies = {name: _rows(part, row) for name, part in episode.items() if name != "path"}
        for name in ("cond", "next_cond"):
            copies[name] = self._with_goal(copies[name], goal)
        return copies | self._judge(path[row], goal, copies["length"])

    def _with_goal(self, cond: Tensor, goal: Tensor) -> Tensor:
        width = goal.shape[1]
        goal = goal if self.is_flat else self.policy.normalizer.encode("goal", goal.to(self.policy.device))
        return torch.cat([cond[:, :-width], goal.to(cond)], dim=1)

    def _judge(self, path: Tensor, goal: Tensor, length: Tensor) -> dict[str, Tensor]:
        """Return rewards (M, Ta), executed steps and terminations (M,) of paths (M, Ta, Do) under goals."""
        goals = goal[:, None].expand(-1, path.shape[1], -1)
        reward, over = (torch.from_numpy(x) for x in self.env.outcome(path.double().numpy(), goals.numpy()))
        step = torch.arange(path.shape[1])
        over = over & (step < length[:, None])
        ended = over.any(dim=1)
        length = torch.where(ended, over.int().argmax(dim=1) + 1, length)
        rewards = torch.where(step < length[:, None], reward.float(), torch.zeros(()))
        return {"rewards": rewards, "length": length, "terminated": ended}

    def state_dict(self) -> dict[str, Any]:
        running = {str(n): _stacked(rows) for n, rows in self._running.items()}
        return {"running": running, "generator": capture_generator(self._generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._running = {int(n): _unstacked(rows) for n, rows in state["running"].items()}
        restore_generator(self._generator, state["generator"])


def _require_goal_at_the_end(policy: Policy) -> None:
    steps, width = policy.chunk.obs_steps, policy.goal_dim
    obs: dict[str, Tensor] = {"state": torch.zeros(1, steps, policy.obs_dim)}
    obs |= {c: torch.zeros(1, steps, *shape, dtype=torch.uint8) for c, shape in policy.images.items()}
    with torch.no_grad():
        conds = [
            policy.encode(policy.observation({**obs, "goal": torch.full((1, width), value)})).vec
            for value in (0.0, 1.0)
        ]
    differs = (conds[0] != conds[1]).squeeze(0)
    if bool(differs[:-width].any()):
        raise CapabilityError(
            "algo.hindsight replaces the goal at the end of a policy's condition; this policy reads it "
            "elsewhere too, as compositions do. Use algo.hindsight=0, or one policy."
        )


def _rows(part: Any, row: Tensor) -> Any:
    if isinstance(part, Mapping):
        return {name: value[row.to(value.device)] for name, value in part.items()}
    return part[row.to(part.device)]


def _stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: {c: torch.stack([row[name][c] for row in rows]) for c in first}
        if isinstance(first, Mapping)
        else torch.stack([row[name] for row in rows])
        for name, first in rows[0].items()
    }


def _unstacked(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    count = len(rows["length"])
    return [
        {
            n: {c: x[i] for c, x in part.items()} if isinstance(part, Mapping) else part[i]
            for n, part in rows.items()
        }
        for i in range(count)
    ]


def _concatenated(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: {c: torch.cat([part[name][c] for part in parts]) for c in first}
        if isinstance(first, Mapping)
        else torch.cat([part[name] for part in parts])
        for name, first in parts[0].items()
    }
