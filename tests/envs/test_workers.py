"""Worker processes answer, report their failures, and never outlive their parent."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import started
from messages import mentions
from pairwise import repeated

from algos.training.run_time import cpu_s
from envs.engine import fork_server
from envs.engine.workers import LocalWorkers, ProcessWorkers, receive, send, start_workers
from policies.errors import ConfigError, WorkerError

DEADLINE_S = 120.0


class Probe:
    """Answers questions about the process it lives in."""

    notify: Callable[[Any], None]

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ValueError("no such start")
        self.start = start

    def add(self, array: np.ndarray) -> np.ndarray:
        self.notify(self.start)
        return array + self.start

    def environment(self) -> tuple[int, int, str]:
        return os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def fail(self, who: int) -> None:
        if who == self.start:
            raise RuntimeError(f"simulator {self.start} exploded")

    def refuse(self) -> None:
        raise ConfigError(f"start must be 2; got {self.start}.")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work(self) -> float:
        began = time.process_time()
        while time.process_time() < began + 0.05:
            pass
        return time.process_time()

    def work_for_ever(self) -> None:
        while True:
            pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessWorkers]:
    workers = ProcessWorkers(Probe, [(1,), (2,)])
    yield workers
    workers.close()


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.02)
    return True


@pytest.mark.parametrize("size", [0, 3, 1_000_003])
def test_results_come_back_in_order_and_writable(pool: ProcessWorkers, size: int) -> None:
    messages: list[int] = []
    array = np.arange(size, dtype=np.float64)
    results = pool.call("add", [(array,), (array,)], on_message=messages.append)
    for start, result in zip((1, 2), results, strict=True):
        np.testing.assert_array_equal(result, array + start)
        result += 1
    assert sorted(messages) == [1, 2]


def tensors() -> dict[str, torch.Tensor]:
    values = torch.arange(12.0).view(3, 4)
    return {
        "plain": values,
        "double": values.double(),
        "strided": values.t()[::2],
        "empty": values[:0],
        "scalar": torch.tensor(7),
        "flags": values > 3,
        "half": values.bfloat16(),
        "leaf": values.clone().requires_grad_(),
        "computed": torch.nn.Parameter(values).detach() * 2,
        "parameter": torch.nn.Parameter(values),
        "frozen": torch.nn.Parameter(values, requires_grad=False),
    }


def test_tensors_arrive_as_they_were_sent_and_share_no_memory() -> None:
    ours, theirs = Pipe()
    message = tensors()
    message["again"] = message["plain"]
    thread = threading.Thread(target=send, args=(ours, message))
    thread.start()
    arrived = receive(theirs)
    thread.join()
    for name, tensor in message.items():
        twin = arrived[name]
        assert type(twin) is type(tensor) and twin.requires_grad == tensor.requires_grad, name
        torch.testing.assert_close(twin.detach(), tensor.detach(), rtol=0, atol=0)
    assert arrived["again"] is arrived["plain"]
    arrived["plain"].zero_()
    assert message["plain"].sum() == 66


def test_every_worker_is_a_process_with_one_thread(pool: ProcessWorkers) -> None:
    answers = pool.call("environment", [(), ()])
    assert [pid for pid, _, _ in answers] == pool.pids
    assert {(threads, omp) for _, threads, omp in answers} == {(1, "1")}
    assert os.getpid() not in pool.pids


@pytest.mark.skipif(sys.platform != "linux", reason="processes are listed in /proc on Linux alone")
def test_the_time_of_workers_counts_while_they_live_and_afterwards() -> None:
    begun, own = fork_server.workers_cpu_s(), time.process_time()
    workers = ProcessWorkers(Probe, [(1,), (2,)])
    spent = sum(workers.call("work", [(), ()]))
    tick = 1 / os.sysconf("SC_CLK_TCK")
    living = fork_server.workers_cpu_s() - begun
    assert living > spent - 4 * tick and spent >= 0.1
    workers.close()
    assert fork_server.workers_cpu_s() - begun > living - 4 * tick
    assert cpu_s() >= own + living


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_whole_job_do_not_end_the_workers(pool: ProcessWorkers, number: int) -> None:
    for pid in pool.pids:
        os.kill(pid, number)
        assert os.getpgid(pid) != os.getpgid(0)  # the terminal's Ctrl-C goes to the foreground group only
    assert len(pool.call("environment", [(), ()])) == 2


def test_an_exception_comes_back_with_its_traceback_and_ends_the_pool() -> None:
    workers = ProcessWorkers(Probe, [(1,), (2,)])
    pids = workers.pids
    with pytest.raises(WorkerError, match=mentions("worker 1 2 fail simulator exploded")):
        workers.call("fail", [(2,), (2,)])
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(WorkerError, match=mentions("closed")):
        workers.call("environment", [(), ()])


@pytest.mark.parametrize("kind", [LocalWorkers, ProcessWorkers])
def test_a_refusal_is_the_same_here_and_in_a_process(kind: type) -> None:
    workers = kind(Probe, [(1,)])
    with pytest.raises(ConfigError) as refused:
        workers.call("refuse", [()])
    assert re.search(mentions("start 2 1"), str(refused.value))


def test_a_killed_worker_is_named() -> None:
    workers = ProcessWorkers(Probe, [(1,)])
    with pytest.raises(WorkerError, match=mentions("0 1 killed 9")):
        workers.call("die", [()])


def test_an_object_that_cannot_be_built_or_sent_is_a_clear_error() -> None:
    with pytest.raises(WorkerError, match=mentions("worker 0 1 no such start")):
        ProcessWorkers(Probe, [(-1,)])
    with pytest.raises(WorkerError, match=mentions("pickled num_workers=0")):
        ProcessWorkers(lambda: None, [()])


def test_the_number_of_arguments_is_checked(pool: ProcessWorkers) -> None:
    with pytest.raises(ConfigError, match=mentions("2 1 workers")):
        pool.call("environment", [()])


def test_an_interrupt_while_a_worker_is_started_leaves_the_others_alone(
    pool: ProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(fork_server.socket, "send_fds", after_sending(interrupted))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                ProcessWorkers(Probe, [(3,)])
    later = ProcessWorkers(Probe, [(4,), (5,)])
    for workers in (later, pool):
        assert [pid for pid, _, _ in workers.call("environment", [(), ()])] == workers.pids
    children = later._children
    later.close()
    assert [child.end() for child in children] == [0, 0]


def test_a_worker_that_is_asked_for_again_after_an_interrupt_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    child = fork_server.fork_worker("envs.engine.workers:serve")
    with monkeypatch.context() as patched:
        patched.setattr(fork_server.socket, "send_fds", after_sending(interrupted))
        with pytest.raises(KeyboardInterrupt):
            child.end(grace_s=0.0)
    assert child.end() == -signal.SIGKILL and not alive(child.pid)
    assert fork_server.fork_worker("envs.engine.workers:serve").end(grace_s=0.0) == -signal.SIGKILL


def test_a_finalizer_in_the_middle_of_a_request_does_not_take_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forgotten = fork_server.fork_worker("envs.engine.workers:serve")
    with monkeypatch.context() as patched:
        patched.setattr(fork_server.socket, "send_fds", after_sending(lambda: forgotten.end(grace_s=0.0)))
        workers = ProcessWorkers(Probe, [(1,)])
    assert [pid for pid, _, _ in workers.call("environment", [()])] == workers.pids
    workers.close()
    assert not alive(forgotten.pid)


def after_sending(happens: Callable[[], object]) -> Callable[..., None]:
    """Return a `socket.send_fds` after which something happens, before the answer is received."""
    send_fds = fork_server.socket.send_fds

    def sent(*arguments: Any) -> None:
        send_fds(*arguments)
        happens()

    return sent


def interrupted() -> None:
    """Do what Ctrl-C does."""
    raise KeyboardInterrupt


def test_local_workers_do_the_same_here_on_one_thread() -> None:
    workers = start_workers(Probe, [(5,)], processes=False)
    before = torch.get_num_threads()
    messages: list[int] = []
    (result,) = workers.call("add", [(np.ones(2),)], on_message=messages.append)
    assert result.tolist() == [6, 6] and messages == [5] and torch.get_num_threads() == before


@pytest.mark.parametrize("in_main_thread", repeated([False, True]))
def test_workers_have_the_environment_as_it_is_now_and_end_with_a_killed_parent(in_main_thread: bool) -> None:
    """The parent is a copy of this process, so that what starts its workers starts with the first value."""
    ours, theirs = os.pipe()
    name = "BURNISH_TEST_OF_WORKERS"

    def tell(*words: object) -> None:
        os.write(theirs, f"{' '.join(map(str, words))}\n".encode())

    def run() -> None:
        os.environ["OMP_NUM_THREADS"] = "7"
        for value in ("first", None):
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
            workers = ProcessWorkers(Probe, [(1,)])
            tell(*(workers.call("variable", [(one,)])[0] for one in (name, "OMP_NUM_THREADS")))
            workers.close()
        workers = ProcessWorkers(Probe, [(1,), (2,)])
        tell(*workers.pids, fork_server._current._process.pid)  # type: ignore[union-attr]
        workers.call("work_for_ever", [(), ()])

    def begin() -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    parent = started(run if in_main_thread else begin)
    os.close(theirs)
    with open(ours) as told:
        assert [told.readline().split() for _ in range(2)] == [["first", "1"], ["None", "1"]]
        pids = [int(pid) for pid in told.readline().split()]
    assert len(pids) == 3 and all(alive(pid) for pid in pids)
    parent.kill()
    parent.join()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("what", ["its class", "an argument"])
def test_what_a_script_or_notebook_defines_is_refused_before_it_is_sent(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = type("Mine", (Probe,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Mine", here, raising=False)
    factory, argument = (here, 0) if what == "its class" else (Probe, here(0))
    advice = "num_workers=0"
    with pytest.raises(WorkerError, match=mentions(advice)):
        ProcessWorkers(factory, [(argument,)])
    start_workers(factory, [(0,)], processes=False).close()
