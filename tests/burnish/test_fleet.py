"""The commands of a fleet: a simulated robot and a learner, in two threads."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from messages import mentions
from small_policies import policy_for

from algos.cloning.fleet_run import EPISODES
from algos.training.run_directory import RunDirectory
from burnish.commands import fleet_act, fleet_learn
from burnish.commands.fleet_act import FleetActConfig
from burnish.commands.fleet_learn import FleetLearnConfig
from burnish.config.overrides import Overrides, RunContext
from burnish.runs.locate import load_policy
from envs.datasets import write_dataset
from envs.make import env as make_env
from envs.rollouts.collect import collect
from envs.rollouts.supervised import SupervisedPlayer
from envs.spec import named_options
from envs.tasks.avoid.task import start_position
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.serving.fleet import EpisodeFiles, FleetTask
from policies.storage.policy_folder import save_policy

pytest.importorskip("zmq")
pytest.importorskip("msgpack")


def test_a_robot_acts_with_versions_of_the_learner_until_its_last_episode_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, spool = make_env("avoid", max_episode_steps=20), tmp_path / "arm1"
    save_policy(policy_for(env), tmp_path / "policy", provenance={"env": named_options(env)})
    write_dataset(tmp_path / "demos.hdf5", collect(make_env("avoid"), episodes=1), env)
    addresses: list[str] = []
    closed: list[SupervisedPlayer] = []
    monkeypatch.setattr(SupervisedPlayer, "close", lambda player: closed.append(player))
    monkeypatch.setattr(fleet_learn, "_print_address", lambda run: addresses.append(run.endpoint.endpoint))
    robot: list[Thread] = []

    def stopped() -> bool:
        """Start the robot once the learner listens; stop the learner once the robot has ended."""
        if not robot:
            own: dict[str, Any] = {"name": "arm1", "out": str(spool), "episodes": 3, "speed": None}
            config = FleetActConfig(address=addresses[0], env=env, **own)
            robot.append(Thread(target=fleet_act.run, args=(config, RunContext(tmp_path))))
            robot[0].start()
        return not robot[0].is_alive()

    serve = fleet_learn.FleetRun.serve
    monkeypatch.setattr(fleet_learn.FleetRun, "serve", lambda run, _: serve(run, stopped))
    paths = {"policy": str(tmp_path / "policy"), "dataset": str(tmp_path / "demos.hdf5")}
    config = FleetLearnConfig(**paths, out=str(tmp_path / "out"), listen="tcp://127.0.0.1:0", batch_size=8)
    fleet_learn.run(config, RunContext(tmp_path))
    episodes = EpisodeFiles(tmp_path / "out" / EPISODES, FleetTask("env=avoid", 4, 2, 20)).read()
    assert [(one.robot, one.number, one.version) for one in episodes] == [("arm1", n, 0) for n in range(3)]
    assert (spool / "acknowledged").read_text() == "2" and not list(spool.glob("*.msgpack"))
    assert load_policy(tmp_path / "out").provenance["env"]["name"] == "avoid"
    assert len(closed) == 1


def test_a_learner_that_goes_on_keeps_its_keys_but_those_that_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, out = make_env("avoid"), tmp_path / "out"
    save_policy(policy_for(env), tmp_path / "policy", provenance={"env": named_options(env)})
    write_dataset(tmp_path / "demos.hdf5", collect(env, episodes=1), env)
    monkeypatch.setattr(fleet_learn.FleetRun, "serve", lambda run, _: None)

    def start(**values: Any) -> dict[str, Any]:
        typed = Overrides.parse(f"{key}={value}" for key, value in values.items())
        fleet_learn.run(FleetLearnConfig(out=str(out), **values), RunContext(tmp_path, typed))
        return RunDirectory.open(out).config

    monkeypatch.chdir(tmp_path)
    first = start(policy="policy", dataset="demos.hdf5", listen="tcp://127.0.0.1:0", batch_size=8)
    monkeypatch.chdir(out)
    assert first["env"]["name"] == "avoid" and start() == first
    assert start(lr=1e-4) == start() == first | {"lr": 1e-4}
    with pytest.raises(CheckpointError, match="seed"):
        start(seed=1, half_life=3.0)
    assert RunDirectory.open(out).config == first | {"lr": 1e-4}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"listen": "tcp://0.0.0.0:5757"}, "0.0.0.0 allow_remote=true"),
        ({"listen": "127.0.0.1:5757"}, "listen 127.0.0.1:5757"),
        ({"listen": "tcp://127.0.0.1:70000"}, "port 70000"),
    ],
)
def test_a_learner_listens_where_a_server_would(values: dict[str, Any], parts: str) -> None:
    with pytest.raises(ConfigError, match=mentions(parts)):
        FleetLearnConfig(**values).endpoint()


def test_commands_refuse_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=mentions("policy=<run> dataset=<file>")):
        fleet_learn.run(FleetLearnConfig(out="fleet"), RunContext(tmp_path))
    with pytest.raises(ConfigError, match=mentions("name=<robot>")):
        fleet_act.run(FleetActConfig(env=make_env("avoid")), RunContext(tmp_path))
    with pytest.raises(CapabilityError, match="hopper"):
        fleet_act.run(FleetActConfig(env=make_env("hopper"), name="arm1", out="arm1"), RunContext(tmp_path))


def test_a_dataset_of_another_task_is_no_ground_to_stand_on(tmp_path: Path) -> None:
    env, other = make_env("avoid"), make_env("avoid", rows="moved")
    save_policy(policy_for(env), tmp_path / "policy", provenance={"env": named_options(env)})
    write_dataset(tmp_path / "demos.hdf5", collect(other, episodes=1), other)
    paths = {"policy": str(tmp_path / "policy"), "dataset": str(tmp_path / "demos.hdf5")}
    with pytest.raises(ConfigError, match=mentions("env.rows=moved")):
        fleet_learn.run(FleetLearnConfig(**paths, out=str(tmp_path / "out")), RunContext(tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_run_of_another_command_is_no_folder_of_a_fleet(tmp_path: Path) -> None:
    env = make_env("avoid")
    save_policy(policy_for(env), tmp_path / "policy", provenance={"env": named_options(env)})
    write_dataset(tmp_path / "demos.hdf5", collect(env, episodes=1), env)
    paths = {"policy": str(tmp_path / "policy"), "dataset": str(tmp_path / "demos.hdf5")}
    RunDirectory.create_at(tmp_path / "run", {"algo": {"name": "bc"}})
    with pytest.raises(ConfigError, match=mentions(f"out={tmp_path / 'run'} burnish train")):
        fleet_learn.run(FleetLearnConfig(**paths, out=str(tmp_path / "run")), RunContext(tmp_path))


def test_which_episodes_are_watched_says_nothing_of_how_they_begin() -> None:
    drawn = [fleet_act.episode_of("arm1", number, 0.5) for number in range(400)]
    assert len({seed for seed, _ in drawn}) == 400
    sides = np.array([start_position(seed)[0] > 0 for seed, _ in drawn])
    watched = np.array([is_watched for _, is_watched in drawn])
    assert abs(watched.mean() - 0.5) < 0.1
    assert abs(sides[watched].mean() - sides[~watched].mean()) < 0.15  # three standard deviations
