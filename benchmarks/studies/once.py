"""What studies make once: demonstrations of a seed, and runs, which are continued where they were stopped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import burnish
import burnish.api
from burnish.api import overrides_of
from burnish.runs.locate import locate
from burnish.runs.tasks import task_of
from envs.datasets import EpisodeDataset, read_dataset, write_dataset
from envs.datasets.episode import Episode
from envs.datasets.windows import DECISION
from envs.evaluation.policy_episodes import policy_episodes

_OF_THE_MACHINE = ("num_workers", "num_threads")
_LENGTHS = ("algo.steps=", "algo.total_steps=")


def first_seed(seed: int) -> int:
    """Return the first episode of a seed's demonstrations, far from those of training and evaluation."""
    return 1_000_000 + 10_000 * seed


def demonstrations(
    path: Path, env: str, episodes: int, *options: str, seed: int, noise: float | None = None
) -> Path:
    """Record a file of demonstrations, unless it is there; returns it.

    Args:
        path: The file.
        env: Task with an expert.
        episodes: How many.
        options: Overrides of the task.
        seed: Whose first episode is the first attempt.
        noise: Of the expert; None: as the task has it.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        values: dict[str, Any] = {"first_seed": first_seed(seed), "noise": noise, "out": str(path)}
        burnish.collect(*options, env=env, episodes=episodes, **values)
    return path


@dataclass(frozen=True)
class Recipe:
    """How the policy of a task is cloned, from demonstrations of its seed."""

    demonstrations: int
    overrides: tuple[str, ...]

    def cloned(self, task: str, seed: int, root: Path) -> str:
        """Record and clone what is not there; returns the run."""
        path, run = root / f"{task}-demonstrations-seed{seed}.hdf5", root / f"{task}-seed{seed}"
        demos = demonstrations(path, task, self.demonstrations, seed=seed)
        trained(run, *self.overrides, dataset=str(demos), seed=seed)
        return str(run)


def with_own_episodes(path: Path, demos: Path, run: Path, episodes: int, *, first: int) -> Path:
    """Record a file of demonstrations and of a run's own episodes, unless it is there; returns it."""
    if not path.exists():
        task, policy, shown = task_of(locate(str(run))), burnish.load_policy(str(run)), read_dataset(demos)
        own = islice(policy_episodes(policy, task, first_seed=first), episodes)
        dataset = EpisodeDataset.from_episodes([*episodes_of(shown), *own], meta=shown.meta)
        dataset.meta["attempts"] = shown.meta["attempts"] + episodes
        write_dataset(path, dataset, task)
    return path


def episodes_of(dataset: EpisodeDataset) -> Iterator[Episode]:
    """Yield the episodes of a dataset, decided frame by frame, without other extras and images."""
    assert dataset.next_observations is not None and dataset.success is not None
    for number, (start, end) in enumerate(pairwise(dataset.episode_start.tolist())):
        last = slice(end - 1, end)
        yield Episode(
            torch.cat([dataset.observations[start:end], dataset.next_observations[last]]).numpy(),
            dataset.actions[start:end].numpy(),
            dataset.rewards[start:end].numpy(),
            terminated=bool(dataset.terminated[last]),
            truncated=bool(dataset.truncated[last]),
            success=bool(dataset.success[number]),
            seed=int(dataset.episode_extras["seed"][number]),
            extras={DECISION: np.ones(end - start, dtype=bool)},
        )


def trained(
    place: Path, *overrides: str, episodes: int = 0, indifferent: Sequence[str] = (), **values: Any
) -> burnish.api.Run:
    """Train in a directory, or continue the run that is there, also by more steps than it was started with.

    One that is finished stays as it is.

    Args:
        place: Directory of the run.
        overrides: Of the command line.
        episodes: Of every evaluation on the way.
        indifferent: Keys that the run that is there may have been given otherwise.
        values: Keys and their values.

    Raises:
        SystemExit: If the run that is there was started with other overrides.
    """
    asked = (*overrides, f"evaluation.episodes={episodes}")
    if (place / "checkpoints" / "last").exists():
        more = _compared(place, overrides_of(asked, values), (*_OF_THE_MACHINE, *indifferent))
        return burnish.train(*more, resume=str(place))
    shutil.rmtree(place, ignore_errors=True)
    return burnish.train(*asked, directory=place, **values)


def _compared(place: Path, asked: list[str], indifferent: Sequence[str]) -> list[str]:
    """Refuse a run of another recipe: results would be told of one that was not followed.

    Returns:
        What is to be changed in the run that is there: its length, if it is to be longer.
    """
    before = (place / "overrides.txt").read_text().splitlines()
    was, wanted = (
        {one for one in each if one.partition("=")[0] not in indifferent} for each in (before, asked)
    )
    if not (was ^ wanted):
        return []
    lengths = [sorted(each) for each in (was - wanted, wanted - was)]
    if all(len(each) == 1 and each[0].startswith(_LENGTHS) for each in lengths):
        (old,), (new,) = lengths
        (key, _, few), (same, _, many) = old.partition("="), new.partition("=")
        if key == same and int(many) > int(few):
            return [new]
    changes = [f"- {one}" for one in sorted(was - wanted)] + [f"+ {one}" for one in sorted(wanted - was)]
    raise SystemExit(
        f"{place} was started with other settings; move it away, or go back to them:\n" + "\n".join(changes)
    )
