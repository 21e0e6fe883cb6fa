"""`burnish eval policy=… dataset=…`: errors of a policy on recorded episodes, beside a second one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.config.evaluate import EvalConfig
from burnish.console import Counting, output, table
from burnish.runs.evaluation import naming, require_no_other_file
from burnish.runs.locate import Located, check_file_to_write, locate_actor
from burnish.runs.tasks import require_recording_of
from envs.datasets import read_dataset
from envs.datasets.episodes import EpisodeDataset
from envs.evaluation.comparison import Comparison, format_interval
from envs.evaluation.intervals import stated
from envs.evaluation.open_loop import (
    QUANTITY,
    OpenLoop,
    as_seen,
    compare_open_loop,
    open_loop,
    with_recorded,
)
from policies.errors import ConfigError
from policies.storage.atomic_write import write_errors, write_text

if TYPE_CHECKING:
    from rich.table import Table

_OF_TASK = ("env", "videos", "fleet", "first_seed", "num_envs")  # have no use here
_log = logging.getLogger(__name__)
_COLUMNS = ("policy", "action", "RMSE", "deviation of the data", QUANTITY, "95 % interval")


@dataclass(frozen=True)
class OpenLoopResult:
    """Errors on recorded episodes, of a policy and a second one."""

    label: str
    names: tuple[str, ...]  # of the entries of an action, (Da,)
    errors: OpenLoop
    baseline: OpenLoop | None
    comparison: Comparison | None  # policy - baseline
    path: Path | None  # JSON

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield one row per policy and entry of an action, and one of all entries."""
        for label, one in ((self.label, self.errors), ("baseline", self.baseline)):
            if one is None:
                continue
            for name, *numbers in zip(self.names, one.rmse, one.deviation, one.unexplained, strict=True):
                yield label, name, *(f"{x:.3g}" if np.isfinite(x) else "–" for x in numbers), ""
                label = ""
            interval = stated(one.summary(), len(one.squared))
            yield "", "all", "", "", *format_interval(QUANTITY, interval)

    def shown(self) -> Table:
        """Return the rows as a table for the terminal."""
        return table("", _COLUMNS, self.rows())

    def __str__(self) -> str:
        """Return the rows, and the comparison."""
        lines = [" | ".join(row) for row in (_COLUMNS, *self.rows())]
        return "\n".join([*lines, *([] if self.comparison is None else [str(self.comparison)])])

    __repr__ = __str__


def measure(config: EvalConfig) -> OpenLoopResult:
    """Compare the policy, and the baseline, with the recorded episodes of `config.dataset`.

    Raises:
        ConfigError: If a key needs a task, or policy and data do not fit.
    """
    if config.policy is None or config.dataset is None:
        raise ConfigError("an open-loop evaluation needs policy=<run or policy> and dataset=<file>.")
    config.require_single()
    if given := config.changed(_OF_TASK):
        raise ConfigError(
            f"{given[0]} belongs to episodes that are played; with dataset= the policy is compared with "
            "recorded ones. Leave one of them out."
        )
    if config.out is not None:
        check_file_to_write(config.out)
        require_no_other_file(Path(config.out))
    mine = locate_actor(config.policy, "policy")
    other = None if config.baseline is None else locate_actor(config.baseline, "baseline")
    found = {"policy": mine} | ({} if other is None else {"baseline": other})
    policies = {key: one.load() for key, one in found.items()}
    for key, policy in policies.items():  # before data are read, which may take long
        with naming(key, getattr(config, key)):
            with_recorded(policy, config)
    dataset = read_dataset(config.dataset, **config.reader)
    for key, one in found.items():
        require_recording_of(one, dataset, key, allow_other=config.allow_other_task)
    _warn_of_training_data(mine, config.dataset)
    for key, policy in policies.items():  # before one of them is compared
        with naming(key, getattr(config, key)):
            as_seen(policy, dataset)
    errors, *others = (_errors(found[key].label, one, dataset, config) for key, one in policies.items())
    baseline = others[0] if others else None
    compared = None if baseline is None else compare_open_loop(baseline, errors)
    names = _names(mine.provenance(), dataset)
    path = None if config.out is None else Path(config.out)
    result = OpenLoopResult(mine.label, names, errors, baseline, compared, path)
    if path is not None:
        try:
            _write(path, config, result)
        except OSError:  # what was measured is not lost
            output().print(str(result), markup=False)
            raise
    return result


def _errors(label: str, policy: Any, dataset: EpisodeDataset, config: EvalConfig) -> OpenLoop:
    with Counting(f"comparing {label}", 1) as counting:
        return open_loop(policy, dataset, config, on_progress=lambda n, of: counting.show(n, total=of))


def _names(provenance: Any, dataset: EpisodeDataset) -> tuple[str, ...]:
    facts = provenance.get("interface") or {}
    names = facts.get("action_names") or dataset.meta.get("action_names") or ()
    if len(names) != dataset.action_dim:
        names = [f"action {i}" for i in range(dataset.action_dim)]
    return tuple(map(str, names))


def _warn_of_training_data(one: Located, path: str) -> None:
    if one.provenance().get("dataset") == Path(path).name:
        _log.warning(
            "%s was trained on a file named %s: errors on episodes that it has learned from say little.",
            one.label, Path(path).name,
        )  # fmt: skip


def _write(path: Path, config: EvalConfig, result: OpenLoopResult) -> None:
    facts = ("noise_seed", "start_noise", "sampling_noise", "steps", "act_steps", "guidance")
    content = {
        "protocol": {
            "dataset": Path(str(config.dataset)).name,
            **{key: getattr(config, key) for key in facts},
        },
        "policy": result.label,
        "actions": result.names,
        "rmse": result.errors.rmse.tolist(),
        "deviation": result.errors.deviation.tolist(),
        "unexplained_variance": stated(result.errors.summary(), len(result.errors.squared)),
        "episodes": result.errors.by_episode().tolist(),
    }
    if result.comparison is not None:
        content["versus"] = {"policy": str(config.baseline), **asdict(result.comparison)}
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=2) + "\n")
