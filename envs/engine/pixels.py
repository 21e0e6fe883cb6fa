"""Image observations: cameras of a task and their image history.

Images are rendered on request. Each step stores only what determines them: positions, and the task's changes
to its model (targets, colours). Rendering uses copies of model and simulator, so it changes no state.

Legend: N environments, H and W height and width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from envs.engine.image_history import ImageHistory
from envs.engine.ray_tracing import RayTracer
from envs.engine.rendering import OffscreenRenderer, replay_frames
from envs.engine.vector import ChunkVector
from envs.spec import Array
from policies.bounds import Checked, bounded
from policies.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from policies.encoders import ImageShape

AnyEnv = TypeVar("AnyEnv")

FREE = "free"
"""Name of MuJoCo's free camera."""
RENDERERS = ("opengl", "warp")


@runtime_checkable
class HasAppearance(Protocol):
    """A simulator whose environments share a model and differ in more than positions."""

    def get_appearance(self, row: int) -> dict[str, Array]:
        """Return what determines the image of a row besides positions; copies."""
        ...

    def set_appearance(self, model: Any, appearance: Mapping[str, Array]) -> None:
        """Apply an appearance to a model that is a copy for rendering; here its entries are fields of it."""
        for name, value in appearance.items():
            getattr(model, name)[:] = value


@dataclass(frozen=True, kw_only=True)
class HasCameras(Checked):
    """Options of a task whose scene can be rendered."""

    camera: ClassVar[str | None] = None  # camera of `render_frames`; None: MuJoCo's free camera

    cameras: tuple[str, ...] = ()  # cameras of the model, or free, whose images are observed; (): none
    image_size: tuple[int, ...] = bounded((96, 96), ge=1)  # image height and width [pixels]
    image_shadows: bool = True  # render shadows; false is several times faster without a GPU
    image_samples: int | None = bounded(None, ge=0)  # samples per pixel; null: the model's; 0: fastest
    image_renderer: str = bounded("opengl", choices=RENDERERS)  # warp: ray tracer, fast on a CPU

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("image_size", len(self.image_size) == 2, "height and width, e.g. [96,96]")
        smooth = self.image_renderer == "warp" and self.image_samples
        self.require("image_samples", not smooth, "0 or null with env.image_renderer=warp")
        if not self.cameras:
            return
        from policies.encoders.images import RESERVED

        distinct = len(set(self.cameras)) == len(self.cameras) and not set(self.cameras) & set(RESERVED)
        self.require("cameras", distinct, f"distinct, and none of {', '.join(RESERVED)}")

    @property
    def images(self) -> dict[str, ImageShape]:
        height, width = self.image_size
        return {camera: (height, width, 3) for camera in self.cameras}

    def make_vector(self: Any, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        """Build N environments from the task's `stepper`, with an image history if there are cameras.

        Raises:
            ConfigError: If the model lacks a camera.
            CapabilityError: If the renderer does not support the scene.
            MissingExtraError: If the simulator or the renderer is not installed.
        """
        stepper, history = self.stepper(num_envs), None
        if self.cameras:
            options = ("shadows", "samples", "renderer")
            drawing = {name: getattr(self, f"image_{name}") for name in options}
            history = FrameHistory(stepper, self.images, obs_steps=obs_steps, **drawing)
        return ChunkVector(self.spec, stepper, obs_steps=obs_steps, image_history=history)

    def render_frames(self: Any, seed: int, actions: Array, **options: Any) -> Array:
        """Replay an episode and return its frames (F, height, width, 3); see `rendering.replay_frames`."""
        return replay_frames(self.make_vector(1), seed, actions, camera=self.camera, **options)


CAMERA_OPTIONS = tuple(f.name for f in fields(HasCameras))


def match_cameras(env: AnyEnv, images: Mapping[str, ImageShape]) -> AnyEnv:
    """Return a task with exactly the cameras of a policy, whose `images` are shapes by camera.

    Raises:
        CapabilityError: If the scene of the task cannot be rendered.
        ConfigError: If the configured cameras lack one of the policy's or differ in image size.
    """
    if hasattr(env, "imagined"):
        world: Any = env
        seen: AnyEnv = world.with_cameras(images)
        return seen
    if not isinstance(env, HasCameras):
        if not images:
            return env
        raise CapabilityError(
            f"the policy needs the cameras {', '.join(images)}; the scene of this task cannot be "
            "drawn. Use a task with the options env.cameras and env.image_size."
        )
    assert is_dataclass(env)
    if not images:
        return replace(env, cameras=()) if env.cameras else env
    if env.cameras:
        _check_cameras(env, images)
    sizes = {shape[:2] for shape in images.values()}
    if len(sizes) > 1:
        raise ConfigError(f"the images of a policy must have one size in a task; got {dict(images)}.")
    return replace(env, cameras=tuple(images), image_size=sizes.pop())


def _check_cameras(env: HasCameras, images: Mapping[str, ImageShape]) -> None:
    if not set(images) <= set(env.cameras):
        raise ConfigError(
            f"the policy needs the cameras {', '.join(images)}; env.cameras has "
            f"{', '.join(env.cameras)}. Leave env.cameras out, name those of the policy, or give a new "
            f"one encoder.cameras=[{','.join(env.cameras)}]."
        )
    for camera, shape in images.items():
        if tuple(shape) != env.images[camera]:
            raise ConfigError(
                f"the policy needs images of {shape[0]} x {shape[1]} pixels from camera '{camera}'; "
                f"env.image_size is {list(env.image_size)}. Leave env.cameras out, or set "
                f"env.image_size=[{shape[0]},{shape[1]}]."
            )


@dataclass(eq=False)
class SceneState:
    """Appearance of an environment at one step, with its images once rendered."""

    positions: Array
    appearance: dict[str, Array]
    images: dict[str, Array] = field(default_factory=dict)


class CameraRenderer:
    """Render simulator states with cameras of one image size, on its own copy of the stepper's model.

    Raises:
        ConfigError: If the model lacks a camera.
        CapabilityError: If the renderer does not support the model.
    """

    def __init__(
        self,
        stepper: Any,
        images: Mapping[str, ImageShape],
        *,
        shadows: bool,
        samples: int | None = None,
        renderer: str = "opengl",
    ) -> None:
        import mujoco

        self._stepper, self._images = stepper, dict(images)
        self._model = copy.copy(stepper.model)
        check_camera_names(images, cameras_of(self._model, renderer))
        self._data = mujoco.MjData(self._model)
        part = mujoco.mjtState
        self._signature = part.mjSTATE_QPOS | part.mjSTATE_MOCAP_POS | part.mjSTATE_MOCAP_QUAT
        self._size = mujoco.mj_stateSize(self._model, self._signature)
        (height, width, _), *_ = images.values()
        drawing: dict[str, Any] = {"width": width, "height": height, "shadows": shadows}
        self._open: Callable[[], Any] = partial(OffscreenRenderer, self._model, samples=samples, **drawing)
        self._renderer: Any = None
        if renderer == "warp":  # opened at once, because it may refuse the model
            self._open = partial(RayTracer, self._model, **drawing)
            self._renderer = self._open()

    def capture(self, row: int) -> SceneState:
        """Return the current appearance of a row."""
        import mujoco

        positions = np.empty(self._size)
        mujoco.mj_getState(self._stepper.model, self._stepper.datas[row], positions, self._signature)
        return SceneState(
            positions, self._stepper.get_appearance(row) if isinstance(self._stepper, HasAppearance) else {}
        )

    def render(self, state: SceneState) -> dict[str, Array]:
        """Return the images (H, W, 3) of a state by camera."""
        if not state.images:
            self._restore(state)
            state.images = {camera: self._render_camera(camera) for camera in self._images}
        return state.images

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
        self._renderer = None

    def _restore(self, state: SceneState) -> None:
        import mujoco

        model, data = self._model, self._data
        if isinstance(self._stepper, HasAppearance):
            self._stepper.set_appearance(model, state.appearance)
        mujoco.mj_setState(model, data, state.positions, self._signature)
        for stage in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_camlight, mujoco.mj_tendon):
            stage(model, data)

    def _render_camera(self, camera: str) -> Array:
        if self._renderer is None:
            self._renderer = self._open()
        self._renderer.look_through(None if camera == FREE else camera)
        image: Array = self._renderer.frame(self._data)
        return image


class FrameHistory(ImageHistory[SceneState]):
    """The rendered frames of a simulator; `drawing` are options of `CameraRenderer`."""

    def __init__(
        self, stepper: Any, images: Mapping[str, ImageShape], *, obs_steps: int, **drawing: Any
    ) -> None:
        super().__init__(stepper.num_envs, images, obs_steps)
        self._renderer = CameraRenderer(stepper, images, **drawing)

    def capture(self, row: int) -> SceneState:
        return self._renderer.capture(row)

    def draw(self, state: SceneState) -> dict[str, Array]:
        return self._renderer.render(state)

    def get_state(self) -> list[list[dict[str, Any]]]:
        return [
            [{"positions": one.positions.copy(), "look": dict(one.appearance)} for one in history]
            for history in super().get_state()
        ]

    def set_state(self, state: Iterable[Iterable[Mapping[str, Any]]]) -> None:
        super().set_state(
            [SceneState(np.array(one["positions"]), dict(one["look"])) for one in saved] for saved in state
        )

    def close(self) -> None:
        self._renderer.close()


def cameras_of(model: Any, renderer: str) -> list[str]:
    """Return the cameras of a MuJoCo model that a renderer looks through."""
    names = [model.camera(i).name for i in range(model.ncam)]
    return [*(name for name in names if name), *(() if renderer == "warp" else (FREE,))]


def check_camera_names(cameras: Iterable[str], known: Sequence[str]) -> None:
    """Refuse cameras that are not known with ConfigError."""
    unknown = [camera for camera in cameras if camera not in known]
    if unknown:
        raise ConfigError(
            f"env.cameras must be among {', '.join(known)}; got {', '.join(unknown)}, which this scene does "
            f"not have."
        )
