"""Actors of d3rlpy: imported whole and equal; the files are those that it wrote, less critics."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from released import FOLDER, recorded

from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.importing.d3rlpy import D3rlpySource
from policies.importing.importing import import_policy
from policies.processes.gaussian import GaussianPolicy
from policies.storage.policy_folder import load_policy, save_policy

EXAMPLES = ("d3rlpy_td3bc", "d3rlpy_iql", "d3rlpy_cql", "d3rlpy_sac")


def changed(name: str, folder: Path, **settings: Any) -> Path:
    """Write the file with another type or other parameters of its algorithm."""
    whole = pickle.loads((FOLDER / f"{name}.d3").read_bytes())
    config = json.loads(whole["config"])
    config["config"]["type"] = settings.pop("type", config["config"]["type"])
    config["config"]["params"] |= settings
    (folder / "model.d3").write_bytes(pickle.dumps(whole | {"config": json.dumps(config)}))
    return folder / "model.d3"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_import_chooses_what_the_program_chooses(name: str, tmp_path: Path) -> None:
    _, arrays = recorded(name)
    policy, conversion = import_policy(FOLDER / f"{name}.d3", D3rlpySource())
    loaded = load_policy(save_policy(policy, tmp_path / "policy", provenance=conversion.facts()))
    actions = loaded.act(arrays["obs"].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(actions, arrays["out"].float(), rtol=1e-5, atol=1e-5)


def test_the_deviation_of_iql_lies_within_its_limits() -> None:
    policy, conversion = import_policy(FOLDER / "d3rlpy_iql.d3", D3rlpySource())
    assert isinstance(policy, GaussianPolicy)
    log_std = policy.head(torch.zeros(1, 5))[1].log()
    assert (log_std > -5).all() and (log_std < 2).all()
    assert conversion.normalizer == {"state": "checkpoint", "action": "checkpoint"}


def test_a_program_without_scalers_has_none_here() -> None:
    policy, conversion = import_policy(FOLDER / "d3rlpy_cql.d3", D3rlpySource())
    assert policy.normalizer.modes == {"state": "identity", "action": "identity"}
    assert set(conversion.normalizer.values()) == {"identity, as in the program"}


def test_an_imported_actor_can_be_cloned_further() -> None:
    policy, _ = import_policy(FOLDER / "d3rlpy_sac.d3", D3rlpySource())
    loss = policy.matching_loss(
        policy.encode({"state": torch.ones(2, 1, 5)}), torch.zeros(2, 1, 2), policy.sample_te(2)
    )
    loss.mean().backward()
    assert all(weight.grad is not None for weight in policy.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "bcq"}, "bcq td3"),
        ({"observation_scaler": {"type": "pixel", "params": {}}}, "observation_scaler pixel standard"),
        ({"actor_encoder_factory": {"params": {"activation": "selu"}}}, "selu relu"),
        ({"actor_encoder_factory": {"params": {"exclude_last_activation": True}}}, "exclude_last_activation"),
        ({"actor_encoder_factory": {"params": {"last_activation": "tanh"}}}, "last_activation"),
    ],
)
def test_what_has_no_counterpart_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=mentions(message)):
        import_policy(changed("d3rlpy_td3bc", tmp_path, **settings), D3rlpySource())


def test_settings_that_are_not_read_are_refused(tmp_path: Path) -> None:
    path = FOLDER / "d3rlpy_cql.d3"
    np.savez(tmp_path / "statistics.npz", obs_mean=np.ones(5), obs_std=np.ones(5))
    with pytest.raises(ConfigError, match=mentions("d3rlpy normalization")):
        import_policy(path, D3rlpySource(), normalization=tmp_path / "statistics.npz")
    with pytest.raises(ConfigError, match=mentions("d3rlpy policy entry=q_funcs")):
        import_policy(path, D3rlpySource(), entry="q_funcs")
    assert import_policy(path, D3rlpySource(), entry="policy")[1].entry == "policy"


def test_a_file_that_would_run_code_is_refused_and_does_not(tmp_path: Path) -> None:
    class Intruder:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "trace",))

    (tmp_path / "model.d3").write_bytes(pickle.dumps({"torch": Intruder(), "config": "{}"}))
    with pytest.raises(CheckpointError, match=mentions("could run its code")):
        import_policy(tmp_path / "model.d3", D3rlpySource())
    assert not (tmp_path / "trace").exists()
    (tmp_path / "model.d3").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match=mentions("d3rlpy torch config")):
        import_policy(tmp_path / "model.d3", D3rlpySource())
