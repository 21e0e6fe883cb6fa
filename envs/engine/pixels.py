"""Pictures as observations: which cameras a task has, and what they saw at the steps of the history.

A picture is drawn when somebody asks for it, never while the simulator steps. What is kept of a step is only
what decides how it looks: positions, and what the task changes in its model (targets, colours). It is drawn
from a copy of model and simulator, so that looking changes no number, and it shows the same state as the
state beside it. So a picture follows from seed and actions, whatever the width of the vector.

Legend: N environments, M of them addressed, To observation history, H and W height and width.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from envs.engine.vector import ChunkVector
from envs.spec import EnvSpec, Stepper
from policies.bounds import Checked, bounded
from policies.encoders import ImageShape
from policies.encoders.images import RESERVED
from policies.errors import CapabilityError, ConfigError

Array = np.ndarray
AnyEnv = TypeVar("AnyEnv")

FREE = "free"
"""Name of MuJoCo's free camera, which looks at the scene as the model says."""


@runtime_checkable
class HasAppearance(Protocol):
    """A simulator whose environments share a model and differ in more than positions."""

    def get_appearance(self, row: int) -> dict[str, Array]:
        """Return what besides positions decides the image of a row; copies."""
        ...

    def set_appearance(self, model: Any, appearance: Mapping[str, Array]) -> None:
        """Give a model, which is a copy for drawing, this appearance."""
        ...


@dataclass(frozen=True, kw_only=True)
class HasCameras(Checked):
    """Options of a task whose scene can be drawn."""

    camera: ClassVar[str | None] = None  # that takes the pictures of `render_frames`; None: MuJoCo's free one

    cameras: tuple[str, ...] = ()  # of the model, or free: what they see is observed as well; (): nothing
    image_size: tuple[int, ...] = bounded((96, 96), ge=1)  # height and width of their images [pixels]
    image_shadows: bool = True  # false: no shadows in them, which is several times faster without a GPU

    def __post_init__(self) -> None:
        """Refuse images of another rank, and cameras that are named twice or like other observations."""
        super().__post_init__()
        self.require("image_size", len(self.image_size) == 2, "height and width, e.g. [96,96]")
        distinct = len(set(self.cameras)) == len(self.cameras) and not set(self.cameras) & set(RESERVED)
        self.require("cameras", distinct, f"distinct, and none of {', '.join(RESERVED)}")

    @property
    def images(self) -> dict[str, ImageShape]:
        """Shapes (H, W, 3) of the images by camera."""
        height, width = self.image_size
        return {camera: (height, width, 3) for camera in self.cameras}

    def vector_of(self: Any, stepper: Stepper, obs_steps: int) -> ChunkVector:
        """Return the environments of a simulator, with a film where there are cameras.

        Raises:
            ConfigError: If the model has no such camera.
        """
        spec: EnvSpec = self.spec
        image_history = None
        if self.cameras:
            image_history = FrameHistory(
                stepper, self.images, obs_steps=obs_steps, shadows=self.image_shadows
            )
        return ChunkVector(spec, stepper, obs_steps=obs_steps, image_history=image_history)

    def render_frames(self: Any, seed: int, actions: Array, **options: Any) -> Array:
        """Replay an episode and return its pictures (F, height, width, 3); see `rendering.replay_frames`."""
        from envs.engine.rendering import replay_frames

        return replay_frames(self.make_vector(1), seed, actions, camera=self.camera, **options)


CAMERA_OPTIONS = tuple(f.name for f in fields(HasCameras))


def match_cameras(env: AnyEnv, images: Mapping[str, ImageShape]) -> AnyEnv:
    """Return a task with exactly the cameras that a policy looks through.

    Args:
        env: Its configuration. Cameras that it names have to be those of the policy, or more.
        images: What the policy looks at, by camera; none: nothing is drawn.

    Raises:
        CapabilityError: If the scene of the task cannot be drawn.
        ConfigError: If the task names other cameras or has images of another size.
    """
    if not isinstance(env, HasCameras):
        if not images:
            return env
        raise CapabilityError(
            f"the policy looks through the cameras {', '.join(images)}; the scene of this task cannot be "
            f"drawn. Evaluate it on a task that has the options env.cameras and env.image_size."
        )
    assert is_dataclass(env)
    if not images:
        return replace(env, cameras=()) if env.cameras else env
    if env.cameras:
        _check_cameras(env, images)
    sizes = {shape[:2] for shape in images.values()}
    if len(sizes) > 1:
        raise ConfigError(
            f"a task draws all images in one size; the policy looks at {dict(images)}. Train it on images "
            f"of one size."
        )
    return replace(env, cameras=tuple(images), image_size=sizes.pop())


def _check_cameras(env: HasCameras, images: Mapping[str, ImageShape]) -> None:
    """Refuse a task that says that it shows something else."""
    shown = env.images
    missing = [camera for camera in images if camera not in shown]
    if missing:
        raise ConfigError(
            f"the policy looks through the cameras {', '.join(images)}; env.cameras has "
            f"{', '.join(env.cameras)}. Leave env.cameras out, or name those of the policy."
        )
    for camera, shape in images.items():
        if tuple(shape) != shown[camera]:
            raise ConfigError(
                f"the policy looks at images of {shape[0]} x {shape[1]} pixels from camera '{camera}'; "
                f"env.image_size is {list(env.image_size)}. Leave env.cameras out, or set "
                f"env.image_size=[{shape[0]},{shape[1]}]."
            )


@dataclass(eq=False)
class SceneState:
    """How an environment looked at one step; its pictures once they were drawn."""

    positions: Array
    appearance: dict[str, Array]
    pictures: dict[str, Array] = field(default_factory=dict)


class CameraRenderer:
    """Draws states of a simulator through some cameras, on a model of its own.

    Args:
        stepper: A simulator on MuJoCo, with a `model` and one of `datas` per environment.
        images: Shapes of the pictures by camera, all of one size.
        shadows: Whether lights cast shadows.

    Raises:
        ConfigError: If the model has no such camera.
    """

    def __init__(self, stepper: Any, images: Mapping[str, ImageShape], *, shadows: bool) -> None:
        import mujoco

        self._stepper, self._images, self._shadows = stepper, dict(images), shadows
        self._model = copy.copy(stepper.model)
        _check_names(self._model, images)
        self._data = mujoco.MjData(self._model)
        part = mujoco.mjtState
        self._signature = part.mjSTATE_QPOS | part.mjSTATE_MOCAP_POS | part.mjSTATE_MOCAP_QUAT
        self._size = mujoco.mj_stateSize(self._model, self._signature)
        self._renderer: Any = None

    def capture(self, row: int) -> SceneState:
        """Keep how a row looks now."""
        import mujoco

        positions = np.empty(self._size)
        mujoco.mj_getState(self._stepper.model, self._stepper.datas[row], positions, self._signature)
        return SceneState(
            positions, self._stepper.get_appearance(row) if isinstance(self._stepper, HasAppearance) else {}
        )

    def render(self, state: SceneState) -> dict[str, Array]:
        """Return the pictures (H, W, 3) of a state by camera.

        Raises:
            MissingExtraError: If no GL context can be made.
        """
        if not state.pictures:
            self._restore(state)
            state.pictures = {camera: self._picture(camera) for camera in self._images}
        return state.pictures

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

    def _picture(self, camera: str) -> Array:
        from envs.engine.rendering import OffscreenRenderer

        if self._renderer is None:
            height, width, _ = self._images[camera]
            self._renderer = OffscreenRenderer(self._model, width=width, height=height, shadows=self._shadows)
        self._renderer.look_through(None if camera == FREE else camera)
        picture: Array = self._renderer.frame(self._data)
        return picture


class FrameHistory:
    """The last To states of every environment; see `CameraRenderer` for the arguments."""

    def __init__(
        self, stepper: Any, images: Mapping[str, ImageShape], *, obs_steps: int, shadows: bool = True
    ) -> None:
        self._renderer = CameraRenderer(stepper, images, shadows=shadows)
        self._states: list[deque[SceneState]] = [deque(maxlen=obs_steps) for _ in range(stepper.num_envs)]

    def begin(self, row: int) -> None:
        """Start an episode in a row: its first state stands for all before it."""
        states = self._states[row]
        assert states.maxlen is not None
        states.extend([self._renderer.capture(row)] * states.maxlen)

    def add(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._states[row].append(self._renderer.capture(row))

    def images(self, rows: Iterable[int]) -> dict[str, Array]:
        """Return the histories of some rows, oldest first, (M, To, H, W, 3) uint8 by camera."""
        drawn = [[self._renderer.render(state) for state in self._states[row]] for row in rows]
        cameras = list(self._renderer._images)
        return {
            camera: np.stack([np.stack([pictures[camera] for pictures in history]) for history in drawn])
            for camera in cameras
        }

    def get_state(self) -> list[list[dict[str, Any]]]:
        """Return the states of every row, without their pictures."""
        return [
            [{"positions": state.positions.copy(), "look": dict(state.appearance)} for state in states]
            for states in self._states
        ]

    def set_state(self, state: Iterable[Iterable[Mapping[str, Any]]]) -> None:
        for states, saved in zip(self._states, state, strict=True):
            states.clear()
            states.extend(SceneState(np.array(one["positions"]), dict(one["look"])) for one in saved)

    def close(self) -> None:
        self._renderer.close()


def _check_names(model: Any, cameras: Iterable[str]) -> None:
    """Refuse cameras that the model does not have."""
    names = [model.camera(i).name for i in range(model.ncam)]
    known = [*(name for name in names if name), FREE]
    unknown = [camera for camera in cameras if camera not in known]
    if unknown:
        raise ConfigError(
            f"env.cameras must be among {', '.join(known)}; got {', '.join(unknown)}, which this scene does "
            f"not have."
        )
