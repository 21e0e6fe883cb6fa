"""First stage of training: from overrides to one immutable description of the run.

Paths become absolute, policies are located, and every check that needs no policy or dataset runs here. The
next stages are `burnish.runs.build` and `burnish.commands.train`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from algos.base import device_of
from algos.training.ranks import current
from algos.training.run_directory import RunDirectory
from burnish.config.nodes import GROUPS
from burnish.config.overrides import NO_OVERRIDES, Overrides, RunContext
from burnish.config.saved import restore, restore_part
from burnish.config.schema import compose_command, refuse_unused
from burnish.config.train import TrainConfig
from burnish.runs.auto import is_auto, with_choices
from burnish.runs.locate import RUN_CONFIG, Located, check_folder_to_write, locate, seed_folders
from burnish.runs.seeds import (
    require_alike,
    require_complete,
    require_distinct,
    require_new_folders,
    require_together,
)
from burnish.runs.tasks import known_task, require_known_code, require_task_of
from envs.datasets import absolute_options
from envs.datasets.catalogue import find_dataset
from envs.datasets.curation import Curation
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
    """A resolved run, or several that differ in their seeds only."""

    configs: tuple[TrainConfig, ...]  # by seed; paths are absolute, policies are single checkpoints
    overrides: tuple[Overrides, ...]  # of each run; for a resumed run, its changes
    folder: Path  # run directory, or folder of several runs
    device: torch.device  # of gradients
    init: Located | None = None  # policy to start from
    teacher: Located | None = None  # policy to distil from
    is_proposed: bool = False  # a number may be appended to the folder's name
    has_folders: bool = False  # each run has a folder `seed-<n>` in `folder`
    order: tuple[int, ...] = ()  # seeds in the requested order of results; empty: order of the runs
    continued: tuple[RunDirectory, ...] = ()  # directories of resumed runs; empty for new runs
    interface: dict[str, Any] = field(default_factory=dict)  # what the dataset's entries are, once it is read

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
    check_folder_to_write(context.directory, "hydra.run.dir")
    return _new(config, context)


def resolve_seeds(config: TrainConfig, context: RunContext) -> ResolvedRun:
    """Resolve runs of several seeds trained at once; each equals a single run.

    Raises:
        ConfigError: E.g. if the algorithm trains one seed at a time, `init` is set, there are several
            processes, or resumed runs differ in more than their seeds.
        CheckpointError: If a run to resume is missing.
    """
    if (world := current().world) > 1:
        raise ConfigError(f"seeds are trained in one process; got {world}. Leave seeds or torchrun out.")
    if config.resume is not None:
        return _continued(_runs_below(config), context, has_folders=True)
    require_distinct(config.seeds or [])
    if "seed" in context.overrides.keys:
        raise ConfigError(f"seed would have no effect beside seeds={config.seeds}. Leave one of them out.")
    require_new_folders(context.directory, config.seeds or [])
    return _new(config, context, has_folders=True, order=tuple(config.seeds or ()))


def resume_directory_error(run: str | Path, got: str) -> ConfigError:
    """Return the error for a directory given together with `resume`."""
    key = got.partition("=")[0]
    return ConfigError(
        f"resume={run} goes on in that run's own directory; got {got}. Leave {key} out; for a new run from "
        f"its policy give init={run} instead of resume."
    )


def resumed_parts(overrides: Overrides) -> Overrides:
    """Return the parts of a resumed run that are not typed; composed first, so that their keys are known.

    Raises:
        CheckpointError: If there is no such folder.
    """
    resume = overrides.value("resume")
    if resume in (None, ""):
        return NO_OVERRIDES
    run = Path(str(resume)).expanduser()
    if not run.exists():
        RunDirectory.open(run)  # raises the error
    run = next(iter(seed_folders(run)), run)
    if not (run / RUN_CONFIG).is_file():
        return NO_OVERRIDES
    return parts_of(RunDirectory.open(run)).without(*overrides.keys)


def parts_of(directory: RunDirectory) -> Overrides:
    """Return the group options of a run, e.g. `algo=dppo` and `env=avoid`."""
    names = {group: directory.section(group).get("name") for group in GROUPS if directory.section(group)}
    for group, name in names.items():
        registry.lookup(group, str(name))
    return Overrides.parse(f"{group}={name}" for group, name in names.items())


def _new(
    config: TrainConfig, context: RunContext, typed: Overrides | None = None, **facts: Any
) -> ResolvedRun:
    """Resolve a new run; `typed` are the overrides without those that were chosen, None: all."""
    _refuse_unused_policy(config, context.overrides)
    config, *policies = _with_absolute_paths(config)
    config = _with_task(config, *policies)
    if is_auto(context.overrides):
        typed = context.overrides
        context = replace(context, overrides=with_choices(config, typed, policies[0]))
        return _new(compose_command("train", context.overrides.texts).config, context, typed, **facts)
    refuse_unused(config, context.overrides if typed is None else typed)
    runs = [(config, context.overrides)]
    if config.seeds is not None:  # sorted, as when resumed: the order in a stack affects the last bits
        others = context.overrides.without("seeds")
        runs = [
            (replace(config, seed=seed, seeds=None), others + Overrides.parse([f"seed={seed}"]))
            for seed in sorted(config.seeds)
        ]
    return _checked(runs, *policies, folder=context.directory, is_proposed=context.is_proposed, **facts)


def _continued(
    runs: Sequence[RunDirectory], context: RunContext, *, has_folders: bool = False
) -> ResolvedRun:
    resumed, policies = [], []
    for run in runs:
        parts = [(part.key, part.value) for part in parts_of(run).items]  # of `resumed_parts`
        overrides = context.overrides.without("resume").items
        changes = Overrides(tuple(item for item in overrides if (item.key, item.value) not in parts))
        config, *located = _with_absolute_paths(at_home(restore(TrainConfig, run.config, changes)), run)
        refuse_unused(config, changes)
        _require_its_task(config, run)
        require_known_code(config.env, run.path, f"the run {run.path}")
        resumed.append((config, changes))
        policies.append(located)
    folder = runs[0].path.parent if has_folders else runs[0].path
    return _checked(resumed, *policies[0], folder=folder, has_folders=has_folders, continued=tuple(runs))


def _checked(
    runs: Sequence[tuple[TrainConfig, Overrides]], init: Located | None, teacher: Located | None, **facts: Any
) -> ResolvedRun:
    configs, overrides = zip(*runs, strict=True)
    device = _require_usable(configs[0], overrides[0])
    if len(configs) > 1:
        require_alike(configs)
        require_together(configs[0])
    return ResolvedRun(configs, overrides, device=device, init=init, teacher=teacher, **facts)


def _runs_below(config: TrainConfig) -> list[RunDirectory]:
    folders = seed_folders(config.resume)
    if not folders:
        raise ConfigError(
            f"resume={config.resume} must be a folder with runs seed-<n>; there are none. Continue a single "
            f"run with burnish.train."
        )
    present = [folder.name for folder in folders]
    if config.seeds is not None and sorted(f"seed-{seed}" for seed in config.seeds) != sorted(present):
        raise ConfigError(
            f"resume={config.resume} continues the seeds that are there, {', '.join(present)}; got "
            f"seeds={config.seeds}. Leave it out."
        )
    require_complete(str(config.resume))
    return [RunDirectory.open(folder) for folder in folders]


def _with_absolute_paths(
    config: TrainConfig, run: RunDirectory | None = None
) -> tuple[TrainConfig, Located | None, Located | None]:
    """Return the configuration with absolute paths, its policy to start from, and its teacher.

    Policies are fixed to one checkpoint, as a run's last checkpoint changes.
    """

    def located(path: str | None, key: str) -> Located | None:
        try:
            return None if path is None else locate(path, key)
        except CheckpointError as error:
            if run is None or is_on_hub(str(path)):
                raise
            moved = f"If it was moved: burnish train resume={run.path} {key}=<its new place>."
            raise CheckpointError(f"{error} {moved}") from None

    init, guide = located(config.init, "init"), located(config.start.guide, "start.guide")
    teacher = located(getattr(config.algo, "teacher", None), "algo.teacher")
    if guide is not None:
        config = replace(config, start=replace(config.start, guide=str(guide.path.resolve())))
    if config.start.dataset is not None:
        recorded = str(find_dataset(config.start.dataset).absolute())
        config = replace(config, start=replace(config.start, dataset=recorded))
    fixed = replace(
        config,
        dataset=None if config.dataset is None else str(find_dataset(config.dataset).absolute()),
        reader=absolute_options(config.reader) if config.reader else {},
        init=None if init is None else str(init.path.resolve()),
        algo=config.algo if teacher is None else replace(config.algo, teacher=str(teacher.path.resolve())),
    )
    return lasting(fixed), init, teacher


def _with_task(config: TrainConfig, init: Located | None, teacher: Located | None) -> TrainConfig:
    """Return the configuration with the task of `init` if none is given; refuse policies of another task."""
    if config.env is None and init is not None:
        config = replace(config, env=known_task(init))
        if config.env is not None:
            _log.info("the task is that of init: %s.", task_text(config.env))
    for key, policy in (("init", init), ("algo.teacher", teacher)):
        if config.env is not None and policy is not None:
            require_task_of(policy, config.env, key, allow_other_task=config.allow_other_task)
    return config


def _require_its_task(config: TrainConfig, run: RunDirectory) -> None:
    """Refuse to resume a run on another task; the error names both."""
    section, allow = run.section("env"), config.allow_other_task
    if section and config.env is not None:
        own = restore_part("env", section)
        require_same_task("this command", config.env, f"resume={run.path}", own, allow_other_task=allow)


def _require_usable(config: TrainConfig, typed: Overrides) -> torch.device:
    if config.algo is None:
        raise ConfigError(f"train needs algo=<name>; choose one of: {', '.join(registry.names('algo'))}.")
    device = device_of(config.device)
    _require_parallel(config)
    algo = registry.name_of("algo", config.algo)
    if config.fleet is not None and config.fleet.is_free and not getattr(config.algo, "may_lag", False):
        raise ConfigError(f"fleet.mode must be lockstep with algo={algo}; free is for sac, rlpd and dsrl.")
    check_seeds("seed", config.seed)
    if config.dataset is not None and not getattr(config.algo, "takes_dataset", True):
        raise ConfigError(
            f"algo={algo} learns in an environment and takes no dataset; got dataset={config.dataset}. Clone "
            f"a policy from it with algo=bc and give that as init, or set algo.demo_weight."
        )
    if config.reader and config.dataset is None:
        raise ConfigError(f"reader={config.reader} needs dataset=<file>, whose reader has these options.")
    if config.curation != Curation() and config.dataset is None:
        raise ConfigError("curation chooses among the episodes of a dataset; give dataset=<file>.")
    keys = ("control_hz", "action_low", "action_high")
    if config.env is not None and (named := [key for key in keys if getattr(config, key) is not None]):
        raise ConfigError(f"{named[0]} is known of env; leave it out, or train without env.")
    _warn_of_unused_evaluation(config, typed)
    if config.requires_init and config.init is None:
        _log.warning("these settings tune a policy: give init=<policy>. Without it a new one is trained.")
    return device


def _require_parallel(config: TrainConfig) -> None:
    """Refuse what several processes cannot train."""
    world, algo = current().world, registry.name_of("algo", config.algo)
    if world == 1:
        return
    online = getattr(config.algo, "online_steps", None)
    if online or not getattr(config.algo, "splits_batches", False):
        what = " with algo.online_steps" if online else ""
        raise ConfigError(
            f"algo={algo}{what} is trained in one process; got {world}. Leave torchrun out; num_workers "
            "are processes that act."
        )
    size = config.algo.batch_size
    if size % world and getattr(config.algo, "takes_dataset", True):
        raise ConfigError(f"algo.batch_size must be a multiple of the {world} processes; got {size}.")


def _refuse_unused_policy(config: TrainConfig, typed: Overrides) -> None:
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
    if config.env is not None or config.evaluation.episodes == 0:
        return
    if unused := [key for key in typed.keys if key.startswith(("evaluation.", "trainer.eval_"))]:
        _log.warning("nothing is evaluated, in spite of %s: give env=<task> as well.", ", ".join(unused))
    elif getattr(config.algo, "makes_policy", False):
        _log.info("nothing is evaluated while training: give env=<task> for that.")
