"""Frames per second of processor time by the ray tracer of mujoco-warp and by OpenGL, and what both draw.

    python -m benchmarks.frames [--rounds 7]

needs the extra `warp`; it writes docs/results/scale/frames.json, its lines in docs/images.md and
docs/pictures/renderers.png. The two draw the same states in turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.options import parser
from benchmarks.pages import keep, record, replace_block, table, versions
from benchmarks.speed.timing import interleave
from envs.engine.pixels import RENDERERS, CameraRenderer
from envs.make import env

PAGE, PICTURE = "docs/images.md", "docs/pictures/renderers.png"
CASES = (("avoid", "top", 48), ("avoid", "top", 64), ("hopper", "track", 48), ("hopper", "track", 64))
SHOWN = (("avoid", "tilted"), ("hopper", "track"))
PIXELS = 220  # of a shown picture


def renderer_of(task: str, camera: str, pixels: int, kind: str, shadows: bool) -> CameraRenderer:
    """Return a renderer of a task's state after a few steps."""
    vector: Any = env(task).make_vector(1)
    vector.reset([1])
    vector.step_chunk(np.full((1, 3, vector.spec.action_dim), 0.2))
    images = {camera: (pixels, pixels, 3)}
    return CameraRenderer(vector.stepper, images, shadows=shadows, samples=0, renderer=kind)


def rates(task: str, camera: str, pixels: int, shadows: bool, rounds: int) -> dict[str, Any]:
    """Return frames per second of processor time by renderer, and the mean difference of both [of 255]."""
    made = {kind: renderer_of(task, camera, pixels, kind, shadows) for kind in RENDERERS}

    def draw(renderer: CameraRenderer) -> np.ndarray:
        return renderer.render(renderer.capture(0))[camera]

    first, second = (draw(renderer).astype(int) for renderer in made.values())
    calls: dict[str, Callable[[], object]] = {kind: partial(draw, one) for kind, one in made.items()}
    found = interleave(calls, rounds=rounds, slot_s=0.2, clock=time.process_time)
    for renderer in made.values():
        renderer.close()
    case = {"task": task, "camera": camera, "pixels": pixels, "shadows": shadows}
    difference = float(np.abs(first - second).mean())
    return case | {"rates": {kind: 1.0 / took for kind, took in found.items()}, "difference": difference}


def picture() -> None:
    """Write the picture: OpenGL beside warp, one task after the other."""
    from matplotlib.image import imsave

    shown = []
    for task, camera in SHOWN:
        for kind in RENDERERS:
            renderer = renderer_of(task, camera, PIXELS, kind, False)
            shown.append(renderer.render(renderer.capture(0))[camera])
            renderer.close()
    imsave(PICTURE, np.concatenate(shown, axis=1))


def lines(found: dict[str, Any]) -> list[str]:
    """Return the text of the page."""

    def row(case: dict[str, Any]) -> Sequence[str]:
        opengl, warp = (case["rates"][kind] for kind in RENDERERS)
        name = f"`{case['task']}`, `{case['camera']}`, {case['pixels']} × {case['pixels']}"
        return (
            name + (", shadows" if case["shadows"] else ""),
            f"{opengl:.0f}",
            f"{warp:.0f}",
            f"**{warp / opengl:.1f}**",
            f"{case['difference']:.0f}",
        )

    columns = (
        "frames per second of processor time",
        "`opengl`",
        "`warp`",
        "ratio",
        "mean difference, of 255",
    )
    about = versions(found, ("mujoco", "mujoco-warp", "warp-lang"))
    return [
        f"`python -m benchmarks.frames --rounds {found['rounds']}`: medians of turns, `image_samples=0`, "
        f"{found['gl']}, {about}, load {found['load']:.1f}. A frame includes the kinematics of its state.",
        "",
        *table(columns, [row(case) for case in found["cases"]]),
    ]


def main() -> None:
    """Measure, keep, write."""
    asked = parser(__doc__)
    asked.add_argument("--rounds", type=int, default=7)
    rounds = asked.parse_args().rounds
    picture()
    cases = [rates(*case, shadows, rounds) for case in CASES for shadows in (False, True)]
    found = {"rounds": rounds, "load": os.getloadavg()[0], "gl": opengl(), "cases": cases}
    keep("scale", "frames", found, indent=1)
    replace_block(PAGE, "frames", lines(record("scale", "frames")))


def opengl() -> str:
    """Return the name of what draws for OpenGL here."""
    from OpenGL import GL

    renderer = renderer_of("avoid", "top", 48, "opengl", False)
    renderer.render(renderer.capture(0))
    name = GL.glGetString(GL.GL_RENDERER).decode()
    renderer.close()
    return str(name).partition(" (")[0]


if __name__ == "__main__":
    main()
