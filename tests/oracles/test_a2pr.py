"""A2PR against the released program: every quantity of four steps, and all weights after each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from official_td3 import (
    NUMBER,
    actor_of,
    actor_weights,
    batch_of,
    check_weights,
    ensemble_of,
    ensemble_weights,
    names,
    num_steps,
    read,
    rules_of,
    shapes_of,
    sine_weights,
    under,
    vae_keys,
    vae_of,
)
from torch import Tensor

from algos.a2pr import AdvantageGuide
from algos.constrained_td3 import Td3Learner

CRITICS, VALUES = (names(1, 5), names(6, 10)), (names(1, 5),)
SEEDS = {"actor": 25, "critic": 26, "value": 27, "vae": 28}


def initial(arrays: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the weights before the first step, stored or by formula."""
    parts = (*SEEDS, "actor_target", "critic_target")
    if any(name.startswith("init/") for name in arrays):
        return {part: under(arrays, f"init/{part}/") for part in parts}
    step = under(arrays, "step1/")
    state, action = step["state"].shape[1], step["action"].shape[1]
    width, wide, latent = (int(arrays[f"cfg/{name}"]) for name in ("hidden", "vae_hidden", "latent"))
    critic = [state + action, *[width] * 4, 1]
    encoder, decoder = [state + action, wide, wide], [state + latent, wide, wide, action]
    heads = {
        f"{head}.{k}": s
        for head in ("mean", "log_std")
        for k, s in (("weight", (latent, wide)), ("bias", (latent,)))
    }
    shapes = {
        "actor": shapes_of("l", [state, *[width] * 3, action]),
        "critic": shapes_of("l", critic) | shapes_of("l", critic, 6),
        "value": shapes_of("l", [state, *[width] * 4, 1]),
        "vae": shapes_of("e", encoder) | heads | shapes_of("d", decoder),
    }
    weights = {part: sine_weights(shapes[part], seed) for part, seed in SEEDS.items()}
    scaled = {
        f"{p}_target": {k: v * np.float32(0.95) for k, v in weights[p].items()} for p in ("actor", "critic")
    }
    return weights | scaled


def learner_of(arrays: dict[str, Tensor]) -> Td3Learner:
    """Return our learner at the start of a file."""
    weights, rules = initial(arrays), rules_of(arrays)
    guide = AdvantageGuide(
        vae_of(weights["vae"], rules.limit), ensemble_of(weights["value"], VALUES),
        weight=float(arrays["cfg/mask"]), vae_weight=float(arrays["cfg/vae_weight"]),
        value_lr=float(arrays["cfg/lr"]), vae_lr=float(arrays["cfg/vae_lr"]),
    )  # fmt: skip
    actor, critic = actor_of(weights["actor"], rules.limit), ensemble_of(weights["critic"], CRITICS)
    learner = Td3Learner(actor, critic, guide, rules)
    target = actor_of(weights["actor_target"], rules.limit).policy
    learner.target_actor.policy.load_state_dict(target.state_dict())
    learner.target_critic.load_state_dict(ensemble_of(weights["critic_target"], CRITICS).state_dict())
    return learner


def weights_of(learner: Td3Learner) -> dict[str, dict[str, Tensor]]:
    """Return all weights by their released names."""
    guide = learner.regulariser
    assert isinstance(guide, AdvantageGuide)
    vae = guide.vae.state_dict()
    return {
        "actor": actor_weights(learner.actor),
        "actor_target": actor_weights(learner.target_actor),
        "critic": ensemble_weights(learner.critic, CRITICS),
        "critic_target": ensemble_weights(learner.target_critic, CRITICS),
        "value": ensemble_weights(guide.value, VALUES),
        "vae": {theirs: vae[ours] for ours, theirs in vae_keys().items()},
    }


def draws_of(step: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the random numbers of a step."""
    none = torch.zeros(len(step["action"]), 0)
    noise = {"vae_data": step["noise_vae_data"]}
    if "noise_vae_policy" in step:
        noise["vae_policy"] = step["noise_vae_policy"]
    return {"target": step["noise_target"], "next_start": none, "start": none} | noise


@pytest.mark.golden("a2pr_*.npz")
def test_steps(golden_path: Path) -> None:
    arrays = read(golden_path)
    learner, discount, moved = learner_of(arrays), float(arrays["cfg/discount"]), 0
    for t in range(1, num_steps(arrays) + 1):
        step = under(arrays, f"step{t}/")
        batch, draws = batch_of(step, discount), draws_of(step)
        torch.testing.assert_close(learner.backup(batch, draws).target, step["target_q"].squeeze(1), **NUMBER)
        out = learner.step(batch, draws)
        expected = {
            "critic/loss": step["critic_loss"], "value/loss": step["value_loss"],
            "guide/loss": step["vae_loss"], "guide/kept_fraction": step["vae_keep"].float().mean(),
        }  # fmt: skip
        if "bc_loss" in step:
            moved += 1
            expected |= {
                "actor/value_loss": step["actor_loss"], "actor/constraint": step["bc_loss"],
                "actor/value": step["Q_value"], "guide/followed_fraction": step["use_recon"].float().mean(),
            }  # fmt: skip
        for name, value in expected.items():
            torch.testing.assert_close(
                out[name], value.float().squeeze(), **NUMBER, msg=lambda m, n=name: f"{n}: {m}"
            )
        check_weights(weights_of(learner), step)
    assert moved  # the actor was compared, too
