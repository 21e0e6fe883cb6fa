"""What breaks imports: other projects' packages with the names of ours, a graphics library that is not there.

Both are found without importing anything; packages of these names are moved behind ours.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
OURS = ("burnish", "policies", "algos", "envs", "configs", "assets")
GL_LIBRARIES = {"egl": ("EGL", "libegl1"), "osmesa": ("OSMesa", "libosmesa6")}
"""Library, and the package of Debian that has it, by value of `MUJOCO_GL`."""


def found_packages() -> Iterator[tuple[str, bool, str]]:
    """Yield name, ownership and location of every package except `burnish`."""
    for name in OURS[1:]:
        place = _place_of(name)
        if place is None:
            yield name, False, "missing: install burnish again"
        elif place == HOME / name:
            yield name, True, str(place)
        else:
            remedy = "rename or remove it, or change the import path"
            yield name, False, f"{place} hides ours ({HOME / name}); {remedy}"


def prefer_own_packages() -> None:
    """Move the folders of the import path that hold foreign packages of these names behind our own."""
    places = {name: _place_of(name) for name in OURS[1:]}
    hiding = {place.parent for name, place in places.items() if place not in (None, HOME / name)}
    if hiding:
        behind = [entry for entry in sys.path if Path(entry).resolve() in hiding]
        sys.path[:] = [*(entry for entry in sys.path if entry not in behind), str(HOME), *behind]


@cache
def require_own_packages() -> None:
    """Refuse to start if another project's package shadows one of ours.

    Raises:
        ImportError: Names the package and its location.
    """
    for name, is_ours, detail in found_packages():
        if not is_ours:
            raise ImportError(f"package {name}: {detail}.")


def require_graphics_library() -> None:
    """Refuse a `MUJOCO_GL` whose library is missing, which breaks the import of MuJoCo.

    Raises:
        ImportError: Names the library and the remedy.
    """
    name = os.environ.get("MUJOCO_GL", "").strip().lower()
    library, package = GL_LIBRARIES.get(name, ("", ""))
    if sys.platform == "linux" and library and ctypes.util.find_library(library) is None:
        raise ImportError(
            f"MUJOCO_GL={name} needs lib{library}, which is not installed. Install it (Debian: {package}), "
            "or unset MUJOCO_GL."
        )


def _place_of(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # already imported, without a known location
        return None
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin).resolve()
    return origin.parent if origin.name == "__init__.py" else origin
