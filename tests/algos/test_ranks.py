"""Data-parallel training: the ranks here are threads of one process that exchange what processes would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from messages import mentions
from small_algorithms import ALGOS, PROCESSES, accepts, dataset, init, setup, small
from small_cloning import weights

from algos.onpolicy.config import OnPolicyConfig
from algos.training.ranks import ALONE, Ranks, _current, digest
from algos.training.run_directory import FollowedRun, RunDirectory
from algos.training.serialization import to_plain
from algos.training.trainer import train
from burnish.config.train import TrainConfig
from burnish.runs.resolve import _require_parallel
from policies import registry
from policies.errors import ConfigError, TrainingError


class Meeting:
    """Where the threads of one run exchange values, once all are built."""

    def __init__(self, world: int) -> None:
        self.world, self._values, self.is_open = world, [None] * world, False
        self._barrier = threading.Barrier(world, timeout=60)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        if not self.is_open:
            return list(self._values)
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def leave(self) -> None:
        self._barrier.abort()


class ThreadRanks(Ranks):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world, self._meeting = rank, meeting.world, meeting

    def _sum(self, flat: torch.Tensor) -> None:
        parts = self._meeting.exchange(self.rank, flat.clone())
        flat.copy_(torch.stack(parts).sum(dim=0))

    def _gather(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, value)


def in_ranks(world: int, build: Callable[[], Any], work: Callable[[Any], Any]) -> list[Any]:
    """Build something in each rank, one after the other; return what `work` makes of it in all at once."""
    meeting = Meeting(world)

    def as_rank(rank: int, call: Callable[[], Any]) -> Any:
        token = _current.set(ThreadRanks(rank, meeting))
        try:
            return call()
        except BaseException:
            meeting.leave()
            raise
        finally:
            _current.reset(token)

    built = [as_rank(rank, build) for rank in range(world)]
    meeting.is_open = True
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: as_rank(rank, lambda: work(built[rank])), range(world)))


# -- one gradient ---------------------------------------------------------------------------------------

DIVIDED = [name for name in ALGOS if getattr(registry.lookup("algo", name), "splits_batches", False)]
FAVOURITES = ("flow", "diffusion", "deterministic", *PROCESSES)


def built(algo: str) -> Any:
    process = next(one for one in FAVOURITES if one in PROCESSES and accepts(algo, one))
    return small(registry.lookup("algo", algo), process).build(setup(process, dataset=dataset()))


def first_iteration(run: Any) -> tuple[torch.Tensor, dict[str, float], str]:
    """Return weights and metrics after one iteration, and the digest of the state."""
    found = {name: float(value) for name, value in run.advance().items()}
    state = digest(to_plain(run.state_dict()))
    run.close()
    return weights(run.policy if hasattr(run, "policy") else run.learner.policy), found, state


def test_every_algorithm_but_those_with_a_replay_is_divided() -> None:
    assert set(ALGOS) - set(DIVIDED) == {"sac", "rlpd", "dsrl"}


@pytest.mark.parametrize("algo", DIVIDED)
def test_two_ranks_take_the_steps_of_one(algo: str) -> None:
    parts = in_ranks(2, lambda: built(algo), first_iteration)
    assert parts[0][2] == parts[1][2], "the whole state of the ranks is equal, bit by bit"
    if issubclass(registry.lookup("algo", algo), OnPolicyConfig):
        return  # each rank acts with noise of its own: compared below
    alone = first_iteration(built(algo))
    torch.testing.assert_close(parts[0][0], alone[0], rtol=0, atol=2e-5)
