"""Evaluating a policy along a sketch: the protocol says so, and nothing else changes a number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from messages import mentions

from envs.evaluation.evaluate import Evaluation, evaluate
from envs.evaluation.settings import EvaluationSettings as Settings
from envs.tasks.avoid.task import Avoid
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError, ConfigError
from policies.execution.replanning import WarmStart
from policies.policy import Policy, PolicyConfig
from policies.processes import VPDiffusion
from policies.samplers.ddpm import DDPM
from policies.wrappers.sketch_settings import STRATEGIES, SketchSettings

TASK = Avoid(max_episode_steps=13)
WAY = {"positions": [[0.0, 0.0], [-0.06, 0.14], [0.0, 0.27]], "pace": 0.015, "reach": 0.02}


@pytest.fixture
def way(tmp_path: Path) -> str:
    path = tmp_path / "way.json"
    path.write_text(json.dumps(WAY))
    return str(path)


def policy_of() -> Policy:
    """A real policy that executes four of six rows."""
    config = PolicyConfig(
        process=VPDiffusion(prediction="eps"),
        backbone=MlpConfig(width=13, time_dim=6),
        sampler=DDPM(steps=4),
        horizon=6,
        normalizer={"state": "identity", "action": "identity"},
    )
    return build_policy(config, obs_dim=TASK.spec.obs_dim, action_dim=TASK.spec.action_dim, seed=3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_episodes_do_not_depend_on_their_neighbours(strategy: str, way: str) -> None:
    policy, steer = policy_of(), SketchSettings(strategy, way)
    expected = evaluate(policy, TASK, Settings(episodes=5, num_envs=1, steer=steer))
    assert evaluate(policy, TASK, Settings(episodes=5, steer=steer, num_envs=4)).rows == expected.rows


def test_worker_processes_change_nothing(way: str) -> None:
    policy, steer = policy_of(), SketchSettings("output_perturbation", way)
    expected = evaluate(policy, TASK, Settings(episodes=4, steer=steer))
    assert (
        evaluate(policy, TASK, Settings(episodes=4, steer=steer, num_envs=2), num_workers=2).rows
        == expected.rows
    )


def test_a_sketch_changes_what_is_done(way: str) -> None:
    plain, on = (
        evaluate(policy_of(), TASK, Settings(episodes=3, steer=steer), keep_observations=True)
        for steer in (SketchSettings(), SketchSettings("guided_diffusion", way))
    )
    assert plain.protocol_hash != on.protocol_hash
    ends = [[row.observations[-1, 1] for row in evaluation.rows] for evaluation in (plain, on)]
    assert min(ends[1]) > max(ends[0])  # an untrained policy wanders, the sketch leads up


def test_the_protocol_holds_the_sketch_itself(way: str) -> None:
    evaluation = evaluate(
        policy_of(), TASK, Settings(episodes=1, steer=SketchSettings("post_hoc_ranking", way, candidates=3))
    )
    assert evaluation.protocol["steer"]["sketch"] == {**WAY, "observed": [0, 1]}
    assert evaluation.protocol["steer"]["candidates"] == 3
    assert Evaluation.from_json(evaluation.to_json()).protocol_hash == evaluation.protocol_hash
    assert evaluate(policy_of(), TASK, Settings(episodes=1)).protocol["steer"] is None


def test_switches_that_exclude_each_other_are_refused(way: str) -> None:
    for options, message in (
        ({"start_noise": "zero"}, "start_noise=zero"),
        ({"warm_start": WarmStart(steps=2)}, "warm_start"),
        ({"steer": SketchSettings("random")}, "steer.sketch"),
    ):
        with pytest.raises(ConfigError, match=mentions(message)):
            evaluate(
                policy_of(), TASK, Settings(episodes=1, **{"steer": SketchSettings("random", way), **options})
            )


def test_a_policy_without_a_plan_is_refused(way: str) -> None:
    class Scripted:
        chunk = policy_of().chunk
        noise_shape = (6, 2)

    with pytest.raises(CapabilityError, match=mentions("Scripted")):
        evaluate(Scripted(), TASK, Settings(episodes=1, steer=SketchSettings("random", way)))  # type: ignore[arg-type]
