"""`burnish export`: export a policy for machines without PyTorch, verified against the original."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from burnish.config.overrides import RunContext
from burnish.console import output, table
from burnish.runs.locate import RUN_CONFIG, Located, check_folder_to_write, locate
from burnish.runs.tasks import task_of
from envs.datasets.interface import interface_of, interface_of_task, with_given
from envs.evaluation.protocol import with_steps
from envs.evaluation.settings import check_seeds
from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.export.card import latency_table
from policies.export.export import GRAPHS, export_onnx
from policies.export.folder import ExportReport, Surroundings, refuse_to_replace
from policies.paths import path_field
from policies.policy import Policy
from policies.storage.policy_folder import CONFIG as POLICY_CONFIG
from policies.wrappers.sketch_guidance import describe_steering, steered
from policies.wrappers.sketch_settings import SketchSettings

_log = logging.getLogger(__name__)


@dataclass
class ExportConfig(Checked):
    """Configuration of `burnish export`."""

    policy: str | None = path_field()  # a run (last checkpoint), a checkpoint, or a policy directory
    graph: str = bounded("whole", choices=GRAPHS)  # with the sampler | one evaluation and a step table
    out: str | None = path_field()  # directory; null: exported-<policy>
    steps: int | None = None  # denoising steps; null: the policy's default
    tolerance: float = bounded(1e-5, gt=0)  # largest allowed difference to the original, see the report
    seed: int = 0  # seed of the random inputs for the comparison
    steer: SketchSettings = field(default_factory=SketchSettings)  # sketch guidance, part of the graph
    control_hz: float | None = None  # rate of the robot [Hz]; null: that of the task or the dataset
    action_low: Any = None  # lowest actions, a number or one per entry; null: those of the task
    action_high: Any = None  # highest actions
    overwrite: bool = False  # replace the export in an existing directory

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seeds("seed", self.seed)


def run(config: ExportConfig, context: RunContext) -> float:
    """Export, print parity and latency, and return the largest difference."""
    report = export(config)
    _print_result(report)
    return report.worst


def export(config: ExportConfig) -> ExportReport:
    """Export a policy; raises if the export does not reproduce it."""
    if config.policy is None:
        raise ConfigError("export needs policy=<run or policy directory>.")
    found = locate(config.policy)
    target = Path(config.out if config.out is not None else f"exported-{found.label}")
    check_folder_to_write(target)
    if any((target / name).is_file() for name in (RUN_CONFIG, POLICY_CONFIG)):
        raise ConfigError(
            f"out={target} is a run or a policy directory, in whose place the graphs would be found; choose "
            f"another, for example out={target / 'exported'}."
        )
    refuse_to_replace(target, overwrite=config.overwrite)
    policy = cast(Policy, with_steps(found.load(), config.steps))
    around = surroundings_of(found, policy, config)
    return export_onnx(
        steered(policy, config.steer),
        target,
        graph=config.graph,
        tolerance=config.tolerance,
        seed=config.seed,
        overwrite=config.overwrite,
        surroundings=with_sketch(around, config.steer),
    )


def with_sketch(around: Surroundings, steer: SketchSettings) -> Surroundings:
    """Return the facts with those of a sketch, if there is one."""
    sketch = describe_steering(steer)
    return around if sketch is None else replace(around, provenance={**around.provenance, "steer": sketch})


def surroundings_of(found: Located, policy: Policy, given: ExportConfig | None = None) -> Surroundings:
    """Return names, rate and limits: those given, else of the policy's task, else of its dataset.

    Without any limits there is a warning.
    """
    provenance, task, reason, width = found.provenance(), None, "", policy.chunk.action_dim
    try:
        spec = task_of(found).spec
        task, reason = spec.name, "its task has none."
        facts = {key: getattr(spec, key) for key in interface_of_task(spec)}
    except ConfigError as error:
        reason, facts = str(error), interface_of(provenance, policy.obs_dim, width)
    if given is not None:
        limits = {"action_low": given.action_low, "action_high": given.action_high}
        facts = with_given(facts, width, control_hz=given.control_hz, **limits)
    if "action_low" not in facts:
        _log.warning(
            "the policy knows no limits, so what runs it does not limit actions; give burnish export "
            "action_low=… and action_high=…: %s", reason,
        )  # fmt: skip
    names = (facts.get("control_hz"), facts.get("obs_names"), facts.get("action_names"))
    box = facts.get("action_low"), facts.get("action_high")
    return Surroundings(task, *names, *box, provenance=provenance)


def _print_result(report: ExportReport) -> None:
    console = output()
    console.print(f"written: {report.directory}", markup=False, soft_wrap=True)
    parity = [(int(row["batch"]), f"{row['max_abs_difference']:.1e}") for row in report.parity]
    console.print(table("", ("batch", "largest difference to the policy"), parity))
    header, latency = latency_table(report.latency)
    console.print(table("", header, latency))
