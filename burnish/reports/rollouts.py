"""Episodes of a policy for a report: run, draw, describe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from algos.training.run_directory import RunDirectory
from burnish.config.saved import restore
from burnish.console import Counting
from burnish.reports.curves import short_value
from burnish.reports.figures import to_png
from burnish.reports.videos import Sheet, beside, film_sheet, replayed, require_pictures, webp, worst_first
from burnish.runs.locate import Located, locate
from burnish.runs.tasks import task_of
from envs.evaluation.evaluate import Evaluation, evaluate
from envs.evaluation.settings import EvaluationSettings
from envs.rollouts.episodes import EpisodeRow

Played = Mapping[str, Evaluation]
"""Evaluations by title: `before`, if the run began with a policy, and the run's own last."""

_MOVING_FRAMES, _CLIP_FRAMES = 60, 24  # most frames of the moving picture, and of an episode's clip
_LARGE = {"width": 320, "height": 320}
_QUICK = {"width": 160, "height": 160, "shadows": False, "samples": 0}  # of clips: many are rendered
_MOST_ACTIONS = 150  # rows of actions per episode


@dataclass
class ReportRollouts:
    """Runs policies with the runs' own evaluation settings: steps, noise, warm starts.

    An initial policy shared by several runs is evaluated once per task and settings.
    """

    episodes: int  # per policy
    first_seed: int
    num_workers: int
    _played: dict[tuple[Path, str, str], Evaluation] = field(default_factory=dict)

    def play(self, directory: RunDirectory) -> tuple[Any, dict[str, Evaluation]]:
        """Evaluate the last policy of a run and its initial policy; return task, and evaluations by title."""
        found = locate(directory.path, "run")
        env, protocol = task_of(found), directory.section("evaluation")
        settings = restore(EvaluationSettings, protocol)
        settings = replace(settings, episodes=self.episodes, first_seed=self.first_seed)
        init = directory.config.get("init")
        shown = {"before": locate(init, "init")} if init and Path(init).exists() else {}
        shown["after" if init else found.label] = found
        return env, {title: self._evaluated(one, env, settings) for title, one in shown.items()}

    def _evaluated(self, found: Located, env: Any, settings: EvaluationSettings) -> Evaluation:
        key = (found.path.resolve(), repr(env), repr(settings))
        if key not in self._played:
            with Counting(f"playing {found.label}", settings.episodes) as counting:
                self._played[key] = evaluate(
                    found.load(),
                    env,
                    settings,
                    num_workers=self.num_workers,
                    keep_observations=True,
                    on_progress=lambda done, _: counting.show(done),
                )
        return self._played[key]


class Picture(NamedTuple):
    """An image, its kind (`png` or `webp`), and its caption."""

    image: bytes
    kind: str
    caption: str


def draw_paths(env: Any, played: Played) -> Picture | None:
    """Draw the paths of all episodes, for tasks that do so."""
    if not hasattr(env, "figure"):
        return None
    panels = {
        title: ([row.observations for row in one.rows], [row.success for row in one.rows])
        for title, one in played.items()
    }
    caption = f"The {len(next(iter(played.values())).rows)} episodes from above, all from the same starts."
    return Picture(to_png(env.figure(panels)), "png", caption)


def draw_moving(env: Any, played: Played) -> Picture:
    """Render one episode in real time, before and after side by side from the same start.

    It is the first that the policy before lost and the last one won, else the first won, else the first.

    Raises:
        CapabilityError: If the task draws nothing.
        MissingExtraError: If rendering is unavailable.
    """
    require_pictures(env)
    last = list(played.values())[-1].rows
    others = [one.rows for one in list(played.values())[:-1]]
    won = [i for i, row in enumerate(last) if row.success]
    gained = [i for i in won if not any(rows[i].success for rows in others)]
    chosen = [*gained, *won, 0][0]
    shown = {title: one.rows[chosen] for title, one in played.items()}
    every = max(math.ceil(max(row.length for row in shown.values()) / _MOVING_FRAMES), 1)
    frames = {title: replayed(env, row, every, **_LARGE) for title, row in shown.items()}
    ends = {title: row.success if env.spec.success_rule else None for title, row in shown.items()}
    why = "the first that was lost before and is won now" if others and gained else "one of those played"
    caption = f"{env.spec.name}, episode of seed {last[chosen].seed}, {why}: " + "; ".join(
        f"{title + ', ' if len(shown) > 1 else ''}{outcome(env, row)} after {row.length} steps, "
        f"return {short_value(row.return_)}"
        for title, row in shown.items()
    )
    rate = env.spec.control_hz / every
    return Picture(webp(beside(frames, ends), rate, hold_s=1.0), "webp", f"{caption}.")


class Clip(NamedTuple):
    """Frames of an episode of one policy."""

    title: str
    outcome: str
    length: int  # control steps
    sheet: Sheet

    def layout(self) -> dict[str, Any]:
        """Return where the frames lie in their image, in JSON types."""
        return {key: value for key, value in self.sheet._asdict().items() if key != "image"}


@dataclass(frozen=True)
class Episode:
    """An episode as it is shown: end, clips by title, and actions over time."""

    row: EpisodeRow
    outcome: str
    clips: tuple[Clip, ...]  # the run's own last policy first
    actions: list[list[float]]  # (T, Da)
    step: int  # control steps from one row of `actions` to the next

    @property
    def size(self) -> int:
        return sum(len(clip.sheet.image) for clip in self.clips)


def grid_of(env: Any, played: Played, shown: int, size: int) -> list[Episode]:
    """Return the episodes of the last policy, failures and low returns first.

    Args:
        env: The task.
        played: Evaluations by title, of the same episodes.
        shown: The number of episodes with actions.
        size: Bytes of the frames of these; the episodes after it is used up have none. 0: no frames.

    Raises:
        MissingExtraError: If rendering is unavailable.
    """
    *others, (own, last) = played.items()
    position = {row.seed: i for i, row in enumerate(last.rows)}
    episodes = []
    for place, row in enumerate(worst_first(last.rows)):
        both = [(own, row), *((title, one.rows[position[row.seed]]) for title, one in others)]
        is_shown = place < shown
        drawn = both if is_shown and size > 0 else []
        found = tuple(Clip(title, outcome(env, one), one.length, _sheet(env, one)) for title, one in drawn)
        step = max(math.ceil(row.length / _MOST_ACTIONS), 1)
        actions = [] if row.actions is None or not is_shown else np.round(row.actions[::step], 3).tolist()
        episodes.append(Episode(row, outcome(env, row), found, actions, step))
        size -= episodes[-1].size
    return episodes


def _sheet(env: Any, row: EpisodeRow) -> Sheet:
    every = max(math.ceil(row.length / _CLIP_FRAMES), 1)
    return film_sheet(replayed(env, row, every, **_QUICK), env.spec.control_hz / every, width=_QUICK["width"])


def outcome(env: Any, row: EpisodeRow) -> str:
    """Name the end of an episode."""
    if row.success:
        return "success"
    if env.spec.success_rule:
        return "failure" if row.terminated else "failure by time limit"
    return "terminated" if row.terminated else "time limit"


def describe_modes(env: Any, rows: Sequence[EpisodeRow]) -> str:
    """Count the solution modes used, for tasks that name them; empty otherwise."""
    if not hasattr(env, "mode_names"):
        return ""
    names = env.mode_names()
    used = Counter(names[int(row.metrics["mode"])] for row in rows if row.success)
    if not used:
        return f"none of {len(rows)} episodes succeeded, so no way through was found."
    ways = "1 way" if len(used) == 1 else f"{len(used)} different ways"
    counts = ", ".join(f"{name} ({count})" for name, count in used.most_common())
    return f"{ways} in the {used.total()} of {len(rows)} episodes that succeeded: {counts}."
