"""Commands as Python functions: same keys, same files, Python objects as results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algos.training.run_directory import RunDirectory
from burnish.commands import collect as collect_command
from burnish.commands import data_convert as data_convert_command
from burnish.commands import data_download as data_download_command
from burnish.commands import data_inspect as data_inspect_command
from burnish.commands import evaluate as evaluate_command
from burnish.commands import export as export_command
from burnish.commands import importing as import_command
from burnish.commands import rank as rank_command
from burnish.commands import report as report_command
from burnish.commands import train as train_command
from burnish.commands.evaluate import Result
from burnish.commands.runs import tabulate
from burnish.config.overrides import Overrides, RunContext, quoted, with_home
from burnish.config.schema import compose_command, compose_config
from burnish.console import log_lines
from burnish.reports.html import render
from burnish.runs.composition import CompositionResult, compose_and_compare
from burnish.runs.locate import (
    check_folder_to_write,
    dated_folder,
    given_policy,
    locate,
    require_writable,
)
from burnish.runs.open_loop import OpenLoopResult
from burnish.runs.open_loop import measure as measure_open_loop
from burnish.runs.resolve import resume_directory_error, resumed_parts
from burnish.runs.tasks import values_of_task
from envs.datasets import write_dataset
from envs.datasets.convert import as_dataset
from policies import registry
from policies.errors import ConfigError
from policies.export.folder import ExportReport
from policies.policy import Policy


@dataclass(frozen=True)
class Run:
    """A training run; accepted wherever a run path is expected."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def directory(self) -> RunDirectory:
        """The run directory: configuration, metrics, checkpoints."""
        return RunDirectory.open(self.path)

    def load_policy(self, step: int | None = None) -> Policy:
        """Load the policy of a checkpoint (the last by default)."""
        return locate(self.directory.policy_path(step)).load()

    def _repr_html_(self) -> str:
        """Return the row of `burnish runs`, for notebooks."""
        columns, rows = tabulate([self.directory], self.path)
        table = {"columns": columns, "rows": rows}
        return render("notebook.html", table=table, comparison=None, clips=())


DATASETS = {"dataset", "against"}
"""Keys whose values may be Python objects with data; see `envs.datasets.convert.as_dataset`."""


def stored_dataset(data: Any, folder: str | Path = "runs") -> Path:
    """Write data that is no file to <folder>/data/<digest>.hdf5, so that runs can be resumed; return it."""
    dataset = as_dataset(data)
    path = Path(folder) / "data" / f"{dataset.digest()[:16]}.hdf5"
    if not path.exists():
        check_folder_to_write(path.parent, "data")
        require_writable(path, remedy="Give directory=<folder>")
        path.parent.mkdir(parents=True, exist_ok=True)
        # whole arrays: a group per episode takes milliseconds each, and there may be thousands
        write_dataset(path, dataset, format=None if dataset.images else "d4rl")
    return path


def overrides_of(overrides: tuple[str, ...], values: dict[str, Any]) -> list[str]:
    """Convert keyword values to overrides; a dict sets the keys below its name.

    `env` and datasets may be Python objects.

    Raises:
        ConfigError: If a value cannot be written as an override.
    """
    written = [with_home(text) for text in overrides]
    for key in DATASETS & set(values):
        items = values[key] if isinstance(values[key], list) else [values[key]]
        if not items or not all(isinstance(item, (str, os.PathLike, type(None))) for item in items):
            values = values | {key: stored_dataset(values[key])}
    if "env" in values and not isinstance(values["env"], (str, dict, type(None))):
        others = {key: value for key, value in values.items() if key != "env"}
        values = values_of_task(values["env"]) | others
    for key, value in values.items():
        if isinstance(value, dict):
            written += overrides_of((), {f"{key}.{inner}": item for inner, item in value.items()})
        else:
            written.append(f"{key}={quoted(value, key)}")
    return written


@log_lines()
def collect(*overrides: str, **values: Any) -> Path:
    """Record demonstrations; see `burnish collect`. Returns the file.

    Args:
        overrides: Command-line overrides, e.g. `"env.expert.noise=0.5"`.
        values: Keys and their values, e.g. `env="avoid"`, `episodes=50`, `out="avoid.hdf5"`. `policy` may
            be an object (`envs.rollouts.player.EvaluatedPolicy`).
    """
    given = given_policy(values.get("policy"))
    values |= {} if given is None else {"policy": given.label}
    config = compose_config("collect", overrides_of(overrides, values))
    collect_command.record(config, given)
    return Path(config.out)


@log_lines()
def inspect_data(dataset: Any, *overrides: str, **values: Any) -> dict[str, Any]:
    """Describe a dataset, in files and as a dict; see `burnish data inspect`.

    Args:
        dataset: File or folder of any known format.
        overrides: Command-line overrides, e.g. `"reader.mask=train"`.
        values: Keys and their values, e.g. `task="hopper-medium-v2"`, `out="found"`.
    """
    config = compose_config("data inspect", overrides_of(overrides, {"dataset": dataset, **values}))
    return data_inspect_command.inspect(config)


@log_lines()
def convert_data(dataset: Any, out: str | Path, *overrides: str, **values: Any) -> Path:
    """Write a dataset in another format; see `burnish data convert`. Returns the file or folder.

    Args:
        dataset: File or folder of any known format, a list of them to join, or Python objects.
        out: File or folder to write.
        overrides: Command-line overrides, e.g. `"reader.mask=train"`.
        values: Keys and their values, e.g. `format="lerobot"`, `control_hz=30`.
    """
    named = {"dataset": dataset, "out": out, **values}
    data_convert_command.convert(compose_config("data convert", overrides_of(overrides, named)))
    return Path(out)


@log_lines()
def download_data(name: str | None = None, *overrides: str, **values: Any) -> Path:
    """Download a public dataset; see `burnish data download`. Returns the value for `dataset=`.

    Args:
        name: E.g. `hopper-medium-v2`; None: requires `url=`.
        overrides: Command-line overrides.
        values: Keys and their values, e.g. `out="data"`.
    """
    config = compose_config("data download", overrides_of(overrides, {"name": name, **values}))
    return data_download_command.download(config)


@log_lines()
def train(*overrides: str, directory: str | Path | None = None, **values: Any) -> Run:
    """Train or resume; see `burnish train`. Returns the run.

    Args:
        overrides: Command-line overrides, e.g. `"experiment=hopper_dppo"`, `"algo.lr=1e-3"`.
        directory: Run directory; None: runs/<date>/<time>-<name>, numbered if taken.
        values: Keys and their values, e.g. `algo="bc"`, `env="avoid"`, `dataset="avoid.hdf5"`.

    Raises:
        ConfigError: If the configuration is refused, e.g. a directory together with `resume`.
    """
    return Run(train_command.train(*_composed(overrides, directory, values)).directory.path)


@log_lines()
def train_seeds(
    *overrides: str,
    seeds: Sequence[int] | None = None,
    directory: str | Path | None = None,
    **values: Any,
) -> list[Run]:
    """Train several seeds at once, or resume them with `resume=<their folder>`; return their runs.

    Args:
        overrides: See `train`.
        seeds: E.g. `[0, 1, 2]`; runs are returned in this order, or sorted by seed with `resume`.
        directory: Folder of the runs, `seed-<n>` each; None: as in `train`.
        values: See `train`.

    Raises:
        ConfigError: See `train`; also if the algorithm trains one seed at a time.
    """
    if isinstance(seeds, int | str):
        raise ConfigError(f"seeds must be a list of seeds, such as [0, 1, 2]; got {seeds!r}.")
    if seeds is not None:
        values = {"seeds": list(seeds)} | values
    results = train_command.train_seeds(*_composed(overrides, directory, values))
    return [Run(result.directory.path) for result in results]


def _composed(
    overrides: tuple[str, ...], directory: str | Path | None, values: dict[str, Any]
) -> tuple[Any, RunContext]:
    """Return the configuration of `train` and its run directory; for a resumed run, that of the run."""
    if wrong := [text for text in overrides if not isinstance(text, str)]:
        raise ConfigError(
            f"overrides are text such as 'algo=iql'; got an object {type(wrong[0]).__name__}. Give values by "
            f"name, such as seeds=[0, 1, 2] or dataset=…"
        )
    if directory is not None and not isinstance(values.get("dataset"), (str, os.PathLike, type(None))):
        values = values | {"dataset": stored_dataset(values["dataset"], Path(directory).expanduser().parent)}
    typed = Overrides.parse(overrides_of(overrides, values))
    if (folder := typed.value("hydra.run.dir")) is not None:
        raise ConfigError(f"hydra.run.dir={folder} is a key of commands; in Python give directory=.")
    composed = compose_command("train", (resumed_parts(typed) + typed).texts)
    config = composed.config
    if directory is not None and config.resume is not None:
        raise resume_directory_error(config.resume, f"directory={directory}")
    place = directory or config.resume or dated_folder(config.name or registry.name_of("algo", config.algo))
    is_proposed = directory is None and config.resume is None
    return config, RunContext(Path(place).expanduser(), composed.overrides, is_proposed)


def clone(dataset: Any, *overrides: str, **values: Any) -> Run:
    """Clone a policy from demonstrations: `train` with `algo=bc`.

    Raises:
        ConfigError: If another algorithm is requested.
    """
    algo = values.get("algo", "bc")
    if not isinstance(algo, dict):
        values.pop("algo", None)
        if algo != "bc":
            raise ConfigError(f"clone is algo=bc; got algo={algo}. Use train(algo='{algo}', ...).")
    return train("algo=bc", *overrides, dataset=dataset, **values)


@log_lines()
def evaluate(policy: Any, *overrides: str, **values: Any) -> Result:
    """Evaluate a policy, optionally against a second one (`baseline=…`); see `burnish eval`.

    Either is a run, a path, or an object (`envs.rollouts.player.EvaluatedPolicy`), which plays in this
    process unless `num_workers` is given. `out` of an object is runs/<date>/<time>-<its class>/eval-<n>.json.
    """
    values, usual = {"policy": policy, **values}, []
    given = {key: one for key in ("policy", "baseline") if (one := given_policy(values.get(key)))}
    values |= {key: one.label for key, one in given.items()}
    if given:
        usual.append("num_workers=0")
    if "policy" in given:
        folder = dated_folder(given["policy"].label)
        number = 1 + len(list(folder.glob("*.json")))
        usual.append(f"out={quoted(folder / f'eval-{number}.json')}")
    config = compose_config("eval", overrides_of((*usual, *overrides), values))
    return evaluate_command.evaluate(config, given)


@log_lines()
def open_loop(policy: str | Path | Run, dataset: Any, *overrides: str, **values: Any) -> OpenLoopResult:
    """Compare a policy with recorded episodes, without a simulator; see `burnish eval dataset=…`.

    Args:
        policy: The policy.
        dataset: Held-out demonstrations, a file or Python objects with data.
        overrides: Command-line overrides, e.g. `"steps=5"`.
        values: Keys and their values, e.g. `baseline="runs/other"`.
    """
    config = compose_config("eval", overrides_of(overrides, {"policy": policy, "dataset": dataset, **values}))
    return measure_open_loop(config)


@log_lines()
def compose(policies: Sequence[str | Path | Run], *overrides: str, **values: Any) -> CompositionResult:
    """Compose policies and compare the result with each member; see `burnish eval compose=[…]`.

    Args:
        policies: The members; the first one is the lead.
        overrides: Command-line overrides, e.g. `"search.episodes=[10,50]"`.
        values: Keys and their values, e.g. `weights=[0.4, 0.6]`, `dataset="held-out.hdf5"`.
    """
    return compose_and_compare(
        compose_config("eval", overrides_of(overrides, {"compose": list(policies), **values}))
    )


@log_lines()
def report(run: Any, *overrides: str, **values: Any) -> Path:
    """Write the report of a run or a list of runs; see `burnish report`. Returns the page."""
    config = compose_config("report", overrides_of(overrides, {"run": run, **values}))
    return report_command.report(config)


@log_lines()
def rank(policy: str | Path | Run, *overrides: str, **values: Any) -> Path:
    """Make a policy that executes the best of several chunks; see `burnish rank`. Returns its directory."""
    config = compose_config("rank", overrides_of(overrides, {"policy": policy, **values}))
    return rank_command.rank(config)


@log_lines()
def export(policy: str | Path | Run, *overrides: str, **values: Any) -> ExportReport:
    """Export a policy, checked against the original; see `burnish export`."""
    config = compose_config("export", overrides_of(overrides, {"policy": policy, **values}))
    return export_command.export(config)


@log_lines()
def import_policy(weights: str | Path, *overrides: str, **values: Any) -> Path:
    """Import a checkpoint of another program; see `burnish import`. Returns the policy directory."""
    config = compose_config("import", overrides_of(overrides, {"weights": weights, **values}))
    return import_command.convert(config).directory
