"""Robots of a fleet lose no episode, whoever is away or killed, and never go back to an older policy."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_episodes import fleet_episode

from policies.errors import ConfigError, DatasetError, ServingError
from policies.serving.encryption import make_keys
from policies.serving.endpoint import EndpointSettings
from policies.serving.fleet import FleetEndpoint, FleetTask
from policies.serving.messages import pack, to_wire, unpack
from policies.serving.robot import FleetRobot

zmq = pytest.importorskip("zmq")
pytest.importorskip("msgpack")
TASK = FleetTask("env=avoid", obs_dim=4, action_dim=2, max_steps=20)
PATIENCE_S = 120.0


class Learner(FleetEndpoint):
    """A learner that answers while a condition is waited for."""

    dies_before_answer = False

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end
            self.receive(5)

    def answer(self, client: bytes, message: dict[str, Any]) -> None:
        if not self.dies_before_answer:
            super().answer(client, message)

    @property
    def numbers(self) -> list[int]:
        return [episode.number for episode in self.files.read()]


def learner_at(folder: Path, port: int = 0) -> Learner:
    return Learner(EndpointSettings(port=port), TASK, folder / "episodes")


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    with learner_at(tmp_path) as found:
        yield found


def robot_at(address: str, spool: Path, task: str = TASK.name, **options: Any) -> FleetRobot:
    return FleetRobot(address, spool, name="arm1", task=task, timeout_s=0.2, every_s=0.01, **options)


def policy_at(folder: Path, name: str) -> Path:
    """A folder with a file; nothing here looks into a policy."""
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text(name)
    return folder / name


def test_an_episode_arrives_as_it_was_reported(learner: Learner, tmp_path: Path) -> None:
    sent = fleet_episode(version=7, watched=True, corrected=np.array([0, 1, 1, 0], bool))
    with robot_at(learner.endpoint, tmp_path / "arm") as robot:
        robot.report(sent)
        learner.until(lambda: not robot.waiting())
    (found,) = learner.files.read()
    assert found.to_bytes() == sent.to_bytes() and found.observations.tolist() == sent.observations.tolist()
    assert [one.to_bytes() for one in learner.arrived] == [sent.to_bytes()]


def test_an_episode_that_is_sent_twice_counts_once(learner: Learner) -> None:
    message = {"type": "episode", "task": TASK.name, "episode": fleet_episode().to_wire()}
    for _ in range(2):
        learner.handle(b"gone", message, 0)
    assert (len(learner.arrived), learner.repeated, learner.numbers) == (1, 1, [0])
    other = fleet_episode(success=False).to_wire()
    with pytest.raises(ServingError, match="arm1") as refused:
        learner.handle(b"gone", message | {"episode": other}, 0)
    assert refused.value.reason == "conflict" and learner.numbers == [0]


GOOD = fleet_episode().to_wire()
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "task": ({"task": "env=lift"}, "schema"),
    "type": ({"type": "act"}, "malformed"),
    "no map": ({"episode": [1]}, "missing"),
    "an entry too many": ({"episode": GOOD | {"more": 1}}, "missing"),
    "a path as name": ({"episode": GOOD | {"robot": "../arm"}}, "malformed"),
    "a negative number": ({"episode": GOOD | {"number": -1}}, "malformed"),
    "a flag that is a number": ({"episode": GOOD | {"success": 1}}, "malformed"),
    "no time": ({"episode": GOOD | {"time": float("nan")}}, "range"),
    "no step": ({"episode": fleet_episode(0).to_wire()}, "shape"),
    "other widths": ({"episode": GOOD | {"actions": to_wire(np.zeros((4, 3), np.float32))}}, "shape"),
    "nan": ({"episode": GOOD | {"rewards": to_wire(np.full(4, np.nan, np.float32))}}, "nan"),
    "a lie of sizes": ({"episode": GOOD | {"rewards": GOOD["rewards"] | {"shape": [5]}}}, "malformed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_episode_of_the_fleet_is_refused_and_not_stored(case: str, learner: Learner) -> None:
    changes, reason = WRONG[case]
    message = {"type": "episode", "task": TASK.name, "episode": GOOD} | changes
    with pytest.raises(ServingError) as refused:
        learner.handle(b"gone", message, 0)
    assert refused.value.reason == reason
    assert not learner.arrived and not learner.numbers


def test_an_episode_that_is_longer_than_any_is_not_read(learner: Learner) -> None:
    message = {"type": "episode", "task": TASK.name, "id": 0, "episode": fleet_episode(400).to_wire()}
    socket = zmq.Context.instance().socket(zmq.DEALER)
    try:
        socket.connect(learner.endpoint)
        socket.send(pack(message))
        learner.until(lambda: bool(socket.poll(0)))
        assert unpack(socket.recv())["reason"] == "oversize" and not learner.numbers
    finally:
        socket.close(linger=0)


def test_a_refused_robot_stops_and_keeps_the_episode(learner: Learner, tmp_path: Path) -> None:
    def is_refused() -> bool:
        try:
            robot.check()
        except ServingError as error:
            return error.reason == "schema"
        return False

    with robot_at(learner.endpoint, tmp_path / "arm", task="env=lift") as robot:
        robot.report(fleet_episode())
        learner.until(is_refused)
        with pytest.raises(ServingError, match="env=avoid"):
            robot.report(fleet_episode())
        assert robot.waiting() == [0]


def test_a_learner_killed_between_write_and_answer_has_the_episode_once(tmp_path: Path) -> None:
    with learner_at(tmp_path) as learner:
        learner.dies_before_answer = True
        robot = robot_at(learner.endpoint, tmp_path / "arm")
        robot.report(fleet_episode())
        learner.until(lambda: learner.numbers == [0])
        port = int(learner.endpoint.rpartition(":")[2])
        assert robot.waiting() == [0]
    with robot, learner_at(tmp_path, port) as learner:
        learner.until(lambda: not robot.waiting())
        assert (learner.numbers, learner.repeated, learner.arrived) == ([0], 1, [])


def test_a_robot_goes_on_without_a_learner_and_after_a_kill(tmp_path: Path) -> None:
    spool = tmp_path / "arm"
    with robot_at("tcp://127.0.0.1:1", spool) as robot:
        assert [robot.report(fleet_episode()) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ConfigError, match="arm"):
            robot_at("tcp://127.0.0.1:1", spool)
    with learner_at(tmp_path) as learner:
        with robot_at(learner.endpoint, spool) as robot:
            assert robot.waiting() == [0, 1, 2]
            assert robot.report(fleet_episode()) == 3
            learner.until(lambda: not robot.waiting())
        (spool / "00000003.msgpack").touch()  # what a kill between acknowledgement and removal leaves
        with robot_at(learner.endpoint, spool) as robot:
            assert (robot.waiting(), robot.next_number, learner.numbers) == ([], 4, [0, 1, 2, 3])


def test_an_episode_of_numpy_numbers_is_one(learner: Learner, tmp_path: Path) -> None:
    sent = fleet_episode(success=np.bool_(True), version=np.int64(3), time=7)
    with robot_at(learner.endpoint, tmp_path / "arm") as robot:
        robot.report(sent)
        learner.until(lambda: not robot.waiting())
    (found,) = learner.files.read()
    assert (found.success, found.version, found.time) == (True, 3, 7.0)


def test_a_damaged_episode_of_the_spool_is_named(learner: Learner, tmp_path: Path) -> None:
    (tmp_path / "arm").mkdir()
    (tmp_path / "arm" / "00000000.msgpack").write_bytes(b"\x82\xa1")

    def is_said() -> bool:
        try:
            robot.check()
        except DatasetError as error:
            return str(tmp_path / "arm" / "00000000.msgpack") in str(error)
        return False

    with robot_at(learner.endpoint, tmp_path / "arm") as robot:
        learner.until(is_said)


def test_a_disk_without_locks_is_not_taken_for_a_robot_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with robot_at("tcp://127.0.0.1:1", tmp_path / "arm") as robot:
        assert robot.report(fleet_episode()) == 0


def test_keys_admit_known_robots_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    own = {"secret_key": make_keys(keys, "arm1"), "server_key": keys / "server.key"}
    settings = EndpointSettings(port=0, keys=str(keys))
    with (
        Learner(settings, TASK, tmp_path / "episodes") as learner,
        robot_at(learner.endpoint, tmp_path / "stranger") as stranger,
        robot_at(learner.endpoint, tmp_path / "arm", **own) as robot,
    ):
        for one in (stranger, robot):
            one.report(fleet_episode())
        learner.until(lambda: not robot.waiting())
        assert stranger.waiting() == [0] and learner.repeated == 0


@contextlib.contextmanager
def slow_link(address: str, rate: int) -> Iterator[str]:
    """Yield another address of a learner, over which each direction takes `rate` bytes per second."""
    port = int(address.rpartition(":")[2])
    listener, open_ends = socket.create_server(("127.0.0.1", 0)), list[socket.socket]()

    def forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), source, target:
            while content := source.recv(max(1, rate // 50)):
                time.sleep(len(content) / rate)
                target.sendall(content)
            target.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                open_ends.extend((near, far))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=forward, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        for one in (listener, *open_ends):
            one.close()


def test_a_policy_that_takes_longer_than_a_timeout_arrives(learner: Learner, tmp_path: Path) -> None:
    """It takes two seconds; robots give up a message after 0.2."""
    learner.offer(1, policy_at(tmp_path, "policy"))
    learner._policy["model.safetensors"] = bytes(40_000)
    with slow_link(learner.endpoint, 20_000) as address, robot_at(address, tmp_path / "arm") as robot:
        learner.until((tmp_path / "arm" / "policy" / "1" / "model.safetensors").exists)
        assert robot.policy()[0] == 1


def test_slow_robots_keep_their_connections_while_they_fetch_a_big_policy(tmp_path: Path) -> None:
    """Robots ask again once they are dropped, so that none would ever get it."""
    folder, size = policy_at(tmp_path, "policy"), 16_000_000
    (folder / "model.safetensors").write_bytes(bytes(size))
    settings, context = EndpointSettings(port=0, max_backlog_mb=24), zmq.Context()
    with (
        Learner(settings, TASK, tmp_path / "episodes") as learner,
        slow_link(learner.endpoint, 100_000) as address,
    ):
        learner.offer(1, folder)
        robots = [context.socket(zmq.DEALER) for _ in range(3)]
        try:
            for one in robots:
                one.connect(address)
                one.send(pack({"type": "policy", "id": 0, "task": TASK.name, "have": None}))
            learner.until(lambda: learner.sent_bytes >= len(robots) * size)
            learner.guard()
            assert learner.metrics.counts["reopened"] == 0
        finally:
            context.destroy(linger=0)


def test_a_policy_that_the_robot_reads_is_not_removed(learner: Learner, tmp_path: Path) -> None:
    spool = tmp_path / "arm"
    with robot_at(learner.endpoint, spool) as robot:
        for version in range(5):
            learner.offer(version, policy_at(tmp_path, f"version {version}"))
            learner.until((spool / "policy" / str(version) / "config.json").exists)
            if version == 1:
                _, folder = robot.policy()
        learner.until(lambda: not (spool / "policy" / "2").exists())
        assert (folder / "config.json").read_text() == "version 1"
        assert sorted(path.name for path in (spool / "policy").iterdir()) == ["1", "3", "4"]


def test_a_fleet_whose_task_is_unknown_takes_robots_of_any(tmp_path: Path) -> None:
    task = FleetTask("", TASK.obs_dim, TASK.action_dim, TASK.max_steps)
    with (
        Learner(EndpointSettings(port=0), task, tmp_path / "episodes") as learner,
        robot_at(learner.endpoint, tmp_path / "arm") as robot,
    ):
        robot.report(fleet_episode())
        learner.until(lambda: not robot.waiting())
        assert learner.numbers == [0]


def test_versions_never_go_back(tmp_path: Path) -> None:
    spool = tmp_path / "arm"
    with learner_at(tmp_path / "one") as learner, robot_at(learner.endpoint, spool) as robot:
        with pytest.raises(ServingError) as nothing:
            robot.policy(timeout_s=0.0)
        assert nothing.value.reason == "timeout"
        for version in (5, 20, 10):
            learner.offer(version, policy_at(tmp_path, f"version {version}"))
        learner.until(lambda: (spool / "policy" / "20").exists())
        assert robot.policy()[0] == learner.version == 20
    with learner_at(tmp_path / "two") as learner:
        learner.offer(10, tmp_path / "version 10")
        with robot_at(learner.endpoint, spool) as robot:
            number = robot.report(fleet_episode())
            learner.until(lambda: number not in robot.waiting())
            version, folder = robot.policy()
    assert version == 20 and (folder / "config.json").read_text() == "version 20"
