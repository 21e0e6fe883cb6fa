"""robomimic's behaviour cloning: imported whole and equal; the checkpoints are those that it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import mentions
from released import FOLDER, recorded
from torch import Tensor

from envs.fit import _action_kind, require_fit
from envs.tasks.robosuite.tasks import Lift
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.importing.importing import import_policy
from policies.importing.robomimic import RobomimicSource
from policies.importing.robomimic_facts import ABSOLUTE, CHANGES, interface_of_task
from policies.policy import Policy
from policies.processes.mixture import MixturePolicy
from policies.storage.policy_folder import load_policy, save_policy

KEYS = ("robot0_eef_pos", "object")


def imported(kind: str, folder: Path, keys: tuple[str, ...] = ()) -> tuple[Policy, dict[str, Tensor]]:
    """Import a recorded checkpoint; returns the loaded policy, and the reference with its `state`."""
    _, arrays = recorded(f"robomimic_{kind}")
    policy, conversion = import_policy(FOLDER / f"robomimic_{kind}.pth", RobomimicSource(keys=keys))
    order = conversion.facts()["imported_source"]["state"]
    arrays["state"] = torch.cat([arrays[f"in.{key}"] for key in order], dim=1).unsqueeze(1)
    return load_policy(save_policy(policy, folder / "policy", provenance=conversion.facts())), arrays


def changed(folder: Path, **settings: Any) -> Path:
    """Write the checkpoint of a mixture with other settings of its algorithm."""
    whole = torch.load(FOLDER / "robomimic_gmm.pth", weights_only=True)
    config = json.loads(whole["config"])
    for name, values in settings.items():
        config["algo"][name] |= values
    torch.save(whole | {"config": json.dumps(config)}, folder / "model.pth")
    return folder / "model.pth"


@pytest.mark.parametrize("kind", ["plain", "gaussian"])
@pytest.mark.parametrize("keys", [(), KEYS])
def test_an_import_chooses_what_the_program_chooses(kind: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    policy, arrays = imported(kind, tmp_path, keys)
    torch.testing.assert_close(policy.act(arrays["state"]).squeeze(1), arrays["out"], rtol=1e-5, atol=1e-6)


def test_a_mixture_is_that_of_the_program(tmp_path: Path) -> None:
    policy, arrays = imported("gmm", tmp_path)
    assert isinstance(policy, MixturePolicy)
    weight, mean, std = policy.head(policy.encode({"state": arrays["state"]}).vec)
    torch.testing.assert_close(weight, arrays["log_weight"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mean.squeeze(2), arrays["out"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(std.squeeze(2), arrays["std"], rtol=1e-5, atol=1e-5)


def test_a_mixture_acts_with_the_mean_of_a_mode_and_can_be_cloned_further(tmp_path: Path) -> None:
    policy, arrays = imported("gmm", tmp_path)
    actions = policy.act(arrays["state"], generator=torch.Generator().manual_seed(0))
    distance = (actions - arrays["out"]).abs().amax(dim=2).amin(dim=1)
    assert distance.max() < 1e-5
    assert isinstance(policy, MixturePolicy)
    cond = policy.encode({"state": arrays["state"]})
    policy.matching_loss(cond, actions, policy.sample_te(8)).mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in policy.parameters())


def test_a_checkpoint_with_optimisers_is_read(tmp_path: Path) -> None:
    """robomimic 0.5 keeps the networks beside the state of training."""
    whole = torch.load(FOLDER / "robomimic_plain.pth", weights_only=True)
    later = {"nets": whole["model"], "optimizers": {}, "lr_schedulers": {}}
    statistics = {"actions": {"offset": [[0.5, -0.5]], "scale": [[2.0, 4.0]]}}
    torch.save(whole | {"model": later, "action_normalization_stats": statistics}, tmp_path / "model.pth")
    policy, conversion = import_policy(tmp_path / "model.pth", RobomimicSource())
    _, arrays = recorded("robomimic_plain")
    state = torch.cat([arrays["in.object"], arrays["in.robot0_eef_pos"]], dim=1).unsqueeze(1)
    expected = arrays["out"] * torch.tensor([2.0, 4.0]) + torch.tensor([0.5, -0.5])
    torch.testing.assert_close(policy.act(state).squeeze(1), expected, rtol=1e-5, atol=1e-5)
    assert conversion.entry == "model/nets" and conversion.normalizer["action"] == "checkpoint"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rnn": {"enabled": True}}, "BC-GMM bc rnn"),
        ({"gmm": {"std_activation": "exp"}}, "exp softplus"),
    ],
)
def test_what_has_no_counterpart_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=mentions(message)):
        import_policy(changed(tmp_path, **settings), RobomimicSource())


def test_keys_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=mentions("source.keys object robot0_eef_pos what")):
        import_policy(FOLDER / "robomimic_gmm.pth", RobomimicSource(keys=("what",)))
    torch.save({"model": {"weight": torch.zeros(2)}}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=mentions("robomimic algo_name")):
        import_policy(tmp_path / "model.pth", RobomimicSource())


ONE_FIVE = {"type": "BASIC", "body_parts": {"right": {"type": "OSC_POSE", "input_type": "absolute"}}}


@pytest.mark.parametrize(
    ("controller", "actions"),
    [
        ({"control_delta": False}, ABSOLUTE),
        ({"control_delta": True}, CHANGES),
        ([{"control_delta": True}, {"control_delta": False}], ABSOLUTE),
        (ONE_FIVE, ABSOLUTE),
        ({"body_parts": {"right": {"input_type": "delta"}, "gripper": {"type": "GRIP"}}}, CHANGES),
        ({"type": "OSC_POSE"}, None),
        (None, None),
    ],
)
def test_the_controller_tells_what_the_actions_are(controller: Any, actions: str | None) -> None:
    task = {"env_name": "Lift", "env_kwargs": {"control_freq": 20, "controller_configs": controller}}
    expected = {"control_hz": 20} | ({} if actions is None else {"actions": actions})
    assert interface_of_task(task) == expected
    assert interface_of_task("what") == interface_of_task({"env_name": "Lift"}) == {}


def test_absolute_actions_are_not_run_where_changes_are_expected(tmp_path: Path) -> None:
    policy, _ = imported("plain", tmp_path)
    assert policy.provenance["interface"] == {"actions": ABSOLUTE}
    lift = Lift().spec
    assert _action_kind(lift) == CHANGES
    with pytest.raises(ConfigError, match=mentions("absolute poses changes poses")):
        require_fit("env=lift", SimpleNamespace(family=lift.family), "the policy", policy, advice="")
    require_fit("env=hopper", SimpleNamespace(family="gym"), "the policy", policy, advice="")
