"""`burnish collect`: record demonstrations of a task's expert, episodes of a policy, or imagined ones."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from algos.cloning.trajectories import imagined_episodes, require_model, require_target
from algos.training.run_lock import take_lock
from burnish.config.overrides import RunContext
from burnish.console import Counting, output, table
from burnish.runs.locate import (
    Located,
    check_file_to_write,
    check_folder_to_write,
    identified,
    locate,
    locate_actor,
)
from burnish.runs.tasks import require_task_of, task_of
from envs.datasets import Episode, EpisodeDataset, write_dataset
from envs.datasets.recorded_task import meta_to_write
from envs.datasets.writers import FOLDERS, WITH_IMAGES, check_place, format_to_write
from envs.evaluation.policy_episodes import policy_episodes
from envs.evaluation.settings import check_seeds
from envs.fit import task_text
from envs.rollouts.collect import MAX_ATTEMPTS, collect
from envs.rollouts.fleet import LOCAL
from envs.rollouts.kept_episodes import KeptEpisodes
from envs.spec import EnvSpec
from policies import registry
from policies.bounds import Checked, bounded
from policies.errors import CapabilityError, ConfigError, DatasetError, reason_of
from policies.paths import lasting, path_field
from policies.storage.atomic_write import write_errors, write_text

_log = logging.getLogger(__name__)
_SETTINGS = "settings.json"
_FREE = (
    *("episodes", "out", "format", "valid_fraction", "overwrite", "num_workers", "fleet"),
    "allow_other_task",
)
"""Keys that episodes do not depend on."""


@dataclass(frozen=True)
class CollectConfig(Checked):
    """Configuration of `burnish collect`; options of the expert belong to the task (`env.expert.…`)."""

    env: Any = None  # the task; it must have an expert. With policy, null: the policy's own task
    policy: str | None = path_field()  # a run or policy directory that plays instead of the expert
    model: str | None = path_field()  # a run of algo=trajectories that imagines windows, near policy if given
    guidance: float = bounded(16.0, ge=0)  # of model: weight of the policy's slope; 0: as the data
    allow_other_task: bool = False  # record a policy in another task than the one that it was made for
    episodes: int = bounded(50, ge=1)  # episodes in the file
    out: str = path_field("demonstrations.hdf5")  # file to write; Minari's and LeRobot's formats are folders
    format: str | None = None  # robomimic, minari, d4rl, lerobot; null: minari for out=…-v<n>, else robomimic
    first_seed: int = 1_000_000  # attempt i uses seed first_seed + i; evaluation starts from 0
    noise: float | None = bounded(None, ge=0)  # expert noise, in its own units; null: env.expert.noise
    expert: str | None = None  # expert, for tasks with several; null: env.expert.tier
    keep_failures: bool = False  # also keep episodes that miss the goal
    valid_fraction: float = bounded(0.0, ge=0, lt=1)  # fraction listed under mask/valid
    overwrite: bool = False  # replace an existing file
    num_workers: int = bounded(0, ge=0)  # processes in which expert or policy plays; 0: this one
    fleet: Any = None  # where they run: local (null), or ray, the actors of a cluster

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            "num_workers", self.model is None or not self.num_workers, "0 beside model, which imagines here"
        )
        check_seeds("first_seed", self.first_seed, MAX_ATTEMPTS * self.episodes)
        if self.policy is not None:
            for name in ("noise", "expert"):
                given = getattr(self, name)
                self.require(name, given is None, "left out beside policy, which plays itself")
        if self.valid_fraction and self.episodes == 1:
            raise ConfigError(f"valid_fraction={self.valid_fraction} needs at least 2 episodes; got 1.")
        if self.model is not None:
            for name in ("noise", "expert"):
                self.require(name, getattr(self, name) is None, "left out beside model")
        if format_to_write(self.out, self.format) != "robomimic" and self.valid_fraction:
            raise ConfigError(f"valid_fraction needs format=robomimic; got {self.valid_fraction}.")

    def unused(self) -> dict[str, str]:
        if self.model is None:
            return {"guidance": "without model"}
        found = {"keep_failures": "beside model, all of whose windows are kept"}
        return found | ({} if self.policy is not None else {"guidance": "without policy, whose weight it is"})


def run(config: CollectConfig, context: RunContext) -> float:
    """Record, write and summarise; return the expert's success rate or mean return."""
    found = resolve(config)
    player = "expert" if found.policy is None else "policy"
    player = "model" if found.model is not None else player
    return _print_result(_record(config, found), Path(config.out), found.env, player)


@dataclass(frozen=True)
class ResolvedCollect:
    """What is recorded and where to."""

    env: Any
    policy: Located | None  # None: the expert
    model: Located | None  # None: the task itself
    target: Path
    format: str


def resolve(config: CollectConfig, given: Located | None = None) -> ResolvedCollect:
    """Check the task, the policy (unless it is `given`) and the output."""
    env, allow = config.env, config.allow_other_task
    policy = given if given is not None or config.policy is None else locate_actor(config.policy)
    model = None if config.model is None else locate(config.model, "model")
    if policy is None and model is None:
        check_expert(env)
    for key, one in (("policy", policy), ("model", model)):
        if one is not None:
            env = task_of(one, " Give env=<name>.") if env is None else env
            require_task_of(one, env, key, allow_other_task=allow)
    has_images = bool(getattr(env, "cameras", ()))
    place = dataset_target(config.out, config.format, has_images=has_images, overwrite=config.overwrite)
    if model is not None and (has_images or env.spec.goal_dim):
        raise ConfigError("model=… imagines states; the task has images or goals beside them.")
    return ResolvedCollect(env, policy, model, *place)


def dataset_target(out: str, form: str | None, *, has_images: bool, overwrite: bool) -> tuple[Path, str]:
    """Check where a dataset is to be written; return path and format."""
    target, chosen = Path(out), format_to_write(out, form)
    if has_images and chosen not in WITH_IMAGES:
        raise ConfigError(
            f"images need format={' or '.join(WITH_IMAGES)}; got format={chosen}. Use one of them, or "
            "leave the images out: cameras=[] of `burnish data convert`."
        )
    (check_folder_to_write if chosen in FOLDERS else check_file_to_write)(target)
    if target.exists() and not overwrite:
        raise DatasetError(f"out={target} exists; choose another place or say overwrite=true.")
    check_place(target, chosen)
    return target, chosen


def record(config: CollectConfig, given: Located | None = None) -> EpisodeDataset:
    """Record episodes and write them to `config.out`; `given` is a policy that is an object."""
    return _record(config, resolve(config, given))


def _record(config: CollectConfig, found: ResolvedCollect) -> EpisodeDataset:
    env, target = found.env, found.target
    with _unfinished(config, found) as store:
        played, facts = _played(config, found)
        with Counting(f"recording {task_text(env)}", config.episodes) as counting:
            dataset = collect(
                env,
                episodes=config.episodes,
                first_seed=config.first_seed,
                noise=config.noise,
                expert=config.expert,
                keep_failures=config.keep_failures or found.model is not None,
                played=played,
                progress=lambda kept, attempts: counting.show(kept, f"{attempts} attempts"),
                num_workers=config.num_workers,
                fleet=config.fleet or LOCAL,
                store=store,
            )
        dataset.meta.update(facts)
        write_dataset(target, dataset, env, format=found.format, valid_fraction=config.valid_fraction)
    return dataset


@contextmanager
def _unfinished(config: CollectConfig, found: ResolvedCollect) -> Iterator[KeptEpisodes]:
    """Lock a folder beside the target, in which episodes are kept until the target is written."""
    target = found.target
    folder = target.with_name(f".{target.name}.unfinished")
    with write_errors(target):
        folder.mkdir(parents=True, exist_ok=True)
    with take_lock(folder):
        store = KeptEpisodes(folder)
        env = found.env.compared() if hasattr(found.env, "compared") else found.env
        actors = {"policy": found.policy, "model": found.model}
        settings = vars(lasting(config)) | {
            key: one.content() for key, one in actors.items() if one is not None
        }
        _check_settings(store, meta_to_write(settings, lasting(env), _FREE), config.episodes)
        try:
            yield store
        except BaseException as error:
            if num := len(store.attempts):
                goes_on = f"the same command goes on from there; with episodes={num} it writes these alone"
                _log.warning(
                    "kept %d of %d episodes in %s: %s.", num, config.episodes, folder,
                    "remove it to begin again" if isinstance(error, DatasetError) else goes_on,
                )  # fmt: skip
            else:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        store.clear()
        shutil.rmtree(folder, ignore_errors=True)  # on NFS the open lock stays


def _check_settings(store: KeptEpisodes, settings: dict[str, Any], episodes: int) -> None:
    """Refuse to go on with more episodes, or of other settings; without any, store these settings."""
    path = store.folder / _SETTINGS
    if not store.attempts:
        write_text(path, json.dumps(settings))
        return
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read ({reason_of(error)}): remove its folder.") from error
    if differing := [key for key in settings if settings[key] != before.get(key)]:
        raise DatasetError(
            f"{store.folder} holds {len(store.attempts)} episodes of an interrupted recording whose settings "
            f"differ in {', '.join(differing)}. Repeat its command, choose another out, or remove the folder."
            f"{_former(before, differing)}"
        )
    if (num := len(store.attempts)) > episodes:
        raise DatasetError(
            f"{store.folder} holds {num} episodes of an interrupted recording, and episodes={episodes} would "
            f"drop {num - episodes}. Give episodes={num} or more, choose another out, or remove the folder."
        )
    _log.info("going on after the %d episodes in %s.", len(store.attempts), store.folder)


def _former(before: Mapping[str, Any], differing: Sequence[str]) -> str:
    """Return where policies lay that are others now, such as the last checkpoint of a run that went on."""
    found = {key: before.get(key) for key in differing if key in ("policy", "model")}
    places = [f"{key}={one.get('path')}" for key, one in found.items() if isinstance(one, dict)]
    return f" It was {' '.join(places)} as it was then." if places else ""


def _played(
    config: CollectConfig, found: ResolvedCollect
) -> tuple[Callable[[int], Iterator[Episode]] | None, dict[str, Any]]:
    """Return what plays instead of the expert, and where imagined episodes come from."""
    if found.model is not None:
        return _imagined(config, found, found.model)
    if found.policy is None:
        return None, {}
    policy = found.policy.load()
    return lambda skip: policy_episodes(
        policy, found.env, first_seed=config.first_seed, skip=skip,
        num_workers=config.num_workers, fleet=config.fleet or LOCAL,
    ), {}  # fmt: skip


def _imagined(
    config: CollectConfig, found: ResolvedCollect, model: Located
) -> tuple[Callable[[int], Iterator[Episode]], dict[str, Any]]:
    """Return the imagined episodes, and where they come from."""
    rows: Any = model.load()
    target = None if found.policy is None else found.policy.load()
    require_model(rows, found.env.spec, f"model={config.model}")
    if target is not None:
        require_target(target, f"policy={config.policy}")
    facts = {"model": identified(model), "guidance": config.guidance if target is not None else 0.0}
    facts |= {} if found.policy is None else {"policy": identified(found.policy)}
    spec, weight, seed = found.env.spec, config.guidance, config.first_seed
    return lambda skip: imagined_episodes(
        rows, spec, policy=target, weight=weight, seed=seed, skip=skip
    ), {"imagined": facts}  # fmt: skip


def check_expert(env: Any) -> None:
    """Refuse a task without an expert; the error names the tasks with one."""
    if hasattr(env, "demonstrate"):
        return
    experts = [name for name, part in registry.parts("env").items() if hasattr(part, "demonstrate")]
    choices = f"tasks with an expert: {', '.join(experts)}."
    if env is None:
        raise ConfigError(f"collect needs env=<name>, or policy=<run>; {choices}")
    own = "in Python a controller of your own (docs/evaluation.md)"
    instead = f"record a policy by policy=<run>, {own}, or clone recordings of your own (docs/own_data.md)"
    raise CapabilityError(f"env={registry.name_of('env', env)} has no expert: {instead}; {choices}")


def _print_result(dataset: EpisodeDataset, path: Path, env: Any, player: str) -> float:
    """Print a summary; return the fraction of successful attempts, or the mean return."""
    spec: EnvSpec = env.spec
    lengths, returns = dataset.lengths, dataset.returns
    steps = f"{dataset.num_frames} ({int(lengths.min())} to {int(lengths.max())} per episode)"
    worth, result = _success(dataset, player) if spec.success_rule else _return(returns, spec)
    rows = [("file", path), ("task", task_text(env)), ("episodes", dataset.num_episodes)]
    output().print(table("", ("", ""), [*rows, ("steps", steps), worth]))
    return result


def _success(dataset: EpisodeDataset, player: str) -> tuple[tuple[str, str], float]:
    """Return the printed row, and the fraction of successful attempts."""
    success, attempts = dataset.success, int(dataset.meta["attempts"])
    rate = float("nan") if success is None else float(success.sum()) / attempts
    return (f"{player}'s success", f"{100 * rate:.1f} % of {attempts} attempts"), rate


def _return(returns: Tensor, spec: EnvSpec) -> tuple[tuple[str, str], float]:
    """Return the printed row, and the mean return."""
    mean, text = float(returns.mean()), f"{returns.mean():.1f} ({returns.min():.1f} to {returns.max():.1f})"
    if spec.reference_scores is not None:
        low, high = spec.reference_scores
        text += f", D4RL score {100 * (mean - low) / (high - low):.1f}"
    return ("mean return", text), mean
