"""`burnish fleet learn`: train a policy on the episodes that robots send, and hand out new versions."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from algos.cloning.fleet import FleetCloning
from algos.cloning.fleet_run import FleetRun, summary
from algos.training.run_directory import RunDirectory
from algos.training.signals import StopSignals
from burnish.config.overrides import RunContext
from burnish.config.saved import describe_part, restore
from burnish.console import output, table
from burnish.runs.locate import RUN_CONFIG, check_folder_to_write, locate
from burnish.runs.tasks import known_task
from envs.datasets import read_dataset
from envs.datasets.catalogue import find_dataset
from envs.fit import task_text, with_task_observations
from policies.bounds import bounded
from policies.errors import ConfigError
from policies.paths import lasting, path_field
from policies.serving.endpoint import EndpointSettings
from policies.serving.fleet import FleetTask
from policies.serving.fleet_messages import LOCAL

_MAX_STEPS = 10_000  # control steps of an episode; longer ones are refused


@dataclass
class FleetLearnConfig(FleetCloning):
    """Configuration of `burnish fleet learn`."""

    policy: str | None = path_field()  # a run (last checkpoint) or policy directory to start from
    dataset: str | None = path_field()  # fixed dataset that training goes on with
    out: str | None = path_field()  # run directory of the learner; one that exists is continued
    listen: str = LOCAL  # address; another host than loopback requires allow_remote=true
    allow_remote: bool = False  # accept robots of other machines
    keys: str | None = path_field()  # folder with CURVE keys, see `burnish serve`; null: no encryption
    steps_per_episode: int = bounded(20, ge=1)  # gradient steps for every episode that arrives
    publish_every: int = bounded(500, ge=1)  # gradient steps between two versions

    def endpoint(self) -> EndpointSettings:
        """Return where to listen."""
        found = re.fullmatch(r"tcp://(.+):(\d+)", self.listen)
        if found is None:
            raise ConfigError(f"listen must be tcp://<host>:<port>; got {self.listen}.")
        host, port = found[1].strip("[]"), int(found[2])
        return EndpointSettings(host=host, port=port, allow_remote=self.allow_remote, keys=self.keys)


def run(config: FleetLearnConfig, context: RunContext) -> None:
    """Learn until a stop signal; a run that goes on keeps the keys that are not typed."""
    known = None if config.out is None else _known(Path(config.out))
    if known is not None:
        kept = {key: value for key, value in known.config.items() if key != "env"}
        config = restore(FleetLearnConfig, kept, context.overrides)
    if config.policy is None or config.dataset is None or config.out is None:
        raise ConfigError("fleet learn needs policy=<run>, dataset=<file> and out=<folder>.")
    config = lasting(replace(config, dataset=str(find_dataset(config.dataset))))
    settings = config.endpoint()
    settings.warn_if_open("teach the policy, and read along")
    found = locate(str(config.policy))
    env, policy = known_task(found), found.load()
    task = FleetTask(
        "" if env is None else task_text(env), policy.obs_dim, policy.chunk.action_dim, _MAX_STEPS
    )
    dataset = read_dataset(str(config.dataset))
    if env is not None:
        dataset = with_task_observations(env, dataset)
    learner = config.build(policy, dataset, env)
    described = {**asdict(config), "env": {} if env is None else describe_part("env", env)}
    directory = known or RunDirectory.create_at(str(config.out), described)
    with directory.claim(), StopSignals() as stop:
        service = FleetRun(
            learner,
            directory,
            task,
            settings,
            steps_per_episode=config.steps_per_episode,
            publish_every=config.publish_every,
            provenance=found.provenance(),
        )
        with service:
            directory.amend(described, ())  # keys may differ from those of an earlier start
            _print_address(service)
            service.serve(lambda: stop.number is not None)
    _print_result(service)


def _known(out: Path) -> RunDirectory | None:
    """Return the run directory of an earlier start; None if there is none."""
    check_folder_to_write(out)
    if not (out / RUN_CONFIG).is_file():
        return None
    run = RunDirectory.open(out)
    if "publish_every" not in run.config:
        raise ConfigError(f"out={out} is a run of burnish train. Give the fleet a folder of its own.")
    return run


def _print_address(service: FleetRun) -> None:
    """Print the address; a parent program may wait for this line."""
    console = output()
    console.print(f"learning: {service.endpoint.endpoint}", markup=False, soft_wrap=True)
    console.file.flush()


def _print_result(service: FleetRun) -> None:
    found = summary(service.episodes)
    output().print(table("", ("robot", "episodes"), found["robots"].items()))
    rows = [(version, *row.values()) for version, row in found["versions"].items()]
    output().print(table("", ("version", "episodes", "without help", "of them successes"), rows))
