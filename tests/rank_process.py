"""One rank of a run in a process of its own, for tests; it is forked, so that little is imported anew."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from small_algorithms import dataset, setup, small

from algos.training.ranks import current, join
from algos.training.run_directory import FollowedRun, RunDirectory
from algos.training.settings import TrainerSettings
from algos.training.trainer import train
from envs.engine.workers import ProcessWorkers
from policies import registry
from policies.errors import WorkerError


class Rank:
    """Trains the smallest run of an algorithm; see `envs.engine.workers`."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(place, RANK=str(rank), WORLD_SIZE=str(world))
        join()

    def train(self, algo: str, folder: str, killed_at: int | None = None) -> str:
        """Train or resume a run; rank 1 kills itself after `killed_at` units. Returns an error of peers."""
        run = small(registry.lookup("algo", algo)).build(setup("flow", dataset=dataset()))
        advance = run.advance

        def advance_or_die() -> Any:
            if killed_at is not None and run.progress >= killed_at and current().rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return advance()

        run.advance = advance_or_die
        kind = FollowedRun if current().rank else RunDirectory
        try:
            train(run, kind(folder), TrainerSettings(checkpoint_every=2), progress=False)
        except WorkerError as error:
            return str(error)
        finally:
            run.close()
        return ""

    def close(self) -> None:
        """There is nothing to close."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def processes(world: int) -> Iterator[list[ProcessWorkers]]:
    """Start the ranks of a run, each for itself, so that the end of one does not end the others."""
    port = free_port()
    with ThreadPoolExecutor(world) as pool:  # they wait for each other
        ranks = list(pool.map(lambda rank: ProcessWorkers(Rank, [(rank, world, port)]), range(world)))
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.close()


def train_in(ranks: list[ProcessWorkers], algo: str, folder: Path, killed_at: int | None = None) -> list[str]:
    """Train or resume a run in all ranks at once; return what each says: its error, nothing, or `killed`."""

    def call(rank: ProcessWorkers) -> str:
        try:
            return str(rank.call("train", [(algo, str(folder), killed_at)])[0])
        except WorkerError as error:
            return "killed" if "signal 9" in str(error) else str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))
