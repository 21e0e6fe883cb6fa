"""What reading a large dataset costs, in memory and in mapped files.

    python -m benchmarks.studies.datasets --gigabytes 2

writes a temporary file of that size in D4RL's layout, reads it as usual and as if there were too little
memory, and prints CPU seconds of every part. The two datasets and their statistics are compared first, number
by number.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import torch

from benchmarks.options import parser
from envs.datasets import EpisodeDataset, free_memory, read_dataset
from envs.datasets.windows import Windows
from policies.policy_config import ChunkSpec

OBS, ACTION, EPISODE, PIECE = 60, 8, 1000, 100_000
BATCH, BATCHES = 256, 200


def write_file(path: Path, gigabytes: float) -> None:
    """Write random numbers in D4RL's layout, piece by piece."""
    rng = np.random.default_rng(0)
    num = max(int(gigabytes * 1e9 / (4 * (OBS + ACTION + 1))) // PIECE, 1) * PIECE
    widths = {"observations": OBS, "actions": ACTION}
    with h5py.File(path, "w") as file:
        for key, width in widths.items():
            rows = file.create_dataset(key, (num, width), "f4")
            for first in range(0, num, PIECE):
                rows[first : first + PIECE] = rng.standard_normal((PIECE, width), "f4")
        file["rewards"], file["terminals"] = np.zeros(num, "f4"), np.zeros(num, bool)
        file["timeouts"] = np.arange(1, num + 1) % EPISODE == 0


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what comes out, and the CPU seconds that it took."""
    start = time.process_time()
    return work(), time.process_time() - start


def batches(data: EpisodeDataset) -> None:
    """Gather batches of windows."""
    windows = Windows(data, ChunkSpec(ACTION, horizon=16, act_steps=8, obs_steps=2))
    generator = torch.Generator().manual_seed(0)
    for _ in range(BATCHES):
        windows.sample(BATCH, generator=generator)


def measure(path: Path) -> dict[str, float]:
    """Return CPU seconds by what was done."""
    inside, read_inside = timed(lambda: read_dataset(path))
    with mock.patch.object(free_memory, "free_memory", lambda: 1):
        outside, read_outside = timed(lambda: read_dataset(path, cache=path.parent))
    statistics, pass_over = timed(inside.statistics)
    mapped, pass_mapped = timed(outside.statistics)
    same = all(
        torch.equal(value, mapped[k][name]) for k, one in statistics.items() for name, value in one.items()
    )
    if inside.digest() != outside.digest() or not same:
        raise RuntimeError("the dataset in files differs from the one in memory.")
    return {
        "reading into memory": read_inside,
        "reading into files": read_outside,
        "statistics, in memory": pass_over,
        "statistics, in files": pass_mapped,
        f"{BATCHES} batches of {BATCH} windows, in memory": timed(lambda: batches(inside))[1],
        f"{BATCHES} batches of {BATCH} windows, in files": timed(lambda: batches(outside))[1],
    }


def main() -> None:
    """Write the file, measure and print."""
    asked = parser(__doc__)
    asked.add_argument("--gigabytes", type=float, default=2.0)
    options = asked.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.hdf5"
        write_file(path, options.gigabytes)
        for what, seconds in measure(path).items():
            print(f"{what:45s} {seconds:8.2f} CPU s")


if __name__ == "__main__":
    main()
