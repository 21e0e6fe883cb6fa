"""Images of a dataset, read lazily by frame.

A camera's images are (N, H, W, 3) uint8 on the CPU: in memory, in an HDF5 file, or compressed as in the
source file. A batch reads the images it needs and moves them to the device as uint8.

Legend: N frames, F requested frames, H and W height and width.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from envs.datasets import free_memory
from envs.datasets.array_storage import ArrayStorage, Column
from envs.datasets.files.arrays import readable
from envs.datasets.files.hdf5 import read_hdf5
from policies.encoders import ImageShape
from policies.errors import DatasetError

MEMORY_BYTES = 4 * 2**30
"""Images of a camera that take more than this stay in their file and are read batch by batch."""
_BLOCK = 256  # frames per read when all are read


class Store(Protocol):
    """Storage of images; `shape` is (N, H, W, 3), `read` returns those of frames (F,), in any order."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, frames: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class InMemory:
    """Images (N, H, W, 3) uint8 in memory."""

    pixels: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pixels.shape

    def read(self, frames: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.pixels[frames]
        return found


@dataclass(frozen=True, eq=False)
class InHdf5:
    """Images in one HDF5 dataset per episode.

    Attributes:
        keys: Names of the datasets, in the order of the episodes.
        start: (E+1,) first frame of each and, last, N.
        image: Shape of one image.
    """

    path: Path
    keys: tuple[str, ...]
    start: np.ndarray
    image: ImageShape

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self.start[-1]), *self.image)

    def read(self, frames: np.ndarray) -> np.ndarray:
        out = np.empty((len(frames), *self.image), np.uint8)
        episodes = np.searchsorted(self.start, frames, side="right") - 1
        with read_hdf5(self.path) as file:
            for episode in np.unique(episodes).tolist():
                places = np.flatnonzero(episodes == episode)
                rows, back = np.unique(frames[places] - self.start[episode], return_inverse=True)
                first, last = int(rows[0]), int(rows[-1]) + 1
                dense = len(rows) == last - first
                found = file[self.keys[episode]][slice(first, last) if dense else rows]
                out[places] = self._pixels(found, rows, self.keys[episode])[back]
        return out

    def _pixels(self, found: np.ndarray, rows: np.ndarray, key: str) -> np.ndarray:
        return found


class EncodedInHdf5(InHdf5):
    """The same with each image a PNG or JPEG file in bytes (n, L), or of varying length (n,)."""

    def _pixels(self, found: np.ndarray, rows: np.ndarray, key: str) -> np.ndarray:
        source = f"{self.path}: key '{key}'"
        files = (np.asarray(one, np.uint8).tobytes() for one in found)
        return np.stack([decoded(f, self.image, source, row) for f, row in zip(files, rows, strict=True)])


class Blobs(Sequence[bytes]):
    """Files in one byte array, which may be mapped; `start` (N,) and `size` (N,) are in bytes."""

    def __init__(self, data: np.ndarray, start: np.ndarray, size: np.ndarray) -> None:
        self._data, self._start, self._size = data, start, size

    def __len__(self) -> int:
        return len(self._start)

    def __getitem__(self, index: Any) -> Any:
        start = int(self._start[index])
        return self._data[start : start + int(self._size[index])].tobytes()


class BlobColumn:
    """Byte strings of files, grown by appending."""

    def __init__(self, storage: ArrayStorage) -> None:
        self._bytes, self._sizes = Column(storage), list[int]()

    def add(self, files: Iterable[bytes]) -> None:
        for one in files:
            self._bytes.add(np.frombuffer(one, np.uint8))
            self._sizes.append(len(one))

    def joined(self, order: np.ndarray | None = None) -> Blobs:
        size = np.array(self._sizes, np.int64)
        start = size.cumsum() - size
        return Blobs(self._bytes.joined(), *((start, size) if order is None else (start[order], size[order])))


@dataclass(frozen=True, eq=False)
class Compressed:
    """N images as PNG or JPEG files in memory or in a mapped array; `source` names them in messages."""

    files: Sequence[bytes]
    image: ImageShape
    source: str

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.files), *self.image)

    def read(self, frames: np.ndarray) -> np.ndarray:
        return np.stack([decoded(self.files[one], self.image, self.source, one) for one in frames.tolist()])


def decoded(file: bytes, image: ImageShape, source: str, row: int) -> np.ndarray:
    """Return the pixels of a PNG or JPEG file, which must have the shape `image` (H, W, 3)."""
    from PIL import Image

    with readable(source, f"PNG or JPEG image in row {row}"), Image.open(io.BytesIO(file)) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    if pixels.shape != image:
        raise DatasetError(f"{source}: images must have shape {image}; that of row {row} has {pixels.shape}.")
    return pixels


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one camera; `frames` (N,) are indices into the store, None: all, in order."""

    store: Store
    frames: np.ndarray | None = None

    @classmethod
    def of(cls, values: Any) -> Images:
        """Return images unchanged, or wrap an array (N, H, W, 3) uint8."""
        if isinstance(values, Images):
            return values
        pixels = np.asarray(values)
        if pixels.dtype != np.uint8:
            raise DatasetError(f"images must be uint8, from 0 to 255; got {pixels.dtype}.")
        return cls(InMemory(pixels))

    def __len__(self) -> int:
        return self.store.shape[0] if self.frames is None else len(self.frames)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.store.shape[1:])

    def __getitem__(self, frames: Tensor) -> Tensor:
        """Return images (F, H, W, 3) uint8 of frames (F,)."""
        index = frames.cpu().numpy()
        return torch.from_numpy(self.store.read(index if self.frames is None else self.frames[index]))

    def select(self, frames: Tensor) -> Images:
        """Return the images of some frames (F,), without reading."""
        index = frames.cpu().numpy()
        return replace(self, frames=index if self.frames is None else self.frames[index])

    def blocks(self) -> Iterator[np.ndarray]:
        for first in range(0, len(self), _BLOCK):
            yield self[torch.arange(first, min(first + _BLOCK, len(self)))].numpy()

    def loaded(self) -> Images:
        """Return the images in memory if they are few enough and fit."""
        size = int(np.prod(self.shape))
        if isinstance(self.store, InMemory) and self.frames is None:
            return self
        if size > MEMORY_BYTES or not free_memory.fits(size):
            return self
        pixels = np.empty(self.shape, np.uint8)
        first = 0
        for block in self.blocks():
            pixels[first : first + len(block)] = block
            first += len(block)
        return Images(InMemory(pixels))


def camera_of(key: str) -> str:
    """Return the camera of an image key: agentview of `agentview_image`, top of `observation.images.top`.

    LeRobot's single camera `observation.image` is called `image`.
    """
    short = key.removeprefix("observation.images.").removeprefix("observation.")
    return short.replace("/", "_").replace(".", "_").removesuffix("_image")
