"""`burnish train`: clone a policy from demonstrations, or fine-tune one; resumable at any moment."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from algos.base import Algorithm, Metrics, Setup
from algos.training.provenance import processor_name
from algos.training.run_directory import RunDirectory, eval_name, new_folder
from algos.training.signals import Interrupted
from algos.training.trainer import Member, train_together
from burnish.config.schema import GROUPS, describe, describe_part, restore
from burnish.config.train import TrainConfig
from burnish.config.unused_keys import (
    keys_of,
    refuse_a_new_policy_beside_init,
    refuse_a_new_policy_where_algo_makes_it,
    say_what_init_replaces,
    say_where_nothing_is_evaluated,
)
from burnish.console import output, table
from burnish.runs.best_evaluation import best_evaluation
from burnish.runs.context import RunContext
from burnish.runs.device import device_of
from burnish.runs.evaluation import evaluate_with, headline
from burnish.runs.locate import RUN_CONFIG, Located, check_folder_to_write, folder_of, locate, seed_folders
from burnish.runs.seeds import (
    forget_seeds,
    has_seeds,
    note_seeds,
    of_one_seed,
    require_alike,
    require_complete,
    require_distinct,
    require_room,
    require_together,
)
from envs.datasets import EpisodeDataset, lasting_options, read_dataset
from envs.datasets.catalogue import find_dataset
from envs.engine.envpool import ENGINES
from envs.evaluation.protocol import as_evaluated, check_seeds, prepare_eval
from envs.fit import as_shown
from policies import registry
from policies.errors import CheckpointError, ConfigError
from policies.paths import at_home, lasting
from policies.policy import Policy
from policies.storage.hub import is_on_hub

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """What a training run leaves behind."""

    directory: RunDirectory
    last_evaluation: dict[str, float]  # empty without rollouts
    quantity: str  # of it: what the task is judged by; empty without a task


@dataclass(frozen=True)
class PendingRun:
    """A run that is about to be started or continued.

    Attributes:
        config: What to do.
        open_directory: Makes or opens the run directory.
        typed: Overrides; of a directory that is continued, those that distinguish it from what it was.
        is_new: Whether the directory is made here, and taken away again if nothing is learned.
    """

    config: TrainConfig
    open_directory: Callable[[], RunDirectory]
    typed: Sequence[str]
    is_new: bool = True


def run(config: TrainConfig, job: RunContext) -> float | None:
    """Train or continue, print where it is; returns the last success rate or return, a mean over seeds."""
    if has_seeds(config):
        return _run_seeds(config, job)
    outcome = train(config, job)
    last, directory = outcome.last_evaluation, outcome.directory
    rows: list[tuple[str, object]] = [("run", directory.path), ("policy", directory.policy_path())]
    rows += [(name, f"{value:.4g}") for name, value in last.items()]
    if (both := best_evaluation(directory)) is not None and both.count > 1:
        rows.append((both.last.quantity, both))
    output().print(table("", ("", ""), rows), "")
    return last.get(outcome.quantity)


def _run_seeds(config: TrainConfig, job: RunContext) -> float | None:
    """Train or continue several seeds, print where they are; returns the mean of what they are judged by."""
    outcomes = train_seeds(config, job)
    names = list(dict.fromkeys(name for one in outcomes for name in one.last_evaluation))
    rows = []
    for one in outcomes:
        found = {name: f"{value:.4g}" for name, value in one.last_evaluation.items()}
        rows.append((one.directory.path.name, *(found.get(name, "") for name in names)))
    output().print(table(str(outcomes[0].directory.path.parent), ("run", *names), rows), "")
    judged = [one.last_evaluation.get(one.quantity) for one in outcomes]
    known = [value for value in judged if value is not None]
    return sum(known) / len(known) if known else None


def train(config: TrainConfig, job: RunContext) -> TrainResult:
    """Train, or continue the run that `config.resume` names.

    Raises:
        ConfigError: Among others, if there are several seeds; see `train_seeds`.
    """
    if has_seeds(config):
        what = f"resume={config.resume}" if config.seeds is None else f"seeds={config.seeds}"
        raise ConfigError(f"{what} means several runs. Use burnish.train_seeds in Python.")
    if config.resume is None:
        refuse_a_new_policy_beside_init(config, job.overrides)
        refuse_a_new_policy_where_algo_makes_it(config, job.overrides)
        check_folder_to_write(job.directory, "hydra.run.dir")
        config = _with_lasting_paths(config)
        return _train([PendingRun(config, lambda: _new_run(config, job), job.overrides)])[0]
    return _train([_continuation(RunDirectory.open(config.resume), job)])[0]


def train_seeds(config: TrainConfig, job: RunContext) -> list[TrainResult]:
    """Train runs of several seeds at once, or continue those in the folder that `config.resume` names.

    Each is a run like any other, in the folder `seed-<n>` of the job's, and can be continued alone.

    Raises:
        ConfigError: Among others, if the algorithm trains one seed at a time, there is a policy to start
            from, or runs that are continued differ in more than their seeds.
    """
    if config.resume is not None:
        return _train([_continuation(run, job) for run in _runs_below(config)])
    require_distinct(config.seeds or [])
    seeds = sorted(config.seeds or [])  # as they are continued: places in a stack matter to the last bit
    if "seed" in keys_of(job.overrides):
        raise ConfigError(f"seed would have no effect beside seeds={seeds}. Leave one of them out.")
    refuse_a_new_policy_beside_init(config, job.overrides)
    refuse_a_new_policy_where_algo_makes_it(config, job.overrides)
    require_room(job.directory, seeds)
    config = _with_lasting_paths(config)
    place: list[Path] = []

    def undertaking(seed: int) -> PendingRun:
        own, typed = of_one_seed(config, job.overrides, seed)

        def open_directory() -> RunDirectory:
            if not place:
                place.append(new_folder(job.directory) if job.is_proposed else job.directory)
                note_seeds(place[0], seeds)
            return RunDirectory.create_at(folder_of(place[0], seed), describe(own), typed)

        return PendingRun(own, open_directory, typed)

    try:
        outcomes = _train([undertaking(seed) for seed in seeds])
    except BaseException:
        if place and not seed_folders(place[0]):  # nothing was learned
            forget_seeds(place[0])
        raise
    return [outcomes[seeds.index(seed)] for seed in config.seeds or []]


def _continuation(directory: RunDirectory, job: RunContext) -> PendingRun:
    """Return what it is to continue a run, with what was typed."""
    known = parts_of(directory)
    changes = [text for text in job.overrides if not text.startswith("resume=") and text not in known]
    config = at_home(restore(TrainConfig, directory.config, changes))
    _require_its_policies(config, directory)
    return PendingRun(_with_lasting_paths(config), lambda: directory, changes, is_new=False)


def _runs_below(config: TrainConfig) -> list[RunDirectory]:
    """Return the runs of the seeds that are continued.

    Raises:
        ConfigError: If other seeds are asked for, or there are none.
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


def _require_its_policies(config: TrainConfig, run: RunDirectory) -> None:
    """Say how a run is continued whose policy to start or learn from is elsewhere now.

    Raises:
        CheckpointError: If there is none where the run found it.
    """
    for key, path in (("init", config.init), ("algo.teacher", getattr(config.algo, "teacher", None))):
        if path is None or is_on_hub(path):
            continue
        try:
            locate(path, key)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} If it was moved, say where to: burnish train resume={run.path} {key}=<its new "
                f"place>."
            ) from None


def _new_run(config: TrainConfig, job: RunContext) -> RunDirectory:
    """Make the directory of a new run."""
    place = new_folder(job.directory) if job.is_proposed else job.directory
    return RunDirectory.create_at(place, describe(config), job.overrides)


def with_resumed_parts(overrides: Sequence[str]) -> list[str]:
    """Put the parts of the run that is resumed in front, so that their keys are known while composing."""
    parser = OverridesParser.create()
    named = [parser.parse_override(text).value() for text in overrides if text.startswith("resume=")]
    run = None if not named or named[-1] is None else Path(str(named[-1])).expanduser()
    if run is None:
        return list(overrides)
    run = next(iter(seed_folders(run)), run)
    if not (run / RUN_CONFIG).is_file():
        return list(overrides)
    typed = {text.partition("=")[0] for text in overrides}
    parts = parts_of(RunDirectory.open(run))
    return [*(part for part in parts if part.partition("=")[0] not in typed), *overrides]


def parts_of(directory: RunDirectory) -> list[str]:
    """Return the choices of a run as overrides, e.g. `algo=dppo` and `env=avoid`.

    Raises:
        ConfigError: If one is no part that is known here.
    """
    names = {group: directory.section(group).get("name") for group in GROUPS if directory.section(group)}
    for group, name in names.items():
        registry.lookup(group, str(name))
    return [f"{group}={name}" for group, name in names.items()]


def _with_lasting_paths(config: TrainConfig) -> TrainConfig:
    """Name files from the root, and policies as one checkpoint: the last one of a run moves."""
    dataset = None if config.dataset is None else str(find_dataset(config.dataset).absolute())
    data = lasting_options(config.data)
    init = None if config.init is None else str(locate(config.init, "init").path.resolve())
    algo, teacher = config.algo, _teacher(config)
    if teacher is not None:
        algo = dataclasses.replace(algo, teacher=str(teacher.path.resolve()))
    return lasting(dataclasses.replace(config, dataset=dataset, data=data, init=init, algo=algo))


def _teacher(config: TrainConfig) -> Located | None:
    """Find the policy to learn from, for an algorithm that knows one."""
    teacher = getattr(config.algo, "teacher", None)
    return None if teacher is None else locate(teacher, "algo.teacher")


def _train(undertakings: Sequence[PendingRun]) -> list[TrainResult]:
    """Build everything that can be refused, then make the directories, then train."""
    first = undertakings[0].config
    if first.algo is None:
        raise ConfigError(f"train needs algo=<name>; choose one of: {', '.join(registry.parts('algo'))}.")
    algorithms, advance = _built([one.config for one in undertakings])
    found: list[dict[str, float]] = [{} for _ in undertakings]
    say_where_nothing_is_evaluated(first, undertakings[0].typed)
    try:
        _try_evaluation(first, algorithms[0])
        with ExitStack() as held:
            directories: list[RunDirectory] = []
            held.enter_context(_said_how_to_continue(directories))
            held.enter_context(_taken_away_if_bare(directories if undertakings[0].is_new else []))
            members = []
            for one, algorithm, last in zip(undertakings, algorithms, found, strict=True):
                directories.append(directory := one.open_directory())
                members.append(
                    Member(
                        algorithm,
                        directory,
                        _evaluator(one.config, directory, last),
                        provenance(one.config) | _company([each.config for each in undertakings]),
                        (describe(one.config), one.typed) if one.typed and not one.is_new else None,
                    )
                )
            title = _place_of(directories).name
            if len(members) > 1:
                title += f" ({len(members)} seeds)"
            train_together(members, advance, first.trainer, title=title, progress=first.progress)
    finally:
        for algorithm in algorithms:
            algorithm.close()
    quantity = "" if first.env is None else first.env.spec.quantity
    return [TrainResult(run, last, quantity) for run, last in zip(directories, found, strict=True)]


def _built(configs: Sequence[TrainConfig]) -> tuple[list[Algorithm], Callable[[], Sequence[Metrics]]]:
    """Return the algorithm of every run, and what advances all of them.

    Raises:
        ConfigError: If there are several, and they cannot be trained together.
    """
    first = configs[0]
    if len(configs) == 1:
        algorithm = first.algo.build(prepare(first))
        return [algorithm], lambda: [algorithm.advance()]
    require_alike(configs)
    require_together(first)
    runs = first.algo.build_seeds(prepare(first), [config.seed for config in configs])
    together = first.algo.together(runs)
    return runs, together.advance


def _company(configs: Sequence[TrainConfig]) -> dict[str, Any]:
    """Return which seeds were trained together: in other company, numbers are the same to rounding only."""
    return {} if len(configs) == 1 else {"seeds_together": [config.seed for config in configs]}


def _place_of(directories: Sequence[RunDirectory]) -> Path:
    """Return the run, or the folder of several."""
    return directories[0].path if len(directories) == 1 else directories[0].path.parent


def _try_evaluation(config: TrainConfig, algorithm: Algorithm) -> None:
    """Refuse an evaluation that could not be made, before anything is trained.

    Raises:
        ConfigError: If the policy cannot denoise in so many steps, or execute or begin as it is told to, or
            if the task shows it other images than its own.
        CapabilityError: If it has no such switch, or the task cannot be drawn.
        MissingExtraError: If nothing can be drawn here.
    """
    if config.env is not None and config.evaluation.episodes:
        policy = algorithm.snapshot()
        prepare_eval(config.env, policy)
        as_evaluated(policy, config.evaluation)


@contextmanager
def _said_how_to_continue(directories: Sequence[RunDirectory]) -> Iterator[None]:
    """Name the command that continues what is stopped; the directories may be added meanwhile."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        if directories and directories[0].path.is_dir():
            steps = [run.latest() for run in directories]
            known = [step for step in steps if step is not None]
            saved = f"its last checkpoint is {min(known)}" if known else "before its first checkpoint"
            place = _place_of(directories)
            _log.warning("stopped; %s. Continue with: burnish train resume=%s", saved, place)
        raise


@contextmanager
def _taken_away_if_bare(directories: Sequence[RunDirectory]) -> Iterator[None]:
    """Remove new runs that end before one of them has anything to show; they may be added meanwhile."""
    try:
        yield
    except BaseException:
        if all(directory.is_bare() for directory in directories):
            for directory in directories:
                directory.remove_if_bare()
        raise


def prepare(config: TrainConfig) -> Setup:
    """Load what a run is built from; everything that can be refused is refused here or in `build`."""
    device = device_of(config.device)
    check_seeds("seed", config.seed)
    if config.num_workers < 0:
        raise ConfigError(f"num_workers must be 0 or more; got {config.num_workers}.")
    if config.dataset is not None and not getattr(config.algo, "takes_dataset", True):
        raise ConfigError(
            f"algo={registry.name_of('algo', config.algo)} learns in an environment and takes no dataset; "
            f"got dataset={config.dataset}. Clone a policy from it with algo=bc and give that as init."
        )
    if config.engine not in ENGINES:
        raise ConfigError(f"engine must be one of {', '.join(ENGINES)}; got '{config.engine}'.")
    if config.engine != Setup.engine and not hasattr(config.algo, "num_envs"):
        algo = registry.name_of("algo", config.algo)
        raise ConfigError(
            f"engine={config.engine} is for algorithms that collect experience; algo={algo} learns from a "
            f"dataset. Leave it out; evaluation is always exact."
        )
    if config.data and config.dataset is None:
        raise ConfigError(f"data={config.data} says how a dataset is read; give dataset=<file> with it.")
    init = None if config.init is None else locate(config.init, "init").load()
    if init is not None:
        say_what_init_replaces(config, init)
    elif config.tunes:
        _log.warning("these settings tune a policy: give init=<policy>. Without it a new one is trained.")
    teacher = _teacher(config)
    return Setup(
        policy=config.policy_config(),
        env=config.env,
        dataset=_dataset(config),
        init=init,
        teacher=None if teacher is None else teacher.load(),
        seed=config.seed,
        num_workers=config.num_workers,
        engine=config.engine,
        num_threads=config.num_threads,
        device=device,
    )


def _dataset(config: TrainConfig) -> EpisodeDataset | None:
    """Read the dataset, if there is one, as the task shows such data."""
    if config.dataset is None:
        return None
    dataset = read_dataset(config.dataset, **config.data)
    return dataset if config.env is None else as_shown(config.env, dataset)


def provenance(config: TrainConfig) -> dict[str, Any]:
    """Return the facts that travel with the policy, so that it can be evaluated and cited."""
    teacher = _teacher(config)
    facts: dict[str, Any] = {
        "algo": registry.name_of("algo", config.algo),
        "seed": config.seed,
        "env": None if config.env is None else describe_part("env", config.env),
        "dataset": None if config.dataset is None else Path(config.dataset).name,
        "data": config.data or None,
        "init": None if config.init is None else locate(config.init, "init").label,
        "teacher": None if teacher is None else teacher.label,
        "num_workers": config.num_workers,
        "processor": processor_name(),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _evaluator(
    config: TrainConfig, directory: RunDirectory, last: dict[str, float]
) -> Callable[[Policy, int], Mapping[str, float]] | None:
    """Return the rollouts that the trainer makes now and then; None without an environment."""
    if config.env is None or config.evaluation.episodes == 0:
        return None

    def evaluate(policy: Policy, step: int) -> Mapping[str, float]:
        evaluation = evaluate_with(policy, config.env, config.evaluation, config.num_workers)
        directory.write_eval(eval_name(step), json.loads(evaluation.to_json()))
        last.clear()
        last.update(headline(evaluation))
        return last

    return evaluate
