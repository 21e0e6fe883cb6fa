"""An expert that watches a policy takes over before it fails, and hands back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions

from envs.datasets.windows import DECISION
from envs.make import env as make_env
from envs.rollouts.supervised import CORRECTED, SupervisedPlayer, require_takeover
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError
from policies.policy_config import ChunkSpec, PolicyConfig


class Straight:
    """Drives towards the finish line, into the pillars."""

    chunk = ChunkSpec(2, horizon=4, act_steps=4)
    noise_shape = (1,)

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.randn(n, 1, generator=generator)

    def act(self, obs: Any, *, noise: torch.Tensor | None = None) -> torch.Tensor:
        assert noise is not None
        return torch.tensor([0.0, 0.7]) + 0.1 * noise[:, None].expand(len(noise), 4, 2)


@pytest.mark.parametrize("rows", ["fixed", "moved"])
def test_the_expert_leads_a_policy_around_the_pillars(rows: str) -> None:
    player = SupervisedPlayer(Straight(), make_env("avoid", rows=rows), expert_steps=8)
    alone, helped = ([player.play(seed, watched=watched) for seed in range(6)] for watched in (False, True))
    player.close()
    assert not any(one.extras[CORRECTED].any() for one in alone)
    assert sum(one.success for one in alone) <= 1 and sum(one.success for one in helped) >= 5
    for one in helped:
        corrected = one.extras[CORRECTED]
        assert (
            not corrected.all() and one.extras[DECISION][corrected].all()
        )  # the expert decides at every step


def test_looking_ahead_changes_nothing_where_the_policy_succeeds() -> None:
    """The rows before the first correction are those of the episode that nobody watched."""
    player = SupervisedPlayer(Straight(), make_env("avoid"), expert_steps=8)
    alone, helped = (player.play(3, watched=watched) for watched in (False, True))
    player.close()
    first = int(helped.extras[CORRECTED].argmax())
    assert first > 0
    np.testing.assert_array_equal(alone.observations[:first], helped.observations[:first])
    np.testing.assert_array_equal(alone.actions[:first], helped.actions[:first])


def test_a_task_whose_expert_cannot_take_over_is_refused() -> None:
    with pytest.raises(CapabilityError, match=mentions("hopper avoid")):
        require_takeover(make_env("hopper"))


def test_a_policy_that_reads_goals_gets_those_of_the_episode() -> None:
    pytest.importorskip("gymnasium_robotics", reason="needs the extra 'mazes'")
    task = make_env("pointmaze-umaze", goal="separate", max_episode_steps=2)
    parts = PolicyConfig(horizon=1, act_steps=1, backbone=MlpConfig(width=8, time_dim=4))
    policy = build_policy(parts, obs_dim=4, action_dim=2, goal_dim=2).eval()
    player = SupervisedPlayer(policy, task, expert_steps=1)
    played = player.play(0, watched=False)
    player.close()
    assert len(played) == 2
