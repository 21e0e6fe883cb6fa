"""Configuration: typed, refused early, and the same before and after it was written down."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any

import composed_once
import pytest
import yaml
from forked import exit_code_of
from hydra.core.singleton import Singleton
from messages import mentions
from omegaconf import OmegaConf

from burnish import cli
from burnish.config.commands import COMMANDS
from burnish.config.hydra_sources import register_configs
from burnish.config.nodes import GROUPS
from burnish.config.overrides import Overrides
from burnish.config.saved import describe, restore
from burnish.config.schema import compose_command, compose_config, to_object
from burnish.config.train import PolicyShape, TrainConfig
from policies import registry
from policies.bounds import Bounds, Checked, bounds_of
from policies.errors import ConfigError
from policies.policy_config import PART_GROUPS, PolicyConfig


def every_part() -> Iterator[Any]:
    """Yield a command and the parts of one composition, by group; every part occurs in one."""
    for name in registry.parts("source"):
        yield pytest.param("import", {"source": name}, id=name)
    groups = [group for group in GROUPS if group != "source"]
    for names in itertools.zip_longest(*map(registry.parts, groups)):
        chosen = {group: name for group, name in zip(groups, names, strict=True) if name is not None}
        yield pytest.param("train", chosen, id="-".join(chosen.values()))


EVERY_PART = list(every_part())


@pytest.mark.parametrize(("command", "chosen"), EVERY_PART)
def test_every_registered_part_composes_to_its_own_defaults(command: str, chosen: dict[str, str]) -> None:
    config = compose_config(command, [f"{group}={name}" for group, name in chosen.items()])
    for group, name in chosen.items():
        assert getattr(config, group) == registry.lookup(group, name)()


@pytest.mark.parametrize(("command", "chosen"), EVERY_PART)
def test_every_number_of_a_part_can_be_overridden(command: str, chosen: dict[str, str]) -> None:
    numbers = {}
    for group, name in chosen.items():
        part = registry.lookup(group, name)()
        values = {f.name: getattr(part, f.name) for f in fields(part)}
        numbers |= {f"{group}.{key}": v for key, v in values.items() if type(v) in (int, float)}
    written = [f"{key}={value}" for key, value in numbers.items()]
    parts = [f"{group}={name}" for group, name in chosen.items()]
    config = compose_command(command, [*parts, *written]).config  # also keys without effect beside others
    assert {key: attrgetter(key)(config) for key in numbers} == numbers


def test_a_resumed_run_may_act_in_another_fleet() -> None:
    saved = describe(compose_config("train", ["fleet=ray", "fleet.mode=free"]))
    assert restore(TrainConfig, saved).fleet.is_free
    assert not restore(TrainConfig, saved, Overrides.parse(["fleet=local"])).fleet.is_free
    typed = ["fleet=ray", "fleet.timeout_s=5"]
    assert restore(TrainConfig, describe(TrainConfig(name="x")), Overrides.parse(typed)).fleet.timeout_s == 5
    assert restore(TrainConfig, saved, Overrides.parse(["fleet=null"])).fleet is None


def test_the_state_of_hydra_can_be_taken_into_the_process_of_a_launcher() -> None:
    """Launchers (joblib, submitit) restore it there, which registers Hydra's own sources beside ours."""

    def launched() -> None:
        register_configs()
        Singleton.set_state(Singleton.get_state())
        register_configs.cache_clear()  # as in a new process
        composed_once.forget()
        assert compose_config("train", ["experiment=avoid_bc"]).name == "avoid_bc"

    assert exit_code_of(launched) == 0


def test_the_defaults_are_those_of_the_dataclasses() -> None:
    config = compose_config("train", [])
    made, expected = config.policy_config(), PolicyConfig()
    for f in fields(PolicyConfig):
        if f.name not in PART_GROUPS:
            assert getattr(made, f.name) == getattr(expected, f.name)
    assert {f.name for f in fields(PolicyShape)} | set(PART_GROUPS) == {f.name for f in fields(PolicyConfig)}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algo.lrr=1", "algo.lrr lr BcConfig"),
        ("algo=bcc", "algo=bcc bc"),
        ("algo.lr=fast", "algo.lr fast str"),
        ("seed=1.5", "1.5 float"),
        ("policy.horizn=8", "policy.horizn horizon"),
        ("experiment=none_such", "experiment=none_such"),
        ("datset=x", "datset dataset TrainConfig"),
        ("+datset=x", "datset dataset TrainConfig"),
        ("+algo.learning_rate=9", "algo.learning_rate BcConfig"),
        ("+policy.horizn=8", "policy.horizn horizon"),
        ("+trainer.log_evry=8", "trainer.log_evry log_every"),
        ("bc", "bc key=value algo=bc"),
        ("avoid_bc", "avoid_bc key=value experiment=avoid_bc"),
        ("avoid.hdf5", "avoid.hdf5 key=value dataset=avoid.hdf5"),
        ("name=a(b", "name=a(b"),
        ("process=null", "process flow diffusion"),
        ("env={image_size: [8, 8]}", "no env image_size env=<name>"),
    ],
)
def test_mistakes_are_refused_while_composing_in_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)) as caught:
        compose_config("train", [override])
    assert "\n" not in str(caught.value)


def test_a_group_whose_default_is_none_may_be_given_none() -> None:
    assert compose_config("train", ["sampler=ddim", "sampler=null", "env=null"]).sampler is None
    with pytest.raises(ConfigError, match=mentions("no sampler steps sampler=<name>")):
        compose_config("train", ["experiment=hopper_trajectories", "sampler=null"])
    with pytest.raises(SystemExit) as left:
        cli.main(["eval", "policy=nowhere", "env=null"])
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("command", "override", "message"),
    [
        ("eval", "runs/base", "runs/base key=value policy=runs/base"),
        ("eval", "+episode=100", "episode episodes"),
        ("eval", "algo=bc", "first_seed noise_seed algo"),
        ("report", "runs/base", "runs/base key=value run=runs/base"),
        ("report", "env=avoid", "first_seed num_workers env"),
        ("collect", "avoid", "avoid key=value env=avoid"),
        ("collect", "algo=bc", "first_seed keep_failures algo"),
        ("collect", "experiment=avoid_bc", "experiment"),
        ("collect", "+algo=bc", "first_seed keep_failures algo"),
        ("collect", "+algo.lr=1", "algo CollectConfig"),
    ],
)
def test_keys_and_groups_that_a_command_lacks_are_refused(command: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)) as caught:
        compose_config(command, [override])
    assert "+algo=bc" not in str(caught.value)


def outside(bounds: Bounds) -> Iterator[Any]:
    """Yield values that a range does not admit: beyond each end, no numbers, and no entries."""
    if bounds.choices:
        yield "no such choice"
        return
    yield math.nan
    if bounds.le != math.inf:
        yield from (math.inf, -math.inf)
    yield from (end for end in (bounds.gt, bounds.lt) if end is not None)
    if bounds.ge is not None and bounds.ge > -math.inf:
        yield bounds.ge - 1
        yield from (bounds.ge + 1,) if bounds.even else ()
    if bounds.le is not None and bounds.le < math.inf:
        yield bounds.le + 1
    if bounds.some:
        yield ()


def kinds_of(kind: type) -> Iterator[type]:
    """Yield the configurations of our packages that can be made without arguments."""
    for one in kind.__subclasses__():
        if one.__module__.split(".")[0] in ("algos", "burnish", "envs", "policies"):
            is_whole = not inspect.isabstract(one) and not one.__name__.startswith("_")
            if is_whole and all(p.default is not p.empty for p in inspect.signature(one).parameters.values()):
                yield one
            yield from kinds_of(one)


def test_every_range_is_enforced_under_its_key() -> None:
    """The page of keys prints the ranges."""
    for group in GROUPS:
        for name in registry.parts(group):
            registry.lookup(group, name)
    for command in COMMANDS.values():
        if command.schema is not None:
            command.config_class()
    seen = set()
    for kind in set(kinds_of(Checked)):
        made: Any = kind()
        for one in fields(made):
            bounds = bounds_of(one)
            for value in () if bounds is None else outside(bounds):
                with pytest.raises(ConfigError) as refused:
                    replace(made, **{one.name: value})
                key = f"{made.key}.{one.name}" if made.key else one.name
                assert str(refused.value).startswith(f"{key} must be {bounds}; got "), (kind, value)
                seen.add(key)
    assert {"algo.gamma", "algo.noise.hold", "backbone.width", "encoder.crop", "env.expert.noise"} <= seen
    assert {"process.huber", "sampler.steps", "source.horizon", "steer.scale", "steering.rank"} <= seen
    assert {"correction.eta", "critic.norm_eps", "curation.keep", "ema.every", "trainer.log_every"} <= seen


def test_a_value_out_of_range_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"algo\.lr must be .*; got -1"):
        compose_config("train", ["algo.lr=-1"])


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algo=dppo", "env=avoid", "env.expert.noise=0.5", "algo.critic.width=32"],
        ["process=flow", "sampler=euler", "sampler.steps=7", "backbone.cond_dims=[8,4]", "policy.horizon=8"],
        ["process=gaussian", "algo=ppo", "algo.log_prob_range=null"],
    ],
)
def test_a_configuration_survives_being_written_down(overrides: list[str]) -> None:
    config = compose_config("train", overrides)
    text = yaml.safe_dump(describe(config))
    assert restore(TrainConfig, yaml.safe_load(text)) == config


def test_values_of_a_restored_configuration_can_be_changed_but_not_its_parts() -> None:
    data = describe(compose_config("train", ["algo=dppo"]))
    assert restore(TrainConfig, data, Overrides.parse(["algo.iterations=7"])).algo.iterations == 7
    with pytest.raises(ConfigError, match=mentions("key=value")):
        restore(TrainConfig, data, Overrides.parse(["algo=bc"]))
    with pytest.raises(ConfigError, match=mentions("algo.iteration")):
        restore(TrainConfig, data, Overrides.parse(["algo.iteration=7"]))


def test_a_description_cannot_name_code() -> None:
    data = describe(compose_config("train", []))
    data["algo"]["name"] = "os.system"
    with pytest.raises(ConfigError, match=mentions("os.system")):
        restore(TrainConfig, data)


def test_frozen_parts_stay_frozen_after_composing() -> None:
    process = compose_config("train", ["process.num_levels=10"]).process
    assert process.num_levels == 10
    with pytest.raises(FrozenInstanceError):
        process.num_levels = 11


def test_tuples_come_back_as_tuples() -> None:
    config = compose_config("train", ["backbone.cond_dims=[16,8]"])
    assert config.backbone.cond_dims == (16, 8)
    assert isinstance(config.backbone.cond_dims, tuple)


def test_a_mandatory_value_that_is_missing_is_named() -> None:
    @dataclass
    class Needy:
        wanted: int

    with pytest.raises(ConfigError, match=mentions("wanted=")):
        to_object(OmegaConf.structured(Needy))


def test_composing_does_not_share_state_between_configurations() -> None:
    first = compose_config("train", ["algo.lr=0.5"])
    assert compose_config("train", []).algo.lr != first.algo.lr
    register_configs()
    assert compose_config("train", []).algo == registry.lookup("algo", "bc")()


@pytest.mark.parametrize("command", ["collect", "eval", "report", "export", "import"])
def test_every_command_composes_to_its_dataclass(command: str) -> None:
    assert is_dataclass(compose_config(command, []))


@pytest.mark.parametrize("value", ["x" * 5000, [0] * 5000])
def test_an_error_shows_the_ends_of_a_long_value_of_a_file(value: object) -> None:
    saved = describe(TrainConfig()) | {"seed": value}
    with pytest.raises(ConfigError, match=mentions("seed")) as refused:
        restore(TrainConfig, saved)
    assert len(str(refused.value)) < 500
