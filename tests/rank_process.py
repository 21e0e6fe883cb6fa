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

import pytest
from small_algorithms import dataset, setup, small
from torch import distributed

from algos.training import ranks
from algos.training.ranks import ALONE, _current, current, join
from algos.training.run_directory import FollowedRun, RunDirectory
from algos.training.settings import TrainerSettings
from algos.training.trainer import train
from envs.engine.workers import LocalWorkers, ProcessWorkers, Workers
from policies import registry
from policies.errors import WorkerError


class Rank:
    """Trains the smallest run of an algorithm; see `envs.engine.workers`."""

    def __init__(self, rank: int, world: int, port: int, large: int) -> None:
        ranks._LARGE = large
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (place | {"RANK": str(rank), "WORLD_SIZE": str(world)}).items():
                patch.setenv(name, value)
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
        _current.set(ALONE)
        distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def processes(large: int = ranks._LARGE) -> Iterator[tuple[LocalWorkers, ProcessWorkers]]:
    """Start two ranks of a run, the first in this process; from `large` numbers on they share memory."""
    port, before = free_port(), ranks._LARGE
    with ThreadPoolExecutor(1) as pool:  # they wait for each other
        other = pool.submit(ProcessWorkers, Rank, [(1, 2, port, large)])
        first = LocalWorkers(Rank, [(0, 2, port, large)])
        both = first, other.result()
        try:
            yield both
        finally:
            ranks._LARGE = before
            for rank in both:
                rank.close()


def train_in(both: tuple[Workers, ...], algo: str, folder: Path, killed_at: int | None = None) -> list[str]:
    """Train or resume a run in both ranks at once; return what each says: its error, nothing, or `killed`."""

    def call(rank: Workers) -> str:
        try:
            return str(rank.call("train", [(algo, str(folder), killed_at)])[0])
        except WorkerError as error:
            return "killed" if "signal 9" in str(error) else str(error)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(call, both[1])
        return [call(both[0]), other.result()]
