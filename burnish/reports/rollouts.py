"""Episodes of a policy for a report: run, draw, describe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from algos.training.run_directory import RunDirectory
from burnish.config.schema import restore
from burnish.console import Counting
from burnish.reports.figures import film_strip, to_png
from burnish.reports.videos import require_pictures, webp
from burnish.runs.evaluation import evaluate_with
from burnish.runs.locate import Located, locate
from burnish.runs.tasks import task_of
from envs.evaluation.settings import EvaluationSettings
from envs.rollouts.episodes import EpisodeRow

FRAMES = 24  # frames of a film strip before thinning


@dataclass
class ReportRollouts:
    """Runs policies with the runs' own evaluation settings: steps, noise, warm starts.

    An initial policy shared by several runs is evaluated once per task and settings.
    """

    episodes: int  # per policy, for a task that draws them in one figure
    first_seed: int
    num_workers: int
    _played: dict[tuple[Path, str, str], tuple[EpisodeRow, ...]] = field(default_factory=dict)

    def play(self, directory: RunDirectory) -> tuple[Any, dict[str, tuple[EpisodeRow, ...]]]:
        """Evaluate the last policy of a run and its initial policy; return task, and rows by title."""
        found = locate(directory.path, "run")
        env, protocol = task_of(found), directory.section("evaluation")
        episodes = self.episodes if hasattr(env, "figure") else 1  # enough for a film strip
        settings = restore(EvaluationSettings, protocol)
        settings = replace(settings, episodes=episodes, first_seed=self.first_seed)
        init = directory.config.get("init")
        shown = {"before": locate(init, "init")} if init and Path(init).exists() else {}
        shown["after" if init else found.label] = found
        return env, {title: self._rows(one, env, settings) for title, one in shown.items()}

    def _rows(self, found: Located, env: Any, settings: EvaluationSettings) -> tuple[EpisodeRow, ...]:
        key = (found.path.resolve(), repr(env), repr(settings))
        if key not in self._played:
            with Counting(f"playing {found.label}", settings.episodes) as counting:
                options = {"keep_observations": True, "on_progress": lambda done, _: counting.show(done)}
                evaluation = evaluate_with(found.load(), env, settings, self.num_workers, **options)
                self._played[key] = evaluation.rows
        return self._played[key]


def draw_behaviour(env: Any, played: Mapping[str, Sequence[EpisodeRow]]) -> tuple[bytes, str, bytes | None]:
    """Return a picture as PNG, its caption, and a moving picture as WebP if there is one.

    The picture is a trajectory plot if the task supports it, else a film strip of one episode.
    """
    if hasattr(env, "figure"):
        panels = {
            title: ([row.observations for row in rows], [row.success for row in rows])
            for title, rows in played.items()
        }
        return to_png(env.figure(panels)), f"Episodes on {env.spec.name}, all from the same starts.", None
    require_pictures(env)
    row = list(played.values())[-1][0]
    end = "success" if row.success else "terminated" if row.terminated else "time limit"
    caption = (
        f"{env.spec.name}, episode of seed {row.seed}: {row.length} steps, return {row.return_:.1f}, {end}."
    )
    every = max(row.length // FRAMES, 1)
    frames = env.render_frames(row.seed, row.actions, every=every)
    return film_strip(frames, title=caption), caption, webp(frames, env.spec.control_hz / every)


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
