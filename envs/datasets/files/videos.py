"""Frames of videos, decoded when somebody looks at them (PyAV, extra `video`).

A frame is asked for by its time. The file is opened at the last key frame before it, and decoded from there;
frames that follow soon are reached by decoding on.

Legend: N frames, F of them asked for, E episodes, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from policies.encoders import ImageShape
from policies.errors import DatasetError
from policies.extras import require

_ON = 8  # frames that are rather decoded than jumped over


@dataclass(frozen=True, eq=False)
class InVideos:
    """Images in videos, each of which holds whole episodes one behind the other.

    Attributes:
        files: (E,) video of every episode.
        episode: (N,) episode of every frame.
        times: (N,) when a frame is shown in its video, s.
        fps: Frames per second.
        image: Shape of one image.
    """

    files: tuple[Path, ...]
    episode: np.ndarray
    times: np.ndarray
    fps: float
    image: ImageShape

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.times), *self.image)

    def read(self, frames: np.ndarray) -> np.ndarray:
        """Return images (F, H, W, 3).

        Raises:
            DatasetError: If a video is gone or damaged, has no frame at a time, or frames of another shape.
            MissingExtraError: If PyAV is not installed.
        """
        out = np.empty((len(frames), *self.image), np.uint8)
        files = np.array([str(self.files[episode]) for episode in self.episode[frames].tolist()])
        for file in np.unique(files).tolist():
            places = np.flatnonzero(files == file)
            times, back = np.unique(self.times[frames[places]], return_inverse=True)
            found = np.empty((len(times), *self.image), np.uint8)
            for row, pixels in enumerate(self._decoded(Path(file), times.tolist())):
                found[row] = pixels
            out[places] = found[back]
        return out

    def _decoded(self, file: Path, times: list[float]) -> Iterator[np.ndarray]:
        """Yield the images of a file at times, which increase."""
        av = require("av", extra="video")
        try:
            with av.open(str(file)) as container:
                decoder = VideoDecoder(container, 0.5 / self.fps)
                for time in times:
                    frame = decoder.frame_at(time)
                    if frame is None:
                        raise DatasetError(
                            f"{file}: expected a frame at {time:.3f} s; there is none within half a frame. "
                            f"The video is cut off, or not the one of this dataset: download it again."
                        )
                    yield self._checked(frame.to_ndarray(format="rgb24"), file)
        except (OSError, ValueError, EOFError, LookupError) as error:  # PyAV's own derive from these
            raise DatasetError(
                f"{file}: expected a readable video; decoding failed with '{error}'. The file is missing, "
                f"truncated or damaged: copy or download it again."
            ) from error

    def _checked(self, pixels: np.ndarray, file: Path) -> np.ndarray:
        if pixels.shape != self.image:
            raise DatasetError(f"{file}: frames must have shape {self.image}; got {pixels.shape}.")
        return pixels


class VideoDecoder:
    """A video that is open at some place.

    Args:
        container: From `av.open`.
        tolerance: How far a frame may be from the time that it is asked for, s.
    """

    def __init__(self, container: Any, tolerance: float) -> None:
        self._container, self._stream = container, container.streams.video[0]
        self._tolerance = tolerance
        self._coming: Iterator[Any] = container.decode(self._stream)
        self._last: Any = None

    def frame_at(self, time: float) -> Any:
        """Return the frame shown at a time, s; None where there is none."""
        now = None if self._last is None else self._last.time
        if now is not None and abs(now - time) <= self._tolerance:
            return self._last
        if now is None or not 0 < time - now <= 2 * _ON * self._tolerance:
            self._jump(time)
        frame = self._forward(time)
        if frame is not None and frame.time > time + self._tolerance:
            self._jump(0.0)  # some files have key frames that cannot be jumped to
            frame = self._forward(time)
        return frame if frame is not None and frame.time <= time + self._tolerance else None

    def _jump(self, time: float) -> None:
        """Go to the last key frame before a time."""
        self._container.seek(int(time / self._stream.time_base), stream=self._stream)
        self._coming = self._container.decode(self._stream)

    def _forward(self, time: float) -> Any:
        """Decode on to the first frame that is not before a time."""
        for frame in self._coming:
            self._last = frame
            if frame.time >= time - self._tolerance:
                return frame
        return None
