"""Trackers of metrics beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, CSV, and own ones.

A tracker is a class registered under the group `logger`; a plug-in may register more. It is built when a run
starts or goes on, and receives every row of metrics.jsonl. Trackers change nothing in the run.
"""

from __future__ import annotations

import csv
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from policies.extras import require
from policies.registry import lookup, register
from policies.storage.atomic_write import write_text

PROJECT = "burnish"
"""Project of Weights & Biases, experiment of MLflow; unless WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME are set."""
_log = logging.getLogger(__name__)


class MetricLogger(Protocol):
    """A tracker of one run; registered as `@register("logger", "<name>")`."""

    def __init__(self, run: RunDirectory, *, first_step: int) -> None:
        """Open the tracker; records after `first_step` belong to an earlier attempt."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Record metrics by name, some of which may not be finite."""
        ...

    def close(self) -> None: ...


def open_logger(name: str, run: RunDirectory, *, first_step: int) -> MetricLogger:
    """Open a tracker by its registered name; unknown names are a ConfigError with the choices."""
    kind: Any = lookup("logger", name)
    opened: MetricLogger = kind(run, first_step=first_step)
    return opened


@register("logger", "tensorboard")
class TensorBoardLogger:
    """Event files in <run>/tensorboard; records of an earlier attempt after `first_step` are hidden."""

    def __init__(self, run: RunDirectory, *, first_step: int) -> None:
        require("tensorboard", extra="tensorboard", what="trainer.loggers=[tensorboard]")
        from torch.utils.tensorboard import SummaryWriter

        purged = first_step + 1 if first_step else 0
        self._events = SummaryWriter(str(run.path / "tensorboard"), purge_step=purged)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._events.close()


@register("logger", "csv")
class CsvLogger:
    """<run>/metrics.csv: the rows of metrics.jsonl, with a column for every metric."""

    def __init__(self, run: RunDirectory, *, first_step: int) -> None:
        self._source, self._path = run.metrics_path, run.path / "metrics.csv"
        self._columns: list[str] = []
        self._rewrite()

    def write(self, values: Mapping[str, float], step: int) -> None:
        if set(values) <= set(self._columns):
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerow({"step": step, **values})
        else:
            self._rewrite()

    def close(self) -> None:
        """Hold nothing open."""

    def _rewrite(self) -> None:
        """Write all rows again: a resumed run has fewer, and a new metric needs a column."""
        rows = read_jsonl(self._source)
        self._columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        with self._path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)


@register("logger", "wandb")
class WandbLogger:
    """A run of Weights & Biases, continued on resume; WANDB_MODE=offline keeps it in <run>/wandb."""

    def __init__(self, run: RunDirectory, *, first_step: int) -> None:
        wandb = require("wandb", extra="wandb", what="trainer.loggers=[wandb]")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.path.name,
            id=_known_id(run, "wandb", lambda: secrets.token_hex(8)),
            dir=str(run.path),
            config=run.config,
            resume="allow",
        )

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


@register("logger", "mlflow")
class MlflowLogger:
    """A run of MLflow, continued on resume; without MLFLOW_TRACKING_URI in the folder <run>/mlruns."""

    def __init__(self, run: RunDirectory, *, first_step: int) -> None:
        tracking = require("mlflow.tracking", extra="mlflow", what="trainer.loggers=[mlflow]")
        local = (run.path / "mlruns").absolute().as_uri()
        if "MLFLOW_TRACKING_URI" not in os.environ:  # MLflow asks for consent to its file store
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = tracking.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", local))
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(title)
        experiment = self._client.create_experiment(title) if found is None else found.experiment_id

        def start() -> str:
            made: str = self._client.create_run(experiment, run_name=run.path.name).info.run_id
            for key, value in _flat(run.config).items():
                self._client.log_param(made, key, str(value)[:500])
            return made

        self._id = _known_id(run, "mlflow", start)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _known_id(run: RunDirectory, tracker: str, make: Callable[[], str]) -> str:
    """Return the tracker's id of a run, from <run>/<tracker>.id; make and keep one if there is none."""
    path = run.path / f"{tracker}.id"
    if not path.exists():
        write_text(path, f"{make()}\n")
    return path.read_text(encoding="utf-8").strip()


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        inner = value if isinstance(value, Mapping) else None
        found |= {f"{prefix}{key}": value} if inner is None else _flat(inner, f"{prefix}{key}.")
    return found
