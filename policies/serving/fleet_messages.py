"""Episodes that robots of a fleet report to a learner, as messages and files.

    episode  {v, type, id, task, episode}  -> stored {v, type, id, number}
    policy   {v, type, id, task, have}     -> policy {v, type, id, version, files: {name: bytes}}
    anything else                          -> error  {v, type, id, reason, message}

`have` is the version that the robot has, or nil; `files` is empty if there is no newer one. Requires NumPy
and msgpack only, so it runs without PyTorch.

Legend: T control steps of an episode, Do and Da widths.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from policies.errors import ConfigError, ServingError
from policies.execution.history import Array
from policies.serving.messages import checked, from_wire, pack, to_wire, unpack
from policies.storage.features import Feature, short

PORT = 5757
LOCAL = f"tcp://127.0.0.1:{PORT}"
MAX_ABS = 1e6  # larger magnitudes are refused
_FLAGS = ("decision", "corrected")
_ARRAYS = ("observations", "actions", "rewards", *_FLAGS)
_FACTS = {"robot": str, "number": int, "version": int, "time": float}
_BOOLS = ("success", "terminated", "watched")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, eq=False)
class FleetEpisode:
    """One episode of a robot.

    Shapes:
        observations: (T+1, Do) float32, the last row after the last action.
        actions: (T, Da) float32, as executed, physical units. rewards: (T,) float32.
        decision: (T,) bool, whether a decision was made at this step, or a chunk went on.
        corrected: (T,) bool, whether an expert acted instead of the policy.
    """

    robot: str
    version: int  # of the policy that acted
    time: float  # end of the episode by the robot's clock [s since 1970]
    success: bool
    terminated: bool  # by the task, not by a time limit
    watched: bool  # whether an expert could take over
    observations: Array
    actions: Array
    rewards: Array
    decision: Array
    corrected: Array
    number: int = 0  # counts the episodes of the robot

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def place(self) -> tuple[float, str, int]:
        """Key of the order of episodes, which does not depend on when they arrived."""
        return self.time, self.robot, self.number

    def to_wire(self) -> dict[str, Any]:
        """Return the body of a message or file."""
        kinds = {**_FACTS, **dict.fromkeys(_BOOLS, bool)}
        plain = {name: kind(getattr(self, name)) for name, kind in kinds.items()}
        flags = {name: to_wire(np.asarray(getattr(self, name), np.uint8)) for name in _FLAGS}
        numbers = {name: to_wire(np.asarray(getattr(self, name), np.float32)) for name in _ARRAYS[:3]}
        return {**plain, **numbers, **flags}

    def numbered(self, number: int) -> FleetEpisode:
        return replace(self, number=number)

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        return pack({"type": "episode", "episode": self.to_wire()})


def read_episode(data: Any, obs_dim: int, action_dim: int) -> FleetEpisode:
    """Parse and validate an episode of a message.

    Raises:
        ServingError: `malformed`, `missing`, `dtype`, `shape`, `nan` or `range`; names the entry.
    """
    expected = {*_FACTS, *_BOOLS, *_ARRAYS}
    if not isinstance(data, dict) or set(data) != expected:
        found = sorted(map(short, data)) if isinstance(data, dict) else short(data)
        raise ServingError("missing", f"an episode must have {sorted(expected)}; got {found}.")
    for name, kind in {**_FACTS, **dict.fromkeys(_BOOLS, bool)}.items():
        if type(data[name]) is not kind or (kind is int and not 0 <= data[name] < 2**53):
            raise ServingError(
                "malformed", f"'{name}' must be of type {kind.__name__}; got {short(data[name])}."
            )
    _require_name(data["robot"])
    if not 0 <= data["time"] < 2**53:
        raise ServingError("range", f"'time' must be in seconds since 1970; got {data['time']}.")
    arrays = {name: from_wire(name, data[name]) for name in _ARRAYS}
    steps = arrays["rewards"].shape[0] if arrays["rewards"].ndim else 0
    if not steps:
        raise ServingError("shape", "'rewards' must be (T,) with T at least 1; an episode has a step.")
    shapes = {"observations": (steps + 1, obs_dim), "actions": (steps, action_dim), "rewards": (steps,)}
    features = {name: Feature(shape) for name, shape in shapes.items()}
    features |= {name: Feature((steps,), "uint8") for name in _FLAGS}
    values = {name: checked(name, arrays[name], features[name], MAX_ABS) for name in _ARRAYS}
    values |= {name: values[name].astype(bool) for name in _FLAGS}
    return FleetEpisode(**{name: data[name] for name in (*_FACTS, *_BOOLS)} | values)


def from_bytes(content: bytes, obs_dim: int, action_dim: int) -> FleetEpisode:
    """Invert `FleetEpisode.to_bytes`; errors as `read_episode`."""
    return read_episode(unpack(content).get("episode"), obs_dim, action_dim)


def max_message(obs_dim: int, action_dim: int, max_steps: int) -> int:
    """Upper bound on the bytes of a message with an episode of `max_steps` steps."""
    return 4096 + 4 * obs_dim + max_steps * (4 * (obs_dim + action_dim + 1) + len(_FLAGS))


def require_robot(name: str) -> str:
    """Return the name of a robot.

    Raises:
        ConfigError: If it is not a plain word.
    """
    try:
        return _require_name(name)
    except ServingError as error:
        raise ConfigError(str(error)) from None


def _require_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ServingError("malformed", f"the name of a robot must be a plain word; got '{short(name)}'.")
    return name
