"""Provenance of a run: versions, platform, threads, source commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from policies.extras import installed_version
from policies.networks import native

_PACKAGES = (
    *("burnish", "torch", "numpy", "mujoco", "gymnasium", "hydra-core", "safetensors"),
    *("ogbench", "robosuite", "mujoco-warp", "warp-lang"),
)


def describe_environment() -> dict[str, Any]:
    """Return versions, processor, threads and source commit: all that results may depend on."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "small_networks": native.unavailable() or "compiled",
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {name: v for name in _PACKAGES if (v := installed_version(name)) is not None}
        | {"torch": str(torch.__version__)},  # with its build, which the index's metadata leaves out
        "commit": _commit(),
        "command": Path(sys.argv[0]).name if sys.argv else None,
    }


def processor_name() -> str:
    """Return the CPU model, or its architecture if unnamed; rounding depends on it."""
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return str(known.get("cpu_name") or platform.processor() or platform.machine())


def _commit() -> str | None:
    """Return the commit of the source checkout; None outside a checkout.

    Ends in `-dirty` with local changes, except changes of pages, which running studies write.
    """
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    try:
        commit = _git(here, "rev-parse", "HEAD")
        changes = _git(here, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changes else commit or None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
