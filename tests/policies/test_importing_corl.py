"""Actors of CORL: imported whole and equal; references were recorded with its released modules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from released import recorded, weights_of
from torch import Tensor

from policies.errors import CheckpointError, ConfigError
from policies.importing.corl import CorlSource
from policies.importing.importing import import_policy
from policies.storage.policy_folder import load_policy, save_policy

PROGRAMS = ("td3_bc", "iql", "cql", "awac", "edac")
TWICE = CorlSource(max_action=2.0)


def written(name: str, folder: Path, **others: Any) -> tuple[Path, dict[str, Tensor]]:
    facts, arrays = recorded(f"corl_{name}")
    actor = weights_of(facts["shapes"])
    actor |= {key.removeprefix("constant."): v for key, v in arrays.items() if key.startswith("constant.")}
    optimizer = {"state": {}, "param_groups": [{"lr": 3e-4, "params": [0]}]}
    whole = {"critic_1": {"net.0.weight": torch.zeros(2, 2)}, "actor": actor, "actor_optimizer": optimizer}
    torch.save(whole | {"total_it": 1000} | others, folder / "checkpoint_999.pt")
    return folder / "checkpoint_999.pt", arrays


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_import_chooses_what_the_program_chooses(name: str, tmp_path: Path) -> None:
    path, arrays = written(name, tmp_path)
    policy, conversion = import_policy(path, TWICE, identity=["state"])
    loaded = load_policy(save_policy(policy, tmp_path / "policy", provenance=conversion.facts()))
    actions = loaded.act(arrays["obs"].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(actions, arrays["out"], rtol=1e-5, atol=2e-6)
    assert conversion.entry == "actor"


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_imported_actor_can_be_cloned_further(name: str, tmp_path: Path) -> None:
    path, arrays = written(name, tmp_path)
    policy, _ = import_policy(path, TWICE, identity=["state"])
    cond = policy.encode({"state": arrays["obs"].unsqueeze(1)})
    policy.matching_loss(cond, torch.zeros(16, 1, 2), policy.sample_te(16)).mean().backward()
    assert all(weight.grad is not None for weight in policy.parameters())


def test_modules_beside_the_actor_of_cql_are_read_without_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scalar(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.constant = torch.nn.Parameter(torch.zeros(()))

        def __setstate__(self, state: Any) -> None:
            raise AssertionError("the code of the file ran")

    Scalar.__module__, Scalar.__qualname__ = "__main__", "Scalar"
    monkeypatch.setattr(sys.modules["__main__"], "Scalar", Scalar, raising=False)
    path, arrays = written("cql", tmp_path, sac_log_alpha=Scalar(), cql_log_alpha=Scalar())
    policy, _ = import_policy(path, TWICE, identity=["state"])
    actions = policy.act(arrays["obs"].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(actions, arrays["out"], rtol=1e-5, atol=2e-6)


def test_observations_are_normalised_with_statistics_of_the_dataset(tmp_path: Path) -> None:
    path, arrays = written("td3_bc", tmp_path)
    mean, std = torch.linspace(-1, 1, 5), torch.linspace(0.0, 2.0, 5)
    np.savez(tmp_path / "statistics.npz", obs_mean=mean, obs_std=std)
    policy, conversion = import_policy(path, TWICE, normalization=tmp_path / "statistics.npz")
    assert conversion.normalizer == {"state": "file of statistics", "action": "checkpoint"}
    physical = arrays["obs"] * (std + 1e-3) + mean
    torch.testing.assert_close(
        policy.act(physical.unsqueeze(1)).squeeze(1), arrays["out"], rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ConfigError, match=mentions("state normalization identity")):
        import_policy(path, TWICE)


def test_another_actor_is_refused(tmp_path: Path) -> None:
    path, _ = written("td3_bc", tmp_path, actor={"transformer.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=mentions("CORL transformer.weight")):
        import_policy(path, CorlSource(), identity=["state"])
    path, _ = written(
        "td3_bc", tmp_path, actor={"net.0.weight": torch.zeros(2, 5), "net.0.bias": torch.zeros(2)}
    )
    with pytest.raises(CheckpointError, match=mentions("hidden layer 1")):
        import_policy(path, CorlSource(), identity=["state"])
