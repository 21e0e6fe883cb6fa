"""`burnish data convert`: write a dataset in another format, or several as one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from burnish.commands.collect import dataset_target
from burnish.config.overrides import RunContext
from burnish.console import output, table
from envs.datasets import EpisodeDataset, read_dataset, write_dataset
from envs.datasets.convert import as_dataset
from envs.datasets.interface import interface_of, interface_of_task, with_given
from envs.datasets.recorded_task import TASK_KEYS, recorded_env, recorded_task
from envs.fit import task_text
from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.paths import path_field

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataConvertConfig(Checked):
    """Configuration of `burnish data convert`."""

    dataset: Any = path_field()  # file, folder, or name of a downloaded dataset; a list is joined
    out: str | None = path_field()  # file to write; Minari's and LeRobot's formats are folders
    format: str | None = None  # robomimic, minari, d4rl, lerobot; null: minari for out=…-v<n>, else robomimic
    reader: dict[str, Any] = bounded({})  # options of the format that is read: see Data
    cameras: tuple[str, ...] | None = None  # cameras to keep; null: all, []: none
    video: bool = False  # images as H.264 videos, which lose detail, instead of PNG; format=lerobot
    control_hz: float | None = bounded(None, gt=0)  # rate of the frames [Hz]; null: that of the dataset
    action_low: Any = None  # lowest actions of the robot, a number or one per entry; null: the dataset's
    action_high: Any = None  # highest actions
    robot: str | None = None  # type of the robot, e.g. so101_follower; null: the dataset's
    instruction: str | None = None  # the task in words; null: the dataset's
    valid_fraction: float = bounded(0.0, ge=0, lt=1)  # fraction listed under mask/valid; format=robomimic
    overwrite: bool = False  # replace an existing file


def run(config: DataConvertConfig, context: RunContext) -> float:
    """Convert and summarise; return the number of frames."""
    data = convert(config)
    facts = interface_of(data.meta, data.obs_dim, data.action_dim)
    rows: list[tuple[str, object]] = [("written", config.out), ("episodes", data.num_episodes)]
    rows += [("frames", data.num_frames), ("cameras", ", ".join(data.images) or "none")]
    rows += [("rate [Hz]", facts.get("control_hz", "unknown")), ("robot", facts.get("robot", "unknown"))]
    output().print(table("", ("", ""), rows))
    return float(data.num_frames)


def convert(config: DataConvertConfig) -> EpisodeDataset:
    """Read a dataset, write it to `config.out`, and return what was written."""
    if config.dataset is None or config.out is None:
        raise ConfigError("data convert needs dataset=<file or folder> and out=<file or folder>.")
    data = _read(config)
    if config.cameras is not None:
        data = data.with_cameras(config.cameras)
    target, form = dataset_target(
        config.out, config.format, has_images=bool(data.images), overwrite=config.overwrite
    )
    data.meta["interface"] = _interface(data, config)
    target.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"valid_fraction": config.valid_fraction, "video": config.video}
    write_dataset(target, data, format=form, **options)
    return data


def _read(config: DataConvertConfig) -> EpisodeDataset:
    """Return the dataset, or several as one, which names them in `meta["parts"]`."""
    if not isinstance(config.dataset, list):
        return read_dataset(str(config.dataset), **config.reader)
    parts = [read_dataset(str(one), **config.reader) for one in config.dataset]
    data = as_dataset(parts, source="dataset")
    if len(tasks := {_task_of(part) for part in parts}) > 1:
        names = ", ".join(sorted(tasks))
        _log.warning("dataset: the parts are of different tasks (%s); %s names none.", names, config.out)
        for key in TASK_KEYS:
            data.meta.pop(key, None)
    kept = ("source", "env", "imagined")
    data.meta["parts"] = [
        {key: part.meta[key] for key in kept if key in part.meta} | {"episodes": part.num_episodes}
        for part in parts
    ]
    return data


def _task_of(part: EpisodeDataset) -> str:
    """Return the recorded task with the options that select it."""
    found = recorded_task(part.meta)
    env = None if found is None else recorded_env(*found)
    return "unknown" if env is None else task_text(env)


def _interface(data: EpisodeDataset, config: DataConvertConfig) -> dict[str, Any]:
    """Return names, rate, limits, robot and task text: given, else the dataset's, else its task's."""
    known = _of_recorded_task(data) | interface_of(data.meta, data.obs_dim, data.action_dim)
    limits = {"action_low": config.action_low, "action_high": config.action_high}
    facts = with_given(known, data.action_dim, control_hz=config.control_hz, **limits)
    facts |= {} if config.robot is None else {"robot": config.robot}
    return facts | ({} if config.instruction is None else {"instructions": [config.instruction]})


def _of_recorded_task(data: EpisodeDataset) -> dict[str, Any]:
    """Return the facts of the recorded task; none where it is unknown, runs code, or has other widths."""
    found = recorded_task(data.meta)
    env = None if found is None else recorded_env(*found)
    if env is None or getattr(env, "runs_code", False):
        return {}
    fits = (env.spec.obs_dim, env.spec.action_dim) == (data.obs_dim, data.action_dim)
    return interface_of_task(env.spec) if fits else {}
