"""Moving pictures of episodes: mp4 where imageio-ffmpeg is installed, else animated WebP by Pillow."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.rollouts.episodes import EpisodeRow
from policies.errors import CapabilityError

FPS = 20  # most pictures per second
_QUALITY = 80  # of WebP, 0 to 100


def write_videos(env: Any, rows: Sequence[EpisodeRow], count: int, folder: Path, name: str) -> list[Path]:
    """Replay episodes and write one file each, in real time; returns the files.

    Args:
        env: Their task, with `render_frames`.
        rows: Episodes with their actions.
        count: Number of files; failures and low returns come first.
        folder: Where to.
        name: Beginning of the files' names.

    Raises:
        CapabilityError: If the task draws nothing.
        MissingExtraError: If rendering is unavailable.
    """
    require_pictures(env)
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


def worst_first(rows: Sequence[EpisodeRow]) -> list[EpisodeRow]:
    """Return episodes without success first, each kind by ascending return."""
    return sorted(rows, key=lambda row: (row.success, row.return_))


def webp(frames: np.ndarray, fps: float) -> bytes:
    """Return frames (F, height, width, 3) uint8 as an animated WebP that repeats."""
    from PIL import Image

    first, *others = (Image.fromarray(frame) for frame in frames)
    buffer = io.BytesIO()
    options = {"save_all": True, "append_images": others, "loop": 0, "quality": _QUALITY}
    first.save(buffer, format="WEBP", duration=max(round(1000 / fps), 1), **options)
    return buffer.getvalue()


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
