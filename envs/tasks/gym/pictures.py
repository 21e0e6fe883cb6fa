"""Images of gymnasium environments: parts of observations, and what `render()` draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from envs.engine.serial import SerialStepper
from envs.spec import Array
from envs.tasks.gym.spaces import part
from policies.errors import BurnishError, ConfigError, reason_of

RENDER = "render"
"""Name of the camera that is the environment's `render()`."""


class Images:
    """The last To images of every environment; see `envs.spec.ImageHistory`."""

    def __init__(self, stepper: SerialStepper, images: Mapping[str, tuple[int, ...]], obs_steps: int) -> None:
        self._stepper, self._sizes = stepper, {name: shape[:2] for name, shape in images.items()}
        self._rows: list[deque[dict[str, Array]]] = [deque(maxlen=obs_steps) for _ in range(stepper.num_envs)]

    def begin(self, row: int) -> None:
        """Start an episode in a row; its first images fill the history."""
        history = self._rows[row]
        assert history.maxlen is not None
        history.extend([self._seen(row)] * history.maxlen)

    def add(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._rows[row].append(self._seen(row))

    def renew(self, row: int) -> None:
        self._rows[row][-1] = self._seen(row)

    def images(self, rows: Iterable[int]) -> dict[str, Array]:
        """Return the histories of some rows, oldest first, (M, To, H, W, 3) uint8 by camera."""
        chosen = [self._rows[row] for row in rows]
        return {
            name: np.stack([np.stack([seen[name] for seen in history]) for history in chosen])
            for name in self._sizes
        }

    def get_state(self) -> Any:
        return [list(history) for history in self._rows]

    def set_state(self, state: Any) -> None:
        for history, saved in zip(self._rows, state, strict=True):
            history.clear()
            history.extend(saved)

    def close(self) -> None:
        """Hold nothing open."""

    def _seen(self, row: int) -> dict[str, Array]:
        env = self._stepper.envs[row]
        return {
            name: _resized(picture(env) if name == RENDER else part(env.last, name), size)
            for name, size in self._sizes.items()
        }


def picture(env: Any) -> Array:
    """Return the picture (H, W, 3) of an environment.

    Raises:
        ConfigError: If `render()` gives none.
    """
    from envs.engine.rendering import gl_for_others

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
