"""A fleet's learner clones what went well or was corrected, whatever the order in which it arrived."""

from __future__ import annotations

from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleet_episodes import fleet_episode
from small_cloning import weights
from small_policies import policy_for, small_policy

from algos.cloning.fleet import SHARES, FleetCloning, merge, online_share
from algos.cloning.fleet_run import EPISODES, FleetRun, summary
from algos.training.run_directory import RunDirectory
from envs.datasets.curation import SAMPLING_WEIGHT
from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeDataset
from envs.make import env as make_env
from policies.errors import CapabilityError
from policies.serving.endpoint import EndpointSettings
from policies.serving.fleet import EpisodeFiles, FleetTask

pytest.importorskip("zmq")
pytest.importorskip("msgpack")
TASK = FleetTask("env=avoid", obs_dim=4, action_dim=2, max_steps=20)
LOSSES = (0.0, 0.1, 0.7, 3.0, 1e4)


@pytest.mark.parametrize(("online", "static"), list(product(LOSSES, LOSSES)))
def test_the_share_stays_within_its_bounds_and_moves_to_the_larger_loss(online: float, static: float) -> None:
    share = online_share(online, static)
    assert SHARES[0] <= share <= SHARES[1]
    assert online_share(online + 1, static) >= share >= online_share(online, static + 1)


def test_the_share_follows_the_formula() -> None:
    assert online_share(0.0, 0.0) == 0.5
    assert online_share(0.4, 0.2) == pytest.approx(np.exp(0.6) / (np.exp(0.6) + np.exp(0.2)))
    assert (online_share(5.0, 0.0), online_share(0.0, 5.0)) == SHARES[::-1]


def test_merged_data_do_not_depend_on_the_order_of_arrival() -> None:
    same_time: dict[str, Any] = {"time": 3.0}
    episodes = [
        fleet_episode(robot="arm1", number=0, **same_time),
        fleet_episode(robot="arm22", number=0, **same_time),
        fleet_episode(robot="arm1", number=1, **same_time),
        fleet_episode(robot="arm333", number=5, time=1.0),
    ]
    digests = {merge(order, 2.0).digest() for order in permutations(episodes)}  # type: ignore[union-attr]
    assert len(digests) == 1


def test_successes_and_corrections_are_cloned_and_newer_ones_more() -> None:
    taken_over = {"watched": True, "corrected": np.array([0, 1, 1, 0, 1, 0], bool)}
    episodes = [
        fleet_episode(6, number=0, success=False, **taken_over),
        fleet_episode(6, number=1, **taken_over),
        fleet_episode(3, number=2, success=False),
        fleet_episode(3, number=3),
    ]
    found = merge(episodes, half_life=1.0)
    assert found is not None
    assert found.lengths.tolist() == [3, 2, 1, 2, 1]  # newest first: a success, then stretches of the expert
    first = found.episode_start[:-1]
    assert found.extras[SAMPLING_WEIGHT][first].tolist() == [1, 1 / 4, 1 / 4, 1 / 8, 1 / 8]
    assert found.observations[first, 0].tolist() == pytest.approx([3.04, 1.04, 1.04, 0.04, 0.04])
    assert merge([fleet_episode(success=False)], 1.0) is None


def dataset() -> EpisodeDataset:
    rng = np.random.default_rng(0)
    one = Episode(rng.normal(size=(13, 4)), rng.uniform(-1, 1, (12, 2)), np.zeros(12), True, False, True)
    return EpisodeDataset.from_episodes([one])


def fleet_run(folder: Path) -> FleetRun:
    """A run of two gradient steps per episode and a version every four."""
    place = folder / "out"
    has_run = (place / "config.yaml").exists()
    run = RunDirectory.open(place) if has_run else RunDirectory.create_at(place, {})
    learner = FleetCloning(batch_size=8).build(policy_for(make_env("avoid")), dataset())
    settings: dict[str, Any] = {"steps_per_episode": 2, "publish_every": 4, "provenance": {}}
    with run.claim():
        return FleetRun(learner, run, TASK, EndpointSettings(port=0), **settings)


def receive(run: FleetRun, *numbers: int) -> None:
    for number in numbers:
        message = {"type": "episode", "task": TASK.name, "episode": fleet_episode(number=number).to_wire()}
        run.endpoint.handle(b"gone", message, 0)


def work_off(run: FleetRun) -> None:
    run.step()
    while run.owed > 0:
        run.step()


def test_a_learner_that_is_killed_goes_on_from_its_last_version_with_all_episodes(tmp_path: Path) -> None:
    with fleet_run(tmp_path) as run:
        assert run.run.checkpoints() == [0] and run.endpoint.version == 0
        receive(run, 0, 1, 2)
        work_off(run)
        assert (run.learner.progress, run.run.checkpoints(), run.endpoint.version) == (6, [0, 4], 4)
        expected = weights(run.learner.policy)
        receive(run, 3)  # on disk; killed before it was trained on
    with fleet_run(tmp_path) as run:
        assert (run.learner.progress, run.endpoint.version, len(run.episodes), run.owed) == (4, 4, 4, 4)
        run.episodes = run.episodes[:3]
        run.learner.use(run.episodes)
        work_off(run)
        assert torch.equal(weights(run.learner.policy), expected)  # as if it had never been killed
        assert run.run.checkpoints() == [0, 4]
    with fleet_run(tmp_path) as run:
        run.serve(iter([False, True]).__next__)
        assert run.learner.progress == run.endpoint.version == run.run.latest() == 8
        assert summary(run.episodes)["robots"] == {"arm1": 4}


def test_a_learner_reports_its_fleet(tmp_path: Path) -> None:
    with fleet_run(tmp_path) as run:
        receive(run, 0, 1)
        work_off(run)
        facts = run.facts()
    assert facts["fleet/episodes"] == facts["fleet/episodes_arm1"] == 2
    assert (facts["fleet/success"], facts["fleet/lag_max"], facts["fleet/versions_in_use"]) == (1, 0, 1)
    assert 0 < facts["fleet/received_mb"] < 0.01
    files = EpisodeFiles(tmp_path / "out" / EPISODES, TASK).read()
    assert [one.to_bytes() for one in files] == [fleet_episode(number=n).to_bytes() for n in (0, 1)]


def test_a_policy_of_goals_is_refused() -> None:
    with pytest.raises(CapabilityError, match="goals"):
        FleetCloning().build(small_policy(goal_dim=3), dataset())


@pytest.mark.parametrize("share", SHARES)
def test_a_batch_of_two_has_a_row_of_the_fleet_and_one_of_the_dataset(share: float) -> None:
    learner = FleetCloning(batch_size=2).build(policy_for(make_env("avoid")), dataset())
    learner.use([fleet_episode()])
    learner.share = share
    metrics = learner.train(1)
    assert (
        learner._count == 1
        and np.isfinite([metrics["fleet/loss_online"], metrics["fleet/loss_static"]]).all()
    )


def test_an_expert_that_takes_over_within_a_chunk_is_cloned() -> None:
    taken = fleet_episode(watched=True, corrected=np.array([0, 1, 0, 0], bool))
    assert not taken.decision[1]
    learner = FleetCloning(batch_size=8).build(policy_for(make_env("avoid")), dataset())
    learner.use([taken])
    assert "fleet/share" in learner.train(1)
