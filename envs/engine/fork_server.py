"""Fork server: a small process that has imported the heavy packages and forks workers.

Importing torch takes seconds; forking a process that has done so takes milliseconds. The server never runs
threads, so forking is safe. Unlike `multiprocessing` it does not import the main script; objects sent to
workers must come from importable modules. Server and workers end when their socket is closed; on Linux the
kernel also kills them with their parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from policies.errors import ConfigError, WorkerError

ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM")}
_PRELOAD = (
    ("envs.rollouts.rollout", "envs.rollouts.player", "mujoco", "gymnasium")
    if sys.platform == "linux"
    else ()
)
_START_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from envs.engine.fork_server import run_fork_server as run; run(sys.argv[2], *map(int, sys.argv[3:]))"
)
_GRACE_S = 5.0  # grace period before a process is killed [s]
_MESSAGE = struct.Struct("<qq")  # requests and answers: request number and content
_PR_SET_PDEATHSIG = 1
_lock = threading.RLock()
_current: ForkServer | None = None


class Child:
    """A worker process and its connection."""

    def __init__(self, fork_server: ForkServer, pid: int, link: Connection) -> None:
        self._fork_server = fork_server
        self.pid = pid
        self.link = link
        self._code: int | None = None

    def end(self, *, grace_s: float = _GRACE_S) -> int:
        """Wait for the process to exit, kill it after `grace_s`; returns its exit code (-signal)."""
        if self._code is None:
            if not _closes_in_time(self.link, grace_s):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            self.link.close()
            self._code = self._fork_server.reap(self.pid)
        return self._code


class ForkServer:
    """Client side of the fork server."""

    def __init__(self, target: str) -> None:
        if os.name != "posix":
            raise ConfigError("worker processes need Linux or macOS; use num_workers=0 on this system.")
        self.owner = os.getpid()
        self.target = target
        self._last_request = 0  # number of the last request
        self._is_requesting = False
        self._uncollected: list[int] = []  # ended workers whose exit code was not collected
        self._control, theirs = socket.socketpair()
        # Linux ties the signal to the starting *thread*; only the main thread may request it.
        in_main_thread = threading.current_thread() is threading.main_thread()
        arguments = (theirs.fileno(), os.getpid(), int(in_main_thread))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START_CODE, json.dumps(sys.path), target, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ONE_THREAD},
                process_group=0,  # unaffected by Ctrl-C in the terminal
            )
        self._finalizer = weakref.finalize(self, _close, self._control, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether the server is alive and owned by this process (a forked program needs its own)."""
        return self.owner == os.getpid() and self._process.poll() is None

    def fork(self) -> Child:
        """Start a worker that runs the target on its end of a new socket pair."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pid = self._request(0, [theirs.fileno()])
            if pid <= 1:  # signalling it would affect this program or all processes
                raise WorkerError(f"the process that starts workers must name a process; got {pid}.")
            return Child(self, pid, Connection(ours.detach()))

    def reap(self, pid: int) -> int:
        """Wait for an ending worker; returns its exit code, negative for a signal."""
        with _lock:
            if self._is_requesting:  # a finalizer runs during a request of the same thread
                self._uncollected.append(pid)
                return -signal.SIGKILL
            with contextlib.suppress(WorkerError):
                while self._uncollected:
                    self._request(self._uncollected.pop(), [])
                return self._request(pid, [])
        return -signal.SIGKILL  # the fork server was killed, and its workers too

    def _request(self, number: int, descriptors: list[int]) -> int:
        """Send a request and wait for its answer; drops answers of interrupted requests."""
        with _lock:
            self._last_request += 1
            self._is_requesting = True
            try:
                socket.send_fds(self._control, [_MESSAGE.pack(self._last_request, number)], descriptors)
                while (answer := _decoded(self._control.recv(_MESSAGE.size))) is not None:
                    if answer[0] == self._last_request:
                        return answer[1]
            except OSError:
                pass
            finally:
                self._is_requesting = False
        raise WorkerError("the process that starts workers has died. Out of memory? Try fewer workers.")


def fork_worker(target: str) -> Child:
    """Start a worker process that runs `target` (`module:function`) on the file descriptor of its socket."""
    global _current
    with _lock:
        if _current is None or not _current.is_usable or _current.target != target:
            _current = ForkServer(target)
        return _current.fork()


def workers_cpu_s() -> float:
    """Return the processor time [s] of the fork server and its workers, living and ended.

    It is 0 without a server, and where `/proc` does not list processes.
    """
    with _lock:
        if _current is None or not _current.is_usable:
            return 0.0
        server = _current.pid
    with contextlib.suppress(OSError):
        living = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        return sum(_cpu_ticks(pid) for pid in [str(server), *living]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _cpu_ticks(pid: str) -> int:
    """Return user and system time of a process and of the children that it collected."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime: proc(5)


def run_fork_server(target: str, descriptor: int, parent: int, die_with_parent: int) -> None:
    """Run the fork server: fork a worker or report an exit code per request, until the socket closes."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # the program ends its workers
        signal.signal(stop, signal.SIG_IGN)
    if die_with_parent:
        _end_with(parent)
    module, _, function = target.partition(":")
    for name in _PRELOAD:
        importlib.import_module(name)
    serve = getattr(importlib.import_module(module), function)
    with socket.socket(fileno=descriptor) as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE.size, 1)
            request = _decoded(message)
            if request is None:
                break
            which, number = request
            answer = _fork(control, descriptors[0], serve) if descriptors else _exit_code(number)
            try:
                control.sendall(_MESSAGE.pack(which, answer))
            except OSError:  # the program is gone
                break
    os._exit(0)


def exit_on_hangup(descriptor: int) -> None:
    """Monitor a socket in a thread and exit this process when the other side closes it."""
    threading.Thread(target=_exit_when_closed, args=(descriptor,), daemon=True).start()


def _fork(control: socket.socket, descriptor: int, serve: Callable[[int], None]) -> int:
    """Fork; the child serves and never returns, the parent receives its pid."""
    fork_server = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        _end_with(fork_server)
        control.close()
        serve(descriptor)
    finally:
        os._exit(1)


def _exit_code(pid: int) -> int:
    """Wait for a worker; one collected by an interrupted request is gone."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return -signal.SIGKILL


def _decoded(message: bytes) -> tuple[int, int] | None:
    """Return the request number and its content; None if the socket is closed."""
    return _MESSAGE.unpack(message) if len(message) == _MESSAGE.size else None


def _end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)


def _exit_when_closed(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are always reported
    while not any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll()):
        pass
    os._exit(1)


def _closes_in_time(link: Connection, timeout_s: float) -> bool:
    """Whether the other side closes in time; late answers are dropped."""
    with contextlib.suppress(OSError):
        while link.poll(timeout_s):
            try:
                link.recv_bytes()
            except EOFError:
                return True
        return False
    return True


def _close(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    if process.returncode is None:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
