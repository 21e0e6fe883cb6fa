"""Trackers receive every row of metrics.jsonl, and a resumed run goes on in them."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from messages import mentions
from random_walk import RandomWalk

from algos.training.loggers import open_logger
from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from algos.training.settings import TrainerSettings
from algos.training.trainer import train
from policies import registry
from policies.errors import ConfigError, MissingExtraError


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create_at(tmp_path / "run", {"algo": {"name": "walk", "lr": 0.5}}, [])


def train_with(run: RunDirectory, *loggers: str, steps: int = 3) -> None:
    settings = TrainerSettings(loggers=loggers, checkpoint_every=1)
    train(RandomWalk(steps), run, settings, evaluator=lambda *_: {"return": 1.0}, progress=False)


def table(run: RunDirectory) -> list[dict[str, str]]:
    with (run.path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_holds_every_row_and_goes_on_when_resumed(run: RunDirectory) -> None:
    train_with(run, "csv", steps=2)
    (run.path / "metrics.csv").write_text("damaged")
    train_with(run, "csv", steps=4)
    rows = read_jsonl(run.metrics_path)
    assert len(table(run)) == len(rows) > 4
    for row, line in zip(rows, table(run), strict=True):
        assert {name: float(text) for name, text in line.items() if text} == {
            name: value for name, value in row.items() if value is not None
        }


def test_a_tracker_of_a_plugin_is_used_by_its_name(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, set[str]]] = []

    class Mine:
        def __init__(self, run: RunDirectory, *, first_step: int) -> None:
            seen.append((first_step, {"opened"}))

        def write(self, values: Mapping[str, float], step: int) -> None:
            seen.append((step, set(values)))

        def close(self) -> None:
            seen.append((-1, {"closed"}))

    monkeypatch.setattr(registry, "_PARTS", {**registry._PARTS, "logger": {}})
    registry.register("logger", "mine")(Mine)
    train_with(run, "mine", steps=2)
    assert seen[0] == (0, {"opened"}) and seen[-1] == (-1, {"closed"})
    assert [step for step, _ in seen[1:-1]] == [row["step"] for row in read_jsonl(run.metrics_path)]


def test_a_tracker_that_fails_ends_no_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        calls = 0

        def __init__(self, run: RunDirectory, *, first_step: int) -> None: ...

        def write(self, values: Mapping[str, float], step: int) -> None:
            Gone.calls += 1
            raise ConnectionError("no route to host")

        def close(self) -> None:
            raise ConnectionError("no route to host")

    monkeypatch.setattr(registry, "_PARTS", {**registry._PARTS, "logger": {}})
    registry.register("logger", "gone")(Gone)
    train_with(run, "gone", steps=3)
    assert run.latest() == 3 and {row["step"] for row in read_jsonl(run.metrics_path)} == {1, 2, 3}
    assert Gone.calls == 1 and "no route to host" in caplog.text


def test_missing_tensorboard_names_the_extra(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=mentions("loggers= tensorboard burnish[tensorboard]")):
        open_logger("tensorboard", run, first_step=0)


def test_an_unknown_tracker_names_the_choices(run: RunDirectory) -> None:
    with pytest.raises(ConfigError, match=mentions("csv mlflow tensorboard wandb")):
        open_logger("nothing", run, first_step=0)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_tracker_names_its_extra(
    name: str, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=mentions(f"trainer.loggers=[{name}] burnish[{name}]")):
        train_with(run, name)


def test_mlflow_keeps_numbers_and_configuration_in_one_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="the extra 'mlflow' is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    train_with(run, "mlflow", steps=2)
    train_with(run, "mlflow", steps=3)
    client = tracking.MlflowClient((run.path / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("burnish").experiment_id])
    assert found.data.params["algo.lr"] == "0.5" and found.info.status == "FINISHED"
    steps = {one.step for one in client.get_metric_history(found.info.run_id, "eval/return")}
    assert max(steps) == 3


def test_wandb_works_offline(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train_with(run, "wandb", steps=2)
    (kept,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    assert kept.stat().st_size > 0 and (run.path / "wandb.id").read_text().strip() in kept.name
