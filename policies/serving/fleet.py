"""Where robots of a fleet report their episodes and fetch newer policies.

An episode is on disk before it is acknowledged, one file each, so a learner that is killed loses none. A
robot repeats what was not acknowledged; the same episode twice counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.errors import DatasetError, ServingError, WriteError
from policies.serving.endpoint import Endpoint, EndpointSettings
from policies.serving.fleet_messages import FleetEpisode, from_bytes, max_message, read_episode
from policies.storage.atomic_write import atomic_file, sync
from policies.storage.features import short

_END = ".msgpack"


@dataclass(frozen=True)
class FleetTask:
    """What all robots of a fleet do."""

    name: str  # e.g. `env=avoid`; empty: unknown, robots of any task are taken
    obs_dim: int
    action_dim: int
    max_steps: int  # of an episode


class EpisodeFiles:
    """Episodes in a folder, one file each: <robot>/<number>.msgpack."""

    def __init__(self, folder: Path, task: FleetTask) -> None:
        self.folder, self._task = folder, task

    def read(self) -> list[FleetEpisode]:
        """Return all episodes in the order of `FleetEpisode.place`.

        Raises:
            DatasetError: If a file holds no episode of this task.
        """
        files = self.folder.glob(f"*/*{_END}")
        return sorted(map(self._episode, files), key=lambda one: one.place)

    def _episode(self, path: Path) -> FleetEpisode:
        try:
            return from_bytes(path.read_bytes(), self._task.obs_dim, self._task.action_dim)
        except ServingError as error:
            raise DatasetError(f"{path} holds no episode of this fleet: {error} Remove it.") from None

    def add(self, episode: FleetEpisode) -> bool:
        """Write an episode to disk; returns whether it is new.

        Raises:
            ServingError: `conflict`, if another one has its number.
            WriteError: If the disk is full.
        """
        path, content = self.folder / episode.robot / f"{episode.number:08d}{_END}", episode.to_bytes()
        if path.exists():
            if path.read_bytes() != content:
                raise ServingError(
                    "conflict",
                    f"another episode {episode.number} of robot '{episode.robot}' is stored. Give every "
                    f"robot a name of its own, and keep its folder.",
                )
            return False
        with atomic_file(path) as draft:
            draft.write(content)
        sync(path.parent)
        return True


class FleetEndpoint(Endpoint):
    """Receive episodes, hand out policies; use as a context manager.

    Attributes:
        arrived: New episodes since the caller last took them.
        repeated: Episodes that were received again.
        received_bytes, sent_bytes: Of new episodes, and of policies.
    """

    def __init__(self, settings: EndpointSettings, task: FleetTask, folder: Path) -> None:
        self.task, self.files = task, EpisodeFiles(folder, task)
        self.arrived: list[FleetEpisode] = []
        self.repeated = self.received_bytes = self.sent_bytes = 0
        self.version, self._policy = -1, dict[str, bytes]()
        super().__init__(settings, max_message(task.obs_dim, task.action_dim, task.max_steps))

    def offer(self, version: int, policy: Path) -> None:
        """Hand out the files of a policy directory from now on; older versions are ignored."""
        if version > self.version:
            self._policy = {path.name: path.read_bytes() for path in sorted(policy.iterdir())}
            self.version = version

    def answers_mb(self) -> float:
        """Return the memory of the policy, of one for every robot, and of two while one is encrypted [MB]."""
        return (3 + self.connections) * sum(map(len, self._policy.values())) / 1e6

    def handle(self, client: bytes, message: dict[str, Any], number: int) -> None:
        if self.task.name and message.get("task") != self.task.name:
            found = short(message.get("task"))
            raise ServingError("schema", f"this fleet is for '{self.task.name}'; got '{found}'.")
        match message["type"]:
            case "episode":
                episode = self._store(message.get("episode"))
                self.answer(client, {"type": "stored", "id": number, "number": episode.number})
            case "policy":
                self._hand_out(client, message.get("have"), number)
            case other:
                raise ServingError("malformed", f"type must be episode or policy; got '{other[:20]}'.")

    def _store(self, data: Any) -> FleetEpisode:
        episode = read_episode(data, self.task.obs_dim, self.task.action_dim)
        try:
            is_new = self.files.add(episode)
        except WriteError as error:
            raise ServingError("failed", str(error)) from None
        if is_new:
            self.arrived.append(episode)
            self.received_bytes += len(episode.to_bytes())
        self.repeated += not is_new
        return episode

    def _hand_out(self, client: bytes, have: Any, number: int) -> None:
        if have is not None and type(have) is not int:
            raise ServingError("malformed", f"have must be a whole number or nil; got {short(have)}.")
        is_newer = have is None or have < self.version
        files = self._policy if is_newer else {}
        self.sent_bytes += sum(map(len, files.values()))
        self.answer(client, {"type": "policy", "id": number, "version": self.version, "files": files})
