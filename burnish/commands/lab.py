"""`burnish lab`: a local page on which a policy acts and is steered with the mouse."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.overrides import RunContext
from burnish.console import output
from burnish.lab.controls import Subject
from burnish.lab.run_control import RunControl
from burnish.lab.runs import RunFolder
from burnish.lab.server import Lab, LabServer
from burnish.lab.session import Session
from burnish.runs.locate import locate
from burnish.runs.tasks import known_task, require_task_of, task_of
from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.paths import path_field


@dataclass(frozen=True)
class LabConfig(Checked):
    """Configuration of `burnish lab`."""

    policy: str | None = path_field()  # a run (last checkpoint), a checkpoint, or a policy directory
    compose: Any = path_field()  # instead of policy: two policies that are composed, [a,b]
    env: Any = None  # null: the policy's own task
    allow_other_task: bool = False  # show a policy in another task than the one that it was made for
    runs: str | None = path_field("runs")  # folder whose runs are shown as they grow, if it exists
    control_runs: bool = False  # whether they can be stopped and continued from the page
    port: int = bounded(0, ge=0, lt=65536)  # on this machine; 0: any free port


def run(config: LabConfig, context: RunContext) -> None:
    """Print the address of the page, and serve it until a stop signal.

    Raises:
        ConfigError: If there is nothing to show, or policy and task do not fit.
        CapabilityError: If the task is neither seen from above nor simulated by MuJoCo.
    """
    folder = None if config.runs is None else Path(config.runs)
    runs = RunFolder(folder) if folder is not None and folder.is_dir() else None
    if runs is None and config.runs not in (None, LabConfig.runs):
        raise ConfigError(f"runs={config.runs}: there is no such folder.")
    has_policy = config.policy is not None or config.compose is not None
    subject = subject_of(config) if has_policy or runs is None else None
    if subject is not None:
        Session(subject).close()  # raises here, not when a page is opened
    control = RunControl(runs) if config.control_runs and runs is not None else None
    server = LabServer(Lab(subject, runs, control), config.port)
    console = output()
    console.print(f"laboratory: {server.address}", markup=False, soft_wrap=True)
    console.file.flush()
    server.run()


def subject_of(config: LabConfig) -> Subject:
    """Load the policy or the two that are composed, and their task.

    Raises:
        ConfigError: If there is no policy or no task, or they do not fit.
    """
    paths = [config.policy] if config.compose is None else config.compose
    if paths == [None] or (config.policy is not None and config.compose is not None):
        raise ConfigError("lab needs policy=<run or policy directory>, compose=[a,b], or runs=<folder>.")
    if config.compose is not None and (not isinstance(paths, list) or len(paths) != 2):
        raise ConfigError(f"compose needs two policies, compose=[a,b]; got {config.compose}.")
    found = tuple(locate(str(path), "policy" if config.compose is None else "compose") for path in paths)
    env = config.env if config.env is not None else task_of(found[0], " Give env=<name>.")
    for one in found:
        require_task_of(one, env, "policy", allow_other_task=config.allow_other_task)
    return Subject(found, tuple(one.load().eval() for one in found), env, env != known_task(found[0]))
