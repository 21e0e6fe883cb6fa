"""Drawing of MuJoCo scenes by mujoco-warp's ray tracer, which needs no GL stack; extra `warp`.

It draws states of MuJoCo from their world poses, in float32, on the CPU and without smoothing of edges: geoms
seen by cameras of the model and lit by its lights. Sites, tendons, skins, transparency, the headlight and the
sky are not drawn. Kernels are compiled with a user's first frame and kept in warp's cache folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from policies.errors import CapabilityError
from policies.extras import require

if TYPE_CHECKING:
    import mujoco

_POSES = ("geom_xpos", "geom_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")
_UNSEEN = 5  # group of geoms that is not drawn; groups 0 to 2 are, as in MuJoCo
_NO_COLOUR = (0.5, 0.5, 0.5, 1.0)  # of a geom that leaves its colour to its material


class RayTracer:
    """Renderer of one model; the same methods as `rendering.OffscreenRenderer`.

    Args:
        model: Its colours may change between frames.
        width: Pixels.
        height: Pixels.
        shadows: Trace rays to the lights, too.

    Raises:
        MissingExtraError: If mujoco-warp is not installed.
        CapabilityError: If it does not support the model.
    """

    def __init__(self, model: mujoco.MjModel, *, width: int, height: int, shadows: bool = True) -> None:
        self._warp, self._tracer = require_warp("env.image_renderer=warp")
        self._model, self._size, self._shadows = model, (width, height), shadows
        self._captures: dict[tuple[int, bytes], tuple[Any, Any]] = {}
        self._camera = 0
        with self._warp.ScopedDevice("cpu"):
            self._scene = put_model(self._tracer, model, "env.image_renderer=opengl")
            self._state = self._tracer.make_data(model)
        self._scene.mat_texrepeat.numpy()[:] = _repeats_per_metre(model)

    def look_through(self, camera: str) -> None:
        """Set the camera of subsequent frames."""
        self._camera = self._model.camera(camera).id

    def frame(self, data: mujoco.MjData) -> np.ndarray:
        """Return the image of a state whose world poses are computed: (height, width, 3) uint8."""
        for name in _POSES:
            shared = getattr(self._state, name).numpy()
            shared[0] = getattr(data, name).reshape(shared.shape[1:])
        unseen = self._paint()
        key = (self._camera, unseen.tobytes())
        if key not in self._captures:
            self._captures[key] = self._capture(unseen)
        context, graph = self._captures[key]
        self._warp.capture_launch(graph)
        width, height = self._size
        packed = context.rgb_data.numpy().view(np.uint8).reshape(height, width, 4)  # blue, green, red, alpha
        return packed[..., 2::-1].copy()

    def close(self) -> None:
        self._captures.clear()

    def _paint(self) -> np.ndarray:
        """Copy the model's colours; returns whether each geom (G,) is fully transparent."""
        colours, material = self._model.geom_rgba.copy(), self._model.geom_matid
        plain = (material >= 0) & (colours == _NO_COLOUR).all(axis=1)
        colours[plain] = self._model.mat_rgba[material[plain]]
        unseen = colours[:, 3] == 0.0
        painted = (material >= 0) & ~unseen
        self._scene.geom_rgba.numpy()[0] = colours
        self._scene.mat_rgba.numpy()[0, material[painted]] = colours[painted]  # the ray tracer prefers these
        return unseen

    def _capture(self, unseen: np.ndarray) -> tuple[Any, Any]:
        """Return the context of the current camera and its launches; `render` defines its kernel anew."""
        groups = self._model.geom_group.copy()
        self._model.geom_group[unseen] = _UNSEEN
        try:
            with self._warp.ScopedDevice("cpu"):
                context = self._tracer.create_render_context(
                    self._model,
                    cam_res=self._size,
                    cam_active=[i == self._camera for i in range(self._model.ncam)],
                    render_rgb=True,
                    render_depth=False,
                    use_shadows=self._shadows,
                )
                with self._warp.ScopedCapture() as capture:
                    self._tracer.refit_bvh(self._scene, self._state, context)
                    self._tracer.render(self._scene, self._state, context)
        finally:
            self._model.geom_group[:] = groups
        return context, capture.graph


def require_warp(what: str) -> tuple[Any, Any]:
    """Import warp and mujoco-warp without their messages; `what` needs them.

    Raises:
        MissingExtraError: If one is not installed.
    """
    warp = require("warp", extra="warp", what=what)
    warp.config.log_level = warp.LOG_ERROR
    return warp, require("mujoco_warp", extra="warp", what=what)


def put_model(engine: Any, model: mujoco.MjModel, instead: str) -> Any:
    """Return a model in mujoco-warp; CapabilityError, with what to use instead, if it lacks something."""
    try:
        return engine.put_model(model)
    except RuntimeError as error:
        raise CapabilityError(f"mujoco-warp does not support this model: {error}. Use {instead}.") from error


def _repeats_per_metre(model: mujoco.MjModel) -> np.ndarray:
    """Return repeats (M, 2) of materials as the ray tracer takes them on planes: per metre, upside down."""
    repeats = model.mat_texrepeat.copy()
    for kind, material, size in zip(model.geom_type, model.geom_matid, model.geom_size[:, :2], strict=True):
        if kind == 0 and material >= 0:
            is_per_metre = model.mat_texuniform[material] or not size.all()
            width = 1.0 if is_per_metre else 2.0 * size
            repeats[material] = model.mat_texrepeat[material] * (1.0, -1.0) / width
    return repeats
