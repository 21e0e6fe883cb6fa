"""Counters of a policy server, for clients and Prometheus."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import numpy as np

from policies.errors import ConfigError
from policies.serving.messages import REASONS

_COUNTS = ("messages", "decisions", "batches", "gone", "slow", "reopened", "crowded")
RECENT = 4096  # decisions over which percentiles are taken


def resident_mb() -> float:
    """Return the resident memory of this process [MB]; 0 if unknown."""
    if not sys.platform.startswith("linux"):
        return 0.0
    return int(os.pread(_facts_of(os.getpid()), 200, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@cache
def _facts_of(process: int) -> int:
    """Return the open memory-statistics file of a process; kept open since descriptors may run out."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)


class Metrics:
    """Counters of a server; one thread writes, others may read.

    `gone` counts clients that disconnected before their answer, `slow` those that did not fetch it, `crowded`
    the times that all connections were in use, `reopened` the times that all were dropped.
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.rejected = dict.fromkeys(REASONS, 0)
        self.waiting = 0
        self._queued: deque[float] = deque(maxlen=RECENT)
        self._decided: deque[float] = deque(maxlen=RECENT)

    def decided(self, queued_s: list[float], decide_s: float) -> None:
        """Record a batch: queueing time of each row with actions, and computation time [s]."""
        self.counts["batches"] += 1
        self.counts["decisions"] += len(queued_s)
        self._queued.extend(queued_s)
        self._decided.append(decide_s)

    def summary(self) -> dict[str, Any]:
        """Return all metrics as plain numbers; times in ms."""
        return {
            **self.counts,
            "waiting": self.waiting,
            "memory_mb": round(resident_mb(), 1),
            "rejected": dict(self.rejected),
            "queue_ms": _percentiles(self._queued),
            "decide_ms": _percentiles(self._decided),
        }

    def prometheus(self) -> str:
        """Return all metrics in the Prometheus text format."""
        now = self.summary()
        lines = []
        for name in self.counts:
            lines += [f"# TYPE burnish_{name}_total counter", f"burnish_{name}_total {now[name]}"]
        lines += ["# TYPE burnish_rejected_total counter"]
        lines += [f'burnish_rejected_total{{reason="{k}"}} {v}' for k, v in now["rejected"].items()]
        for name in ("waiting", "memory_mb"):
            lines += [f"# TYPE burnish_{name} gauge", f"burnish_{name} {now[name]}"]
        for name in ("queue_ms", "decide_ms"):
            lines += [f"# TYPE burnish_{name} gauge"]
            lines += [f'burnish_{name}{{quantile="{k}"}} {v}' for k, v in now[name].items()]
        return "\n".join(lines) + "\n"


def _percentiles(seconds: deque[float]) -> dict[str, float]:
    if not seconds:
        return {"0.5": 0.0, "0.99": 0.0}
    values = np.quantile(list(seconds), (0.5, 0.99)) * 1e3
    return {"0.5": round(float(values[0]), 3), "0.99": round(float(values[1]), 3)}


@contextlib.contextmanager
def metrics_page(metrics: Metrics, port: int | None) -> Iterator[int | None]:
    """Serve `/metrics` over HTTP on the loopback interface; yields the port (0: any; None: no page)."""
    if port is None:
        yield None
        return

    class Page(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            found = self.path == "/metrics"
            body = (metrics.prometheus() if found else "see /metrics\n").encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    try:
        server = HTTPServer(("127.0.0.1", port), Page)
    except OSError as error:
        reason = f"metrics_port={port} cannot be used: {error.strerror}. Choose another, or null."
        raise ConfigError(reason) from None
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
