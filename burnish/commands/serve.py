"""`burnish serve`: serve a policy to robots over the network."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from algos.base import device_of
from burnish.commands.export import surroundings_of
from burnish.config.overrides import RunContext
from burnish.console import output
from burnish.runs.locate import check_folder_to_write, locate
from envs.evaluation.protocol import with_steps
from policies.bounds import bounded
from policies.errors import ConfigError
from policies.export.signature import is_exported
from policies.paths import path_field
from policies.policy import Policy
from policies.serving.encryption import make_keys
from policies.serving.metrics import metrics_page
from policies.serving.served_policy import ServedFolder, ServedPolicy
from policies.serving.server import Served, Server, ServerSettings
from policies.storage.checksums import sha256
from policies.storage.policy_folder import WEIGHTS
from policies.wrappers.sketch_guidance import steered
from policies.wrappers.sketch_settings import SketchSettings

_log = logging.getLogger(__name__)


@dataclass
class ServeConfig(ServerSettings):
    """Configuration of `burnish serve`."""

    policy: str | None = path_field()  # a run (last checkpoint), a checkpoint, a policy directory, an export
    steps: int | None = None  # denoising steps; null: the policy's default
    steer: SketchSettings = field(default_factory=SketchSettings)  # sketch guidance
    device: str = "cpu"  # inference device: cpu, cuda or cuda:<n>
    metrics_port: int | None = bounded(None, ge=0, lt=65536)  # port of /metrics; 0: any free one; null: none
    new_client: str | None = None  # create keys for this client in keys=<folder>, and exit

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_client is not None and self.keys is None:
            raise ConfigError("new_client needs keys=<folder>, where the keys are put.")


def run(config: ServeConfig, context: RunContext) -> None:
    """Serve until a stop signal."""
    if config.new_client is not None:
        check_folder_to_write(str(config.keys), "keys")
        path = make_keys(str(config.keys), config.new_client)
        output().print(f"written: {path}", markup=False, soft_wrap=True)
        return
    settings = ServerSettings(**{f.name: getattr(config, f.name) for f in fields(ServerSettings)})
    settings.warn_if_open("command the robot, and read along")
    with (
        Server(served_by(config), settings) as server,
        metrics_page(server.metrics, config.metrics_port) as page,
        _stopped_by_signals(server.stop),
    ):
        _print_result(server.endpoint, page)
        server.run()
    _log.info("stopped; %d decisions", server.metrics.counts["decisions"])


def served_by(config: ServeConfig) -> Served:
    """Load the policy to serve."""
    if config.policy is None:
        raise ConfigError("serve needs policy=<run, policy directory or exported folder>.")
    if is_exported(Path(config.policy)):
        if config.steps is not None or config.device != "cpu" or config.steer.is_on:
            raise ConfigError(
                "an exported folder has its steps and its sketch, and runs on the CPU; leave steps, steer "
                "and device out."
            )
        return ServedFolder(config.policy)
    device = device_of(config.device)
    found = locate(config.policy)
    policy = cast(Policy, with_steps(found.load(), config.steps)).to(device)
    chosen, around = steered(policy, config.steer), surroundings_of(found, policy)
    return ServedPolicy(chosen, around, sha256(found.path / WEIGHTS))


def _print_result(endpoint: str, page: int | None) -> None:
    """Print the address; a parent program may wait for this line."""
    console = output()
    where = "" if page is None else f", metrics: http://127.0.0.1:{page}/metrics"
    console.print(f"serving: {endpoint}{where}", markup=False, soft_wrap=True)
    console.file.flush()


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Shut down cleanly at the first SIGINT or SIGTERM, immediately at the second."""

    def handle(number: int, frame: Any) -> None:
        for one in earlier:
            signal.signal(one, earlier[one])
        stop()

    earlier = {one: signal.signal(one, handle) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in earlier.items():
            signal.signal(one, handler)
