"""Former names of keys: read in saved files, refused where they are typed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from burnish.config.overrides import Overrides
from burnish.config.saved import describe, restore, restore_part
from burnish.config.schema import compose_config
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


@pytest.mark.parametrize(
    ("typed", "present"),
    [("algo.pace=2", "speed"), ("+algo.pace=2", "speed"), ("tunes=true", "requires_init")],
)
def test_a_former_name_that_is_typed_is_refused_with_the_present_one(typed: str, present: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key '.*'\. It is called '{present}' now\."):
        compose_config("train", ["algo=renamed", typed])


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


def test_an_obsolete_key_of_a_saved_run_is_ignored() -> None:
    config = compose_config("train", ["algo=renamed", "trainer.loggers=[csv]"])
    saved = describe(config)
    saved["trainer"]["tensorboard"] = True
    assert restore(TrainConfig, saved) == config


def test_a_key_that_never_was_is_refused_with_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'algo\.sped'\. Did you mean 'speed'\?"):
        compose_config("train", ["algo=renamed", "algo.sped=2"])


@pytest.mark.parametrize(
    ("algo", "key"),
    [("trqam", "inverse_temperature"), ("awm", "difference_range"), ("awm", "max_difference")],
)
def test_a_key_of_another_algorithm_is_refused_and_saved_runs_that_have_it_load(algo: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key 'algo\.{key}'"):
        compose_config("train", [f"algo={algo}", f"algo.{key}=2"])
    config = compose_config("train", [f"algo={algo}"])
    saved = describe(config)
    assert key not in saved["algo"]
    saved["algo"][key] = 2.0
    assert restore(TrainConfig, saved) == config
