"""Objects in worker processes that serve method calls.

Each process uses one thread for linear algebra, ignores Ctrl-C and ends with the program. Messages are
pickles between a program and its own children; large arrays are sent outside the pickle stream.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import FunctionType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter

from envs.engine.fork_server import ONE_THREAD, Child, exit_on_hangup, fork_worker
from policies.errors import BurnishError, ConfigError, WorkerError
from policies.threads import torch_threads

Factory = Callable[..., Any]
OnMessage = Callable[[Any], None]
_SERVE = f"{__name__}:serve"


class Workers(Protocol):
    """Objects of one kind, local or in processes."""

    def __len__(self) -> int: ...

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, on_message: OnMessage | None = None
    ) -> list[Any]:
        """Call a method of every object with its own tuple of arguments; returns the results in order.

        `on_message` receives the arguments of the objects' `notify` calls during the call.
        """
        ...

    def close(self) -> None:
        """End all objects; safe to call twice."""
        ...


@runtime_checkable
class FreeWorkers(Workers, Protocol):
    """Workers that may be called one by one."""

    @property
    def idle(self) -> list[int]:
        """Workers without a call."""
        ...

    def store(self, arguments: tuple[Any, ...]) -> Any:
        """Return arguments for several `submit`."""
        ...

    def submit(self, index: int, method: str, arguments: Any) -> None:
        """Begin a call of an idle worker with stored arguments."""
        ...

    def next(self) -> tuple[int, Any]:
        """Wait for an answer; return the worker and the answer."""
        ...

    def ready(self) -> tuple[int, Any] | None:
        """Return as `next` an answer that is there; None without any."""
        ...


def start_workers(factory: Factory, arguments: Sequence[tuple[Any, ...]], *, processes: bool) -> Workers:
    """Build one object per tuple of arguments, each in its own process or all in this one.

    Raises:
        WorkerError: If an object cannot be built in its process.
    """
    return ProcessWorkers(factory, arguments) if processes else LocalWorkers(factory, arguments)


class LocalWorkers:
    """The same interface without processes; calls run here, on one thread as in a worker."""

    def __init__(self, factory: Factory, arguments: Sequence[tuple[Any, ...]]) -> None:
        with torch_threads(1):
            self._objects = [factory(*args) for args in arguments]

    def __len__(self) -> int:
        return len(self._objects)

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, on_message: OnMessage | None = None
    ) -> list[Any]:
        results = []
        with torch_threads(1):
            for worker, args in zip(self._objects, arguments, strict=True):
                worker.notify = on_message or _drop
                results.append(getattr(worker, method)(*args))
        return results

    def close(self) -> None:
        for worker in self._objects:
            worker.close()
        self._objects = []


class ProcessWorkers:
    """One process per object.

    Raises:
        BurnishError: Raised by a worker; forwarded unchanged.
        WorkerError: If an object cannot be built; the message carries the worker's traceback.
    """

    def __init__(self, factory: Factory, arguments: Sequence[tuple[Any, ...]]) -> None:
        self._children: list[Child] = []
        self._finalizer = weakref.finalize(self, _close_all, self._children)
        for _ in arguments:
            self._children.append(fork_worker(_SERVE))
        program = {"path": sys.path, "directory": os.getcwd(), "environment": dict(os.environ)}
        self._exchange([program] * len(arguments), None)
        self._exchange([(factory, args) for args in arguments], None)

    def __len__(self) -> int:
        return len(self._children)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, on_message: OnMessage | None = None
    ) -> list[Any]:
        """Call a method of all objects concurrently.

        After an error all processes are ended, because their states no longer match.

        Raises:
            BurnishError: Raised by a worker; forwarded unchanged.
            WorkerError: If a call raises anything else or a process dies.
        """
        if not self._children:
            raise WorkerError("these worker processes are closed. Start them again.")
        if len(arguments) != len(self._children):
            raise ConfigError(f"{len(self._children)} workers need as many arguments; got {len(arguments)}.")
        return self._exchange([(method, args) for args in arguments], on_message)

    def close(self) -> None:
        self._finalizer()
        self._children = []

    def _exchange(self, messages: Sequence[Any], on_message: OnMessage | None) -> list[Any]:
        """Send one message to each worker and collect the answers; a failure ends all workers."""
        try:
            for index, message in enumerate(messages):
                self._send(index, message)
            return self._collect(on_message)
        except BaseException:
            self._kill_all()
            raise

    def _kill_all(self) -> None:
        for child in self._children:
            child.end(grace_s=0.0)
        self.close()

    def _send(self, index: int, message: Any) -> None:
        try:
            send(self._children[index].link, message)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise WorkerError(
                f"what is sent to worker {index} cannot be pickled ({error}). Put it at the top level of "
                "a module that can be imported, or use num_workers=0."
            ) from error
        except OSError:
            raise self._died(index) from None

    def _collect(self, on_message: OnMessage | None) -> list[Any]:
        results: list[Any] = [None] * len(self._children)
        waiting: dict[Any, int] = {child.link: index for index, child in enumerate(self._children)}
        while waiting:
            for link in wait(list(waiting)):
                index = waiting[link]
                try:
                    kind, value = receive(self._children[index].link)
                except (EOFError, OSError):
                    raise self._died(index) from None
                if kind == "message":
                    (on_message or _drop)(value)
                    continue
                if kind == "refusal":
                    raise value
                if kind == "error":
                    raise WorkerError(f"worker {index} of {len(self)} failed:\n{value}")
                results[index] = value
                del waiting[link]
        return results

    def _died(self, index: int) -> WorkerError:
        code = self._children[index].end()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return WorkerError(
            f"worker {index} of {len(self)} {how} without an answer. Out of memory? Try fewer workers."
        )


class Pickler(pickle.Pickler):
    """Pickle tensors as arrays, whose memory is sent outside the pickle stream."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in the main script or in a notebook")
        plain = type(obj) in (Tensor, Parameter) and obj.device.type == "cpu" and obj.is_leaf
        if not plain or obj.dtype not in _NUMPY_TYPES or obj.layout is not torch.strided:
            return NotImplemented
        return _tensor, (type(obj), obj.detach().numpy(), obj.requires_grad)


_NUMPY_TYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


def _tensor(kind: type, values: Any, requires_grad: bool) -> Tensor:
    tensor = torch.from_numpy(values)
    return Parameter(tensor, requires_grad) if kind is Parameter else tensor.requires_grad_(requires_grad)


def send(link: Connection, message: Any) -> None:
    """Send a picklable object; the memory of arrays and tensors follows, each as one message."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    head.write(bytes(8))
    Pickler(head, protocol=5, buffer_callback=buffers.append).dump(message)
    head.getbuffer()[:8] = len(buffers).to_bytes(8, "little")
    link.send_bytes(head.getbuffer())
    for buffer in buffers:
        with buffer.raw() as view:
            link.send_bytes(view)


def receive(link: Connection) -> Any:
    """Receive an object from `send`; arrays are writable. Raises EOFError if the connection is closed."""
    message = memoryview(link.recv_bytes())
    count = int.from_bytes(message[:8], "little")
    buffers = [bytearray(link.recv_bytes()) for _ in range(count)]
    return pickle.loads(message[8:], buffers=buffers)


def serve(descriptor: int) -> None:
    """Run a worker on a socket until it is closed; the process ends with it."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # the program ends its workers
        signal.signal(stop, signal.SIG_IGN)
    exit_on_hangup(descriptor)
    link = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        _adopt(receive(link))
        send(link, ("ok", None))
        with torch_threads(1):
            _serve_calls(link)
    os._exit(0)


def _adopt(program: dict[str, Any]) -> None:
    """Adopt the program's module search path, working directory and environment variables."""
    sys.path[:] = program["path"]
    os.chdir(program["directory"])
    os.environ.clear()
    os.environ.update(program["environment"] | ONE_THREAD)


def _serve_calls(link: Connection) -> None:
    """Build the object, then serve calls until the stop message."""
    worker: Any = None
    while True:
        try:
            head, args = receive(link)
            if head is None:
                worker.close()
                return
            if worker is None:
                worker, answer = head(*args), None
                worker.notify = lambda value: send(link, ("message", value))
            else:
                answer = getattr(worker, head)(*args)
            send(link, ("ok", answer))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except BurnishError as error:
            send(link, ("refusal", error))
        except Exception:
            send(link, ("error", traceback.format_exc()))


def _close_all(children: list[Child]) -> None:
    """Request processes to close, then kill the rest."""
    for child in children:
        with contextlib.suppress(OSError):  # it has died
            send(child.link, (None, ()))
    for child in children:
        child.end()


def _drop(_: Any) -> None:
    """Drop a message."""
