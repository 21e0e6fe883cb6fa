"""An imported network of FPO's released program: what that program sampled, and how it judged actions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from official_networks import read
from safetensors.torch import save_file
from torch import Tensor

from algos.onpolicy.fpo_ratio import FpoRatio, Matching
from policies.denoising import DenoisingPolicy
from policies.errors import CheckpointError, ConfigError
from policies.importing.fpo import FpoSource
from policies.importing.importing import Conversion, import_policy
from policies.networks.embeddings import OctaveEmbedding
from policies.storage.policy_folder import load_policy, save_policy

FORWARD = {"rtol": 1e-5, "atol": 2e-6}
FILE = "fpo_playground_loss*.npz"


def weights_of(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = ("policy.", "value.", "obs_mean", "obs_std")
    return {name: value.contiguous() for name, value in arrays.items() if name.startswith(kept)}


def imported(weights: dict[str, Tensor], folder: Path, **options: Any) -> tuple[DenoisingPolicy, Conversion]:
    save_file(weights, folder / "fpo.safetensors")
    policy, conversion = import_policy(folder / "fpo.safetensors", FpoSource(), **options)
    assert isinstance(policy, DenoisingPolicy)
    return policy, conversion


@pytest.mark.golden(FILE)
def test_an_imported_policy_samples_what_the_program_samples(golden_path: Path, tmp_path: Path) -> None:
    arrays = read(golden_path)
    policy, conversion = imported(weights_of(arrays), tmp_path)
    critic = [name for name in arrays if name.startswith("value.")]
    assert conversion.skipped == {"the critic": len(critic)}
    assert conversion.tensors == len(weights_of(arrays)) - len(critic)
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    assert isinstance(loaded, DenoisingPolicy)
    cond = loaded.encode(loaded.observation({"state": arrays["sample_obs"][:, None]}))
    action = loaded.executed(loaded.decode(cond, arrays["sample_x1_noise"][:, None]))
    torch.testing.assert_close(action[:, 0], arrays["sample_action"], **FORWARD)


@pytest.mark.golden(FILE)
def test_an_imported_policy_judges_actions_as_the_program_does(golden_path: Path, tmp_path: Path) -> None:
    arrays = read(golden_path)
    policy, _ = imported(weights_of(arrays), tmp_path)
    cond = policy.encode(policy.observation({"state": arrays["cfm_obs"].flatten(0, 1)[:, None]}))
    t = 1 - arrays["cfm_t"].flatten(0, 1).squeeze(-1)
    draws = t.shape[1]
    action = arrays["cfm_action"].flatten(0, 1).repeat_interleave(draws, 0)[:, None]
    eps = arrays["cfm_eps"].flatten(0, 2)[:, None]
    for mode, kind in (("u", "velocity"), ("u_but_supervise_as_eps", "eps")):
        ratio = FpoRatio(policy, Matching(prediction=kind), num_draws=draws)
        with torch.no_grad():
            loss = ratio.losses(cond.repeat(draws), action, eps, t.flatten()).view_as(t)
        torch.testing.assert_close(loss, arrays[f"cfm_loss_{mode}"].flatten(0, 1), rtol=1e-5, atol=5e-6)


@pytest.mark.golden(FILE)
def test_octaves_are_the_time_features_of_the_program(golden_path: Path) -> None:
    arrays = read(golden_path)
    net = OctaveEmbedding(arrays["embed_t_out"].shape[1])
    torch.testing.assert_close(net(arrays["embed_t_in"].squeeze(1)), arrays["embed_t_out"], **FORWARD)
    assert not net.state_dict() and net.double()(torch.arange(3)).dtype == torch.float64


def without_states(weights: dict[str, Tensor]) -> None:
    """Leave the first layer rows for action and time features alone."""
    *_, last = (value for name, value in weights.items() if name.startswith("policy.b"))
    weights["policy.W0"] = weights["policy.W0"][: len(last) + FpoSource().time_features]


BROKEN: tuple[tuple[Callable[[dict[str, Tensor]], Any], str], ...] = (
    (lambda weights: weights.pop("policy.b1"), "network"),
    (lambda weights: weights.update({"policy.scale": torch.ones(1)}), "network"),
    (without_states, "W0 source.time_features="),
    (lambda weights: weights.update({"policy.W1": weights["policy.W1"][0]}), "W1 2 (32,)"),
    (lambda weights: weights.update({"policy.W1": weights["policy.W1"][1:]}), "W1"),
    (lambda weights: weights["obs_std"].zero_(), "state"),
    (lambda weights: weights.pop("obs_std"), "network"),
)


@pytest.mark.parametrize(
    ("break_it", "message"), BROKEN, ids=lambda part: part if isinstance(part, str) else ""
)
@pytest.mark.golden(FILE)
def test_other_tensors_are_refused(
    golden_path: Path, tmp_path: Path, break_it: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    weights = weights_of(read(golden_path))
    break_it(weights)
    with pytest.raises(CheckpointError, match=mentions(message)):
        imported({name: value.contiguous() for name, value in weights.items()}, tmp_path)


@pytest.mark.golden(FILE)
def test_statistics_are_given_or_left_out_on_purpose(golden_path: Path, tmp_path: Path) -> None:
    arrays = read(golden_path)
    weights = {name: value for name, value in weights_of(arrays).items() if "obs" not in name}
    with pytest.raises(ConfigError, match=mentions("identity=[state]")):
        imported(weights, tmp_path)
    policy, _ = imported(weights, tmp_path, identity=["state"])
    assert policy.obs_dim == len(arrays["obs_mean"])
    assert policy.chunk.shape == (1, arrays["sample_action"].shape[1])


def test_an_odd_number_of_time_features_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("source.time_features 7")):
        FpoSource(time_features=7)
