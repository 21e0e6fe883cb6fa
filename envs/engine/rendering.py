"""Off-screen rendering of MuJoCo scenes; the GL stack is loaded with the first frame."""

from __future__ import annotations

import ctypes.util
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.engine.ray_tracing import require_warp
from policies.errors import MissingExtraError

if TYPE_CHECKING:
    import mujoco

    from envs.engine.vector import ChunkVector


class OffscreenRenderer:
    """Renderer of one model without a window; use as a context manager.

    Headless machines need no setting: see `gl_backends`. `camera` names a camera of the model, None the free
    camera. Shadows are the main cost of a software rasteriser, then `samples` per pixel, which smooth edges;
    None: as many as the model has.

    Raises:
        MissingExtraError: If no GL context can be made.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        *,
        width: int = 320,
        height: int = 240,
        camera: str | None = None,
        shadows: bool = True,
        samples: int | None = None,
    ) -> None:
        import mujoco

        self._model = model
        self._rect = mujoco.MjrRect(0, 0, width, height)
        self._gl = _gl_context(width, height)
        self._gl.make_current()
        shapes = model.ngeom + model.nsite + model.nwrap  # a tendon has up to two shapes per point
        self._scene = mujoco.MjvScene(model, maxgeom=1_000 + 2 * shapes)  # room for 10,000 takes 30 ms
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = shadows
        self._option = mujoco.MjvOption()
        self._camera = _camera(model, camera)
        with _buffers_for(model, width, height, shadows, samples):
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150.value)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)

    def look_through(self, camera: str | None) -> None:
        """Set the camera of subsequent frames."""
        self._camera = _camera(self._model, camera)

    def frame(self, data: mujoco.MjData) -> np.ndarray:
        """Return the image of a state: (height, width, 3) uint8."""
        import mujoco

        self._gl.make_current()
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self._model, data, self._option, None, self._camera, everything, self._scene)
        mujoco.mjr_render(self._rect, self._scene, self._context)
        pixels = np.empty((self._rect.height, self._rect.width, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, self._rect, self._context)
        return np.flipud(pixels).copy()

    def close(self) -> None:
        self._gl.make_current()
        self._context.free()
        self._gl.free()

    def __enter__(self) -> OffscreenRenderer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _buffers_for(
    model: mujoco.MjModel, width: int, height: int, shadows: bool, samples: int | None
) -> Iterator[None]:
    """Allocate buffers of the image size instead of the model's, which may be many times larger."""
    size, quality = model.vis.global_, model.vis.quality
    before = size.offwidth, size.offheight, quality.shadowsize, quality.offsamples
    size.offwidth, size.offheight = width, height
    quality.shadowsize = quality.shadowsize if shadows else 0
    quality.offsamples = quality.offsamples if samples is None else samples
    try:
        yield
    finally:
        size.offwidth, size.offheight, quality.shadowsize, quality.offsamples = before


def gl_backends() -> tuple[str, ...]:
    """Return the kinds of GL context to try here, in order.

    `MUJOCO_GL` takes precedence. Otherwise EGL (a GPU, or Mesa's software rasteriser) comes first; without
    its library but with OSMesa's, a display, then OSMesa. The choice precedes any loading, because PyOpenGL
    supports only one of the two per process.
    """
    chosen = os.environ.get("MUJOCO_GL", "").lower().strip()
    if sys.platform != "linux":
        return ("cgl",) if sys.platform == "darwin" else ("glfw",)
    if chosen in ("egl", "osmesa", "glfw"):
        return (chosen,)
    is_software_only = not has_library("EGL") and has_library("OSMesa")
    return ("glfw", "osmesa") if is_software_only else ("egl", "glfw")


@contextmanager
def gl_for_others() -> Iterator[None]:
    """Set `MUJOCO_GL` for a block, to a kind of `gl_backends`; gymnasium's own choice needs a display."""
    load_triton()
    with_display = bool(os.environ.get("DISPLAY")) or sys.platform != "linux"
    usable = [kind for kind in gl_backends() if kind != "glfw" or with_display]
    if "MUJOCO_GL" in os.environ or not usable:
        yield
        return
    os.environ["MUJOCO_GL"] = usable[0]
    try:
        yield
    finally:
        del os.environ["MUJOCO_GL"]


@cache
def has_library(name: str) -> bool:
    """Return whether a shared library is installed, by its name without `lib`."""
    return ctypes.util.find_library(name) is not None


def require_renderer(name: str) -> None:
    """Raise MissingExtraError unless a renderer of `pixels.RENDERERS` works."""
    if name == "warp":
        require_warp("env.image_renderer=warp")
    else:
        require_gl()


def require_gl() -> None:
    """Raise MissingExtraError unless OpenGL works."""
    _gl_context(8, 8).free()


def replay_frames(
    vector: ChunkVector,
    seed: int,
    actions: np.ndarray,
    *,
    every: int = 10,
    width: int = 320,
    height: int = 240,
    camera: str | None = None,
    shadows: bool = True,
    samples: int | None = None,
) -> np.ndarray:
    """Replay an episode of one environment in the exact engine; returns frames (F, height, width, 3) uint8.

    Args:
        vector: A `ChunkVector` of one environment, simulated by MuJoCo.
        seed: Seed of the episode.
        actions: (L, Da) its actions, e.g. `EpisodeRow.actions`.
        every: Control steps between frames; the reset and the last step are always included.
        width: Pixels.
        height: Pixels.
        camera: Name of a camera of the model; None: the free camera.
        shadows: Draw shadows, the main cost without a GPU.
        samples: Samples per pixel; None: as many as the model has.

    Raises:
        MissingExtraError: If no GL context can be made.
    """
    simulator: Any = vector.stepper
    vector.reset([seed])
    drawing: dict[str, Any] = {"camera": camera, "shadows": shadows, "samples": samples}
    with OffscreenRenderer(simulator.model, width=width, height=height, **drawing) as renderer:
        frames = [renderer.frame(simulator.datas[0])]
        for i, action in enumerate(actions, start=1):
            done = bool(vector.step_chunk(action[None, None]).done[0])
            if i % every == 0 or i == len(actions) or done:
                frames.append(renderer.frame(simulator.datas[0]))
            if done:
                break
    return np.stack(frames)


def _camera(model: mujoco.MjModel, camera: str | None) -> mujoco.MjvCamera:
    import mujoco

    view = mujoco.MjvCamera()
    if camera is None:
        mujoco.mjv_defaultFreeCamera(model, view)
    else:
        view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, model.camera(camera).id
    return view


@cache
def load_triton() -> None:
    """Load the compiler of PyTorch's builds for GPUs, if there is one, before a GL stack.

    It and Mesa's software rasteriser each bring an LLVM; loaded after Mesa's, its own ends the process, for
    instance at an export after a drawing. Takes 0.2 s.
    """
    if importlib.util.find_spec("triton") is not None:
        with suppress(ImportError):  # another layout of the package
            importlib.import_module("triton._C.libtriton")


def _gl_context(width: int, height: int) -> Any:
    load_triton()
    reasons = []
    for backend in gl_backends():
        if backend == "glfw" and sys.platform == "linux" and not os.environ.get("DISPLAY"):
            reasons.append("glfw: no display")
            continue
        try:
            return importlib.import_module(f"mujoco.{backend}").GLContext(width, height)
        except Exception as error:  # GL bindings raise their own classes
            reasons.append(f"{backend}: {type(error).__name__} {error}")
    raise MissingExtraError(
        f"rendering needs a GL stack; none works here ({'; '.join(reasons)}). On Debian install libegl1 and "
        "libgl1-mesa-dri (EGL, no display needed), or libosmesa6 (OSMesa, in software)."
    )
