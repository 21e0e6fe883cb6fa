"""Processes that each hold one object and answer method calls; they never outlive their parent.

Every process is a fresh interpreter with one thread for linear algebra. It does not import the parent's
main script, so no `if __name__ == "__main__"` is needed, and in exchange everything sent to it must come
from an importable module. It ignores Ctrl-C, which is the parent's to handle, and ends when its end of
the connection hangs up; on Linux the kernel ends it as well, should it be too busy to notice.

Messages are pickles between a parent and its own children; large arrays travel outside of the pickle
stream, so that they are copied once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from policies.errors import ConfigError, WorkerError

Factory = Callable[..., Any]
OnMessage = Callable[[Any], None]

_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM")}
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from envs.workers import serve; serve(*map(int, sys.argv[2:]))"
)
_GRACE_S = 5.0  # time a worker gets to close its simulators before it is killed
_PR_SET_PDEATHSIG = 1


class Workers(Protocol):
    """Objects of one kind, here or in processes."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, on_message: OnMessage | None = None
    ) -> list[Any]:
        """Call a method of every object with its own arguments; returns the results in order.

        Args:
            method: Name of the method.
            arguments: One tuple per object.
            on_message: Receives what the objects pass to their `notify` while they work.
        """
        ...

    def close(self) -> None:
        """End all objects; safe to call twice."""
        ...


def start_workers(factory: Factory, arguments: Sequence[tuple[Any, ...]], *, processes: bool) -> Workers:
    """Build one object per tuple of arguments, each in its own process or all in this one.

    Args:
        factory: Builds an object; with `processes` it must be importable by name.
        arguments: One tuple per object.
        processes: Whether to start processes.

    Raises:
        WorkerError: If an object cannot be built in its process.
    """
    return ProcessWorkers(factory, arguments) if processes else LocalWorkers(factory, arguments)


class LocalWorkers:
    """The same interface without processes; calls run here, on one thread as in a worker."""

    def __init__(self, factory: Factory, arguments: Sequence[tuple[Any, ...]]) -> None:
        with one_thread():
            self._objects = [factory(*args) for args in arguments]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._objects)

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, on_message: OnMessage | None = None
    ) -> list[Any]:
        """Call a method of every object, one after the other."""
        results = []
        with one_thread():
            for worker, args in zip(self._objects, arguments, strict=True):
                worker.notify = on_message or _ignore
                results.append(getattr(worker, method)(*args))
        return results

    def close(self) -> None:
        """Close every object."""
        for worker in self._objects:
            worker.close()
        self._objects = []


class ProcessWorkers:
    """One process per object.

    Raises:
        WorkerError: If an object cannot be built; the message carries the worker's traceback.
    """

    def __init__(self, factory: Factory, arguments: Sequence[tuple[Any, ...]]) -> None:
        if os.name != "posix":
            raise ConfigError("worker processes need Linux or macOS; use num_workers=0 on this system.")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        self._finalizer = weakref.finalize(self, _end, self._processes, self._links)
        for index in range(len(arguments)):
            process, link = _launch(index)
            self._processes.append(process)
            self._links.append(link)
        self._exchange([(factory, args) for args in arguments], None)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._links)

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [process.pid for process in self._processes]

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, on_message: OnMessage | None = None
    ) -> list[Any]:
        """Call a method of every object at the same time.

        Raises:
            WorkerError: If a call raises or a process dies. The other processes are ended, too, because
                what they hold no longer belongs together.
        """
        if not self._links:
            raise WorkerError("these worker processes are closed. Start them again.")
        if len(arguments) != len(self._links):
            raise ConfigError(f"{len(self._links)} workers need as many arguments; got {len(arguments)}.")
        return self._exchange([(method, args) for args in arguments], on_message)

    def close(self) -> None:
        """End all processes; safe to call twice."""
        self._finalizer()
        self._processes, self._links = [], []

    def _exchange(self, messages: Sequence[Any], on_message: OnMessage | None) -> list[Any]:
        """Send one message to each worker and collect the answers; a failure ends all of them."""
        try:
            for index, (link, message) in enumerate(zip(self._links, messages, strict=True)):
                self._send(index, link, message)
            return self._collect(on_message)
        except BaseException:
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        """End all processes at once, whatever they are doing."""
        for link in self._links:
            link.close()
        self.close()

    def _send(self, index: int, link: Connection, message: Any) -> None:
        try:
            send(link, message)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise WorkerError(
                f"what is sent to worker {index} cannot be pickled ({error}). Define it at the top level of "
                "an importable module, or use num_workers=0."
            ) from error
        except OSError:
            raise self._died(index) from None

    def _collect(self, on_message: OnMessage | None) -> list[Any]:
        results: list[Any] = [None] * len(self._links)
        waiting = {link: index for index, link in enumerate(self._links)}
        while waiting:
            for link in wait(list(waiting)):
                index = waiting[link]  # type: ignore[index]
                try:
                    kind, value = receive(link)  # type: ignore[arg-type]
                except (EOFError, OSError):
                    raise self._died(index) from None
                if kind == "message":
                    (on_message or _ignore)(value)
                    continue
                if kind == "error":
                    raise WorkerError(f"worker {index} of {len(self._links)} failed:\n{value}")
                results[index] = value
                del waiting[link]  # type: ignore[arg-type]
        return results

    def _died(self, index: int) -> WorkerError:
        """Describe a worker that hung up without an answer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[index].wait(_GRACE_S)
        code = self._processes[index].returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        return WorkerError(
            f"worker {index} of {len(self._links)} {how} without an answer. Out of memory? Try fewer workers."
        )


def send(link: Connection, message: Any) -> None:
    """Send a picklable object; its large arrays follow the pickle, each as one message."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    link.send_bytes(len(buffers).to_bytes(8, "little") + head)
    for buffer in buffers:
        with buffer.raw() as view:
            link.send_bytes(view)


def receive(link: Connection) -> Any:
    """Receive what `send` sent; arrays are writable.

    Raises:
        EOFError: If the other side hung up.
    """
    message = memoryview(link.recv_bytes())
    count = int.from_bytes(message[:8], "little")
    buffers = [bytearray(link.recv_bytes()) for _ in range(count)]
    return pickle.loads(message[8:], buffers=buffers)


def serve(descriptor: int, parent: int, die_with_parent: int) -> None:
    """Run a worker on an inherited socket until its parent hangs up; the entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if die_with_parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
    threading.Thread(target=_exit_on_hangup, args=(descriptor,), daemon=True).start()
    link = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError), one_thread():
        _answer(link)
    os._exit(0)


def _answer(link: Connection) -> None:
    """Build the object, then answer calls until told to stop."""
    worker: Any = None
    while True:
        head, args = None, ()
        try:
            head, args = receive(link)
            if head is None:
                worker.close()
                return
            if worker is None:
                worker = head(*args)
                worker.notify = lambda value: send(link, ("message", value))
                answer = None
            else:
                answer = getattr(worker, head)(*args)
            send(link, ("ok", answer))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception:
            send(link, ("error", traceback.format_exc()))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: on small networks, more of them only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _launch(index: int) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start one interpreter with one end of a socket pair."""
    ours, theirs = socket.socketpair()
    # The kernel's signal follows the *thread* that starts a process, so only the main thread may ask for it.
    in_main_thread = threading.current_thread() is threading.main_thread()
    arguments = (theirs.fileno(), os.getpid(), int(in_main_thread))
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_ONE_THREAD},
            process_group=0,  # a Ctrl-C in the terminal is the parent's business, from the first moment on
        )
    return process, Connection(ours.detach())


def _end(processes: list[subprocess.Popen[bytes]], links: list[Connection]) -> None:
    """Ask processes to close, then make sure."""
    for link in links:
        with contextlib.suppress(OSError):
            send(link, (None, ()))
    for process in processes:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for link in links:
        link.close()


def _exit_on_hangup(descriptor: int) -> None:
    """End this process as soon as the parent's end of the socket is gone."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are always reported
    while not any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll()):
        pass
    os._exit(1)


def _ignore(_: Any) -> None:
    """Drop a message."""
