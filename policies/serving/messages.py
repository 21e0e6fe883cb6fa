"""Messages between a policy server and its clients, and their validation.

A message is one msgpack map in one ZeroMQ frame; arrays are maps of `dtype`, `shape` and raw `data`. Nothing
is unpickled, no types are resolved by name, and sizes are compared with the received bytes before use.

    hello    {v, type, id}                                           -> welcome {v, type, id, schema, ...}
    act      {v, type, id, schema, obs: {name: array}, key, deadline_ms} -> actions {..., actions: array}
    metrics  {v, type, id}                                           -> metrics {v, type, id, metrics}
    anything else                                                    -> error {v, type, id, reason, message}

Requires NumPy and msgpack only, so it runs without PyTorch.

Legend: To observation history, Ta executed steps, Da action width.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from policies import extras
from policies.errors import ServingError
from policies.execution.history import Array
from policies.storage.features import Feature, short
from policies.storage.strict_json import MAX_DEPTH, depth_of

VERSION = 1
PORT = 5750
DTYPES = ("float32", "float64", "uint8")
MAX_DIMS, MAX_ITEMS, MAX_TEXT = 8, 256, 65536  # of an array; of a list or map; characters of a text

REASONS = {
    "malformed": "not a message of this protocol",
    "version": "another version of the protocol",
    "oversize": "more bytes than an observation can have",
    "schema": "made for another policy or task than the one that is served",
    "conflict": "another episode of this robot has the same number",
    "missing": "an observation without an entry that the policy needs, or with one that it does not have",
    "dtype": "an array of another type",
    "shape": "an array of another shape",
    "nan": "a number that is NaN or infinite",
    "range": "a number that is too large to be an observation",
    "busy": "more requests are waiting than the queue takes",
    "late": "the deadline passed before the decision began",
    "stopping": "the server is shutting down",
    "failed": "the policy raised an error, or gave a number that is not finite",
}
"""Why a server refuses."""


def require(name: str) -> ModuleType:
    """Import a package of the extra `serve`."""
    bare = "on a robot without PyTorch: pip install numpy pyzmq msgpack"
    return extras.require(name, extra="serve", what="serving", instead=bare)


@dataclass(frozen=True)
class Schema:
    """Inputs and outputs of a served policy."""

    inputs: Mapping[str, Feature]  # `observation` (To, Do), `goal` (Dg,), images (To, H, W, 3) by camera
    action: Feature  # (Ta, Da), physical
    obs_steps: int = 1  # To
    task: str | None = None  # name of the task; None: unknown
    control_hz: float | None = None  # execution rate of actions [Hz]; None: unknown
    action_low: Sequence[float] | None = None  # (Da,), physical; None: unknown
    action_high: Sequence[float] | None = None  # (Da,)
    policy: str = field(default="", compare=False)  # fingerprint of the weights

    def to_wire(self) -> dict[str, Any]:
        return {**asdict(self), "inputs": {name: asdict(one) for name, one in self.inputs.items()}}

    @classmethod
    def from_wire(cls, data: Any) -> Schema:
        try:
            inputs = {str(name): _feature(one) for name, one in data["inputs"].items()}
            own: dict[str, Any] = {key: data[key] for key in ("obs_steps", "task", "control_hz", "policy")}
            low, high = floats_of(data["action_low"]), floats_of(data["action_high"])
            return cls(inputs, _feature(data["action"]), action_low=low, action_high=high, **own)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ServingError("malformed", f"the server's description cannot be read: {error!r}.") from None

    @property
    def fingerprint(self) -> str:
        """Identifier of the requested policy."""
        text = json.dumps(self.to_wire(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def max_message(self) -> int:
        """Upper bound on the bytes of a valid request."""
        return sum(one.nbytes for one in self.inputs.values()) + 4096 + 256 * len(self.inputs)


def _feature(data: Mapping[str, Any]) -> Feature:
    return Feature(tuple(int(n) for n in data["shape"]), str(data["dtype"]))


def floats_of(values: Any) -> tuple[float, ...] | None:
    """Return numbers as a tuple; None for None."""
    return None if values is None else tuple(float(value) for value in values)


def pack(message: Mapping[str, Any]) -> bytes:
    """Serialise a message."""
    packed: bytes = require("msgpack").packb({"v": VERSION, **message}, use_bin_type=True)
    return packed


def unpack(frame: bytes) -> dict[str, Any]:
    """Parse a message of any version.

    Raises:
        ServingError: `malformed`, unless it is a map of text, numbers, bytes, and short lists and maps of
            these.
    """
    limits = {"max_str_len": MAX_TEXT, "max_array_len": MAX_ITEMS, "max_map_len": MAX_ITEMS}
    limits |= {"max_ext_len": 0, "max_bin_len": len(frame)}
    msgpack = require("msgpack")
    try:
        data = msgpack.unpackb(frame, raw=False, strict_map_key=True, **limits)
    except Exception as error:  # msgpack raises several classes
        raise ServingError("malformed", f"a message must be one msgpack map: {short(error)}") from None
    if not isinstance(data, dict) or not isinstance(data.get("type"), str):
        raise ServingError("malformed", "a message must be a map with a text 'type'.")
    if depth_of(data) > MAX_DEPTH:  # msgpack reads more levels than Python prints
        raise ServingError("malformed", f"a message must have at most {MAX_DEPTH} levels.")
    return data


def to_wire(array: Array) -> dict[str, Any]:
    """Serialise an array to msgpack types."""
    data = np.ascontiguousarray(array).tobytes()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def from_wire(name: str, data: Any) -> Array:
    """Deserialise an array."""
    if not isinstance(data, dict) or set(data) != {"dtype", "shape", "data"}:
        raise ServingError("malformed", f"'{name}' must be a map of dtype, shape and data.")
    dtype, shape, raw = data["dtype"], data["shape"], data["data"]
    if dtype not in DTYPES:
        raise ServingError("dtype", f"'{name}' must be one of {', '.join(DTYPES)}; got {short(dtype)}.")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_size, shape)):
        raise ServingError("malformed", f"the shape of '{name}' must be a short list of sizes.")
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if not isinstance(raw, bytes) or len(raw) != expected:
        found = f"{len(raw)} bytes" if isinstance(raw, bytes) else type(raw).__name__
        raise ServingError("malformed", f"'{name}' must have {expected} bytes by its shape; got {found}.")
    try:
        return np.frombuffer(raw, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape)
    except ValueError:  # no entries, and other sizes beyond those of an array
        raise ServingError("malformed", f"'{name}' has a shape that no array has: {short(shape)}.") from None


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def read_observation(data: Any, schema: Schema, max_abs: float) -> dict[str, Array]:
    """Parse and validate the observation of a request; `max_abs` bounds its magnitudes.

    Raises:
        ServingError: `malformed`, `missing`, `dtype`, `shape`, `nan` or `range`; names the entry.
    """
    if not isinstance(data, dict) or set(data) != set(schema.inputs):
        found = sorted(map(short, data)) if isinstance(data, dict) else short(data)
        raise ServingError("missing", f"an observation must have {sorted(schema.inputs)}; got {found}.")
    inputs = schema.inputs.items()
    return {name: checked(name, from_wire(name, data[name]), one, max_abs) for name, one in inputs}


def checked(name: str, value: Array, feature: Feature, max_abs: float) -> Array:
    """Return an array in the dtype of a feature.

    Raises:
        ServingError: `dtype`, `shape`, `nan` or `range`; names the entry.
    """
    floating = feature.dtype != "uint8"
    if (value.dtype.kind == "f") != floating:
        raise ServingError("dtype", f"'{name}' must be {feature.dtype}; got {value.dtype}.")
    if value.shape != feature.shape:
        raise ServingError("shape", f"'{name}' must have shape {feature.shape}; got {value.shape}.")
    if not floating:
        return value
    largest = float(np.abs(value).max(initial=0.0))  # NaN, if any is
    if not math.isfinite(largest):
        raise ServingError("nan", f"'{name}' must be finite; it holds NaN or inf.")
    if largest > max_abs:
        raise ServingError("range", f"'{name}' must lie within ± {max_abs:g}; got {largest:g}.")
    return value.astype(feature.dtype)
