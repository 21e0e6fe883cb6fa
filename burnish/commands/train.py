"""`burnish train`: clone a policy from demonstrations, or fine-tune one; resumable at any moment."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING

from algos.base import Algorithm, Setup
from algos.state import RunDirectory, eval_name, new_folder
from algos.trainer import Interrupted, TrainerSettings
from algos.trainer import train as run_trainer
from burnish.commands.evaluate import evaluate_with, headline
from burnish.config import GROUPS, describe, describe_part, restore
from burnish.console import output, table
from burnish.device import device_of
from burnish.job import Job
from burnish.last_and_best import last_and_best
from burnish.locate import RUN_CONFIG, Located, check_folder_to_write, locate
from envs.datasets import EpisodeDataset, lasting_options, read_dataset
from envs.datasets.catalogue import find_dataset
from envs.envpool import ENGINES
from envs.evaluation_protocol import EvaluationSettings, as_evaluated, check_seeds, staged
from envs.fit import as_shown
from policies import registry
from policies.errors import CheckpointError, ConfigError
from policies.hub import is_on_hub
from policies.paths import at_home, lasting, path_field
from policies.policy import PART_GROUPS, Policy, PolicyConfig, complete

_log = logging.getLogger(__name__)


def _shape_schema() -> type:
    """Return PolicyConfig without its parts, which stand at the top of the configuration."""
    hints, kept = get_type_hints(PolicyConfig), []
    for f in fields(PolicyConfig):
        if f.name not in PART_GROUPS:
            own = {k: getattr(f, k) for k in ("default", "default_factory")}
            kept.append(
                (
                    f.name,
                    hints[f.name],
                    field(**{k: v for k, v in own.items() if v is not dataclasses.MISSING}),
                )
            )
    schema = make_dataclass("PolicyShape", kept)
    schema.__module__ = __name__
    return schema


PolicyShape = _shape_schema()


@dataclass
class TrainConfig:
    """What `burnish train` does."""

    algo: Any = None  # what learns
    env: Any = None  # the task; null: no rollouts (cloning from a file)
    dataset: str | None = path_field()  # file of demonstrations or transitions, or name of a downloaded one
    data: dict[str, Any] = field(default_factory=dict)  # options of its format's reader: see Data
    init: str | None = path_field()  # policy to start from: a run or a policy directory
    tunes: bool = False  # of an experiment: its settings are for a policy that is given; warns without init
    resume: str | None = path_field()  # run to continue, with the configuration it was last run with
    name: str | None = MISSING  # end of the run directory's name; the algorithm's name when left out
    seed: int = 0  # root of every random stream of the run
    process: Any = None  # what the output of a new policy's network means
    encoder: Any = None  # what a new policy sees of an observation
    backbone: Any = None  # network of a new policy
    sampler: Any = None  # how a new policy is integrated; null: the process's own
    policy: Any = field(default_factory=PolicyShape)  # horizons and normalisation of a new policy
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    evaluation: EvaluationSettings = field(default_factory=lambda: EvaluationSettings(episodes=50))
    num_workers: int = Setup.num_workers  # rollout processes, each with its own noise; 0: this one, as if 1
    engine: str = Setup.engine  # exact | envpool, which only collects: see Environments; evaluation is exact
    num_threads: int | None = Setup.num_threads  # null: 2 on-policy (sharing gradients), else 1 (of torch)
    device: str = "cpu"  # cpu, cuda or cuda:<n>: where gradients are computed; rollouts stay on the CPU
    progress: bool | None = None  # null: a bar on a terminal, lines elsewhere

    def policy_config(self) -> PolicyConfig:
        """Return what a new policy is made of."""
        shape = {f.name: getattr(self.policy, f.name) for f in fields(self.policy)}
        return PolicyConfig(**{name: getattr(self, name) for name in PART_GROUPS}, **shape)


@dataclass(frozen=True)
class Outcome:
    """What a training run leaves behind."""

    directory: RunDirectory
    last_evaluation: dict[str, float]  # empty without rollouts
    quantity: str  # of it: what the task is judged by; empty without a task


def run(config: TrainConfig, job: Job) -> float | None:
    """Train or continue, print where it is; returns the last success rate or mean return."""
    outcome = train(config, job)
    last, directory = outcome.last_evaluation, outcome.directory
    rows: list[tuple[str, object]] = [("run", directory.path), ("policy", directory.policy_path())]
    rows += [(name, f"{value:.4g}") for name, value in last.items()]
    if (both := last_and_best(directory)) is not None and both.count > 1:
        rows.append((both.last.quantity, both))
    output().print(table("", ("", ""), rows), "")
    return last.get(outcome.quantity)


def train(config: TrainConfig, job: Job) -> Outcome:
    """Train, or continue the run that `config.resume` names."""
    if config.resume is None:
        _refuse_a_new_policy_beside_init(config, job.overrides)
        _refuse_a_new_policy_where_algo_makes_it(config, job.overrides)
        check_folder_to_write(job.directory, "hydra.run.dir")
        config = _with_lasting_paths(config)
        return _train(config, lambda: _new_run(config, job), job.overrides)
    directory = RunDirectory.open(config.resume)
    known = parts_of(directory)
    changes = [text for text in job.overrides if not text.startswith("resume=") and text not in known]
    config = at_home(restore(TrainConfig, directory.config, changes))
    _require_its_policies(config, directory)
    config = _with_lasting_paths(config)
    return _train(config, lambda: directory, changes, is_new=False)


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


def _new_run(config: TrainConfig, job: Job) -> RunDirectory:
    """Make the directory of a new run."""
    place = new_folder(job.directory) if job.is_proposed else job.directory
    return RunDirectory.create_at(place, describe(config), job.overrides)


def with_resumed_parts(overrides: Sequence[str]) -> list[str]:
    """Put the parts of the run that is resumed in front, so that their keys are known while composing."""
    parser = OverridesParser.create()
    named = [parser.parse_override(text).value() for text in overrides if text.startswith("resume=")]
    run = None if not named or named[-1] is None else Path(str(named[-1])).expanduser()
    if run is None or not (run / RUN_CONFIG).is_file():
        return list(overrides)
    typed = {text.partition("=")[0] for text in overrides}
    parts = parts_of(RunDirectory.open(run))
    return [*(part for part in parts if part.partition("=")[0] not in typed), *overrides]


def parts_of(directory: RunDirectory) -> list[str]:
    """Return the choices of a run as overrides, e.g. `algo=dppo` and `env=avoid`."""
    chosen = {group: directory.config.get(group) for group in GROUPS}
    return [f"{group}={part['name']}" for group, part in chosen.items() if isinstance(part, Mapping)]


def _refuse_a_new_policy_beside_init(config: TrainConfig, overrides: Sequence[str]) -> None:
    """Refuse what was typed about a new policy where the one of `init` is taken as it is.

    Raises:
        ConfigError: If anything was.
    """
    typed = [] if config.init is None else _typed_about_a_policy(overrides)
    if typed:
        raise ConfigError(
            f"init={config.init} is a whole policy, so {', '.join(typed)} would have no effect. Leave "
            f"{'it' if len(typed) == 1 else 'them'} out, or train a new policy without init."
        )


def _refuse_a_new_policy_where_algo_makes_it(config: TrainConfig, overrides: Sequence[str]) -> None:
    """Refuse what was typed about a new policy where the algorithm decides what that is.

    Raises:
        ConfigError: If anything was.
    """
    if config.init is not None or not getattr(config.algo, "makes_policy", False):
        return
    if typed := _typed_about_a_policy(overrides):
        algo = registry.name_of("algo", config.algo)
        raise ConfigError(
            f"algo={algo} makes its own actor (see algo.hidden_dims), so {', '.join(typed)} would have no "
            "effect. Leave it out; or clone a policy of that kind with algo=bc and give it as init."
        )


def _typed_about_a_policy(overrides: Sequence[str]) -> list[str]:
    """Return the keys among overrides that say what a new policy is."""
    return [key for key in _keys_of(overrides) if key.partition(".")[0] in (*PART_GROUPS, "policy")]


def _keys_of(overrides: Sequence[str]) -> list[str]:
    """Return the keys and groups of overrides."""
    parser = OverridesParser.create()
    return [str(parser.parse_override(text).key_or_group) for text in overrides]


def _say_where_nothing_is_evaluated(config: TrainConfig, overrides: Sequence[str]) -> None:
    """Warn of what was typed about evaluations where there is no task to evaluate in."""
    if config.env is not None or config.evaluation.episodes == 0:
        return
    if vain := [key for key in _keys_of(overrides) if key.startswith(("evaluation.", "trainer.eval_"))]:
        _log.warning("nothing is evaluated, in spite of %s: give env=<task> as well.", ", ".join(vain))
    elif getattr(config.algo, "makes_policy", False):
        _log.info("nothing is evaluated while training: give env=<task> for that.")


def _say_what_init_replaces(config: TrainConfig, init: Policy) -> None:
    """Warn of what an experiment sets about a new policy and the one of `init` has otherwise."""
    wanted, default = config.policy_config(), complete(PolicyConfig())
    vain = [
        f.name
        for f in fields(PolicyConfig)
        if (value := getattr(wanted, f.name)) is not None
        if value not in (getattr(default, f.name), getattr(init.config, f.name))
    ]
    if vain:
        _log.warning(
            "the policy of init keeps its own %s; this configuration's has no effect.", ", ".join(vain)
        )


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


def _train(
    config: TrainConfig,
    open_directory: Callable[[], RunDirectory],
    typed: Sequence[str],
    *,
    is_new: bool = True,
) -> Outcome:
    """Build everything that can be refused, then make the directory, then train.

    Args:
        config: What to do.
        open_directory: Makes or opens the run directory.
        typed: Overrides; of a directory that is continued, those that distinguish it from what it was.
        is_new: Whether the directory is made here, and taken away again if nothing is learned.
    """
    if config.algo is None:
        raise ConfigError(f"train needs algo=<name>; choose one of: {', '.join(registry.parts('algo'))}.")
    algorithm = config.algo.build(prepare(config))
    last: dict[str, float] = {}
    _say_where_nothing_is_evaluated(config, typed)
    try:
        _try_evaluation(config, algorithm)
        directory = open_directory()
        with _said_how_to_continue(directory), _taken_away_if_bare(directory if is_new else None):
            run_trainer(
                algorithm,
                directory,
                config.trainer,
                evaluator=_evaluator(config, directory, last),
                progress=config.progress,
                provenance=provenance(config),
                amendment=(describe(config), typed) if typed and not is_new else None,
            )
    finally:
        algorithm.close()
    return Outcome(directory, last, "" if config.env is None else config.env.spec.quantity)


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
        staged(config.env, policy)
        as_evaluated(policy, config.evaluation)


@contextmanager
def _said_how_to_continue(directory: RunDirectory) -> Iterator[None]:
    """Name the command that continues a run, when it is stopped."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        if directory.path.is_dir():
            step = directory.latest()
            saved = "before its first checkpoint" if step is None else f"its last checkpoint is {step}"
            _log.warning("stopped; %s. Continue with: burnish train resume=%s", saved, directory.path)
        raise


@contextmanager
def _taken_away_if_bare(directory: RunDirectory | None) -> Iterator[None]:
    """Remove a new run that ends before it has anything to show."""
    try:
        yield
    except BaseException:
        if directory is not None:
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
        _say_what_init_replaces(config, init)
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
