"""Mazes whose goal is no part of the state: told beside it, recorded, cloned, followed and exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataset_files import write_d4rl_maze
from messages import mentions

from algos.base import Setup
from algos.bc import BcConfig
from envs.datasets import EpisodeDataset, read_dataset, write_dataset
from envs.datasets.array_storage import Disk
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings as Settings
from envs.fit import with_task_observations
from envs.make import env
from envs.rollouts.collect import collect
from envs.spec import GoalTask
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.export.export import export_onnx
from policies.export.exported_policy import ExportedPolicy
from policies.policy import Policy, PolicyConfig
from policies.processes.edm import Edm
from policies.samplers.ode import Euler

pytest.importorskip("gymnasium_robotics", reason="needs the extra 'mazes'")

QUICK = {"control": "waypoint", "hold": 10, "max_episode_steps": 60}


def task(goal: str = "separate", name: str = "pointmaze-umaze") -> Any:
    return env(name, goal=goal, **(QUICK if name.startswith("point") else {}))


@pytest.fixture(scope="module")
def demonstrations() -> EpisodeDataset:
    return collect(task(), episodes=6, first_seed=100)


def blank(goal_dim: int = 2, **changes: object) -> Policy:
    """A small guided policy that was not trained."""
    config = PolicyConfig(
        process=Edm(),
        sampler=Euler(steps=3),
        backbone=MlpConfig(width=16, time_dim=8),
        horizon=4,
        act_steps=4,
        **changes,
    )
    unit = {
        name: {
            "min": -torch.ones(dim),
            "max": torch.ones(dim),
            "mean": torch.zeros(dim),
            "std": torch.ones(dim),
        }
        for name, dim in (("state", 4), ("goal", goal_dim), ("action", 2))
        if dim
    }
    return build_policy(config, obs_dim=4, action_dim=2, goal_dim=goal_dim, statistics=unit, seed=3)


@pytest.mark.parametrize("name", ["pointmaze-umaze", "antmaze-umaze"])
def test_goal_and_state_together_are_what_was_one_vector(name: str) -> None:
    apart, joint = (task(goal, name).make_vector(3, obs_steps=2) for goal in ("separate", "appended"))
    assert apart.spec.goal_dim == 2 and joint.spec.goal_dim == 0 and joint.goals() == {}
    assert apart.spec.obs_names == joint.spec.obs_names[:-2]
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 2, apart.spec.action_dim))
    for got, expected in (
        (apart.reset([1, 2, 3]), joint.reset([1, 2, 3])),
        (apart.step_chunk(actions).obs, joint.step_chunk(actions).obs),
        (apart.reset([9], [1]), joint.reset([9], [1])),
    ):
        np.testing.assert_array_equal(got, expected[..., :-2])
    told = apart.goals([2, 1])["goal"]
    np.testing.assert_array_equal(told, joint.step_chunk(actions).obs[[2, 1], -1, -2:])
    apart.close()
    joint.close()


def test_demonstrations_record_the_goal_of_every_step_and_keep_it_on_disk(
    demonstrations: EpisodeDataset, tmp_path: Path
) -> None:
    joint = collect(task("appended"), episodes=6, first_seed=100)
    whole = torch.cat([demonstrations.observations, demonstrations.extras["goal"].float()], dim=1)
    assert torch.equal(whole, joint.observations) and torch.equal(demonstrations.actions, joint.actions)
    for form, out in (("robomimic", "a.hdf5"), ("d4rl", "b.hdf5"), ("minari", "c-v0")):
        write_dataset(tmp_path / out, demonstrations, task(), format=form)
        again = read_dataset(tmp_path / out)
        assert torch.equal(again.extras["goal"].float(), demonstrations.extras["goal"].float()), form
        assert torch.equal(again.observations, demonstrations.observations), form


def test_recorded_goals_end_the_states_of_tasks_that_have_them_there(
    demonstrations: EpisodeDataset, tmp_path: Path
) -> None:
    """What was recorded beside the state is what a task with the goal in its state would have recorded."""
    joint = collect(task("appended"), episodes=6, first_seed=100)
    shown = with_task_observations(task("appended"), demonstrations)
    assert torch.equal(shown.observations, joint.observations) and "goal" not in shown.extras
    assert shown.next_observations is not None and joint.next_observations is not None
    assert torch.equal(shown.next_observations, joint.next_observations)
    assert with_task_observations(task("separate"), demonstrations) is demonstrations
    assert with_task_observations(task("appended"), joint) is joint
    on_disk = with_task_observations(task("appended"), replace(demonstrations, storage=Disk(tmp_path)))
    assert torch.equal(on_disk.observations, joint.observations)
    bare = with_task_observations(task("appended"), replace(demonstrations, next_observations=None))
    assert bare.next_observations is None and torch.equal(bare.observations, joint.observations)


def test_a_goal_that_moves_within_an_episode_is_that_of_the_next_frame_afterwards(tmp_path: Path) -> None:
    data = read_dataset(write_d4rl_maze(tmp_path / "maze.hdf5", 4, 2))
    moving = torch.arange(120.0).view(60, 2)
    known = replace(data, next_observations=data.observations.roll(-1, 0), extras={"goal": moving})
    following = with_task_observations(task("appended"), known).next_observations
    assert following is not None
    assert following[:, -2:].tolist() == [
        moving[frame if frame % 20 == 19 else frame + 1].tolist() for frame in range(60)
    ]


def test_states_that_lack_a_goal_nobody_recorded_are_refused(demonstrations: EpisodeDataset) -> None:
    wide = replace(demonstrations, extras={"goal": torch.zeros(demonstrations.num_frames, 3)})
    for data, found in ((replace(demonstrations, extras={}), "no goals"), (wide, "(3,)")):
        with pytest.raises(ConfigError, match=mentions(f"6 2 {found}")):
            with_task_observations(task("appended"), data)


def test_positions_in_walls_are_told(
    demonstrations: EpisodeDataset, caplog: pytest.LogCaptureFixture
) -> None:
    """D4RL counts from a corner: the same way through the maze, in other numbers."""
    layout = task().layout
    assert layout.is_free(layout.centers).all()
    assert not layout.is_free(np.array([layout.center(wall) for wall in layout.walls])).any()
    with_task_observations(task(), demonstrations)
    assert not caplog.records
    moved = demonstrations.observations + torch.tensor([1.0, 1.0, 0.0, 0.0])
    with caplog.at_level("WARNING"):
        with_task_observations(task("appended"), replace(demonstrations, observations=moved))
    assert "positions lie in walls of env=pointmaze-umaze" in caplog.text


def test_a_guided_score_model_is_cloned_evaluated_and_exported_with_goals_as_goals(
    demonstrations: EpisodeDataset, tmp_path: Path
) -> None:
    config = blank(goal_dropout=0.1).config
    setup = Setup(policy=config, env=task(), dataset=demonstrations)
    algorithm = BcConfig(steps=30, batch_size=64, warmup_steps=5, validation_fraction=0.2).build(setup)
    losses = [float(algorithm.advance()["policy/loss"])]
    policy = algorithm.snapshot()
    assert isinstance(policy, DenoisingPolicy) and policy.goal_dim == 2 and np.isfinite(losses).all()
    guided = policy.with_guidance(2.0)
    found = evaluate(guided, task(), Settings(episodes=3, num_envs=2))
    export_onnx(guided, tmp_path / "out", batch_sizes=(2,), latency_batches=())
    exported = ExportedPolicy(tmp_path / "out")
    assert exported.goal_dim == 2
    other = evaluate(exported, task(), Settings(episodes=3, num_envs=2))
    np.testing.assert_allclose(other.values("return"), found.values("return"))
    assert [row.length for row in other.rows] == [row.length for row in found.rows]


def test_a_policy_that_is_told_a_goal_goes_where_its_goal_says() -> None:
    """In place of a network, a rule: the action is the goal. The evaluation has to tell the episode's own."""

    class Rule:
        chunk, noise_shape, obs_dim, goal_dim = blank().chunk, (4, 2), 4, 2

        def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> torch.Tensor:
            return torch.zeros(n, 4, 2)

        def act(self, obs: dict[str, torch.Tensor], *, noise: Any = None) -> torch.Tensor:
            return obs["goal"][:, None].expand(-1, 4, -1)

    rows = evaluate(Rule(), task(), Settings(episodes=5, num_envs=2), keep_observations=True).rows  # type: ignore[arg-type]
    for row in rows:
        vector = task("appended").make_vector(1)
        goal = vector.reset([row.seed])[0, -1, -2:]
        assert row.actions is not None
        np.testing.assert_allclose(row.actions, np.broadcast_to(goal, row.actions.shape), rtol=1e-6)
        vector.close()


def test_without_a_task_goals_are_the_datasets_where_they_are_dropped(demonstrations: EpisodeDataset) -> None:
    quick = BcConfig(steps=10, warmup_steps=1)
    for dropout, goal_dim in ((0.1, 2), (0.0, 0)):
        setup = Setup(policy=blank(goal_dropout=dropout).config, dataset=demonstrations)
        assert quick.build(setup).snapshot().goal_dim == goal_dim


def test_what_has_no_use_for_goals_is_refused_by_name(demonstrations: EpisodeDataset) -> None:
    bare = replace(demonstrations, extras={})
    quick = BcConfig(steps=10, warmup_steps=1)
    with pytest.raises(ConfigError, match=mentions("goal env.goal=appended")):
        quick.build(Setup(policy=blank().config, env=task(), dataset=bare))
    wide = replace(demonstrations, extras={"goal": torch.zeros(demonstrations.num_frames, 3)})
    with pytest.raises(ConfigError, match=r"goals of width 2; those of .* have width 3"):
        quick.build(Setup(policy=blank().config, env=task(), dataset=wide))
    with pytest.raises(ConfigError, match=mentions("env.goal none appended separate")):
        task("none")
    with pytest.raises(ConfigError, match=mentions("2 0 goal width policy")):
        evaluate(blank(goal_dim=0), task(), Settings(episodes=1))


@pytest.mark.parametrize("options", [{}, {"reward": "dense"}, {"continuing": True}])
def test_the_rule_for_any_goal_is_the_rule_of_the_task(options: dict[str, Any]) -> None:
    maze = replace(task(), **options)
    assert isinstance(maze, GoalTask)
    vector = maze.make_vector(2)
    vector.reset([0, 1])
    far, near = vector.goals()["goal"].copy(), False
    vector.stepper._goal[1] = vector.stepper._start[1] + 0.3  # reached within a few steps
    for _ in range(8):
        goals = vector.goals()["goal"]
        step = vector.step_chunk(np.tile(goals[:, None] / 2, (1, 2, 1)))
        reward, over = maze.outcome(step.path, goals[:, None].repeat(2, axis=1))
        executed = np.arange(2) < step.length[:, None]
        assert np.array_equal(step.rewards, np.where(executed, reward, 0.0))
        assert np.array_equal(step.terminated, (over & executed).any(axis=1))
        assert np.array_equal(maze.achieved_goal(step.path), step.path[..., :2])
        near = near or bool((step.rewards[1] > 0.7).any())
        if step.done.any():
            break
    assert near and np.array_equal(vector.goals()["goal"][0], far[0])


def test_drawings_without_goals_have_no_rings() -> None:
    lines = []
    for goal in ("appended", "separate"):
        episode = task(goal).demonstrate(0)
        axes = task(goal).figure({"": ([episode.observations], [True])}).axes[0]
        lines.append(len(axes.lines))
    assert lines[0] == lines[1] + 1
