"""The policy server: how many robots it serves, and what happens when it is attacked, overrun and killed.

    python -m benchmarks.studies.serving                 everything; about two minutes on two idle cores
    python -m benchmarks.studies.serving --seconds 3     shorter
    python -m benchmarks.studies.serving --report        the page from what is there

The server is `burnish serve` in a process of its own, with a network of the size of DPPO's Hopper actor and
20 denoising steps. Numbers go to docs/results/serving/run.json; the page docs/results/serving.md is made of
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

from benchmarks import pages
from benchmarks.options import study_parser
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.serving.client import Client
from policies.serving.messages import VERSION, pack, to_wire, unpack
from policies.serving.server import ServerSettings
from policies.storage.policy_folder import save_policy

OBS_DIM, ACTION_DIM, STEPS = 11, 3, 20
ROBOTS = (1, 4, 16)
RATE = 1000.0
PER_CLIENT = 64
"""`max_per_client` while robots work undisturbed: the queue as a whole is the limit then."""
UNDISTURBED = f"`max_per_client={PER_CLIENT}` and `max_queue={ServerSettings().max_queue}`"


def make_policy(directory: Path) -> Path:
    """Write a policy of the size of DPPO's Hopper actor, with fresh weights."""
    config = PolicyConfig(process=VPDiffusion(num_levels=STEPS), backbone=MlpConfig())
    policy = build_policy(config, obs_dim=OBS_DIM, action_dim=ACTION_DIM, seed=0)
    return save_policy(policy, directory)


@contextmanager
def served(directory: Path, port: int = 0, **settings: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `burnish serve` meanwhile; yields the process and where it listens."""
    words = [f"policy={directory}", f"port={port}", *(f"{key}={value}" for key, value in settings.items())]
    command = [sys.executable, "-m", "burnish", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            yield server, server.stdout.readline().split()[1]
        finally:
            server.kill()


class Robot:
    """A connection that asks without waiting."""

    def __init__(self, context: Any, endpoint: str, fingerprint: str, number: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self._body = {"type": "act", "schema": fingerprint, "deadline_ms": 1000.0}
        self._obs = to_wire(np.full((1, OBS_DIM), 0.1 * number, np.float32))
        self._sent: dict[int, float] = {}
        self._id, self._number = 0, number

    def send(self, **changes: Any) -> None:
        """Ask."""
        self._id += 1
        self._sent[self._id] = time.perf_counter()
        body = {
            **self._body,
            "id": self._id,
            "key": [self._number, self._id],
            "obs": {"observation": self._obs},
        }
        self.socket.send(pack({**body, **changes}), zmq.NOBLOCK)

    def receive(self) -> tuple[dict[str, Any], float]:
        """Return an answer, and how long it took [s]."""
        answer = unpack(self.socket.recv())
        return answer, time.perf_counter() - self._sent.pop(answer.get("id") or 0, time.perf_counter())


@contextmanager
def robots_at(endpoint: str, count: int) -> Iterator[tuple[list[Robot], Any]]:
    """Connect robots; yields them and a poller of their sockets."""
    with Client(endpoint, timeout_s=30) as client:
        fingerprint = client.schema and client._fingerprint
    context = zmq.Context()
    robots = [Robot(context, endpoint, fingerprint, number) for number in range(count)]
    poller = zmq.Poller()
    for robot in robots:
        poller.register(robot.socket, zmq.POLLIN)
    try:
        yield robots, poller
    finally:
        for robot in robots:
            robot.socket.close(linger=0)
        context.term()


def closed_loop(endpoint: str, count: int, seconds: float) -> dict[str, float]:
    """Let robots ask again as soon as they are answered."""
    latencies: list[float] = []
    sizes: list[int] = []
    with robots_at(endpoint, count) as (robots, poller):
        by_socket = {robot.socket: robot for robot in robots}
        for robot in robots:
            robot.send()
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            for socket, _ in poller.poll(100):
                answer, took = by_socket[socket].receive()
                if answer["type"] == "actions":
                    latencies.append(took)
                    sizes.append(answer["batch"])
                by_socket[socket].send()
        elapsed = time.perf_counter() - start
    return {
        "robots": count,
        "requests_per_s": len(latencies) / elapsed,
        **quantiles(latencies),
        "mean_batch": float(np.mean(sizes)),
    }


def quantiles(latencies: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile of latencies [s] in ms."""
    p50, p99 = 1e3 * np.quantile(latencies, (0.5, 0.99)) if latencies else (0.0, 0.0)
    return {"p50_ms": float(p50), "p99_ms": float(p99)}


def open_loop(endpoint: str, count: int, seconds: float, rate: float) -> dict[str, Any]:
    """Ask at a fixed rate, whatever comes back."""
    outcomes: Counter[str] = Counter()
    latencies: list[float] = []
    with robots_at(endpoint, count) as (robots, poller):
        by_socket = {robot.socket: robot for robot in robots}
        start, sent = time.perf_counter(), 0
        while (now := time.perf_counter() - start) < seconds + 2:
            while now < seconds and sent < now * rate:
                robots[sent % count].send()
                sent += 1
            for socket, _ in poller.poll(1):
                answer, took = by_socket[socket].receive()
                outcomes[answer.get("reason") or answer["type"]] += 1
                if answer["type"] == "actions":
                    latencies.append(took)
            if now > seconds and sum(outcomes.values()) == sent:
                break
    found = {"robots": count, "sent": sent, "sent_per_s": sent / seconds}
    return {**found, "outcomes": dict(sorted(outcomes.items())), **quantiles(latencies)}


def attacks(robot: Robot, max_message: int) -> list[tuple[str, Callable[[], None]]]:
    """Return every kind of bad message."""
    raw, good = robot.socket, np.zeros((1, OBS_DIM), np.float32)

    def observed(array: Any) -> dict[str, Any]:
        return {"obs": {"observation": to_wire(array)}}

    lying = to_wire(good) | {"shape": [2**31 - 1] * 8}
    return [
        ("noise", lambda: raw.send(os.urandom(200), zmq.NOBLOCK)),
        ("a pickle", lambda: raw.send(b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00.", zmq.NOBLOCK)),
        ("nesting", lambda: raw.send(b"\x91" * 3000, zmq.NOBLOCK)),
        ("billions claimed", lambda: raw.send(b"\xdd\xff\xff\xff\xff", zmq.NOBLOCK)),
        ("many frames", lambda: raw.send_multipart([b"x"] * 50, zmq.NOBLOCK)),
        ("too long", lambda: raw.send(bytes(max_message + 1), zmq.NOBLOCK)),
        (
            "no version",
            lambda: raw.send(msgpack.packb({"type": "act", "id": 1, "v": VERSION + 1}), zmq.NOBLOCK),
        ),
        ("wrong shape", lambda: robot.send(**observed(good[:, :4]))),
        ("wrong type", lambda: robot.send(**observed(good.astype(np.uint8)))),
        ("giant shape", lambda: robot.send(obs={"observation": lying})),
        ("missing", lambda: robot.send(obs={})),
        ("NaN", lambda: robot.send(**observed(good * np.nan))),
        ("too large", lambda: robot.send(**observed(good + 1e9))),
        ("other policy", lambda: robot.send(schema="0" * 16)),
        ("late", lambda: robot.send(deadline_ms=1e-6)),
    ]


def under_attack(endpoint: str, seconds: float) -> dict[str, Any]:
    """Let four robots work while one client sends every bad message and another never reads its answers."""
    memory: list[tuple[float, float]] = []
    latencies: list[float] = []
    with Client(endpoint, timeout_s=30) as client, robots_at(endpoint, 6) as (robots, poller):
        *honest, attacker, deaf = robots
        poller.unregister(deaf.socket)
        before, limit = client.metrics(), client.request({"type": "hello"})["max_message"]
        kinds = attacks(attacker, limit)
        by_socket = {robot.socket: robot for robot in robots}
        for robot in honest:
            robot.send()
        start, sent, sample = time.perf_counter(), 0, 0.0
        while (now := time.perf_counter() - start) < seconds:
            for _ in range(20):
                sent += _try(kinds[sent % len(kinds)][1])
            _try(lambda: deaf.socket.send(pack({"type": "hello", "id": 1}), zmq.NOBLOCK))
            for socket, _ in poller.poll(2):
                robot = by_socket[socket]
                answer, took = robot.receive()
                if robot in honest:
                    if answer["type"] == "actions":
                        latencies.append(took)
                    robot.send()
            if now >= sample:
                memory.append((round(now, 1), client.metrics()["memory_mb"]))
                sample = now + seconds / 10
        after = client.metrics()
    known = before["rejected"]
    rejected = {why: n - known[why] for why, n in after["rejected"].items() if n > known[why]}
    return {
        "bad_messages": sent,
        "kinds": [name for name, _ in kinds],
        "seconds": seconds,
        "rejected": rejected,
        "memory_mb": memory,
        "honest_per_s": len(latencies) / seconds,
        **quantiles(latencies),
        "slow": after["slow"],
    }


def _try(send: Callable[[], None]) -> int:
    try:
        send()
    except zmq.Again:
        return 0
    return 1


def flood_of_frames(directory: Path, megabytes: int) -> dict[str, Any]:
    """Send messages of a great many frames, which ZeroMQ gathers before the server sees them."""
    with served(directory, max_backlog_mb=64) as (server, endpoint), Client(endpoint, timeout_s=60) as client:
        before = client.metrics()["memory_mb"]
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        most = before
        for _ in range(4):
            socket.send_multipart([bytes(4000)] * (megabytes * 250 // 4))
            most = max(most, client.metrics()["memory_mb"])
        after = client.metrics()
        socket.close(linger=0)
        context.term()
        assert server.poll() is None
    return {
        "sent_mb": megabytes,
        "limit_mb": 64,
        "before_mb": before,
        "most_seen_mb": max(most, after["memory_mb"]),
        "after_mb": after["memory_mb"],
        "reopened": after["reopened"],
    }


def killed(directory: Path) -> dict[str, Any]:
    """Kill the server between two requests of a robot and start it again at the same place."""
    obs, key = {"observation": np.zeros((1, OBS_DIM), np.float32)}, (0, 1)
    with served(directory) as (server, endpoint):
        client = Client(endpoint, timeout_s=1.0, retries=60)
        before = client.decide(obs, key)
        server.kill()
        server.wait()
    start = time.perf_counter()
    with client, served(directory, int(endpoint.rpartition(":")[2])):
        listening = time.perf_counter()
        after = client.decide(obs, key)
        gap = time.perf_counter() - listening
    return {
        "start_s": listening - start,
        "reconnected_s": gap,
        "difference": float(np.abs(after - before).max()),
    }


def measure(seconds: float) -> dict[str, Any]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as folder:
        directory = make_policy(Path(folder) / "policy")
        out: dict[str, Any] = {"load_average": os.getloadavg()}
        with served(directory, max_per_client=PER_CLIENT) as (_, endpoint):
            out["closed"] = [closed_loop(endpoint, count, seconds) for count in ROBOTS]
            _say("closed loop", out["closed"])
            out["open"] = open_loop(endpoint, 16, seconds, RATE)
            _say("open loop", out["open"])
        with served(directory) as (server, endpoint):
            out["attack"] = under_attack(endpoint, 3 * seconds)
            out["attack"]["alive"] = server.poll() is None
            _say("attack", out["attack"])
        out["frames"] = flood_of_frames(directory, 400)
        _say("frames", out["frames"])
        out["kill"] = killed(directory)
        _say("kill", out["kill"])
    return out


def _say(what: str, found: Any) -> None:
    print(f"{what}: {json.dumps(found)}", flush=True)


def page(data: dict[str, Any]) -> str:
    """Return docs/results/serving.md."""
    cores, load = data["environment"]["cpu_count"], data["load_average"][0]
    return f"""# Serving

Made by `python -m benchmarks.studies.serving`. The server is `burnish serve`, in a process of its own and
with one thread; the policy is a residual MLP of the size of DPPO's Hopper actor with {STEPS} denoising
steps. Robots and attackers share the machine with it ({cores} cores; load average {load:.1f} at the start).

{_closed(data["closed"])}
{_open(data["open"])}
{_attack(data["attack"])}
{_frames(data["frames"])}
{_kill(data["kill"])}"""


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return "\n".join([*pages.table(columns, rows), ""])


def _closed(rows: list[dict[str, float]]) -> str:
    table = _table(
        ("robots", "decisions per second", "p50 [ms]", "p99 [ms]", "rows per batch"),
        (
            [row["robots"], f"{row['requests_per_s']:.0f}"]
            + [f"{row[name]:.1f}" for name in ("p50_ms", "p99_ms", "mean_batch")]
            for row in rows
        ),
    )
    return f"""## Robots that ask again as soon as they are answered

{table}
A decision is a chunk of 4 actions; {UNDISTURBED}.
"""


def _open(found: dict[str, Any]) -> str:
    outcomes = ", ".join(f"{count} {name}" for name, count in found["outcomes"].items())
    lost = found["sent"] - sum(found["outcomes"].values())
    return f"""## {RATE:.0f} requests per second

{found["robots"]} robots sent {found["sent"]} requests at {found["sent_per_s"]:.0f} per second without waiting
for answers, with {UNDISTURBED}: {outcomes}, {lost} without an answer. Those
with actions took {found["p50_ms"]:.1f} ms (p50) and {found["p99_ms"]:.1f} ms (p99).
"""


def _attack(found: dict[str, Any]) -> str:
    counts = sorted(found["rejected"].items())
    rejected = _table(("refused because", "times"), ((f"`{reason}`", count) for reason, count in counts))
    samples = ((f"{second:.0f}", f"{mb:.0f}") for second, mb in found["memory_mb"])
    memory = _table(("second", "memory of the server [MB]"), samples)
    return f"""## Under attack

For {found["seconds"]:.0f} s one client sent {found["bad_messages"]} bad messages of {len(found["kinds"])}
kinds ({", ".join(found["kinds"])}), another asked and never read an answer, and four robots went on working:
{found["honest_per_s"]:.0f} decisions per second, p50 {found["p50_ms"]:.1f} ms, p99 {found["p99_ms"]:.1f} ms.
The server {"lived" if found["alive"] else "died"}. With `max_per_client={ServerSettings().max_per_client}`,
the default, {found["slow"]} answers were dropped because they were not fetched in time.

{rejected}
{memory}"""


def _frames(found: dict[str, Any]) -> str:
    frames = found["sent_mb"] * 250 // 4
    return f"""Messages of {frames:,} frames each, {found["sent_mb"]} MB in all, which ZeroMQ gathers before
the server can look at them, with `max_backlog_mb={found["limit_mb"]}`: {found["before_mb"]:.0f} MB before, at
most {found["most_seen_mb"]:.0f} MB seen, {found["after_mb"]:.0f} MB after; connections were dropped
{found["reopened"]} times.
"""


def _kill(found: dict[str, float]) -> str:
    return f"""## Killed

`kill -9` between two requests of a robot, and started again ({found["start_s"]:.1f} s until it listened): the
robot's next decision came {found["reconnected_s"]:.2f} s after that, and differed by
{found["difference"]:.1e} from the one before the kill.
"""


def main() -> None:
    """Measure, and write the page."""
    parser = study_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    options = parser.parse_args()
    if not options.report:
        pages.keep("serving", "run", measure(options.seconds), indent=1)
    (found,) = pages.kept("serving", advice="measure first")
    print(f"written: {pages.write('serving', [page(found).rstrip()])}")


if __name__ == "__main__":
    main()
