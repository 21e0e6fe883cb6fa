"""`burnish doctor`: check the installation and suggest repairs."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

import burnish
from burnish.console import output, table
from burnish.name_clashes import GL_LIBRARIES, found_packages
from envs.engine.rendering import gl_backends, has_library
from policies.errors import ConfigError
from policies.extras import SECOND_STEP, installed_version, second_command
from policies.networks import native

GL_BACKENDS = ("egl", "osmesa", "glfw")
GL_TIMEOUT_S = 120
_RENDER = """
import mujoco
from envs.engine.rendering import OffscreenRenderer
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with OffscreenRenderer(model, width=32, height=32) as renderer:
    renderer.frame(data)
    from OpenGL import GL
    print(GL.glGetString(GL.GL_RENDERER).decode())
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report; findings with `needed` determine the exit code."""

    subject: str
    is_good: bool
    detail: str
    needed: bool = False


def main(arguments: Sequence[str]) -> int:
    """Print the report; return 0 if all needed parts work, else 1."""
    parser = argparse.ArgumentParser(prog="burnish doctor", description="Check the installation.")
    parser.add_argument("--no-render", action="store_true", help="skip trying the off-screen renderers")
    options = parser.parse_args(arguments)
    findings = [*_python(), *_packages(), *_threads(), *_ours(), *_parts(), *_extras()]
    if not options.no_render:
        findings += _rendering()
    marks = ["ok" if f.is_good else "FAIL" if f.needed else "--" for f in findings]
    rows = [(mark, f.subject, f.detail) for mark, f in zip(marks, findings, strict=True)]
    output().print(table("", ("", "what", "found"), rows))
    return int("FAIL" in marks)


def _python() -> Iterator[Finding]:
    detail = f"{platform.python_version()} on {platform.platform()} (needs 3.11 or newer)"
    yield Finding("python", sys.version_info >= (3, 11), detail, True)
    yield Finding("burnish", True, burnish.__version__)


def _packages() -> Iterator[Finding]:
    for requirement in _requirements():
        if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
            name, problem = requirement.name, _problem(requirement)
            repair = f"{problem}: pip install '{name}{requirement.specifier}'"
            yield Finding(name, problem is None, repair if problem else str(installed_version(name)), True)
    gpu = torch.cuda.is_available()
    detail = torch.cuda.get_device_name() if gpu else "none; everything runs on the CPU"
    yield Finding("accelerator", gpu, detail)


def _threads() -> Iterator[Finding]:
    omp, policy = os.environ.get("OMP_NUM_THREADS"), os.environ.get("OMP_WAIT_POLICY")
    detail = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()}, OMP_NUM_THREADS={omp}, "
    detail += f"OMP_WAIT_POLICY={policy}"
    quiet = policy is not None and policy.upper() == "PASSIVE"
    yield Finding("threads", quiet, detail if quiet else f"{detail}; set OMP_WAIT_POLICY=PASSIVE")
    slow = native.unavailable()
    yield Finding(
        "small networks", slow is None, f"plain operations: {slow}" if slow else "compiled for this CPU"
    )


def _ours() -> Iterator[Finding]:
    for name, is_ours, detail in found_packages():
        yield Finding(f"package {name}", is_ours, detail, True)


def _parts() -> Iterator[Finding]:
    from burnish.config.nodes import GROUPS
    from policies import registry

    try:
        registry.load_plugins()
    except ConfigError as error:  # the packages of this project are present
        yield Finding("plug-ins", False, str(error), True)
    names = {group: {*registry.sources(group), *registry.registered(group)} for group in GROUPS}
    counts = {group: len([registry.lookup(group, name) for name in names[group]]) for group in GROUPS}
    shown = ", ".join(f"{count} {group}" for group, count in counts.items())
    yield Finding("parts", all(counts.values()), shown, True)


def _extras() -> Iterator[Finding]:
    known = _requirements()
    if not known:
        yield Finding("extras", False, "unknown: running from a checkout; pip install -e . makes them known")
        return
    for extra in metadata.metadata("burnish").get_all("Provides-Extra") or []:
        wanted = list(_of_extra(extra, known))
        problems = list(dict.fromkeys(problem for item in wanted if (problem := _problem(item))))
        names = ", ".join(f"{item.name} {installed_version(item.name)}" for item in wanted)
        repair = f"{', '.join(problems)}: pip install 'burnish[{extra}]'"
        yield Finding(f"extra {extra}", not problems, repair if problems else names)
        yield from _second_step(extra)


def _second_step(extra: str) -> Iterator[Finding]:
    """Check the packages of an extra that pip cannot install; see docs/install.md."""
    pins = [Requirement(text) for text in SECOND_STEP.get(extra, ())]
    missing = [problem for pin in pins if (problem := _problem(pin))]
    if pins:
        detail = f"{', '.join(missing)}: {second_command(extra)}" if missing else ", ".join(map(str, pins))
        yield Finding("  and without dependencies", not missing, detail)


def _requirements() -> list[Requirement]:
    """Return the requirements of this installation; empty without an installation."""
    try:
        return [Requirement(line) for line in metadata.requires("burnish") or []]
    except metadata.PackageNotFoundError:
        return []


def _of_extra(extra: str, known: Sequence[Requirement]) -> Iterator[Requirement]:
    for requirement in known:
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "burnish":
            for inner in sorted(requirement.extras):
                yield from _of_extra(inner, known)
        else:
            yield requirement


def _problem(requirement: Requirement) -> str | None:
    """Return the problem of an installed package; None if it satisfies the requirement."""
    version = installed_version(requirement.name)
    if version is None:
        return f"missing {requirement.name}"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} {version} is not {requirement.specifier}"
    return None


def _rendering() -> Iterator[Finding]:
    """Test each off-screen renderer in its own process, as a broken one may crash it."""
    chosen = os.environ.get("MUJOCO_GL", "").strip().lower()
    tried = {backend: _try_renderer(backend) for backend in ([chosen] if chosen else GL_BACKENDS)}
    for backend, (works, detail) in tried.items():
        yield Finding(f"rendering {backend}", works, detail)
    working = [backend for backend, (works, _) in tried.items() if works]
    usable = working if chosen else [backend for backend in gl_backends() if backend in working]
    if usable:
        only = usable[0] == "osmesa"
        reason = "libEGL is not installed and libOSMesa is" if only else "and it is the first that works"
        why = "MUJOCO_GL says so" if chosen else f"MUJOCO_GL is not set, {reason}"
        yield Finding("pictures", True, f"drawn by {usable[0]}: {why}")
    elif working:
        yield Finding(
            "pictures", False, "only OSMesa works, and libEGL comes before it: set MUJOCO_GL=osmesa"
        )
    else:
        hint = "unset MUJOCO_GL to try all" if chosen else "install libegl1 or libosmesa6"
        yield Finding("pictures", False, f"none works: reports leave pictures of MuJoCo scenes out; {hint}")


def _try_renderer(backend: str) -> tuple[bool, str]:
    home = Path(burnish.__file__).resolve().parents[1]
    environment = {key: value for key, value in os.environ.items() if key != "PYOPENGL_PLATFORM"}
    environment["MUJOCO_GL"] = backend
    command = [sys.executable, "-c", _RENDER]
    try:
        done = subprocess.run(
            command, env=environment, cwd=home, capture_output=True, text=True, timeout=GL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return False, f"no picture within {GL_TIMEOUT_S} s"
    if done.returncode == 0:
        return True, f"works, on {done.stdout.strip()}"
    lines = done.stderr.strip().splitlines()
    found = lines[-1] if lines else f"the process ended with code {done.returncode}"
    return False, f"not usable: {_missing_for(backend) or found}; one backend is enough"


def _missing_for(backend: str) -> str | None:
    library, package = GL_LIBRARIES.get(backend, ("", ""))
    if library and not has_library(library):
        return f"lib{library} is not installed (Debian: {package})"
    if backend == "glfw" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return "it needs a screen, and neither DISPLAY nor WAYLAND_DISPLAY is set"
    if backend == "egl":
        return "libEGL found no device that can draw"
    return None
