"""Programs in C beside the Python that calls them: compiled once per processor, or absent.

The C compiler of the machine (`cc`) makes a library of a source file when it is first needed, and keeps it in
`~/.burnish/native`. Without a compiler, or with `BURNISH_NATIVE=0`, callers do the same in Python.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-shared", "-fPIC")


@functools.cache
def program(source: Path, functions: tuple[str, ...]) -> tuple[ctypes.CDLL | None, str | None]:
    """Return the compiled program of a source file with these functions; or None, and why there is none."""
    if os.environ.get("BURNISH_NATIVE", "1") == "0":
        return None, "BURNISH_NATIVE=0"
    compiler = shutil.which("cc")
    if compiler is None:
        return None, "there is no C compiler `cc`"
    try:
        return _loaded(source, compiler, functions), None
    except (AttributeError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return None, f"the program in C is not usable: {error}"


def addresses(tensors: Sequence[Tensor]) -> bytes:
    """Return the addresses of tensors, as an array of pointers."""
    return struct.pack(f"{len(tensors)}Q", *[tensor.data_ptr() for tensor in tensors])


def _loaded(source: Path, compiler: str, functions: tuple[str, ...]) -> ctypes.CDLL:
    for is_again in (False, True):
        path = _compiled(source, compiler)
        try:
            found = ctypes.CDLL(str(path))
            for name in functions:
                getattr(found, name)
            break
        except (AttributeError, OSError):  # a damaged file
            if is_again:
                raise
            path.unlink()
    return found


def _compiled(source: Path, compiler: str) -> Path:
    """Return the compiled program for this processor, made if it is missing."""
    told = (source.read_bytes(), " ".join((compiler, *FLAGS)).encode(), _processor().encode())
    name = hashlib.sha256(b"\0".join(told)).hexdigest()[:16]
    home = Path.home() / ".burnish" / "native"
    path = home / f"{name}.so"
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:
            made = Path(folder) / path.name
            command = [compiler, *FLAGS, str(source), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            with made.open("rb") as file:
                os.fsync(file.fileno())  # all of it is there before its name is
            made.replace(path)  # processes that start together each make one
    return path


def _processor() -> str:
    """Return what a program for this processor depends on: its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")
