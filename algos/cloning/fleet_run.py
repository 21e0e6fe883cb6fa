"""The learner of a fleet as a program: episodes in, gradient steps, versions of the policy out.

It is a run directory whose checkpoints are the versions, numbered by gradient steps, with the episodes beside
them in `episodes/<robot>/<number>.msgpack` and a summary in `summary.json`. A learner that is killed goes on
from its last version with all episodes.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from algos.base import Metrics
from algos.cloning.fleet import FleetLearner
from algos.training.metrics import read_out
from algos.training.run_directory import RunDirectory
from policies.serving.endpoint import EndpointSettings
from policies.serving.fleet import FleetEndpoint, FleetTask
from policies.serving.fleet_messages import FleetEpisode
from policies.storage.atomic_write import write_text

_log = logging.getLogger(__name__)

EPISODES, SUMMARY = "episodes", "summary.json"
RECENT = 100  # episodes over which success is reported
_BLOCK, _ROW = 10, 50  # gradient steps between two looks at messages, and between two rows of metrics
_IDLE_MS = 200
_LINE_S = 10.0


class FleetRun:
    """A learner that listens; use as a context manager.

    Args:
        learner: What is trained.
        run: Its run directory, claimed by the caller.
        task: What the robots do.
        settings: Where to listen.
        steps_per_episode: Gradient steps for every episode that arrives.
        publish_every: Gradient steps between two versions.
        provenance: Facts for the model card of every version.
    """

    def __init__(
        self,
        learner: FleetLearner,
        run: RunDirectory,
        task: FleetTask,
        settings: EndpointSettings,
        *,
        steps_per_episode: int,
        publish_every: int,
        provenance: Mapping[str, Any],
    ) -> None:
        self.learner, self.run, self._provenance = learner, run, provenance
        self._steps_per_episode, self._publish_every = steps_per_episode, publish_every
        self.endpoint = FleetEndpoint(settings, task, run.path / EPISODES)
        self._lags: list[int] = []
        self._row, self._line, self._metrics = 0, -math.inf, Metrics()
        try:
            self._continue()
        except BaseException:
            self.endpoint.__exit__()
            raise

    def __enter__(self) -> FleetRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.endpoint.__exit__()

    def _continue(self) -> None:
        """Go on from the last version, or publish the first one."""
        self.episodes = self.endpoint.files.read()
        step = self.run.latest()
        if step is None:
            self.publish()
        else:
            state = self.run.load_training_state(step)
            self.run.rewind(step, metrics_bytes=state["metrics_bytes"])
            self.learner.load_state_dict(state["algorithm"])
            self.endpoint.offer(step, self.run.policy_path(step))
        self._row = self.learner.progress
        self.learner.use(self.episodes)

    @property
    def owed(self) -> int:
        """Gradient steps that the episodes so far ask for."""
        return self._steps_per_episode * len(self.episodes) - self.learner.progress

    def serve(self, is_stopped: Callable[[], bool]) -> None:
        """Learn until stopped, then publish what was learned."""
        while not is_stopped():
            self.step()
        if self.learner.progress > self.endpoint.version:
            self.publish()

    def step(self) -> None:
        """Handle messages, take a few gradient steps if any are owed, publish if due."""
        self.endpoint.receive(0 if self.owed > 0 else _IDLE_MS)
        self.endpoint.guard()
        self._take_arrived()
        if self.owed > 0:
            left = self._publish_every - self.learner.progress % self._publish_every
            self._metrics = self.learner.train(min(_BLOCK, self.owed, left))
            if self.learner.progress - self._row >= _ROW:
                self.log()
            if self.learner.progress % self._publish_every == 0:
                self.publish()
        self._tell()

    def _take_arrived(self) -> None:
        arrived, self.endpoint.arrived = self.endpoint.arrived, []
        if arrived:
            self._lags += [self.endpoint.version - one.version for one in arrived]
            self.episodes = sorted([*self.episodes, *arrived], key=lambda one: one.place)
            self.learner.use(self.episodes)

    def publish(self) -> None:
        """Write a version, and hand it out from now on."""
        step = self.learner.progress
        state = {"algorithm": self.learner.state_dict(), "metrics_bytes": self.run.metrics_bytes}
        self.run.save_checkpoint(step, self.learner.snapshot(), state, provenance=self._provenance)
        self.endpoint.offer(step, self.run.policy_path(step))
        write_text(self.run.path / SUMMARY, json.dumps(summary(self.episodes), indent=1) + "\n")

    def log(self) -> None:
        """Write a row of metrics."""
        self._row = self.learner.progress
        self.run.log(read_out(self._metrics) | self.facts(), self._row)
        self._lags = []

    def facts(self) -> dict[str, float]:
        """Return what is known of the fleet."""
        alone = [one.success for one in self.episodes if not one.watched][-RECENT:]
        newest = {one.robot: one.version for one in self.episodes}
        mega = {"received": self.endpoint.received_bytes, "sent": self.endpoint.sent_bytes}
        robots = robots_of(self.episodes)
        return {
            "fleet/episodes": len(self.episodes),
            "fleet/success": sum(alone) / len(alone) if alone else math.nan,
            "fleet/versions_in_use": len(set(newest.values())),
            "fleet/lag_mean": sum(self._lags) / len(self._lags) if self._lags else math.nan,
            "fleet/lag_max": max(self._lags, default=math.nan),
            "fleet/repeated": self.endpoint.repeated,
            **{f"fleet/{name}_mb": value / 1e6 for name, value in mega.items()},
            **{f"fleet/episodes_{name}": count for name, count in robots.items()},
        }

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._line < _LINE_S:
            return
        self._line, facts = now, self.facts()
        _log.info(
            "version %d, %d gradient steps; %d episodes of %d robots, success %.2f without help; share %.2f.",
            self.endpoint.version, self.learner.progress, facts["fleet/episodes"],
            len(robots_of(self.episodes)), facts["fleet/success"], self.learner.share,
        )  # fmt: skip


def robots_of(episodes: Sequence[FleetEpisode]) -> dict[str, int]:
    """Return the number of episodes by robot."""
    names = sorted({one.robot for one in episodes})
    return {name: sum(one.robot == name for one in episodes) for name in names}


def summary(episodes: Sequence[FleetEpisode]) -> dict[str, Any]:
    """Return episodes by robot, and by version how many there are, went without help, and succeeded so."""
    versions: dict[int, dict[str, int]] = {}
    for one in episodes:
        row = versions.setdefault(one.version, {"episodes": 0, "alone": 0, "success_alone": 0})
        row["episodes"] += 1
        row["alone"] += not one.watched
        row["success_alone"] += one.success and not one.watched
    return {"robots": robots_of(episodes), "versions": {str(key): versions[key] for key in sorted(versions)}}
