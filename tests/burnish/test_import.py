"""`burnish import`: a checkpoint of another program becomes a policy directory like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foreign_checkpoints import TOLERANCE, example, write
from messages import mentions

import burnish
from burnish.commands import importing as command
from burnish.config.overrides import RunContext
from burnish.config.schema import compose_config
from policies.errors import ConfigError
from policies.protocols import Cond
from policies.storage.policy_folder import read_config


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    written = write(example("dppo_net_mlp_res_relu"), tmp_path)
    told = ["source=dppo", "source.activation=relu", f"normalization={written['normalization']}"]
    return [f"weights={written['path']}", *told, f"out={tmp_path / 'policy'}"]


def test_an_imported_policy_loads_and_acts(given: list[str], tmp_path: Path) -> None:
    of = example("dppo_net_mlp_res_relu")
    folder = burnish.import_policy(tmp_path / "state_3.pt", *given[1:])
    policy = burnish.load_policy(folder)
    with torch.no_grad():
        out = policy.field(of.x, of.time.float(), Cond(of.obs.flatten(1)))
    torch.testing.assert_close(out, of.out, **TOLERANCE)
    assert policy.act(of.obs).shape == (5, 4, 3)


def test_the_command_says_what_it_did(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = command.run(compose_config("import", given), RunContext(tmp_path))
    shown = capsys.readouterr().out
    assert f"written: {tmp_path / 'policy'}" in shown
    for fact in ("state_3.pt", "ema", "num_levels=20", "state=file of statistics", "left_out"):
        assert fact in shown
    assert count == len(example("dppo_net_mlp_res_relu").weights)
    assert read_config(tmp_path / "policy")["provenance"]["name"] == "policy"


def test_the_sampler_can_be_chosen(given: list[str], tmp_path: Path) -> None:
    imported = command.convert(compose_config("import", [*given, "sampler=ddim", "sampler.steps=5"]))
    assert burnish.load_policy(imported.directory).table.num_steps == 5


def test_the_directory_is_named_after_the_checkpoint(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.convert(compose_config("import", given[:-1])).directory == Path("imported-state_3")


def test_what_exists_is_replaced_only_when_asked(given: list[str], tmp_path: Path) -> None:
    command.convert(compose_config("import", given))
    with pytest.raises(ConfigError, match=mentions("exists overwrite=true")):
        command.convert(compose_config("import", given))
    command.convert(compose_config("import", [*given, "overwrite=true"]))
    with pytest.raises(ConfigError, match=mentions("out= state_3.pt")):
        command.convert(compose_config("import", [*given[:-1], f"out={tmp_path / 'state_3.pt'}"]))


def test_a_refused_import_leaves_nothing_behind(given: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=mentions("source.horizon")):
        command.convert(compose_config("import", [*given, "source.horizon=5"]))
    assert not (tmp_path / "policy").exists()
