"""Video frames, decoded on access (PyAV, extra `video`).

A frame is found by its time: decoding starts at the last key frame before it. Frames that follow soon are
reached by decoding on.

Legend: N frames, F requested frames, E episodes, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envs.datasets.files.arrays import readable
from policies.encoders import ImageShape
from policies.errors import DatasetError
from policies.extras import require

_SKIP = 8  # frames up to which decoding on is preferred to seeking


@dataclass(frozen=True, eq=False)
class InVideos:
    """Images in videos of whole consecutive episodes.

    Attributes:
        files: (E,) video of every episode.
        episode: (N,) episode of every frame.
        times: (N,) time of every frame in its video, s.
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
        """Yield the images of a file at increasing times."""
        av = require("av", extra="video")
        with readable(file, "video"), av.open(str(file)) as container:
            decoder = VideoDecoder(container, 0.5 / self.fps)
            for time in times:
                frame = decoder.frame_at(time)
                if frame is None:
                    raise DatasetError(
                        f"{file}: expected a frame at {time:.3f} s; there is none within half a frame. "
                        f"The video is cut off, or not the one of this dataset: download it again."
                    )
                pixels = frame.to_ndarray(format="rgb24")
                if pixels.shape != self.image:
                    raise DatasetError(f"{file}: frames must have shape {self.image}; got {pixels.shape}.")
                yield pixels


class VideoDecoder:
    """An open video; `tolerance` is the maximum difference of a frame's time, s."""

    def __init__(self, container: Any, tolerance: float) -> None:
        self._container, self._stream = container, container.streams.video[0]
        self._tolerance = tolerance
        self._coming: Iterator[Any] = container.decode(self._stream)
        self._last: Any = None

    def frame_at(self, time: float) -> Any:
        """Return the frame at a time, s; None if there is none."""
        now = None if self._last is None else self._last.time
        if now is not None and abs(now - time) <= self._tolerance:
            return self._last
        if now is None or not 0 < time - now <= 2 * _SKIP * self._tolerance:
            self._jump(time)
        frame = self._forward(time)
        if frame is not None and frame.time > time + self._tolerance:
            self._jump(0.0)  # some files have key frames that cannot be sought
            frame = self._forward(time)
        return frame if frame is not None and frame.time <= time + self._tolerance else None

    def _jump(self, time: float) -> None:
        self._container.seek(int(time / self._stream.time_base), stream=self._stream)
        self._coming = self._container.decode(self._stream)

    def _forward(self, time: float) -> Any:
        for frame in self._coming:
            self._last = frame
            if frame.time >= time - self._tolerance:
                return frame
        return None
