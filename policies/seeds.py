"""Random streams: derives independent seeds from one.

Each consumer of random numbers (initial weights, shuffles, noise, episodes) names its own stream at the call
site; there is no central list.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(seed: int, stream: str, *key: int) -> int:
    """Return a 32-bit seed from all arguments; `key` indexes items of the stream, e.g. episode or worker."""
    place = (zlib.crc32(stream.encode()), *key)
    return int(np.random.SeedSequence(seed, spawn_key=place).generate_state(1)[0])


def seeded_generator(
    seed: int, stream: str, *key: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a generator seeded with `derive_seed`."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, stream, *key))


@contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Draw initial weights from a seed on the CPU; global generators are restored afterwards."""
    with seeded_global(seed):
        yield


@contextmanager
def seeded_global(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generators, which dropout draws from, of CPU and device; restored afterwards."""
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would also seed other accelerators
        for one in devices:
            with torch.cuda.device(one):
                torch.cuda.manual_seed(seed)
        yield
