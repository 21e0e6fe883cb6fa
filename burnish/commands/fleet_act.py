"""`burnish fleet act`: a simulated robot that acts for a fleet and reports its episodes."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from algos.training.signals import StopSignals
from burnish.config.overrides import RunContext
from envs.datasets.episode import Episode
from envs.datasets.windows import DECISION
from envs.fit import require_fit, task_text
from envs.rollouts.supervised import CORRECTED, SupervisedPlayer, require_takeover
from policies.bounds import Checked, bounded
from policies.errors import ConfigError, ServingError
from policies.paths import path_field
from policies.seeds import derive_seed
from policies.serving.fleet_messages import LOCAL, FleetEpisode
from policies.serving.robot import FleetRobot
from policies.storage.policy_folder import load_policy

_log = logging.getLogger(__name__)

_ADVICE = "Start the learner with a policy of the same task."
_WAIT_S = 0.2  # between two looks at stop signals


@dataclass(frozen=True)
class FleetActConfig(Checked):
    """Configuration of `burnish fleet act`."""

    address: str = LOCAL  # of the learner
    env: Any = None  # the task
    name: str | None = None  # of the robot in the fleet, a plain word
    out: str | None = path_field()  # folder of the robot: episodes not acknowledged, newest policy
    episodes: int | None = bounded(None, ge=1)  # of the robot, those of earlier starts included; null: no end
    watched: float = bounded(0.5, ge=0, le=1)  # fraction of episodes in which the expert may take over
    expert_steps: int = bounded(8, ge=1)  # control steps before the expert hands back
    speed: float | None = bounded(1.0, gt=0)  # simulated time by real time; null: as fast as possible
    secret_key: str | None = path_field()  # file with the robot's CURVE keys; null: no encryption
    server_key: str | None = path_field()  # file with the learner's public key


def run(config: FleetActConfig, context: RunContext) -> None:
    """Act until the last episode is acknowledged, or until a stop signal."""
    if config.env is None or config.name is None or config.out is None:
        raise ConfigError("fleet act needs env=<task>, name=<robot> and out=<folder>.")
    if config.watched:
        require_takeover(config.env)
    keys: dict[str, Any] = {"secret_key": config.secret_key, "server_key": config.server_key}
    task = task_text(config.env)
    with (
        FleetRobot(config.address, config.out, name=config.name, task=task, **keys) as robot,
        StopSignals() as stop,
        contextlib.closing(_Acting(config, robot)) as acting,
    ):
        while stop.number is None and (config.episodes is None or robot.next_number < config.episodes):
            acting.episode()
        while stop.number is None and robot.waiting():
            robot.check()
            time.sleep(_WAIT_S)


def episode_of(robot: str, number: int, watched: float) -> tuple[int, bool]:
    """Return the seed of an episode, and whether the expert watches it, independent of how it begins."""
    draw = np.random.default_rng(derive_seed(0, f"fleet {robot} watched", number))
    return derive_seed(0, f"fleet {robot}", number), bool(draw.random() < watched)


class _Acting:
    """A robot with the policy that it acts with."""

    def __init__(self, config: FleetActConfig, robot: FleetRobot) -> None:
        self._config, self._robot = config, robot
        self._version = -1
        self._player: SupervisedPlayer | None = None

    def close(self) -> None:
        if self._player is not None:
            self._player.close()

    def episode(self) -> None:
        """Play and report one episode; without a policy, wait a little for the first one."""
        try:
            version, folder = self._robot.policy(_WAIT_S)
        except ServingError as error:
            if error.reason != "timeout":
                raise
            return
        config = self._config
        player = self._player_of(version, folder)
        seed, watched = episode_of(self._robot.name, self._robot.next_number, config.watched)
        played = player.play(seed, watched=watched)
        number = self._robot.report(_reported(played, self._robot.name, self._version, watched))
        end = "success" if played.success else "no success"
        _log.info("episode %d, version %d: %d steps, %s.", number, self._version, len(played), end)

    def _player_of(self, version: int, folder: Path) -> SupervisedPlayer:
        """Return the player, with this version of the policy from now on."""
        if self._player is not None and version == self._version:
            return self._player
        config, policy = self._config, load_policy(folder)
        require_fit(
            "the policy of the fleet", policy, f"env={config.env.spec.name}", config.env.spec, advice=_ADVICE
        )
        if self._player is None:
            options: dict[str, Any] = {"expert_steps": config.expert_steps, "speed": config.speed}
            self._player = SupervisedPlayer(policy, config.env, **options)
        self._version, self._player.policy = version, policy
        return self._player


def _reported(played: Episode, robot: str, version: int, watched: bool) -> FleetEpisode:
    return FleetEpisode(
        robot=robot,
        version=version,
        time=time.time(),
        success=played.success,
        terminated=played.terminated,
        watched=watched,
        observations=played.observations,
        actions=played.actions,
        rewards=played.rewards,
        decision=played.extras[DECISION],
        corrected=played.extras[CORRECTED],
    )
