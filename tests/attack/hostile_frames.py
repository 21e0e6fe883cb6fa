"""What a hostile client sends to a policy server, frame by frame."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from policies.serving.messages import VERSION, Schema, pack, to_wire


def request(schema: Schema) -> dict[str, Any]:
    """Return what an honest client asks."""
    obs = {name: to_wire(np.zeros(one.shape, one.dtype)) for name, one in schema.inputs.items()}
    return {
        "v": VERSION, "type": "act", "id": 1, "schema": schema.fingerprint, "obs": obs, "key": [0, 0, 0],
        "deadline_ms": 1e6,
    }  # fmt: skip


STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**63 - 1, 1e308, float("nan"), float("inf"), "", "x" * 2000, b"", b"\xff" * 64, [],
    {},    [[[[]]]], [0] * 500, {"a": {"a": {}}}, "float32", "object", "|O", [2**40, 2**40], [-1, 3], [0],
)  # fmt: skip


def hostile(schema: Schema, rng: random.Random) -> list[bytes]:
    """Return the frames of one message."""
    message = request(schema)
    way = rng.randrange(8)
    if way == 0:
        return [rng.randbytes(rng.randrange(200))]
    if way == 1:
        return [b"\x81" * rng.randrange(1, 400) + b"\xa1a"]  # maps in maps
    if way == 2:
        return [b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff"][
            : rng.randrange(1, 4)
        ]
    if way == 3:
        frame = bytearray(pack(message))
        for _ in range(rng.choice([1, 3, 20])):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        return [bytes(frame[: rng.randrange(len(frame) + 1)] if rng.random() < 0.3 else frame)]
    if way == 4:
        message["obs"]["observation"][rng.choice(["dtype", "shape", "data", "other"])] = rng.choice(STRANGE)
    elif way == 5:
        message["obs"][rng.choice(["observation", "goal", ""])] = rng.choice(STRANGE)
    elif way == 6:
        message[rng.choice(["v", "type", "id", "schema", "obs", "key", "deadline_ms", "extra"])] = rng.choice(
            STRANGE
        )
    else:
        return [pack(message)] * rng.randrange(2, 6)  # several frames
    return [pack(message)]


def send_many(
    endpoint: str, schema: Schema, count: int, seed: int, meanwhile: Callable[[], None]
) -> tuple[int, int]:
    """Send frames, drop answers, and do something honest every now and then.

    Returns:
        Frames sent, and how often something honest was done.
    """
    import zmq

    rng, sent, honest = random.Random(seed), 0, 0
    with zmq.Context() as context:
        client: Any = None
        while sent < count:
            if client is None or rng.random() < 0.001:  # a new connection now and then
                if client is not None:
                    client.close(linger=0)
                client = context.socket(zmq.DEALER)
                client.linger, client.sndhwm = 0, 1000
                client.connect(endpoint)
            frames = hostile(schema, rng)
            if client.poll(1000, zmq.POLLOUT):
                client.send_multipart(frames)
                sent += len(frames)
            while client.poll(0, zmq.POLLIN):
                client.recv_multipart()
            if rng.random() < 50 / count:
                meanwhile()
                honest += 1
        client.poll(2000)
        client.close(linger=2000)
    return sent, honest
