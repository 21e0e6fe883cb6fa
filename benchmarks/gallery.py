"""A moving picture of every task that can be drawn.

    python -m benchmarks.gallery              all tasks
    python -m benchmarks.gallery avoid lift   some of them

writes docs/pictures/tasks/<task>.webp: an episode of the task's expert, or of random actions if it has none.
The page docs/gallery.md is made of the pictures that are there; tasks whose packages are missing keep theirs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from burnish.reports.videos import replayed, webp
from envs.rollouts.episodes import EpisodeRow
from envs.spec import Array
from policies import registry
from policies.errors import BurnishError

PICTURES, PAGE = Path("docs/pictures/tasks"), Path("docs/gallery.md")
_FRAMES, _COLUMNS, _ATTEMPTS = 24, 4, 5
_DRAWING = {"width": 180, "height": 180, "shadows": False}
_RANDOM_STEPS, _HELD = 96, 12  # control steps of random actions, and how long each is held


def draw(name: str) -> Path:
    """Draw one task; returns the picture.

    Raises:
        BurnishError: If the task needs a package or an option.
    """
    env: Any = registry.lookup("env", name)()
    seed, actions = _actions(env)
    row = EpisodeRow(seed, 0, 0.0, len(actions), True, False, False, actions=actions)
    every = max(math.ceil(len(actions) / _FRAMES), 1)
    frames = replayed(env, row, every, **_DRAWING)
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.webp"
    path.write_bytes(webp(frames, min(env.spec.control_hz / every, 20.0), hold_s=1.0))
    return path


def _actions(env: Any) -> tuple[int, Array]:
    """Return seed and actions (T, Da) of an episode: the expert's first success, else random actions."""
    if hasattr(env, "demonstrate"):
        for seed in range(_ATTEMPTS):
            episode = env.demonstrate(seed)
            if episode.success or not env.spec.success_rule:
                return seed, episode.actions
        return seed, episode.actions
    low, high = np.asarray(env.spec.action_low), np.asarray(env.spec.action_high)
    drawn = np.random.default_rng(0).uniform(low, high, (_RANDOM_STEPS // _HELD, len(low)))
    return 0, drawn.repeat(_HELD, axis=0).astype(np.float32)


def page(names: Sequence[str]) -> str:
    """Return the page of some tasks."""
    lines = [
        "# Gallery",
        "",
        "One episode of a task: of its expert where it has one, else of random actions. "
        "[environments.md](environments.md)",
        "describes them, and those that are not drawn here (robosuite, Meta-World, Control Suite). "
        "`python -m benchmarks.gallery`",
        "makes pictures and page.",
        "",
        "| | | | |",
        "|---|---|---|---|",
    ]
    for first in range(0, len(names), _COLUMNS):
        row = list(names[first : first + _COLUMNS])
        empty = [""] * (_COLUMNS - len(row))
        shown = [f"![{name}]({PICTURES.relative_to('docs')}/{name}.webp)" for name in row]
        lines += [f"| {' | '.join([*shown, *empty])} |"]
        lines += [f"| {' | '.join([*(f'`env={name}`' for name in row), *empty])} |"]
    return "\n".join(lines) + "\n"


def drawn() -> list[str]:
    """Return the tasks with a picture, sorted."""
    return sorted(path.stem for path in PICTURES.glob("*.webp"))


def main(arguments: Sequence[str]) -> None:
    """Draw tasks, and write the page."""
    for name in arguments or registry.names("env"):
        if not hasattr(registry.lookup("env", name), "render_frames"):
            continue
        try:
            print(draw(name))
        except BurnishError as error:
            print(f"{name} is left out: {error}")
    PAGE.write_text(page(drawn()))


if __name__ == "__main__":
    main(sys.argv[1:])
