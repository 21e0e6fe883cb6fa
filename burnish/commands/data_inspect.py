"""`burnish data inspect`: statistics and a picture of a dataset."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from burnish.config.overrides import RunContext
from burnish.console import Counting, output, table
from burnish.reports.dataset_figure import draw_dataset
from burnish.reports.figures import film_strip
from burnish.runs.locate import check_folder_to_write
from envs.datasets import EpisodeDataset, read_dataset, supported_options
from envs.datasets import quality as measure
from envs.datasets.catalogue import find_dataset
from envs.datasets.inspect import KeyFacts, describe_file, size_of
from envs.datasets.interface import interface_of
from envs.datasets.recorded_task import recorded_task_text
from envs.evaluation.scores import normalized_score, reference
from envs.evaluation.settings import check_seeds
from policies.bounds import Checked, bounded
from policies.errors import ConfigError, DatasetError
from policies.paths import path_field
from policies.storage.atomic_write import draft_folder, move_into

FACTS, PICTURE, FRAMES = "inspection.json", "inspection.png", "frames-"
_STRIP = 12  # frames of a film strip
_CONSTANT = 1e-4  # range below which a dimension counts as constant, as in the normaliser
_MEBI = 2**20
_CLUSTERS, _CLUSTERED = 50, 10_000
_NOISES = (0.1, 0.5)


@dataclass(frozen=True)
class DataInspectConfig(Checked):
    """Configuration of `burnish data inspect`."""

    dataset: str | None = path_field()  # file, folder, or name of a downloaded dataset
    out: str | None = path_field()  # folder of inspection.json and .png; null: inspection-<dataset>
    reader: dict[str, Any] = bounded({}, was="data")  # options of the format's reader: see Data
    task: str | None = None  # D4RL task whose reference returns define scores and trajectory quality
    against: str | None = path_field()  # reference dataset for the coverage of distinct state-action pairs
    measures: bool = True  # also measure coverage, action divergence and own rows
    samples: int = bounded(2000, ge=1)  # sampled frames for these measures
    beta: float = bounded(2.0, gt=0)  # weight of states relative to actions for own rows
    seed: int = 0  # seed of the sampled frames

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.against is not None and not self.measures:
            raise ConfigError("against= is for measuring coverage; leave it out, or measures=false.")
        check_seeds("seed", self.seed, 1)


def run(config: DataInspectConfig, context: RunContext) -> None:
    """Write and print the statistics; of a file that is refused, its keys."""
    shown = output()
    facts = inspect(config, on_keys=lambda facts: shown.print(_key_table(facts)))
    shown.print(table("", ("", ""), _fact_rows(facts)))
    for remark in facts["remarks"]:
        shown.print(f"- {remark}", markup=False, soft_wrap=True)
    shown.print(f"written: {facts['written']}", markup=False, soft_wrap=True)


def inspect(
    config: DataInspectConfig, on_keys: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Analyse a dataset and write the statistics; return the content of inspection.json.

    Args:
        config: What to analyse.
        on_keys: Called with the facts of the keys, before the file is read as a dataset.

    Raises:
        DatasetError: If the file is unusable (a list of its keys is still written), or `against` is unusable
            or of other widths (nothing is written).
    """
    if config.dataset is None:
        raise ConfigError("data inspect needs dataset=<file or folder>.")
    path = find_dataset(config.dataset)
    target = Path(config.out) if config.out is not None else Path(f"inspection-{path.resolve().name}")
    check_folder_to_write(target)
    if config.task is not None:
        reference(config.task)  # refuses, by name
    size = size_of(path)
    facts: dict[str, Any] = {"file": str(path), "keys": _keys(path, size), "remarks": [], "bytes": size}
    on_keys(facts)
    try:
        data = read_dataset(path, **config.reader)
    except DatasetError as error:
        facts["error"] = str(error)
        _write(target, facts, {})
        raise
    other = None
    if config.against is not None:
        other = read_dataset(config.against, **supported_options(config.against, config.reader))
        measure.check_widths(data, other)
    facts |= describe(data, config.task)
    if config.measures:
        facts["measures"] = _measures(data, other, config)
    facts["remarks"] = list(_remarks(facts, data))
    _write(target, facts, {PICTURE: draw_dataset(data, path.name)} | _draw_frames(data))
    return facts | {"written": str(target)}


def _keys(path: Path, size: int) -> list[dict[str, Any]]:
    with Counting(f"reading {path.name} (MiB)", max(round(size / _MEBI), 1)) as counting:
        found: list[KeyFacts] = describe_file(path, lambda seen: counting.show(round(seen / _MEBI)))
    return [asdict(one) for one in found]


def describe(data: EpisodeDataset, task: str | None = None) -> dict[str, Any]:
    """Describe a dataset on the CPU in JSON types; `task` is the D4RL task of the scores."""
    last = data.episode_start[1:] - 1
    lengths, returns = data.lengths.double().numpy(), data.returns.numpy()
    success = data.success
    ends = {key: int(getattr(data, key)[last].sum()) for key in ("terminated", "truncated")}
    facts: dict[str, Any] = {
        "format": data.meta.get("format"),
        "env": recorded_task_text(data.meta, data.obs_dim, data.action_dim),
        "digest": data.digest(),
        "episodes": data.num_episodes,
        "frames": data.num_frames,
        "transitions": len(data.transition_frames),
        "successors_recorded": data.next_observations is not None,
        "lengths": _spread(lengths),
        "returns": _spread(returns),
        "ends": ends,
        "reward": _spread(data.rewards.double().numpy())
        | {"share_nonzero": float((data.rewards != 0).double().mean())},
        "success": None if success is None else float(success.double().mean()),
        "observation": _dimensions(data.observations.double().numpy()),
        "action": _dimensions(data.actions.double().numpy()),
        "goal": _dimensions(data.extras["goal"].double().numpy()) if "goal" in data.extras else None,
        "extras": {key: list(value.shape[1:]) for key, value in data.extras.items()},
        "episode_extras": {key: list(value.shape[1:]) for key, value in data.episode_extras.items()},
        "interface": interface_of(data.meta, data.obs_dim, data.action_dim),
        "cameras": {camera: list(shape) for camera, shape in data.image_shapes.items()},
        "not_read": data.meta.get("not_read", []),
    }
    if task is not None:
        facts["d4rl_score"] = _spread(normalized_score(task, returns)) | {"task": task}
    return facts


def _spread(values: np.ndarray) -> dict[str, float]:
    quartiles = np.quantile(values, [0.0, 0.25, 0.5, 0.75, 1.0]).tolist()
    return dict(zip(("min", "q25", "median", "q75", "max"), quartiles, strict=True)) | {
        "mean": float(values.mean()),
        "std": float(values.std()),
    }


def _dimensions(values: np.ndarray) -> dict[str, Any]:
    low, high = values.min(axis=0), values.max(axis=0)
    return {
        "width": values.shape[1],
        "min": low.tolist(),
        "max": high.tolist(),
        "mean": values.mean(axis=0).tolist(),
        "std": values.std(axis=0).tolist(),
        "constant": np.flatnonzero(high - low < _CONSTANT).tolist(),
    }


def _measures(
    data: EpisodeDataset, other: EpisodeDataset | None, config: DataInspectConfig
) -> dict[str, Any]:
    """Compute the learning-related measures; each resamples its frames from the seed."""
    rate = {}

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    def rng() -> np.random.Generator:
        return np.random.default_rng(config.seed)

    with Counting("measuring", 3 + len(_NOISES)) as counting:
        for done, noise in enumerate(_NOISES, 1):
            share = measure.own_row_rate(data, config.beta, noise, config.samples, rng())
            rate[f"noise {noise}"] = share
            counting.show(done, "own rows")
        divergence = measure.action_divergence(data, config.samples, rng())
        counting.show(1 + len(_NOISES), "divergence of actions")
        variance = measure.cluster_variance(data, _CLUSTERS, max(_CLUSTERED, config.samples), rng())
        counting.show(2 + len(_NOISES), "clusters")
        distinct = measure.distinct_pairs(data, measure.limits_of(data))
    found = {
        "own_row_rate": rate | {"beta": config.beta},
        "action_divergence": finite(divergence),
        "cluster_action_variance": finite(variance),
        "distinct_pairs": distinct,
        "distinct_share": distinct / data.num_frames,
        "coverage": None,
        "trajectory_quality": None,
    }
    if other is not None:
        found["coverage"] = measure.coverage(data, other, rng())
    if config.task is not None:
        known, returns = reference(config.task), data.returns.numpy()
        found["trajectory_quality"] = measure.trajectory_quality(returns, known.min_return, known.max_return)
    return found


def _remarks(facts: dict[str, Any], data: EpisodeDataset) -> Iterator[str]:
    for what in ("observation", "action"):
        if constant := facts[what]["constant"]:
            yield f"{what} dimensions that do not move (scale 1 in the normaliser): {constant}"
    yield from _remarks_on_actions(facts["interface"], data)
    lost = facts["frames"] - facts["transitions"]
    if lost and not facts["successors_recorded"]:
        yield f"successors are not recorded: {lost} last frames are no transitions"
    if facts["reward"]["min"] == facts["reward"]["max"]:
        yield f"all rewards are {facts['reward']['min']:g}"
    if facts["not_read"]:
        yield f"not read: {', '.join(facts['not_read'])}"
    for key in facts["keys"]:
        if key["nan"] or key["infinite"]:
            yield f"{key['key']} has {key['nan']} NaN and {key['infinite']} infinite entries"


def _remarks_on_actions(interface: dict[str, Any], data: EpisodeDataset) -> Iterator[str]:
    """Yield the share of actions outside of known limits; without any, the units are those of the robot."""
    if {"action_low", "action_high"} <= set(interface):
        low, high = (torch.tensor(interface[key]) for key in ("action_low", "action_high"))
        beyond = float(((data.actions < low) | (data.actions > high)).double().mean())
        if beyond:
            yield f"{100 * beyond:.2g} % of the action entries lie outside of action_low and action_high"
    elif (largest := float(data.actions.abs().max())) > 1 + 1e-6:
        yield (
            f"actions reach {largest:.4g}, in units of the robot; give its limits to train or export: "
            "action_low=… action_high=…"
        )


def _draw_frames(data: EpisodeDataset) -> dict[str, bytes]:
    """Return a film strip of the first episode for every camera, by file name."""
    last = int(data.episode_start[1])
    chosen = torch.linspace(0, last - 1, min(last, _STRIP)).round().long()
    return {
        f"{FRAMES}{re.sub(r'[^A-Za-z0-9_.-]', '_', camera)}.png": film_strip(
            images[chosen].numpy(), title=f"{camera}, first episode"
        )
        for camera, images in data.images.items()
    }


def _write(target: Path, facts: dict[str, Any], pictures: Mapping[str, bytes]) -> None:
    with draft_folder(target) as draft:
        (draft / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        for name, png in pictures.items():
            (draft / name).write_bytes(png)
        for stale in (target / PICTURE, *target.glob(f"{FRAMES}*.png")):
            stale.unlink(missing_ok=True)
        move_into(draft, target)


def _interface_rows(interface: dict[str, Any]) -> Iterator[tuple[str, object]]:
    titles = {"control_hz": "rate [Hz]", "robot": "robot", "instructions": "task in words"}
    titles |= {"obs_names": "observation entries", "action_names": "action entries"}
    for key, title in titles.items():
        if key in interface:
            value = interface[key]
            yield title, ", ".join(value) if isinstance(value, list) else f"{value}"


def _key_table(facts: dict[str, Any]) -> Table:
    names = ("key", "arrays", "rows", "shape", "type", "min", "max", "bad")
    return table("", names, _key_rows(facts))


def _key_rows(facts: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    for key in facts["keys"]:
        shape = " or ".join(str(tuple(one)) for one in key["shapes"])
        low, high = ("" if key[name] is None else f"{key[name]:.4g}" for name in ("low", "high"))
        first = (key["key"], key["arrays"], key["rows"], shape, key["dtype"])
        yield *first, low, high, key["nan"] + key["infinite"]


def _fact_rows(facts: dict[str, Any]) -> Iterator[tuple[str, object]]:
    def spread(name: str) -> str:
        one = facts[name]
        return f"{one['mean']:.4g} (from {one['min']:.4g} to {one['max']:.4g})"

    yield "format", facts["format"]
    if facts["env"] is not None:
        yield "task", facts["env"]
    yield "episodes", facts["episodes"]
    yield "frames", f"{facts['frames']}, of which {facts['transitions']} are transitions"
    yield "length", spread("lengths")
    yield "ends", f"{facts['ends']['terminated']} terminated, {facts['ends']['truncated']} truncated"
    yield "return", spread("returns")
    if "d4rl_score" in facts:
        yield f"score ({facts['d4rl_score']['task']})", spread("d4rl_score")
    if facts["success"] is not None:
        yield "success", f"{100 * facts['success']:.1f} %"
    for what in ("observation", "action"):
        one = facts[what]
        yield f"{what}s", f"{one['width']} wide, from {min(one['min']):.4g} to {max(one['max']):.4g}"
    for camera, shape in facts["cameras"].items():
        yield f"camera {camera}", f"{shape[0]} x {shape[1]} pixels, in {FRAMES}*.png"
    yield from _interface_rows(facts["interface"])
    names = {"action_divergence": "action divergence", "cluster_action_variance": "cluster action variance"}
    names |= {"distinct_share": "distinct pairs per frame", "coverage": "coverage (SACo)"}
    names |= {"trajectory_quality": "trajectory quality (TQ)"}
    for key, name in names.items():
        if facts.get("measures", {}).get(key) is not None:
            yield name, f"{facts['measures'][key]:.3f}"
    for noise, rate in facts.get("measures", {}).get("own_row_rate", {}).items():
        if noise != "beta":
            yield f"own-row rate, {noise}", f"{rate:.3f} (beta {facts['measures']['own_row_rate']['beta']:g})"
