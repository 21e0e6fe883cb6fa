"""Datasets of the study of offline learning, and the settings of its algorithms."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import burnish
import burnish.api
from benchmarks.studies.once import episodes_of, first_seed
from burnish.config.overrides import experiments
from envs.datasets import EpisodeDataset, read_dataset, write_dataset
from policies.registry import lookup

BASES = {"flow": "study_flow_bc", "diffusion": "study_bc"}  # experiments that clone what is tuned
STEPS = 100_000  # gradient steps, unless others are asked for
COLLECTED = 100  # episodes of a dataset that the study records itself
RATED = 100  # actions of which the time is measured
JUDGED = 10  # episodes of an evaluation on the way: the first ones of the last evaluation
PLAIN = (
    "algo=bc", "algo.batch_size=256", "algo.lr=3e-4", "algo.min_lr=3e-4", "algo.warmup_steps=0",
    "algo.weight_decay=0", "algo.ema_decay=0", "process=deterministic", "policy.horizon=1",
    "policy.act_steps=1", "policy.normalizer.state=gaussian", "policy.observation_clip=null",
    "backbone.residual=false", "backbone.hidden_dims=[256,256]",
)  # fmt: skip
"""The actor of TD3+BC, cloned by the same optimiser."""


@dataclass(frozen=True)
class Data:
    """The task of a dataset, and the experts that record it where no file is given."""

    task: str
    parts: tuple[Part, ...] = ()

    @property
    def is_mixed(self) -> bool:
        return len(self.parts) > 1


class Part(NamedTuple):
    """Episodes of one expert."""

    expert: str
    episodes: int
    noise: float | None = None  # on its actions: without, critics know nothing beside one action per state


DATA = {
    "hopper-medium": Data("hopper"),
    "hopper-medium-expert": Data("hopper"),
    "halfcheetah-medium": Data("halfcheetah", (Part("medium", COLLECTED, noise=0.3),)),
    "hopper-expert": Data("hopper", (Part("expert", COLLECTED, noise=0.1),)),
    "walker2d-expert": Data("walker2d", (Part("expert", COLLECTED, noise=0.3),)),
    "hopper-mixed": Data("hopper", (Part("medium", 90, noise=0.3), Part("expert", 10))),
}

CURATIONS = {
    "return": ("curation.weighting=return",),
    "advantage": ("curation.weighting=advantage",),
    "top": ("curation.keep=return", "curation.share=0.1"),
}
"""Overrides of what stands behind an @."""


def dataset_of(name: str, given: str | None, root: Path) -> Path:
    """Return the file of a dataset, recording it where the study knows how."""
    data, path = DATA[name], root / f"{name}.hdf5"
    if given is not None:
        return Path(given)
    if not data.parts:
        raise SystemExit(f"{name} needs --dataset FILE")
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if not data.is_mixed:
        recorded(path, data.task, data.parts[0], "d4rl")
        return path
    files = [path.with_suffix(f".{number}.hdf5") for number in range(len(data.parts))]
    for number, (file, part) in enumerate(zip(files, data.parts, strict=True)):
        recorded(file, data.task, part, "robomimic", first_seed=first_seed(number))
    read = [read_dataset(file) for file in files]
    episodes = [one for each in read for one in episodes_of(each)]
    write_dataset(path, EpisodeDataset.from_episodes(episodes, meta=read[0].meta), lookup("env", data.task)())
    return path


def recorded(file: Path, task: str, part: Part, form: str, **first: int) -> None:
    """Record the episodes of one expert, unless they are there."""
    if not file.exists():
        wished: dict[str, Any] = {"expert": part.expert, "noise": part.noise, **first}
        burnish.collect(env=task, episodes=part.episodes, format=form, out=str(file), **wished)


def experiment_of(data: str, base: str, algo: str) -> str:
    """Return the experiment of an algorithm: to tune a base; of the data, or the task, or for few rows."""
    task, known = DATA[data].task, experiments()
    if base:
        tuned = f"{task}_{algo}_tuning"
        return tuned if tuned in known else f"{task}_study_{algo}"
    names = f"{data.replace('-', '_')}_{algo}", f"{task}_{algo}", f"{algo.removeprefix('study_')}_few_rows"
    return next((name for name in names if name in known), names[1])


def settings_of(data: str, base: str, algo: str, options: argparse.Namespace) -> list[str]:
    """Return the overrides that choose an algorithm by its published settings, or by those for tuning."""
    algo, _, curated = algo.partition("@")
    rows = CURATIONS[curated] if curated else ()
    if algo == "bc":
        return [f"env={DATA[data].task}", *PLAIN, f"algo.steps={(options.steps or STEPS) // 2}", *rows]
    name = experiment_of(data, base, algo)
    steps = options.steps if base else options.steps or STEPS
    more = [f"env={DATA[data].task}"] if name.endswith("_few_rows") else []
    more += [] if steps is None else [f"algo.steps={steps}"]
    more += [] if options.autocast is None else [f"algo.autocast={options.autocast}"]
    return [f"experiment={name}", *more, *rows, *options.set]
