"""First stage of training: from overrides to one immutable description of the run.

Paths become absolute, policies are located, and every check that needs no policy or dataset runs here. The
next stages are `burnish.runs.build` and `burnish.runs.launch`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from algos.base import device_of
from algos.training.run_directory import RunDirectory
from burnish.config.overrides import Overrides
from burnish.config.schema import GROUPS, restore, restore_part
from burnish.config.train import TrainConfig
from burnish.runs.context import RunContext
from burnish.runs.locate import RUN_CONFIG, Located, check_folder_to_write, locate, seed_folders
from burnish.runs.seeds import (
    of_one_seed,
    require_alike,
    require_complete,
    require_distinct,
    require_room,
    require_together,
)
from burnish.runs.tasks import known_task, require_task_of
from envs.datasets import lasting_options
from envs.datasets.catalogue import find_dataset
from envs.evaluation.settings import check_seeds
from envs.fit import require_same_task, task_text
from policies import registry
from policies.errors import CheckpointError, ConfigError
from policies.paths import at_home, lasting
from policies.policy_config import PART_GROUPS
from policies.storage.hub import is_on_hub

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedRun:
    """A resolved run, or several that differ in their seeds only.

    Attributes:
        configs: Configurations by seed; paths are absolute, policies are single checkpoints.
        overrides: Overrides of each run; for a resumed run, its changes.
        folder: Run directory, or folder of several runs.
        device: Device of gradients.
        init: Policy to start from.
        teacher: Policy to distil from.
        is_proposed: A number may be appended to the folder's name.
        has_folders: Each run has a folder `seed-<n>` in `folder`.
        order: Seeds in the requested order of results; empty: order of the runs.
        continued: Directories of resumed runs; empty for new runs.
    """

    configs: tuple[TrainConfig, ...]
    overrides: tuple[Overrides, ...]
    folder: Path
    device: torch.device
    init: Located | None = None
    teacher: Located | None = None
    is_proposed: bool = False
    has_folders: bool = False
    order: tuple[int, ...] = ()
    continued: tuple[RunDirectory, ...] = ()

    @property
    def config(self) -> TrainConfig:
        """The configuration; for several runs that of the first."""
        return self.configs[0]


def has_seeds(config: TrainConfig) -> bool:
    """Return whether several runs are started or resumed."""
    return config.seeds is not None or bool(seed_folders(config.resume))


def resolve(config: TrainConfig, context: RunContext) -> ResolvedRun:
    """Resolve one run, new or resumed.

    Raises:
        ConfigError: E.g. for several seeds; see `resolve_seeds`.
        CheckpointError: If a policy or the run to resume is missing.
    """
    if has_seeds(config):
        what = f"resume={config.resume}" if config.seeds is None else f"seeds={config.seeds}"
        raise ConfigError(f"{what} means several runs. Use burnish.train_seeds in Python.")
    if config.resume is not None:
        return _continued([RunDirectory.open(config.resume)], context)
    _refuse_unused_policy(config, context.overrides)
    check_folder_to_write(context.directory, "hydra.run.dir")
    config, init, teacher = _with_lasting_paths(config)
    config = _with_task(config, init, teacher)
    return ResolvedRun(
        configs=(config,),
        overrides=(context.overrides,),
        folder=context.directory,
        device=_require_usable(config, context.overrides),
        init=init,
        teacher=teacher,
        is_proposed=context.is_proposed,
    )


def resolve_seeds(config: TrainConfig, context: RunContext) -> ResolvedRun:
    """Resolve runs of several seeds trained at once; each equals a single run.

    Raises:
        ConfigError: E.g. if the algorithm trains one seed at a time, `init` is set, or resumed runs differ in
            more than their seeds.
        CheckpointError: If a run to resume is missing.
    """
    if config.resume is not None:
        return _continued(_runs_below(config), context, has_folders=True)
    require_distinct(config.seeds or [])
    seeds = sorted(config.seeds or [])  # as when resumed: the order in a stack affects the last bits
    if "seed" in context.overrides.keys:
        raise ConfigError(f"seed would have no effect beside seeds={seeds}. Leave one of them out.")
    _refuse_unused_policy(config, context.overrides)
    require_room(context.directory, seeds)
    config, init, teacher = _with_lasting_paths(config)
    config = _with_task(config, init, teacher)
    each = [of_one_seed(config, context.overrides, seed) for seed in seeds]
    device = _require_usable(each[0][0], context.overrides)
    _require_together([one for one, _ in each])
    return ResolvedRun(
        configs=tuple(one for one, _ in each),
        overrides=tuple(typed for _, typed in each),
        folder=context.directory,
        device=device,
        init=init,
        teacher=teacher,
        is_proposed=context.is_proposed,
        has_folders=True,
        order=tuple(config.seeds or ()),
    )


def with_resumed_parts(overrides: Overrides) -> Overrides:
    """Prepend the parts of the resumed run, so that their keys are known while composing."""
    given = overrides.value("resume")
    if given in (None, ""):
        return overrides
    run = Path(str(given)).expanduser()
    run = next(iter(seed_folders(run)), run)
    if not (run / RUN_CONFIG).is_file():
        return overrides
    parts = parts_of(RunDirectory.open(run))
    return parts.but(*overrides.keys) + overrides


def parts_of(directory: RunDirectory) -> Overrides:
    """Return the group options of a run, e.g. `algo=dppo` and `env=avoid`.

    Raises:
        ConfigError: If a part is unknown.
    """
    names = {group: directory.section(group).get("name") for group in GROUPS if directory.section(group)}
    for group, name in names.items():
        registry.lookup(group, str(name))
    return Overrides.parse(f"{group}={name}" for group, name in names.items())


def _continued(
    runs: Sequence[RunDirectory], context: RunContext, *, has_folders: bool = False
) -> ResolvedRun:
    """Resolve resumed runs with their overrides."""
    configs, typed, places = [], [], []
    for run in runs:
        known = parts_of(run).texts
        changes = Overrides(
            tuple(item for item in context.overrides.but("resume").items if item.text not in known)
        )
        config = at_home(restore(TrainConfig, run.config, changes))
        _require_its_task(config, run)
        _require_its_policies(config, run)
        config, init, teacher = _with_lasting_paths(config)
        configs.append(config)
        typed.append(changes)
        places.append((init, teacher))
    device = _require_usable(configs[0], typed[0])
    _require_together(configs)
    return ResolvedRun(
        configs=tuple(configs),
        overrides=tuple(typed),
        folder=runs[0].path.parent if has_folders else runs[0].path,
        device=device,
        init=places[0][0],
        teacher=places[0][1],
        has_folders=has_folders,
        continued=tuple(runs),
    )


def _require_together(configs: Sequence[TrainConfig]) -> None:
    if len(configs) > 1:
        require_alike(configs)
        require_together(configs[0])


def _runs_below(config: TrainConfig) -> list[RunDirectory]:
    """Return the resumed runs by seed.

    Raises:
        ConfigError: If other seeds are requested, or there are none.
        CheckpointError: If one is missing.
    """
    folders = seed_folders(config.resume)
    there = [folder.name for folder in folders]
    if config.seeds is not None and sorted(f"seed-{seed}" for seed in config.seeds) != sorted(there):
        raise ConfigError(
            f"resume={config.resume} continues the seeds that are there, {', '.join(there)}; got "
            f"seeds={config.seeds}. Leave it out."
        )
    if not folders:
        raise ConfigError(
            f"resume={config.resume} must be a folder with runs seed-<n>; there are none. Continue a single "
            f"run with burnish.train."
        )
    require_complete(str(config.resume))
    return [RunDirectory.open(folder) for folder in folders]


def _with_task(config: TrainConfig, init: Located | None, teacher: Located | None) -> TrainConfig:
    """Return the configuration with the task of `init` if none is given.

    Raises:
        ConfigError: If `init` or the teacher was made for another task.
    """
    if config.env is None and init is not None:
        config = dataclasses.replace(config, env=known_task(init))
        if config.env is not None:
            _log.info("the task is that of init: %s.", task_text(config.env))
    for key, found in (("init", init), ("algo.teacher", teacher)):
        if config.env is not None and found is not None:
            require_task_of(found, config.env, key, allow_other_task=config.allow_other_task)
    return config


def _require_its_task(config: TrainConfig, run: RunDirectory) -> None:
    """Refuse to resume a run on another task.

    Raises:
        ConfigError: If options that select the task differ; names both.
    """
    before = run.section("env")
    if before and config.env is not None:
        own = restore_part("env", before)
        require_same_task(
            "this command", config.env, f"resume={run.path}", own, allow_other_task=config.allow_other_task
        )


def _require_its_policies(config: TrainConfig, run: RunDirectory) -> None:
    """Check that the run's `init` and teacher exist; errors name the override to relocate them.

    Raises:
        CheckpointError: If one is missing.
    """
    for key, path in (("init", config.init), ("algo.teacher", getattr(config.algo, "teacher", None))):
        if path is None or is_on_hub(path):
            continue
        try:
            locate(path, key)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} If it was moved: burnish train resume={run.path} {key}=<its new place>."
            ) from None


def _with_lasting_paths(config: TrainConfig) -> tuple[TrainConfig, Located | None, Located | None]:
    """Return the configuration with absolute paths, and its policies.

    Policies are fixed to one checkpoint, as a run's last checkpoint changes.
    """
    dataset = None if config.dataset is None else str(find_dataset(config.dataset).absolute())
    init = None if config.init is None else locate(config.init, "init")
    given, algo = getattr(config.algo, "teacher", None), config.algo
    teacher = None if given is None else locate(given, "algo.teacher")
    if teacher is not None:
        algo = dataclasses.replace(algo, teacher=str(teacher.path.resolve()))
    fixed = dataclasses.replace(
        config,
        dataset=dataset,
        reader=lasting_options(config.reader) if config.reader else {},
        init=None if init is None else str(init.path.resolve()),
        algo=algo,
    )
    return lasting(fixed), init, teacher


def _require_usable(config: TrainConfig, typed: Overrides) -> torch.device:
    """Refuse inconsistent values, warn of those without effect; return the device.

    Raises:
        ConfigError: If values are inconsistent.
    """
    if config.algo is None:
        raise ConfigError(f"train needs algo=<name>; choose one of: {', '.join(registry.names('algo'))}.")
    device = device_of(config.device)
    check_seeds("seed", config.seed)
    if config.num_workers < 0:
        raise ConfigError(f"num_workers must be 0 or more; got {config.num_workers}.")
    algo = registry.name_of("algo", config.algo)
    if config.dataset is not None and not getattr(config.algo, "takes_dataset", True):
        raise ConfigError(
            f"algo={algo} learns in an environment and takes no dataset; got dataset={config.dataset}. Clone "
            f"a policy from it with algo=bc and give that as init."
        )
    if config.reader and config.dataset is None:
        raise ConfigError(
            f"reader={config.reader} are options of a dataset's reader; give dataset=<file> with them."
        )
    _warn_of_unused_evaluation(config, typed)
    if config.requires_init and config.init is None:
        _log.warning("these settings tune a policy: give init=<policy>. Without it a new one is trained.")
    return device


def _refuse_unused_policy(config: TrainConfig, typed: Overrides) -> None:
    """Refuse overrides of a new policy if `init` is set or the algorithm builds its policy.

    Raises:
        ConfigError: If there are any.
    """
    keys = [key for key in typed.keys if key.partition(".")[0] in (*PART_GROUPS, "policy")]
    if keys and config.init is not None:
        raise ConfigError(
            f"init={config.init} is a whole policy, so {', '.join(keys)} would have no effect. Leave "
            f"{'it' if len(keys) == 1 else 'them'} out, or train a new policy without init."
        )
    if keys and getattr(config.algo, "makes_policy", False):
        algo = registry.name_of("algo", config.algo)
        raise ConfigError(
            f"algo={algo} makes its own actor (see algo.hidden_dims), so {', '.join(keys)} would have no "
            "effect. Leave it out; or clone a policy of that kind with algo=bc and give it as init."
        )


def _warn_of_unused_evaluation(config: TrainConfig, typed: Overrides) -> None:
    """Warn of evaluation overrides without a task."""
    if config.env is not None or config.evaluation.episodes == 0:
        return
    if unused := [key for key in typed.keys if key.startswith(("evaluation.", "trainer.eval_"))]:
        _log.warning("nothing is evaluated, in spite of %s: give env=<task> as well.", ", ".join(unused))
    elif getattr(config.algo, "makes_policy", False):
        _log.info("nothing is evaluated while training: give env=<task> for that.")
