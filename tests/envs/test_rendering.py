"""Which GL stack draws: decided by what is asked for and what is installed, before anything is loaded."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from messages import mentions

from envs.engine import rendering
from envs.engine.rendering import gl_backends, require_gl
from policies.errors import MissingExtraError


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Linux machine without a screen, on which nobody asked for a backend."""
    monkeypatch.setattr(rendering.sys, "platform", "linux")
    for name in ("MUJOCO_GL", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)


def install(monkeypatch: pytest.MonkeyPatch, *libraries: str) -> None:
    """Let the finder find these libraries and no other."""
    found = {name: f"lib{name}.so" for name in libraries}
    monkeypatch.setattr(rendering.ctypes.util, "find_library", found.get)
    monkeypatch.setattr(rendering, "has_library", rendering.has_library.__wrapped__)  # without its memory


@pytest.mark.parametrize(
    ("libraries", "chosen", "expected"),
    [
        (("EGL", "OSMesa"), "", ("egl", "glfw")),
        (("EGL",), "", ("egl", "glfw")),
        (("OSMesa",), "", ("glfw", "osmesa")),
        ((), "", ("egl", "glfw")),  # the loader may know places that the finder does not
        (("EGL",), " OSMesa ", ("osmesa",)),
        (("OSMesa",), "egl", ("egl",)),
        (("OSMesa",), "vulkan", ("glfw", "osmesa")),
    ],
)
def test_osmesa_draws_by_itself_where_it_is_the_only_library(
    libraries: tuple[str, ...], chosen: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *libraries)
    monkeypatch.setenv("MUJOCO_GL", chosen)
    assert gl_backends() == expected


def test_egl_is_not_even_loaded_where_osmesa_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyOpenGL serves one of them per process: whichever is imported first."""
    freed: list[str] = []

    def context(width: int, height: int) -> SimpleNamespace:
        return SimpleNamespace(free=lambda: freed.append(f"osmesa {width} x {height}"))

    install(monkeypatch, "OSMesa")
    monkeypatch.setitem(sys.modules, "mujoco.egl", None)  # importing it fails
    monkeypatch.setitem(sys.modules, "mujoco.osmesa", SimpleNamespace(GLContext=context))
    require_gl()
    assert freed == ["osmesa 8 x 8"]


def test_without_any_library_the_error_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setitem(sys.modules, "mujoco.egl", None)
    with pytest.raises(MissingExtraError, match=mentions("libegl1 libosmesa6")):
        require_gl()


def test_a_compiler_is_loaded_before_the_gl_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of PyTorch's builds for GPUs, which ends the process if Mesa was first."""
    loaded: list[str] = []
    context = SimpleNamespace(GLContext=lambda width, height: (width, height))
    fake = SimpleNamespace(
        util=SimpleNamespace(find_spec=lambda name: name),
        import_module=lambda name: loaded.append(name) or context,
    )
    monkeypatch.setattr(rendering, "importlib", fake)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    rendering.load_triton.cache_clear()
    assert rendering._gl_context(4, 3) == (4, 3)
    rendering.load_triton.cache_clear()
    assert loaded == ["triton._C.libtriton", "mujoco.egl"]
