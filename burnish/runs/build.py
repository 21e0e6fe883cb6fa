"""Second stage of training: load policies, build the algorithm, create the run directory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from algos.base import Algorithm, Metrics, Setup
from algos.training.ranks import current
from algos.training.run_directory import FollowedRun, RunDirectory, new_folder
from burnish.config.saved import describe
from burnish.config.train import TrainConfig
from burnish.runs.locate import folder_of, locate, seed_folders
from burnish.runs.resolve import ResolvedRun
from burnish.runs.seeds import remove_seeds, write_seeds
from burnish.runs.tasks import record_code, require_task_of
from envs.datasets import EpisodeDataset, read_dataset
from envs.datasets.action_bounds import warn_of_actions_outside
from envs.datasets.interface import interface_of, with_given
from envs.evaluation.protocol import prepare_eval, with_settings
from envs.fit import with_task_observations
from envs.rollouts.fleet import LOCAL
from envs.rollouts.starts import Recorded, Starts
from policies.build import complete
from policies.errors import ConfigError
from policies.policy import Policy
from policies.policy_config import PolicyConfig
from policies.registry import name_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """The algorithms of all runs, and the function that advances them."""

    algorithms: Sequence[Algorithm]
    advance: Callable[[], Sequence[Metrics]]

    def close(self) -> None:
        for algorithm in self.algorithms:
            algorithm.close()


def build(run: ResolvedRun) -> Built:
    """Build the algorithms, and check that evaluation during training is possible."""
    config, setup = run.config, prepare(run)
    if len(run.configs) == 1:
        algorithm = config.algo.build(setup)
        built = Built([algorithm], lambda: [algorithm.advance()])
    else:
        from algos.offline.batched_seeds import SeedBatch, build_seeds  # not needed for a single run

        algorithms = build_seeds(config.algo, setup, [one.seed for one in run.configs])
        built = Built([*algorithms], SeedBatch(algorithms).advance)
    try:
        if setup.has_unused_starts:
            algo = name_of("algo", config.algo)
            raise ConfigError(f"algo={algo} collects no episodes, so start has no effect. Leave it out.")
        if config.env is not None and config.is_evaluated:
            policy = built.algorithms[0].snapshot()
            prepare_eval(config.env, policy)
            with_settings(policy, config.evaluation)
    except BaseException:
        built.close()
        raise
    return built


def prepare(run: ResolvedRun) -> Setup:
    """Load the policies of a run; the dataset is read, and curated, at its first use."""
    config = run.config
    init = None if run.init is None else run.init.load()
    if init is not None:
        _warn_of_replaced_settings(config, init)
    return Setup(
        policy=config.policy_config(),
        env=config.env,
        dataset=None if config.dataset is None else partial(_dataset, run),  # type: ignore[arg-type]
        init=init,
        teacher=None if run.teacher is None else run.teacher.load(),
        starts=partial(_starts, config) if config.start.is_on else None,  # type: ignore[arg-type]
        seed=config.seed,
        num_workers=config.num_workers,
        fleet=config.fleet or LOCAL,
        num_threads=config.num_threads,
        device=run.device,
        rollout=config.rollout,
        allow_other_task=config.allow_other_task,
    )


def _dataset(run: ResolvedRun) -> EpisodeDataset:
    config = run.config
    assert config.dataset is not None
    dataset = read_dataset(config.dataset, **config.reader)
    if config.env is not None:
        return config.curation(with_task_observations(config.env, dataset))
    known = interface_of(dataset.meta, dataset.obs_dim, dataset.action_dim)
    bounds = {"action_low": config.action_low, "action_high": config.action_high}
    run.interface.update(with_given(known, dataset.action_dim, control_hz=config.control_hz, **bounds))
    if "action_low" in run.interface:
        warn_of_actions_outside(dataset, run.interface["action_low"], run.interface["action_high"])
    return config.curation(dataset)


def _starts(config: TrainConfig) -> Starts:
    start, env = config.start, config.env
    if start.guide is None:
        assert start.dataset is not None
        dataset = read_dataset(start.dataset)
        dataset = dataset if env is None else with_task_observations(env, dataset)
        return Starts(start, recorded=Recorded.from_dataset(dataset))
    guide = locate(start.guide, "start.guide")
    if env is not None:
        require_task_of(guide, env, "start.guide", allow_other_task=config.allow_other_task)
    return Starts(start, guide=guide.load().on_cpu().eval())


def _warn_of_replaced_settings(config: TrainConfig, init: Policy) -> None:
    wanted, default = config.policy_config(), complete(PolicyConfig())
    unused = [
        f.name
        for f in fields(PolicyConfig)
        if (value := getattr(wanted, f.name)) is not None
        if value not in (getattr(default, f.name), getattr(init.config, f.name))
    ]
    if unused:
        _log.warning(
            "the policy of init keeps its own %s; this configuration's has no effect.", ", ".join(unused)
        )


@contextmanager
def opened_directories(run: ResolvedRun, directories: list[RunDirectory]) -> Iterator[None]:
    """Append the created or opened run directories to a list; new ones still bare at the end are removed."""
    place, ranks = run.folder, current()
    if ranks.rank:
        paths: list[Path] = []
        directories += [FollowedRun(path) for path in ranks.share(paths)]
        yield
        return
    directories += run.continued
    try:
        if not run.continued:
            place = new_folder(run.folder) if run.is_proposed else run.folder
            if run.has_folders:
                write_seeds(place, [config.seed for config in run.configs])
            for config, typed in zip(run.configs, run.overrides, strict=True):
                folder = folder_of(place, config.seed) if run.has_folders else place
                directories.append(RunDirectory.create_at(folder, describe(config), typed.texts))
                record_code(directories[-1].path, config.env)
        ranks.share([directory.path for directory in directories])
        yield
    except BaseException:
        if not run.continued:
            if all(directory.is_bare() for directory in directories):
                for directory in directories:
                    directory.remove_if_bare()
            if run.has_folders and not seed_folders(place):
                remove_seeds(place)
        raise
