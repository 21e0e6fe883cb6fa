"""Former names of keys: accepted where they are typed, with a warning, and in saved files."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from burnish import cli
from burnish.config.overrides import Overrides
from burnish.config.saved import describe, restore, restore_part
from burnish.config.schema import compose_command, compose_config
from burnish.config.train import TrainConfig
from policies import registry
from policies.bounds import bounded
from policies.errors import ConfigError


@dataclass
class Inner:
    """Keys below another one."""

    share: float = bounded(0.5, was="portion")


@dataclass(frozen=True)
class Renamed:
    """A part with renamed keys."""

    speed: float = bounded(1.0, was="pace")
    inner: Inner = field(default_factory=Inner)


@pytest.fixture(autouse=True)
def renamed() -> None:
    registry._PARTS.setdefault("algo", {})["renamed"] = Renamed


@pytest.fixture(autouse=True)
def removed() -> object:
    yield
    registry._PARTS["algo"].pop("renamed")


def test_a_former_name_that_is_typed_takes_effect_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    typed = ["algo=renamed", "algo.pace=2", "algo.inner.portion=0.25", "data.mask=train", "tunes=true"]
    found = compose_command("train", typed)
    assert found.config.algo == Renamed(2.0, Inner(0.25))
    assert found.config.reader == {"mask": "train"} and found.config.requires_init
    present = ["algo.speed=2", "algo.inner.share=0.25", "reader.mask=train", "requires_init=true"]
    assert found.overrides.texts == ["algo=renamed", *present]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    names = ("algo.pace", "algo.inner.portion", "data", "tunes")
    assert len(warnings) == 4 and all(any(w.startswith(f"{n} is called ") for w in warnings) for n in names)
    assert "algo.inner.portion is called algo.inner.share now; the former name goes" in caplog.text


def test_the_last_of_a_former_and_a_present_name_counts() -> None:
    assert compose_config("train", ["algo=renamed", "algo.pace=2", "algo.speed=3"]).algo.speed == 3
    assert compose_config("train", ["algo=renamed", "algo.speed=3", "algo.pace=2"]).algo.speed == 2
    assert compose_config("train", ["algo=renamed", "+algo.pace=4"]).algo.speed == 4


def test_a_file_may_use_former_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    lines = ["# @package _global_", "defaults:", "  - override /algo: renamed", "name: old", "tunes: true"]
    lines += ["algo:", "  pace: 2", "  inner:", "    portion: 0.25", "data:", "  mask: train"]
    (tmp_path / "experiment" / "old.yaml").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["burnish"])
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "experiment=old", "--config-dir", str(tmp_path), "--cfg", "job"])
    assert not ended.value.code
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["algo"] == {"speed": 2.0, "inner": {"share": 0.25}}
    assert shown["reader"] == {"mask": "train"} and shown["requires_init"] is True


def test_saved_configurations_with_former_names_load_silently(caplog: pytest.LogCaptureFixture) -> None:
    config = compose_config("train", ["algo=renamed", "algo.speed=2", "algo.inner.share=0.25"])
    saved = describe(config)
    saved["algo"] = {"name": "renamed", "pace": 2.0, "inner": {"portion": 0.25}}
    saved["data"], saved["tunes"] = saved.pop("reader"), saved.pop("requires_init")
    assert restore(TrainConfig, saved) == config
    assert restore(TrainConfig, saved, Overrides.parse(["algo.speed=3"])).algo.speed == 3
    assert restore_part("algo", saved["algo"]) == config.algo
    assert registry.from_json("algo", {"name": "renamed", "pace": 2.0}).speed == 2.0
    assert not caplog.records


def test_a_saved_run_with_the_former_key_of_tensorboard_keeps_its_trackers() -> None:
    saved = describe(compose_config("train", ["algo=renamed", "trainer.loggers=[csv]"]))
    saved["trainer"]["tensorboard"] = True
    assert restore(TrainConfig, saved).trainer.loggers == ("tensorboard", "csv")
    del saved["trainer"]["loggers"]
    assert restore(TrainConfig, saved).trainer.loggers == ("tensorboard",)


def test_a_key_that_never_was_is_refused_with_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'algo\.sped'\. Did you mean 'speed'\?"):
        compose_config("train", ["algo=renamed", "algo.sped=2"])
    with pytest.raises(ConfigError, match=r"algo\.pace|algo\.speed"):
        compose_config("train", ["algo=renamed", "algo.pace=fast"])
