"""Workers as Ray actors: the same numbers, whatever happens to an actor. One cluster serves all tests."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from point_env import PointEnv
from small_algorithms import setup, small
from small_cloning import weights

from envs.engine.workers import LocalWorkers
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings as Settings
from envs.rollouts.fleet import RayFleet
from envs.rollouts.rollout import Rollout, RolloutPool
from policies import registry
from policies.errors import ConfigError, EnvironmentFailure, WorkerError

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra cluster")

FLEET = RayFleet()
WORKERS = 2


class Random:
    """Acts at random; does to its process what the first file of a folder says, which it removes."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def act(self, obs: Mapping[str, Any], generator: torch.Generator) -> tuple[torch.Tensor, dict[str, Any]]:
        action = torch.randn(len(obs["state"]), 2, 2, generator=generator)
        for file in sorted(self.folder.iterdir()) if self.folder is not None else ():
            try:
                file.unlink()
            except FileNotFoundError:  # another worker was first
                continue
            os.kill(os.getpid(), getattr(signal, file.name.partition("-")[0]))
        return action, {"action": action.flatten(1)}


class Broken(Random):
    def act(self, obs: Mapping[str, Any], generator: torch.Generator) -> Any:
        raise EnvironmentFailure("the simulator is broken")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Give Ray a folder whose path is short enough for its sockets, and end what it has begun."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", folder)
            yield
        if find_spec("ray") is not None:
            import ray

            ray.shutdown()


def test_a_folder_whose_path_is_too_long_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    with pytest.raises(WorkerError, match=mentions("RAY_TMPDIR AF_UNIX")):
        pool()


def pool(fleet: Any = FLEET, **changes: Any) -> RolloutPool:
    return RolloutPool(PointEnv(limit=3), num_envs=4, num_workers=WORKERS, seed=5, fleet=fleet, **changes)


class InThisProcess:
    """As many workers without processes."""

    is_free, max_lag = False, None

    def start(self, factory: Any, arguments: Any, *, processes: bool) -> LocalWorkers:
        return LocalWorkers(factory, arguments)


def assert_same(one: Rollout, other: Rollout) -> None:
    assert torch.equal(one.rewards, other.rewards) and torch.equal(one.obs["state"], other.obs["state"])
    assert torch.equal(one.record["action"], other.record["action"])
    assert one.episodes == other.episodes


def test_a_cluster_of_its_own_listens_to_this_machine_only() -> None:
    pool().close()
    import ray

    assert ray.util.get_node_ip_address() == "127.0.0.1"


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_lost_worker_costs_time_and_changes_nothing(how: str, tmp_path: Path) -> None:
    ours, theirs = pool(RayFleet(timeout_s=5)), pool(InThisProcess())
    for turn in range(3):
        if turn:
            (tmp_path / f"{how}-{turn}").touch()
        assert_same(ours.collect(Random(tmp_path), 4), theirs.collect(Random(), 4))
        assert not list(tmp_path.iterdir())
    states = ours.state_dict()["workers"], theirs.state_dict()["workers"]
    assert all(torch.equal(a["obs"], b["obs"]) for a, b in zip(*states, strict=True))
    ours.close()


def test_progress_and_errors_arrive(tmp_path: Path) -> None:
    ours, told = pool(), []
    ours.collect(Random(), 40, on_progress=told.append)
    assert told == sorted(told) and told[-1] > 0
    with pytest.raises(EnvironmentFailure, match="broken"):
        ours.collect(Broken(), 1)


def test_an_answer_to_another_ticket_is_refused() -> None:
    ours = pool()
    ours.collect(Random(), 1)
    workers: Any = ours._workers
    stored = workers.store((Random(), 1, False))
    workers.submit(0, "collect", stored)
    ((ref, ticket),) = workers._pending.items()
    workers._pending[ref] = ticket.__class__(ticket.index, ticket.number + 1, "collect", stored)
    with pytest.raises(WorkerError, match=mentions(f"ticket {ticket.number} {ticket.number + 1}")):
        workers.next()
    ours.close()


def test_an_evaluation_is_that_of_this_process() -> None:
    policy = small_policy()
    rows = [
        evaluate(
            policy, PointEnv(limit=3), Settings(episodes=5, num_envs=2), num_workers=count, fleet=fleet
        ).rows
        for count, fleet in ((0, InThisProcess()), (2, FLEET))
    ]
    assert rows[0] == rows[1]


def small_policy() -> Any:
    return small(registry.lookup("algo", "dppo")).build(setup("flow", dataset=None)).snapshot()


def test_on_policy_learning_is_that_of_workers_here() -> None:
    found = []
    for fleet in (FLEET, InThisProcess()):
        run = small(registry.lookup("algo", "dppo")).build(
            setup("flow", dataset=None, num_workers=WORKERS, fleet=fleet)
        )
        run.advance()
        found.append(weights(run.policy))
        run.close()
    assert torch.equal(*found)


def test_free_workers_do_not_wait_and_say_which_weights_they_had() -> None:
    ours = pool()
    seen: list[int] = []
    for version in range(6):
        rollout = ours.collect_free(Random(), 2, version)
        assert rollout.version is not None and len(rollout.version) == rollout.rewards.shape[1]
        assert (rollout.version <= version).all()
        seen += rollout.version.tolist()
        oldest = ours.oldest_version
        assert oldest is None or oldest <= version
    assert set(seen) <= set(range(6)) and len(set(seen)) > 1
    state = ours.state_dict()
    again = pool()
    again.load_state_dict(state)
    assert again.collect_free(Random(), 2, 0).rewards.shape[0] == 2
    saved = [worker["obs"] for worker in again.state_dict()["workers"]]
    begun = [obs for obs in saved if obs is not None]  # a busy machine may not have begun one of them
    assert begun and all(np.isfinite(obs).all() for obs in begun)
    ours.close(), again.close()


def test_off_policy_learning_bounds_and_reports_the_lag() -> None:
    config = small(registry.lookup("algo", "sac"))
    config.log_every, config.total_steps = 24, 72
    run = config.build(
        setup("tanh_gaussian", dataset=None, num_workers=WORKERS, fleet=RayFleet(mode="free", max_lag=3))
    )
    rows = []
    while run.progress < run.total:
        rows.append(run.advance())
    assert all(row["fleet/lag_max"] <= 3 for row in rows)
    shares = [float(v) for name, v in rows[-1].items() if name[-1].isdigit() and "/lag_" in name]
    assert sum(shares) == pytest.approx(1)
    updates = run.config.updates_per_step * (run.progress - run.config.warmup_steps)
    assert run._steps + run._pending_updates == pytest.approx(updates, abs=run.config.num_envs)
    run.close()


def test_workers_of_a_cluster_are_processes() -> None:
    with pytest.raises(ConfigError, match=mentions("num_workers fleet=ray 0")):
        RolloutPool(PointEnv(), num_envs=1, num_workers=0, fleet=FLEET)
