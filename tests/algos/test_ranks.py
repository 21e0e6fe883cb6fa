"""Data-parallel training: the ranks here are threads of one process that exchange what processes would."""

from __future__ import annotations

import re
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pairwise
import pytest
import torch
from messages import mentions
from rank_process import processes, train_in
from small_algorithms import ALGOS, PROCESSES, accepts, dataset, setup, small
from small_cloning import weights

from algos.onpolicy.config import OnPolicyConfig
from algos.training import rank_memory
from algos.training.ranks import Ranks, _current, current, digest
from algos.training.run_directory import FollowedRun, RunDirectory
from algos.training.serialization import to_plain
from algos.training.settings import TrainerSettings
from algos.training.signals import Interrupted, StopSignals
from algos.training.trainer import train
from burnish.config.overrides import RunContext
from burnish.config.train import TrainConfig
from burnish.runs.resolve import _require_parallel, resolve_seeds
from envs.engine import workers
from envs.engine.workers import LocalWorkers
from envs.rollouts.fleet import RolloutSettings
from policies import registry
from policies.errors import CheckpointError, ConfigError, TrainingError


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
        with suppress(threading.BrokenBarrierError):  # another rank had an error since
            self._barrier.wait()
        return found

    def leave(self) -> None:
        self._barrier.abort()


class ThreadRanks(Ranks):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world, self._meeting = rank, meeting.world, meeting

    def _sum(self, flat: torch.Tensor, divisor: int) -> torch.Tensor:
        return torch.stack(self._meeting.exchange(self.rank, flat)).sum(dim=0) / divisor

    def gather(self, value: Any) -> list[Any]:
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
ON_POLICY = [name for name in DIVIDED if issubclass(registry.lookup("algo", name), OnPolicyConfig)]
COMPARED = DIVIDED if pairwise.everything else ["bc", "cdsa", "fql", "prdc", "td3_bc", "trqam"]
"""Of the loops and of the statistics of batches, each once."""


def built(algo: str, **changes: Any) -> Any:
    process = next(one for one in ("flow", "diffusion", "deterministic", *PROCESSES) if accepts(algo, one))
    given = setup(process, dataset=dataset(), **changes)
    if algo in ("diffuser", "decision_diffuser"):  # they continue planners alone
        given.init = None
    return small(registry.lookup("algo", algo), process).build(given)


def first_iteration(run: Any) -> tuple[torch.Tensor, dict[str, float], str]:
    """Return weights and metrics after one iteration, and the digest of the state."""
    found = {name: float(value) for name, value in run.advance().items()}
    state = digest(to_plain(run.state_dict()))
    run.close()
    return weights(run.policy if hasattr(run, "policy") else run.learner.policy), found, state


def test_every_algorithm_but_those_with_a_replay_is_divided() -> None:
    assert set(ALGOS) - set(DIVIDED) == {"sac", "rlpd", "dsrl"}


@pytest.mark.parametrize("algo", COMPARED)
def test_two_ranks_take_the_steps_of_one(algo: str) -> None:
    parts = in_ranks(2, lambda: built(algo), first_iteration)
    assert parts[0][2] == parts[1][2], "the whole state of the ranks is equal, bit by bit"
    if algo in ON_POLICY:
        return  # a rank acts with noise of its own: see the next law
    alone = first_iteration(built(algo))
    away = ((parts[0][0] - alone[0]).abs() > 2e-5).double().mean()
    # The last block of a value network has gradients that are rounding; Adam's first step scales them up.
    assert away <= (0.01 if algo == "diffuser" else 0.0)


@pytest.mark.parametrize("acts", ["workers", "learner"])
@pytest.mark.parametrize("algo", ON_POLICY if pairwise.everything else ["dppo", "gorl"])
def test_two_ranks_collect_and_learn_what_one_with_two_workers_does(
    algo: str, acts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = lambda factory, arguments, processes: LocalWorkers(factory, arguments)  # noqa: E731
    monkeypatch.setattr(workers, "start_workers", local)
    weights_alone, metrics_alone, _ = first_iteration(built(algo, num_workers=2))
    rollout = RolloutSettings(acts)
    parts = in_ranks(2, lambda: built(algo, num_workers=1, rollout=rollout), first_iteration)
    torch.testing.assert_close(parts[0][0], weights_alone, rtol=0, atol=1e-5)
    for name, value in metrics_alone.items():
        if not name.startswith("time/"):
            assert parts[0][1][name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name


def test_with_other_processes_an_episode_starts_anew_and_seeds_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = in_ranks(2, lambda: built("dppo"), lambda run: (run.advance(), run.state_dict())[1])[0]
    run = built("dppo")
    run.load_state_dict(saved)
    assert run.iteration == 1
    counted = [worker["next_episode"] for worker in saved["pool"]["workers"]]
    run.advance()
    run.pool.state_dict()
    now = run.pool.state_dict()["workers"][0]["next_episode"]
    assert (now > torch.cat(counted)).all()
    saved["pool"]["processes"] = 1
    with pytest.raises(CheckpointError, match=mentions("workers (2, 2) (2, 1)")):
        built("dppo").load_state_dict(saved)


def test_demonstrations_count_once_for_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    local = lambda factory, arguments, processes: LocalWorkers(factory, arguments)  # noqa: E731
    monkeypatch.setattr(workers, "start_workers", local)
    config = replace(small(registry.lookup("algo", "dppo"), "diffusion"), demo_weight=0.5)

    def begun(num_workers: int) -> Any:
        return config.build(setup("diffusion", dataset=dataset(), num_workers=num_workers))

    alone, _, _ = first_iteration(begun(2))
    for part, _, _ in in_ranks(2, lambda: begun(1), first_iteration):
        torch.testing.assert_close(part, alone, rtol=0, atol=1e-5)


def test_a_signal_to_one_rank_stops_all_after_the_same_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stops = new_run(tmp_path / "run"), dict[int, StopSignals]()

    class Stop(StopSignals):  # threads receive no signals
        def __enter__(self) -> StopSignals:
            stops[current().rank] = self
            return self

    monkeypatch.setattr("algos.training.trainer.StopSignals", Stop)

    def stopped(run: Any) -> int:
        rank, advance = current().rank, run.advance

        def advance_and_stop() -> Any:
            found = advance()
            if rank == 1 and run.progress == 4:
                stops[1].number = signal.SIGTERM
            return found

        run.advance = advance_and_stop
        kind = FollowedRun if rank else RunDirectory
        with pytest.raises(Interrupted):
            train(run, kind(folder), TrainerSettings(checkpoint_every=2), progress=False)
        return run.progress

    assert in_ranks(2, lambda: built("bc"), stopped) == [4, 4]
    assert RunDirectory(folder).checkpoints() == [2, 4]


# -- processes ------------------------------------------------------------------------------------------


def new_run(folder: Path) -> Path:
    RunDirectory.create_at(folder, {"seed": 5})
    return folder


def state_of(folder: Path) -> str:
    state = RunDirectory(folder).load_training_state()
    return digest(to_plain(state["algorithm"]))


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "sockets"])
@pytest.mark.parametrize("algo", ["bc", "dppo", "iql"] if pairwise.everything else ["dppo"])
def test_two_processes_resume_bit_by_bit_and_one_goes_on_after_a_kill(
    algo: str, shared: bool, tmp_path: Path
) -> None:
    whole, resumed, killed = (new_run(tmp_path / name) for name in ("whole", "resumed", "killed"))
    with processes(large=1 if shared else 1 << 40) as ranks:
        assert train_in(ranks, algo, whole) == ["", ""]
        middle = RunDirectory(whole).checkpoints()[0]
        shutil.copytree(RunDirectory(whole).checkpoint_path(middle), resumed / "checkpoints" / str(middle))
        assert train_in(ranks, algo, resumed) == ["", ""]
        assert state_of(resumed) == state_of(whole)
        found = train_in(ranks, algo, killed, middle)
    assert found[1] == "killed" and re.search(mentions("rank 0 resume"), found[0])
    assert RunDirectory(killed).checkpoints() == [middle]
    run = small(registry.lookup("algo", algo)).build(setup("flow", dataset=dataset()))
    train(run, RunDirectory(killed), TrainerSettings(checkpoint_every=2), progress=False)
    assert run.progress >= run.total
    state = RunDirectory(killed).load_training_state()["trainer"]
    assert state["processes"] == [(0, 2), (middle, 1)], "other last bits from there on"


@pytest.mark.parametrize("room", ["there", "not there", "on one rank"])
def test_memory_that_ranks_share_sums_or_is_not_used(
    room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path if room == "there" else tmp_path / "not there"
    monkeypatch.setattr(rank_memory, "_FOLDER", folder)
    opened = torch.from_file
    barrier = threading.Barrier(3, timeout=60)

    def open_or_not(*args: Any, **options: Any) -> torch.Tensor:
        if current().rank == 1 and room == "on one rank":
            raise RuntimeError("on another machine")
        return opened(*args, **options)

    if room == "on one rank":
        folder.mkdir()
    monkeypatch.setattr(torch, "from_file", open_or_not)

    def work(memory: rank_memory.RankMemory) -> list[torch.Tensor] | None:
        found = []
        for size in (5, 2, 9, 9):  # more than there was: a new block
            if (space := memory.space(size, torch.float64)) is None:
                return None
            space.copy_(torch.arange(size) + 10 * current().rank)
            found.append(memory.sum(space, 3).clone())
        assert memory.sum(torch.zeros(9, dtype=torch.float64), 3) is None  # lies elsewhere
        return found

    for found in in_ranks(3, lambda: rank_memory.RankMemory(current(), barrier.wait), work):
        if room == "there":
            for one, size in zip(found, (5, 2, 9, 9), strict=True):
                torch.testing.assert_close(one, torch.arange(size).double() + 10)
        else:
            assert found is None
    assert not list(tmp_path.rglob("burnish-*"))


def test_states_that_differ_between_ranks_stop_a_run() -> None:
    def check(_: None) -> None:
        current().require_equal({"weights": torch.tensor([current().rank])}, "weights after 3 steps")

    with pytest.raises(TrainingError, match=mentions("weights 3 2 processes [1]")):
        in_ranks(2, lambda: None, check)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algo": {"batch_size": 7}}, "algo.batch_size multiple 2 7"),
        ({"algo": "sac"}, "sac one process 2"),
        ({"algo": {"online_steps": 5}}, "algo.online_steps 2"),
    ],
)
def test_what_several_processes_cannot_train_is_refused(changes: dict[str, Any], message: str) -> None:
    algo = changes.pop("algo", {})
    name = algo if isinstance(algo, str) else "iql" if "online_steps" in algo else "bc"
    config = TrainConfig(algo=small(registry.lookup("algo", name)), **changes)
    for key, value in {} if isinstance(algo, str) else algo.items():
        setattr(config.algo, key, value)
    with pytest.raises(ConfigError, match=mentions(message)):
        in_ranks(2, lambda: None, lambda _: _require_parallel(config))


def test_seeds_are_refused_in_several_processes(tmp_path: Path) -> None:
    config = TrainConfig(algo=small(registry.lookup("algo", "iql")), seeds=[1, 2])
    with pytest.raises(ConfigError, match=mentions("seeds one process 2")):
        in_ranks(2, lambda: None, lambda _: resolve_seeds(config, RunContext(tmp_path / "runs")))
