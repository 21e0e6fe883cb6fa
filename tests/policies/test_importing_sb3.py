"""Actors of Stable-Baselines3: imported whole and equal; the archives are those that it wrote."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from messages import mentions
from released import FOLDER, recorded

from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.importing.actors import activation_of
from policies.importing.importing import import_policy
from policies.importing.sb3 import Sb3Source
from policies.networks.activations import ACTIVATIONS
from policies.processes.gaussian import GaussianPolicy
from policies.storage.policy_folder import load_policy, save_policy

EXAMPLES = ("sb3_ppo", "sb3_a2c", "sb3_sac", "sb3_td3")


def statistics(name: str, folder: Path) -> Path:
    _, arrays = recorded(name)
    np.savez(folder / "normalize.npz", obs_mean=arrays["obs_mean"], obs_var=arrays["obs_var"])
    return folder / "normalize.npz"


def changed(name: str, folder: Path, compression: int = zipfile.ZIP_STORED, **data: Any) -> Path:
    """Write the archive with other values in its `data`."""
    with zipfile.ZipFile(FOLDER / f"{name}.zip") as archive:
        own, weights = json.loads(archive.read("data")), archive.read("policy.pth")
    path = folder / "model.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("data", json.dumps(own | data))
        archive.writestr("policy.pth", weights)
    return path


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_import_chooses_what_the_program_chooses(name: str, tmp_path: Path) -> None:
    _, arrays = recorded(name)
    path = FOLDER / f"{name}.zip"
    policy, conversion = import_policy(path, Sb3Source(), normalization=statistics(name, tmp_path))
    loaded = load_policy(save_policy(policy, tmp_path / "policy", provenance=conversion.facts()))
    actions = loaded.act(arrays["obs"].unsqueeze(1))
    torch.testing.assert_close(actions.squeeze(1), arrays["out"], rtol=1e-5, atol=1e-5)
    assert conversion.normalizer == {"state": "file of statistics", "action": "checkpoint"}


@pytest.mark.parametrize(("theirs", "formula"), [("GELU", F.gelu), ("LeakyReLU", F.leaky_relu)])
def test_an_activation_is_that_of_torch(theirs: str, formula: Any) -> None:
    x = torch.linspace(-4, 4, 101)
    name = activation_of(f"<class 'torch.nn.modules.activation.{theirs}'>")
    torch.testing.assert_close(ACTIVATIONS[name][0](x), formula(x), rtol=0, atol=0)


def test_the_deviations_of_an_on_policy_actor_come_along(tmp_path: Path) -> None:
    _, arrays = recorded("sb3_ppo")
    policy, _ = import_policy(
        FOLDER / "sb3_ppo.zip", Sb3Source(), normalization=statistics("sb3_ppo", tmp_path)
    )
    assert isinstance(policy, GaussianPolicy)
    _, std = policy.head(policy.encode({"state": arrays["obs"].unsqueeze(1)}).vec)
    torch.testing.assert_close(std[0, 0] * torch.tensor([1.75, 0.25]), arrays["std"])  # half the ranges


def test_an_imported_actor_is_fine_tuned_by_the_chain_that_ppo_uses() -> None:
    policy, _ = import_policy(FOLDER / "sb3_ppo.zip", Sb3Source(), identity=["state"])
    cond = policy.encode({"state": torch.ones(3, 1, 5)})
    chain = policy.sample_chain(cond, generator=torch.Generator().manual_seed(0))
    log_prob, _ = policy.chain_log_prob(cond, chain.x)
    assert torch.equal(log_prob, chain.log_prob)
    log_prob.sum().backward()
    assert all(weight.grad is not None for weight in policy.parameters())


def test_statistics_must_be_given_or_waived(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=mentions("state normalization identity")):
        import_policy(FOLDER / "sb3_sac.zip", Sb3Source())
    np.savez(tmp_path / "other.npz", obs_mean=np.zeros(5))
    with pytest.raises(CheckpointError, match=mentions("obs_var obs_mean")):
        import_policy(FOLDER / "sb3_sac.zip", Sb3Source(), normalization=tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("name", "data", "error", "message"),
    [
        ("sb3_sac", {"use_sde": True}, CapabilityError, "use_sde=True"),
        ("sb3_ppo", {"policy_kwargs": {"activation_fn": "<class 'torch.nn.ELU'>"}},
         CapabilityError, "elu relu"),
        ("sb3_ppo", {"action_space": {":type:": "<class 'gymnasium.spaces.discrete.Discrete'>"}},
         CapabilityError, "Box"),
        ("sb3_ppo", {"action_space": {":type:": "Box'>", "low": "[-1.]", "high": ""}},
         CheckpointError, "bounds -1.0"),
        ("sb3_ppo", {"action_space": {":type:": "Box'>", "low": "[-1.]", "high": "[1.]"}},
         CheckpointError, "2 actions 1"),
        ("sb3_sac", {"action_space": {":type:": "Box'>", "low": "[-1.]", "high": "[1.]"}},
         CheckpointError, "(4, 12) (2, 12)"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused(
    name: str, data: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=mentions(message)):
        import_policy(changed(name, tmp_path, **data), Sb3Source(), identity=["state"])


def test_settings_that_are_no_json_are_refused(tmp_path: Path) -> None:
    path = changed("sb3_ppo", tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "x")
    with pytest.raises(CheckpointError, match=mentions("model.zip data JSON")):
        import_policy(path, Sb3Source())


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    path = changed("sb3_ppo", tmp_path, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=mentions("data compressed")):
        import_policy(path, Sb3Source(), identity=["state"])


def test_weights_that_hold_code_are_refused_and_not_run(tmp_path: Path) -> None:
    class Intruder:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "trace",))

    torch.save({"actor.mu.0.weight": Intruder()}, tmp_path / "weights.pth")
    path = tmp_path / "model.zip"
    with zipfile.ZipFile(FOLDER / "sb3_td3.zip") as archive, zipfile.ZipFile(path, "w") as evil:
        evil.writestr("data", archive.read("data"))
        evil.write(tmp_path / "weights.pth", "policy.pth")
    with pytest.raises(CheckpointError, match=mentions("could run its code")):
        import_policy(path, Sb3Source(), identity=["state"])
    assert not (tmp_path / "trace").exists()
