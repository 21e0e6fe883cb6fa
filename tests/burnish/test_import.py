"""`burnish import`: a checkpoint of another program becomes a policy directory like any other."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_checkpoints import TOLERANCE, example, write
from messages import mentions
from released import recorded, weights_of

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


def test_an_imported_actor_is_evaluated_and_fine_tuned_by_ppo(tmp_path: Path) -> None:
    layers = {"mlp_extractor.policy_net.0": (16, 4), "action_net": (2, 16)}
    shapes = {f"{name}.weight": size for name, size in layers.items()}
    shapes |= {f"{name}.bias": size[:1] for name, size in layers.items()} | {"log_std": (2,)}
    weights = io.BytesIO()
    torch.save(weights_of(shapes), weights)
    space = {":type:": "<class 'gymnasium.spaces.box.Box'>", "low": "[-1. -1.]", "high": "[1. 1.]"}
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("data", json.dumps({"action_space": space}))
        archive.writestr("policy.pth", weights.getvalue())
    out = tmp_path / "policy"
    policy = burnish.import_policy(tmp_path / "model.zip", "source=sb3", "identity=[state]", out=out)
    assert len(burnish.evaluate(policy, env="avoid", episodes=2).evaluation.rows) == 2
    few = ["algo.num_envs=2", "algo.steps_per_iteration=4", "algo.batch_size=4", "algo.critic.width=16"]
    few += ["algo.iterations=1", "algo.env_steps=null", "evaluation.episodes=2"]
    run = burnish.train("algo=ppo", "env=avoid", *few, init=policy, directory=tmp_path / "run")
    tuned = run.load_policy()
    assert not torch.equal(tuned.head.log_var, weights_of(shapes)["log_std"] * 2)


def test_an_imported_mip_is_evaluated_and_fine_tuned_by_reinflow(tmp_path: Path) -> None:
    """Its MLP with the widths of `avoid`: two observations of 4 numbers, 8 actions of 2."""
    facts, arrays = recorded("mip_mlp")
    network, encoder = facts["shapes"]["flow_map"], facts["shapes"]["encoder"]
    encoder["mlp.mlp.0.0.weight"][1] = 2 * 4
    network["net.input_proj.weight"][1] -= 8
    network["net.main_output.weight"][0] = network["net.main_output.bias"][0] = 8 * 2
    weights = weights_of(network) | {"net.frequencies": arrays["frequencies"]}
    torch.save({"flow_map_ema": weights, "encoder_ema": weights_of(encoder)}, tmp_path / "model.pt")
    limits = {f"{name}_{end}": sign * np.ones(width) for name, width in (("obs", 4), ("action", 2))
              for end, sign in (("min", -1), ("max", 1))}  # fmt: skip
    np.savez(tmp_path / "limits.npz", **limits)
    given = ["source=mip", f"normalization={tmp_path / 'limits.npz'}"]
    policy = burnish.import_policy(tmp_path / "model.pt", *given, out=tmp_path / "policy")
    assert len(burnish.evaluate(policy, env="avoid", episodes=2).evaluation.rows) == 2
    few = ["algo.num_envs=2", "algo.steps_per_iteration=4", "algo.batch_size=4", "algo.critic.width=16"]
    few += ["algo.iterations=1", "algo.env_steps=null", "evaluation.episodes=2"]
    run = burnish.train("algo=reinflow", "env=avoid", *few, init=policy, directory=tmp_path / "run")
    before, after = (
        one.field.trunk.outlet.weight for one in (burnish.load_policy(policy), run.load_policy())
    )
    assert not torch.equal(before, after)


def test_an_imported_beso_is_evaluated_and_fine_tuned_by_dppo(tmp_path: Path) -> None:
    """Its network with the widths of `avoid`: three states of 4 numbers, actions of 2, no goals."""
    shapes = recorded("beso_window")[0]["shapes"]
    net = "inner_model."
    shapes[f"{net}tok_emb.weight"][1], shapes[f"{net}action_emb.weight"][1] = 4, 2
    shapes[f"{net}action_pred.weight"][0] = shapes[f"{net}action_pred.bias"][0] = 2
    shapes[f"{net}pos_emb"][1] = 4
    masks = {f"{net}blocks.{i}.attn.mask": torch.ones(7, 7).tril()[None, None] for i in range(2)}
    torch.save(weights_of(shapes) | masks, tmp_path / "model_state_dict.pth")
    given = ["source=beso", "source.heads=4", "identity=[state,action]"]
    policy = burnish.import_policy(tmp_path / "model_state_dict.pth", *given, out=tmp_path / "policy")
    plain = burnish.evaluate(policy, env="avoid", episodes=2).evaluation
    remembering = burnish.evaluate(policy, "warm_start.executed=true", env="avoid", episodes=2).evaluation
    assert len(plain.rows) == len(remembering.rows) == 2
    assert plain.protocol_hash != remembering.protocol_hash
    few = ["algo.num_envs=2", "algo.steps_per_iteration=4", "algo.batch_size=4", "algo.critic.width=16"]
    few += ["algo.tuned_steps=3", "algo.iterations=1", "algo.env_steps=null", "evaluation.episodes=2"]
    run = burnish.train("algo=dppo", "env=avoid", *few, init=policy, directory=tmp_path / "run")
    before, after = (one.scored_net.outlet.weight for one in (burnish.load_policy(policy), run.load_policy()))
    assert not torch.equal(before, after)
