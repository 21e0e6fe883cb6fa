"""Processor time of a program with its worker processes."""

from __future__ import annotations

import os
import time

from envs.engine.fork_server import workers_cpu_s


def cpu_s() -> float:
    """Return the processor time [s] so far, user and system: all threads, workers and finished children.

    Workers that live are counted where the system lists processes in `/proc` (Linux); elsewhere they count
    once the program has ended them all.
    """
    return time.process_time() + sum(os.times()[2:4]) + workers_cpu_s()
