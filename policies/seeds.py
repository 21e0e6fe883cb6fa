"""Random streams: the only place where one seed becomes many.

Whatever draws random numbers in a run names its stream, so that no two share one by accident: initial
weights, shuffles, noise, episodes. A name is chosen where it is used; there is no list of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(seed: int, stream: str, *key: int) -> int:
    """Return a 32-bit seed that depends on all arguments; streams are independent of each other.

    `stream` names what is drawn, `key` which one of many: an episode, a worker.
    """
    place = (zlib.crc32(stream.encode()), *key)
    return int(np.random.SeedSequence(seed, spawn_key=place).generate_state(1)[0])


def seeded_generator(
    seed: int, stream: str, *key: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a generator at the start of a stream; see `derive_seed`."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, stream, *key))


@contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Draw initial weights from a seed, on the CPU; every global generator is afterwards as it was before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed those of accelerators too
        yield
