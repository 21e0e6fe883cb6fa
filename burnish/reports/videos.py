"""Moving pictures of episodes: mp4 where imageio-ffmpeg is installed, else animated WebP by Pillow."""

from __future__ import annotations

import importlib.util
import inspect
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envs.rollouts.episodes import EpisodeRow
from policies.errors import CapabilityError

FPS = 20  # most pictures per second
_QUALITY, _SHEET_QUALITY = 80, 60  # of WebP, 0 to 100
_COLUMNS = 6  # of a sheet of frames
_GAP, _EDGE = 6, 5  # between panels, and around one that has ended [pixels]
_INK, _EDGES = "#2f3640", {True: "#1f8a70", False: "#e4572e", None: "#7d8794"}


def write_videos(env: Any, rows: Sequence[EpisodeRow], count: int, folder: Path, name: str) -> list[Path]:
    """Replay episodes and write one file each, in real time; returns the files.

    Args:
        env: Their task, with `render_frames`.
        rows: Episodes with their actions.
        count: Number of files; failures and low returns come first.
        folder: Where to.
        name: Beginning of the files' names.

    Raises:
        MissingExtraError: If rendering is unavailable; see `try_drawing`.
    """
    every = max(round(env.spec.control_hz / FPS), 1)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for row in worst_first(rows)[:count]:
        frames = env.render_frames(row.seed, row.actions, every=every)
        end = "success" if row.success else "failure" if env.spec.success_rule else f"return{row.return_:.0f}"
        written.append(_write(folder / f"{name}-seed{row.seed}-{end}", frames, env.spec.control_hz / every))
    return written


def require_pictures(env: Any) -> None:
    """Refuse a task that draws nothing."""
    if not hasattr(env, "render_frames"):
        raise CapabilityError(f"env={env.spec.name} draws nothing; give it render_frames(seed, actions).")


def try_drawing(env: Any) -> None:
    """Draw a step of a task, before much is played for its pictures.

    Raises:
        CapabilityError: If the task draws nothing.
        MissingExtraError: If rendering is unavailable.
    """
    require_pictures(env)
    middle = (np.asarray(env.spec.action_low) + np.asarray(env.spec.action_high)) / 2
    env.render_frames(0, middle[None])


def worst_first(rows: Sequence[EpisodeRow]) -> list[EpisodeRow]:
    """Return episodes without success first, each kind by ascending return."""
    return sorted(rows, key=lambda row: (row.success, row.return_))


def replayed(env: Any, row: EpisodeRow, every: int, **options: Any) -> np.ndarray:
    """Replay an episode and return its frames; options are for tasks whose `render_frames` takes them."""
    kinds = [one.kind for one in inspect.signature(env.render_frames).parameters.values()]
    taken = options if inspect.Parameter.VAR_KEYWORD in kinds else {}
    frames: np.ndarray = env.render_frames(row.seed, row.actions, every=every, **taken)
    return frames


def webp(frames: np.ndarray, fps: float, *, hold_s: float = 0.0) -> bytes:
    """Return frames (F, height, width, 3) uint8 as an animated WebP that repeats.

    Args:
        frames: The frames.
        fps: Frames per second.
        hold_s: How much longer the last one is shown [s].
    """
    from PIL import Image

    first, *others = (Image.fromarray(frame) for frame in frames)
    buffer = io.BytesIO()
    each = max(round(1000 / fps), 1)
    durations = [each] * len(others) + [each + round(1000 * hold_s)]
    options = {"save_all": True, "append_images": others, "loop": 0, "quality": _QUALITY}
    first.save(buffer, format="WEBP", duration=durations, **options)
    return buffer.getvalue()


def beside(panels: Mapping[str, np.ndarray], ends: Mapping[str, bool | None]) -> np.ndarray:
    """Lay the frames of episodes side by side under their titles; one that has ended stands still.

    Args:
        panels: Frames (F, height, width, 3) by title.
        ends: By title: success, failure, or None for an end that is neither; colours the edge at the end.

    Returns:
        Frames (F, height + title, width of all, 3) of the longest episode; a single panel has no title.
    """
    from PIL import Image, ImageDraw, ImageFont

    length, height = max(map(len, panels.values())), max(frames.shape[1] for frames in panels.values())
    head = max(height // 10, 12) if len(panels) > 1 else 0
    width = sum(frames.shape[2] + _GAP for frames in panels.values()) - _GAP
    font = ImageFont.load_default(head * 0.75) if head else None
    laid = []
    for place in range(length):
        whole, left = Image.new("RGB", (width, head + height), "white"), 0
        draw = ImageDraw.Draw(whole)
        for title, frames in panels.items():
            right = left + frames.shape[2]
            whole.paste(Image.fromarray(frames[min(place, len(frames) - 1)]), (left, head))
            draw.text((left + 4, 0), title if head else "", font=font, fill=_INK)
            if place >= len(frames) - 1:
                box = (left, head, right - 1, head + frames.shape[1] - 1)
                draw.rectangle(box, outline=_EDGES[ends[title]], width=_EDGE)
            left = right + _GAP
        laid.append(np.asarray(whole))
    return np.stack(laid)


class Sheet(NamedTuple):
    """The frames of an episode in one image, row by row, of which a page shows one after the other."""

    image: bytes  # WebP
    columns: int
    frames: int
    width: int  # of a frame [pixels]
    height: int
    fps: float

    @property
    def rows(self) -> int:
        return -(-self.frames // self.columns)


def film_sheet(frames: np.ndarray, fps: float, *, width: int) -> Sheet:
    """Lay frames (F, height, width, 3) out in one WebP image; larger ones are reduced to `width`."""
    from PIL import Image

    size = (min(width, frames.shape[2]), round(frames.shape[1] * min(width / frames.shape[2], 1.0)))
    columns = min(_COLUMNS, len(frames))
    whole = Image.new("RGB", (size[0] * columns, size[1] * -(-len(frames) // columns)))
    for place, frame in enumerate(frames):
        image = Image.fromarray(frame)
        small = image if image.size == size else image.resize(size)
        whole.paste(small, (place % columns * size[0], place // columns * size[1]))
    buffer = io.BytesIO()
    whole.save(buffer, format="WEBP", quality=_SHEET_QUALITY)
    return Sheet(buffer.getvalue(), columns, len(frames), *size, fps)


def _write(stem: Path, frames: np.ndarray, fps: float) -> Path:
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        path = stem.with_name(f"{stem.name}.webp")
        path.write_bytes(webp(frames, fps))
        return path
    import imageio_ffmpeg

    path = stem.with_name(f"{stem.name}.mp4")
    height, width = frames.shape[1:3]
    writer = imageio_ffmpeg.write_frames(
        str(path), (width, height), fps=fps, macro_block_size=2, ffmpeg_log_level="error"
    )
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame))
    writer.close()
    return path
