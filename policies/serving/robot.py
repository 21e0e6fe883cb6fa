"""A robot of a fleet: fetches the newest policy, reports its episodes, and loses none.

    with FleetRobot("tcp://learner:5757", "spool", name="arm1", task="env=avoid") as robot:
        while True:
            version, policy = robot.policy()      # the newest that is here; waits for the first one only
            robot.report(FleetEpisode(robot.name, version, time.time(), …))

Requires NumPy, pyzmq and msgpack, not PyTorch. A thread exchanges with the learner, so the robot never waits
for it. Every episode is a file in the spool until the learner has acknowledged it; a robot that is killed, or
without a connection, goes on with the policy, the number and the episodes in its spool.

<spool>/<number>.msgpack   episodes that are not acknowledged
<spool>/acknowledged       the highest number that is
<spool>/policy/<version>   the newest policy directory
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import re
import shutil
import threading
from pathlib import Path
from typing import Any

from policies.errors import ConfigError, DatasetError, ServingError
from policies.serving.client import Client
from policies.serving.fleet_messages import LOCAL, FleetEpisode, require_robot
from policies.serving.messages import unpack
from policies.storage.atomic_write import WITHOUT_LOCKS, atomic_file, draft_folder, sync_tree, write_text

_log = logging.getLogger(__name__)

_LATER = ("timeout", "busy", "stopping", "failed")  # reasons after which the robot tries again
_MOST_TIMEOUTS = 128  # within which an answer must arrive
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class FleetRobot:
    """A robot of a fleet; use as a context manager, in one thread.

    Args:
        address: Address of the learner.
        spool: Folder of this robot, created if missing.
        name: Name of the robot in the fleet, a plain word.
        task: Task of the fleet.
        secret_key: File with the robot's CURVE keys; None: no encryption.
        server_key: File with the learner's public key.
        timeout_s: Timeout of a message [s]; of those that take longer it is doubled until they arrive.
        every_s: Time between two exchanges without a new episode [s].

    Raises:
        ConfigError: If the name is no plain word, or another process uses the spool.
        MissingExtraError: If pyzmq or msgpack is not installed.
    """

    def __init__(
        self,
        address: str = LOCAL,
        spool: str | Path = "spool",
        *,
        name: str,
        task: str = "",
        secret_key: str | Path | None = None,
        server_key: str | Path | None = None,
        timeout_s: float = 5.0,
        every_s: float = 1.0,
    ) -> None:
        self.name, self._task, self._every_s = require_robot(name), task, every_s
        self._home = Path(spool)
        self._home.mkdir(parents=True, exist_ok=True)
        self._lock = (self._home / ".lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                self._lock.close()
                message = f"{spool} is the folder of a robot that runs; choose another one."
                raise ConfigError(message) from None
        keys: dict[str, Any] = {"secret_key": secret_key, "server_key": server_key}
        self._client = Client(address, timeout_s=timeout_s, retries=0, **keys)
        for path in self._home.glob("*.msgpack"):
            if int(path.stem) <= self.acknowledged:  # it was killed before it could remove it
                path.unlink()
        self.next_number = max([self.acknowledged, *self.waiting()]) + 1
        self._timeouts = 1  # within which an answer arrived so far
        self._given = -1  # version of the policy that the robot has
        self._stopping, self._wake, self._has_policy = (threading.Event() for _ in range(3))
        self._failure: Exception | None = None
        if self._newest() is not None:
            self._has_policy.set()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()

    def __enter__(self) -> FleetRobot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; episodes that are not acknowledged stay in the spool."""
        self._stopping.set()
        self._wake.set()
        self._thread.join()
        self._client.close()
        self._lock.close()

    @property
    def acknowledged(self) -> int:
        """Highest number that the learner has acknowledged; -1 for none."""
        path = self._home / "acknowledged"
        return int(path.read_text()) if path.exists() else -1

    def waiting(self) -> list[int]:
        """Return the numbers of the episodes that are not acknowledged, in order."""
        return sorted(int(path.stem) for path in self._home.glob("*.msgpack"))

    def policy(self, timeout_s: float | None = None) -> tuple[int, Path]:
        """Return version and policy directory of the newest policy here; waits for the first one.

        Raises:
            ServingError: `timeout` without a policy after `timeout_s` [s], or why the learner refuses.
        """
        self._has_policy.wait(timeout_s)
        self.check()
        found = self._newest()
        if found is None:
            raise ServingError("timeout", f"{self._client.endpoint} gave no policy. Is the learner running?")
        self._given = found[0]
        return found

    def report(self, episode: FleetEpisode) -> int:
        """Put an episode with the next number into the spool, from where it is sent; returns the number.

        Raises:
            ServingError: If the learner refused an earlier episode; it stays in the spool.
            WriteError: If the disk is full.
        """
        self.check()
        number = self.next_number
        with atomic_file(self._file(number)) as draft:
            draft.write(episode.numbered(number).to_bytes())
        self.next_number += 1
        self._wake.set()
        return number

    def check(self) -> None:
        """Raise what ended the exchange with the learner: a refusal (ServingError), or a full disk."""
        if self._failure is not None:
            raise self._failure

    def _file(self, number: int) -> Path:
        return self._home / f"{number:08d}.msgpack"

    def _newest(self) -> tuple[int, Path] | None:
        found = [path for path in (self._home / "policy").glob("*") if path.name.isdecimal()]
        return max(((int(path.name), path) for path in found), default=None)

    def _run(self) -> None:
        """Exchange until the end, a refusal or an error."""
        is_away = False
        while not self._stopping.is_set():
            try:
                self._send()
                self._fetch()
                is_away = False
            except Exception as error:  # raised where the robot looks, see `check`
                if not isinstance(error, ServingError) or error.reason not in _LATER:
                    self._failure = error
                    self._has_policy.set()
                    return
                if not is_away:
                    _log.warning("%s Going on with what is here.", error)
                is_away = True
            self._wake.wait(self._every_s)
            self._wake.clear()

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a message; next time it may take twice as long if it came too late."""
        left = self._timeouts

        def goes_on() -> bool:
            nonlocal left
            left -= 1
            if left <= 0:
                self._timeouts = min(2 * self._timeouts, _MOST_TIMEOUTS)
            return left > 0 and not self._stopping.is_set()

        return self._client.request({**body, "task": self._task}, goes_on=goes_on)

    def _send(self) -> None:
        """Send the episodes of the spool, oldest first; remove what is acknowledged."""
        for number in self.waiting():
            if self._stopping.is_set():
                return
            episode = self._episode(number)
            self._ask({"type": "episode", "episode": episode})
            write_text(self._home / "acknowledged", str(number))  # keeps the numbering of an empty spool
            self._file(number).unlink()

    def _episode(self, number: int) -> Any:
        """Return the body of an episode in the spool."""
        path = self._file(number)
        try:
            return unpack(path.read_bytes()).get("episode")
        except ServingError as error:
            raise DatasetError(f"{path} holds no episode: {error} Remove it.") from None

    def _fetch(self) -> None:
        """Ask for a newer policy; versions never go back."""
        newest = self._newest()
        have = None if newest is None else newest[0]
        answer = self._ask({"type": "policy", "have": have})
        version, files = answer.get("version"), answer.get("files")
        if type(version) is not int or not isinstance(files, dict):
            raise ServingError("malformed", "the learner must answer with a version and files.")
        if not files or (have is not None and version <= have):
            return
        target = self._home / "policy" / str(version)
        with draft_folder(target) as draft:
            for name, content in files.items():
                if not _FILE.fullmatch(str(name)) or not isinstance(content, bytes):
                    raise ServingError("malformed", f"a policy must be plain files; got '{str(name)[:80]}'.")
                (draft / name).write_bytes(content)
            sync_tree(draft)
            with contextlib.suppress(FileExistsError):
                draft.rename(target)
        self._remove_older(version)
        self._has_policy.set()

    def _remove_older(self, version: int) -> None:
        """Remove all policies but the newest two, and the one that the robot has: it may be reading it."""
        found = sorted(int(path.name) for path in (self._home / "policy").glob("*") if path.name.isdecimal())
        for old in found[:-2]:
            if old != self._given:
                shutil.rmtree(self._home / "policy" / str(old), ignore_errors=True)
