"""Images of gymnasium environments: parts of observations, and what `render()` draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envs.engine.image_history import ImageHistory
from envs.engine.rendering import gl_for_others
from envs.engine.serial import SerialStepper
from envs.spec import Array
from envs.tasks.gym.spaces import part
from policies.errors import BurnishError, ConfigError, reason_of

RENDER = "render"
"""Name of the camera that is the environment's `render()`."""


class PictureHistory(ImageHistory[dict[str, Array]]):
    """The images of the last To steps, which a gymnasium environment shows at its present state only."""

    def __init__(self, stepper: SerialStepper, images: Mapping[str, tuple[int, ...]], obs_steps: int) -> None:
        super().__init__(stepper.num_envs, images, obs_steps)
        self._stepper, self._sizes = stepper, {name: shape[:2] for name, shape in images.items()}

    def capture(self, row: int) -> dict[str, Array]:
        env = self._stepper.envs[row]
        return {
            name: _resized(picture(env) if name == RENDER else part(env.last, name), size)
            for name, size in self._sizes.items()
        }

    def draw(self, state: dict[str, Array]) -> dict[str, Array]:
        return state


def picture(env: Any) -> Array:
    """Return the picture (H, W, 3) of an environment.

    Raises:
        ConfigError: If `render()` gives none.
    """
    needed = "this environment draws no picture: its render() must return (H, W, 3) in render_mode=rgb_array"
    try:
        with gl_for_others():
            frame = env.render()
    except BurnishError:
        raise
    except Exception as error:  # of the environment
        raise ConfigError(f"{needed}; it raised {reason_of(error)}.") from error
    frame = frame[-1] if isinstance(frame, list) and frame else frame
    if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3:
        raise ConfigError(f"{needed}.")
    return frame.astype(np.uint8)


def _resized(image: Array, size: tuple[int, ...]) -> Array:
    """Return an image (H, W, 3) in another size, by averaging."""
    if image.shape[:2] == tuple(size):
        return np.array(image)
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BOX))
