"""How an episode is seen on the page: from above, or through a camera.

Legend: N plans, Th horizon, R rows of a plan that lie ahead, Da action width.
"""

from __future__ import annotations

import base64
import io
from typing import Any, Protocol

import numpy as np

from envs.engine.pixels import FREE, CameraRenderer
from envs.engine.vector import ChunkVector
from envs.spec import Array, EnvConfig
from envs.tasks.plane import Plane, PlaneStepper
from policies.errors import CapabilityError

_DECIMALS = 4  # of a place [m] and of an action
_PICTURE = (300, 400, 3)  # height, width [pixels]
_QUALITY = 80  # of JPEG, 0 to 100


class View(Protocol):
    """What is drawn of an episode and of plans."""

    @property
    def plane(self) -> Plane | None:
        """The scene from above; None: it is seen through a camera."""
        ...

    def scene(self) -> dict[str, Any]:
        """Return what stays as it is during an episode."""
        ...

    def frame(self, obs: Array) -> dict[str, Any]:
        """Return what is drawn now; `obs` (1, To, Do) is the observed history."""
        ...

    def drawn(self, obs: Array, actions: Array) -> Any:
        """Return plans (N, R, Da), physical, as they are drawn."""
        ...

    def close(self) -> None:
        """Free what draws."""
        ...


def view_of(env: EnvConfig, vector: Any) -> View:
    """Return how a task of one environment is seen.

    Raises:
        CapabilityError: If it is neither seen from above nor simulated by MuJoCo.
        MissingExtraError: If no GL context can be made for its pictures.
    """
    stepper = vector.stepper if isinstance(vector, ChunkVector) else None
    if isinstance(stepper, PlaneStepper):
        return FromAbove(stepper)
    if getattr(stepper, "model", None) is not None:
        return ThroughCamera(env, stepper)
    raise CapabilityError(
        f"env={env.spec.name} cannot be shown: MuJoCo does not simulate it, and it has no view from above."
    )


class FromAbove:
    """The scene of a `PlaneStepper`; plans are paths (R + 1, 2) of places [m]."""

    def __init__(self, stepper: PlaneStepper) -> None:
        self.stepper = stepper

    @property
    def plane(self) -> Plane:
        return self.stepper.plane(0)

    def scene(self) -> dict[str, Any]:
        plane = self.plane
        return {
            "low": plane.low, "high": plane.high, "pillars": plane.pillars, "walls": plane.walls,
            "finish": plane.finish, "goal": plane.goal, "radius": plane.radius, "slides": plane.slides,
        }  # fmt: skip

    def frame(self, obs: Array) -> dict[str, Any]:
        return {"at": rounded(self._here(obs))}

    def drawn(self, obs: Array, actions: Array) -> Any:
        return rounded(self.plane.paths(self._here(obs), actions))

    def _here(self, obs: Array) -> Array:
        found: Array = obs[0, -1, list(self.plane.observed)]
        return found

    def close(self) -> None:
        pass


class ThroughCamera:
    """Pictures of a MuJoCo simulator; plans are their actions (R, Da) over time."""

    plane = None

    def __init__(self, env: EnvConfig, stepper: Any) -> None:
        self._spec = env.spec
        camera = getattr(env, "camera", None) or FREE
        self._renderer = CameraRenderer(stepper, {camera: _PICTURE}, shadows=False, samples=0)
        self._camera = camera

    def scene(self) -> dict[str, Any]:
        spec = self._spec
        ends = {"lows": spec.action_low, "highs": spec.action_high}
        return {
            "picture": _PICTURE[:2],
            "actions": spec.action_names,
            **{name: [one if np.isfinite(one) else None for one in end] for name, end in ends.items()},
        }

    def frame(self, obs: Array) -> dict[str, Any]:
        from PIL import Image

        image = self._renderer.render(self._renderer.capture(0))[self._camera]
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="JPEG", quality=_QUALITY)
        return {"picture": f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"}

    def drawn(self, obs: Array, actions: Array) -> Any:
        return rounded(actions)

    def close(self) -> None:
        self._renderer.close()


def rounded(values: Any) -> Any:
    """Return numbers as lists, to tenths of a millimetre and the like."""
    return np.round(np.asarray(values, np.float64), _DECIMALS).tolist()
