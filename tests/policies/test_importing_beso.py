"""BESO's network, agent and scalers: the reference files hold what the released code gives.

Its weights are drawn by name. `window`: three states, two goals, no scaling; `single`: one of each, with its
scaler, the goals of block push and a hidden layer before the actions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_checkpoints import TOLERANCE
from messages import mentions
from released import recorded, weights_of
from torch import Tensor

from policies.denoising import DenoisingPolicy
from policies.errors import CheckpointError, ConfigError
from policies.execution.replanning import Replanner
from policies.execution.warm_start import WarmStart
from policies.importing.beso import BesoSource
from policies.importing.importing import import_policy
from policies.protocols import TE
from policies.samplers.ode import Euler
from policies.storage.policy_folder import load_policy, save_policy

SOURCE = BesoSource(heads=4)
LIMITS = ("obs_mean", "obs_std", "action_min", "action_max")


def written(name: str, folder: Path, **changes: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a recorded network as its program does; returns the arguments and the recorded arrays."""
    facts, arrays = recorded(f"beso_{name}")
    weights, tokens = weights_of(facts["shapes"]), facts["tokens"]
    for i in range(2):
        weights[f"inner_model.blocks.{i}.attn.mask"] = torch.ones(tokens, tokens).tril()[None, None]
    torch.save(weights | changes, folder / "model_state_dict.pth")
    given: dict[str, Any] = {"path": folder / "model_state_dict.pth", "identity": ["state", "action"]}
    if name == "single":
        np.savez(folder / "scaler.npz", **{key: arrays[key] for key in LIMITS})
        given = {"path": given["path"], "normalization": folder / "scaler.npz"}
    return given, arrays


def policy_of(name: str, folder: Path, source: BesoSource = SOURCE, **options: Any) -> Any:
    given, arrays = written(name, folder)
    policy, conversion = import_policy(**given, source=source, **options)
    loaded = load_policy(save_policy(policy, folder / "policy", provenance=conversion.facts()))
    assert isinstance(loaded, DenoisingPolicy)
    return loaded, arrays


def times_of(sigma: Tensor) -> Tensor:
    return 1 / (1 + sigma)


@pytest.mark.parametrize(("guidance", "name"), [(1.0, "denoised"), (1.5, "guided"), (0.0, "unconditional")])
def test_the_denoiser_is_the_released_one(guidance: float, name: str, tmp_path: Path) -> None:
    source = replace(SOURCE, goal_dropout=0.1, guidance=guidance)
    policy, arrays = policy_of("window", tmp_path, source)
    cond, t = (
        policy.encode({"state": arrays["state"], "goal": arrays["goal"].flatten(1)}),
        times_of(arrays["sigma"]),
    )
    x = arrays["x"] * policy.process.alpha_sigma(t)[0][:, None, None]
    with torch.no_grad():
        clean = policy.predict(x, t, cond, kind="x0")
    torch.testing.assert_close(clean, arrays[name], **TOLERANCE)


def test_the_loss_is_the_released_one(tmp_path: Path) -> None:
    policy, arrays = policy_of("window", tmp_path)
    cond = policy.encode({"state": arrays["state"], "goal": arrays["goal"].flatten(1)})
    te = TE(times_of(arrays["sigma"]), arrays["loss_noise"])
    loss = policy.matching_loss(cond, arrays["x"], te, reduce="mean")
    torch.testing.assert_close(loss, arrays["loss"], **TOLERANCE)


def test_a_whole_window_is_denoised_as_in_its_validation(tmp_path: Path) -> None:
    policy, arrays = policy_of("window", tmp_path)
    obs = {"state": arrays["state"], "goal": arrays["goal"].flatten(1)}
    tape = torch.nn.functional.pad(arrays["chunk_draws"], (0, 0, 0, 0, 0, 1))  # the last step draws nothing
    chunk = policy.decode(policy.encode(obs), tape)
    torch.testing.assert_close(chunk, arrays["chunk"], **TOLERANCE)
    torch.testing.assert_close(policy.act(obs, noise=tape), arrays["chunk"][:, -1:], **TOLERANCE)


def test_one_state_acts_as_its_agent_after_a_reset(tmp_path: Path) -> None:
    policy, arrays = policy_of("window", tmp_path, replace(SOURCE, window=1))
    tape = torch.cat([arrays["first_0"][:, None], arrays["draws_0"], torch.zeros(1, 1, 1, 3)], dim=1)
    obs = {"state": arrays["observations"][:1], "goal": arrays["goal"][:1].flatten(1)}
    torch.testing.assert_close(policy.act(obs, noise=tape)[:, 0], arrays["actions"][:1], **TOLERANCE)


def test_executed_actions_as_start_give_the_actions_of_its_agent(tmp_path: Path) -> None:
    """From the third decision on, when its window is full; the fourth and fifth remember by themselves."""
    policy, arrays = policy_of("window", tmp_path)
    replanner = Replanner(policy, WarmStart(executed=True))
    goal, zeros = arrays["goal"][:1].flatten(1), torch.zeros(1, 1, 3, 3)
    plan = torch.nn.functional.pad(arrays["actions"][:2], (0, 0, 1, 0))[None]  # of the second decision
    for now in (2, 3, 4):
        obs = {"state": arrays["observations"][now - 2 : now + 1, 0][None], "goal": goal}
        first = torch.nn.functional.pad(arrays[f"first_{now}"], (0, 0, 2, 0))[:, None]
        tape = torch.cat([first, arrays[f"draws_{now}"], zeros], dim=1)
        decision = replanner.decide(obs, noise=tape, previous=plan)
        torch.testing.assert_close(decision.actions[:, 0], arrays["actions"][now][None], **TOLERANCE)
        torch.testing.assert_close(decision.plan[0], arrays["actions"][now - 2 : now + 1], **TOLERANCE)
        assert decision.calls == 3
        plan = decision.plan


def test_a_window_of_one_state_acts_as_its_agent_in_physical_units(tmp_path: Path) -> None:
    sampler = Euler(steps=3, grid="linear", clip_action=1.1)
    policy, arrays = policy_of("single", tmp_path, replace(SOURCE, noise_min=0.05), sampler=sampler)
    obs = {"state": arrays["state"], "goal": arrays["goal"][:, 0]}
    torch.testing.assert_close(policy.act(obs, noise=arrays["draws"]), arrays["actions"], **TOLERANCE)
    unread = torch.zeros(10).index_fill_(0, torch.tensor([2, 5, 6, 7, 8, 9]), 5.0)
    other = policy.act(obs | {"goal": obs["goal"] + unread}, noise=arrays["draws"])
    torch.testing.assert_close(other, arrays["actions"], **TOLERANCE)


def test_its_sampler_bounds_actions_by_the_limits_of_its_data(tmp_path: Path) -> None:
    bounded, _ = policy_of("single", tmp_path)
    free, _ = policy_of("window", tmp_path)
    assert (bounded.sampler.clip_action, free.sampler.clip_action) == (1.1, None)


def test_actions_may_be_scaled_by_mean_and_deviation(tmp_path: Path) -> None:
    given, arrays = written("single", tmp_path)
    low, high = (arrays[f"action_{end}"].double() for end in ("min", "max"))
    moments = {"action_mean": (low + high) / 2, "action_std": (high - low) / 2}
    by_limits, _ = import_policy(**given, source=SOURCE)
    np.savez(given["normalization"], **{key: arrays[key] for key in LIMITS[:2]}, **moments)
    by_moments, conversion = import_policy(**given, source=SOURCE)
    rows = torch.randn(3, 2)
    torch.testing.assert_close(by_moments.physical(rows), by_limits.physical(rows))
    assert conversion.normalizer == dict.fromkeys(("state", "action"), "file of statistics")
    assert set(conversion.skipped) == {"rebuilt, and equal"}


def test_an_import_can_be_trained_on(tmp_path: Path) -> None:
    policy, arrays = policy_of("window", tmp_path, replace(SOURCE, goal_dropout=0.5))
    cond = policy.encode({"state": arrays["state"], "goal": arrays["goal"].flatten(1)})
    te = policy.sample_te(len(cond), generator=torch.Generator().manual_seed(0))
    policy.matching_loss(cond, arrays["x"], te).mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in policy.parameters())


def test_what_cannot_be_imported_is_named(tmp_path: Path) -> None:
    given, arrays = written("window", tmp_path)
    for source, message in (
        (replace(SOURCE, heads=None), "source.heads"),
        (replace(SOURCE, heads=3), "heads 16 3"),
        (replace(SOURCE, window=4), "source.window 3 4"),
        (replace(SOURCE, guidance=2.0), "guidance goal_dropout"),
    ):
        with pytest.raises(ConfigError, match=mentions(message)):
            import_policy(**given, source=source)
    for name, value, message in (
        ("blocks.1.attn.mask", torch.ones(1, 1, 9, 9), "blocks.1.attn.mask"),
        ("pos_emb", torch.zeros(1, 9, 16), "9"),
        ("goal_emb.weight", torch.zeros(16, 5), "goal_emb.weight"),
        ("tok_emb.weight", torch.zeros(8, 5), "obs_inlet.weight"),
    ):
        given, _ = written("window", tmp_path, **{f"inner_model.{name}": value})
        with pytest.raises(CheckpointError, match=mentions(message)):
            import_policy(**given, source=SOURCE)
    given, _ = written("single", tmp_path)
    with pytest.raises(ConfigError, match=mentions("state normalization=")):
        import_policy(given["path"], SOURCE)
    same = {"action_max": arrays["x"].new_zeros(2), "action_min": arrays["x"].new_zeros(2)}
    np.savez(given["normalization"], obs_mean=np.zeros(10), obs_std=np.ones(10), **same)
    with pytest.raises(CheckpointError, match=mentions("action 0")):
        import_policy(**given, source=SOURCE)
