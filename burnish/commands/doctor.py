"""`burnish doctor`: is this installation complete, and if not, what repairs it."""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import burnish
from burnish.console import output, table

OURS = ("burnish", "policies", "algos", "envs", "configs", "assets")
CORE = (
    "torch",
    "numpy",
    "mujoco",
    "gymnasium",
    "hydra-core",
    "safetensors",
    "h5py",
    "scipy",
    "matplotlib",
    "rich",
)
GL_BACKENDS = ("egl", "osmesa", "glfw")
GL_LIBRARIES = {"egl": ("EGL", "Debian: libegl1"), "osmesa": ("OSMesa", "Debian: libosmesa6")}
GL_TIMEOUT_S = 60
_RENDER = """
import mujoco
from envs.rendering import OffscreenRenderer
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with OffscreenRenderer(model, width=32, height=32) as renderer:
    renderer.frame(data)
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report; `needed` findings decide the exit code."""

    subject: str
    is_good: bool
    detail: str
    needed: bool = False


def main(arguments: Sequence[str]) -> int:
    """Print the report; 0 if everything needed works, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="burnish doctor", description="Check the installation.")
    parser.add_argument("--no-render", action="store_true", help="skip trying the off-screen renderers")
    options = parser.parse_args(arguments)
    findings = [*_python(), *_packages(), *_threads(), *_ours(), *_parts(), *_extras()]
    if not options.no_render:
        findings += _rendering()
    marks = {True: "ok", False: "--"}
    rows = [
        ("FAIL" if f.needed and not f.is_good else marks[f.is_good], f.subject, f.detail) for f in findings
    ]
    output().print(table("", ("", "what", "found"), rows))
    return int(any(f.needed and not f.is_good for f in findings))


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding(
        "python", sys.version_info >= (3, 11), f"{version} on {platform.platform()} (needs 3.11)", True
    )
    yield Finding("burnish", True, burnish.__version__)


def _packages() -> Iterator[Finding]:
    for name in CORE:
        version = _version(name)
        yield Finding(name, version is not None, version or f"missing: pip install {name}", True)
    gpu = torch.cuda.is_available()
    detail = torch.cuda.get_device_name() if gpu else "none; everything runs on the CPU"
    yield Finding("accelerator", gpu, detail)


def _threads() -> Iterator[Finding]:
    omp, policy = os.environ.get("OMP_NUM_THREADS"), os.environ.get("OMP_WAIT_POLICY")
    detail = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()}, OMP_NUM_THREADS={omp}, "
    detail += f"OMP_WAIT_POLICY={policy}"
    quiet = policy is not None and policy.upper() == "PASSIVE"
    yield Finding("threads", quiet, detail if quiet else f"{detail}; set OMP_WAIT_POLICY=PASSIVE")


def _ours() -> Iterator[Finding]:
    """Check that the top-level packages are this project's and not others of the same name."""
    home = Path(burnish.__file__).resolve().parents[1]
    for name in OURS[1:]:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            yield Finding(f"package {name}", False, "missing: install burnish again", True)
            continue
        found = Path(spec.origin).resolve().parent
        good = found == home / name
        other = f"{found} hides ours ({home / name}); rename or remove it, or change the import path"
        yield Finding(f"package {name}", good, str(found) if good else other, True)


def _parts() -> Iterator[Finding]:
    from burnish.config import GROUPS, scan_parts
    from policies import registry

    scan_parts()
    counts = ", ".join(f"{len(registry.parts(group))} {group}" for group in GROUPS)
    yield Finding("parts", all(registry.parts(group) for group in GROUPS), counts, True)


def _extras() -> Iterator[Finding]:
    """Compare what each extra asks for with what is installed."""
    try:
        requires = metadata.requires("burnish") or []
    except metadata.PackageNotFoundError:
        yield Finding("extras", False, "unknown: running from a checkout; pip install -e . makes them known")
        return
    for extra in metadata.metadata("burnish").get_all("Provides-Extra") or []:
        mark = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
        names = [_name(line) for line in requires if mark.search(line)]
        missing = [name for name in names if _version(name) is None]
        repair = f"missing {', '.join(missing)}: pip install 'burnish[{extra}]'"
        yield Finding(f"extra {extra}", not missing, repair if missing else ", ".join(names))


def _rendering() -> Iterator[Finding]:
    """Try each off-screen renderer in a process of its own: a broken one may take its process down."""
    chosen = os.environ.get("MUJOCO_GL")
    problems = {backend: _try_renderer(backend) for backend in ([chosen] if chosen else GL_BACKENDS)}
    for backend, problem in problems.items():
        yield Finding(f"rendering {backend}", problem is None, problem or f"MUJOCO_GL={backend} works")
    if all(problems.values()):
        hint = "none works: reports leave pictures of MuJoCo scenes out; install libegl1 or libosmesa6"
        yield Finding("rendering", False, hint)


def _try_renderer(backend: str) -> str | None:
    """Return None if a picture came out, else the reason."""
    home = Path(burnish.__file__).resolve().parents[1]
    environment = {key: value for key, value in os.environ.items() if key != "PYOPENGL_PLATFORM"}
    environment["MUJOCO_GL"] = backend
    command = [sys.executable, "-c", _RENDER]
    try:
        done = subprocess.run(
            command, env=environment, cwd=home, capture_output=True, text=True, timeout=GL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no picture within {GL_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    found = lines[-1] if lines else f"the process ended with code {done.returncode}"
    return f"not usable: {_missing_for(backend) or found}; one backend is enough"


def _missing_for(backend: str) -> str | None:
    """Return what a backend that failed lacks on this machine; None where that is not known."""
    library, package = GL_LIBRARIES.get(backend, ("", ""))
    if library and ctypes.util.find_library(library) is None:
        return f"lib{library} is not installed ({package})"
    if backend == "glfw" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return "it needs a screen, and neither DISPLAY nor WAYLAND_DISPLAY is set"
    if backend == "egl":
        return "libEGL found no device that can draw"
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _name(requirement: str) -> str:
    """Return the distribution name at the start of a requirement."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found.group(0) if found else requirement
