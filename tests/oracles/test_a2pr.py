"""A2PR against the released program: every quantity of four steps, and all weights after each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from official_td3 import (
    actor_of,
    actor_weights,
    batch_of,
    check_number,
    check_weights,
    config_of,
    ensemble_of,
    ensemble_weights,
    limit_of,
    names,
    num_steps,
    read,
    shapes_of,
    sine_weights,
    under,
    vae_keys,
    vae_of,
)
from torch import Tensor

from algos.a2pr import A2prConfig, AdvantageGuide, divergence
from algos.offline.td3_update import Td3Learner
from algos.transitions import Batch

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
    weights, limit = initial(arrays), limit_of(arrays)
    config = A2prConfig(
        constraint_weight=float(arrays["cfg/mask"]), vae_weight=float(arrays["cfg/vae_weight"]),
        value_lr=float(arrays["cfg/lr"]), vae_lr=float(arrays["cfg/vae_lr"]),
    )  # fmt: skip
    guide = AdvantageGuide(vae_of(weights["vae"], limit), ensemble_of(weights["value"], VALUES), config)
    actor, critic = actor_of(weights["actor"], limit), ensemble_of(weights["critic"], CRITICS)
    learner = Td3Learner(actor, critic, guide, config_of(arrays))
    target = actor_of(weights["actor_target"], limit).policy
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


REQUIRED = {"target_q", "critic_loss", "value_loss", "vae_keep", "vae_loss"}
"""What a step of a file must hold, if nothing else."""


def watched(learner: Td3Learner, batch: Batch, draws: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take a step; return every quantity on the way, by its released name, and shares that we report."""
    guide, seen = learner.regulariser, Seen(learner)
    assert isinstance(guide, AdvantageGuide)
    target = learner.backup(batch, draws).target
    with seen:
        out = learner.step(batch, draws)
    current, fresh, data, *of_actor = seen.critic
    recon, mean, std = seen.vae[0]
    kl = divergence(mean, std)
    found = {
        "target_q": target, "current_q1": current[0], "current_q2": current[1],
        "critic_loss": out["critic/loss"], "value_pred": seen.value[0][0],
        "value_target": seen.results["value_target"], "value_loss": out["value/loss"],
        "q1_data_after_critic_step": data[0], "vae_keep": data[0] > seen.value[0][0],
        "vae_recon": recon, "vae_mean": mean, "vae_std": std, "vae_loss": out["guide/loss"], "KL_loss": kl,
        "recon_loss": out["guide/loss"] - 0.5 * kl, "mean of vae_keep": out["guide/kept_fraction"],
    }  # fmt: skip
    if not of_actor:
        return found
    pi, rebuilt = seen.arguments["penalty"][1], seen.vae[1][0]
    follows, weight = seen.results["judged"]
    guided = torch.where(follows[:, None], rebuilt, batch.action)
    return found | {
        "pi": pi, "vae_recon_pi": rebuilt, "q1_pi": of_actor[0][0], "q1_recon_pi": of_actor[1][0],
        "q1_data": data[0], "guide_action": guided, "bc_residual": pi - guided, "use_recon": follows,
        "bc_weight": weight, "bc_loss": out["actor/constraint"], "actor_loss": out["actor/value_loss"],
        "combined_loss": out["actor/value_loss"] + out["actor/constraint"], "Q_value": out["actor/value"],
        "lmbda": -out["actor/value_loss"] / out["actor/value"], "target_Q": out["critic/target"],
        "mean of use_recon": out["guide/followed_fraction"],
        "targ_Q": (batch.reward + batch.discount * fresh.amin(0)).mean(),
    }  # fmt: skip


class Seen:
    """What networks return during a step, call by call, and what some functions of the guide do."""

    def __init__(self, learner: Td3Learner) -> None:
        guide = learner.regulariser
        assert isinstance(guide, AdvantageGuide)
        self._guide, self._nets = guide, {"critic": learner.critic, "value": guide.value, "vae": guide.vae}
        self.critic, self.value, self.vae = [], [], []
        self.arguments, self.results = {}, {}

    def __enter__(self) -> None:
        self._hooks = [
            net.register_forward_hook(self._listening(getattr(self, name)))
            for name, net in self._nets.items()
        ]
        for name in ("value_target", "penalty", "judged"):
            setattr(self._guide, name, self._watched(name, getattr(self._guide, name)))

    def _listening(self, calls: list[Any]) -> Any:
        return lambda net, arguments, result: calls.append(detached(result))

    def _watched(self, name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.arguments[name], self.results[name] = arguments, function(*arguments)
            return self.results[name]

        return call

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for name in ("value_target", "penalty", "judged"):
            delattr(self._guide, name)


def detached(value: Any) -> Any:
    """Return copies that later steps do not change."""
    return tuple(map(detached, value)) if isinstance(value, tuple) else value.detach().clone()


@pytest.mark.golden("a2pr_*.npz")
def test_steps(golden_path: Path) -> None:
    arrays = read(golden_path)
    learner, discount, moved = learner_of(arrays), float(arrays["cfg/discount"]), 0
    for t in range(1, num_steps(arrays) + 1):
        step = under(arrays, f"step{t}/")
        found = watched(learner, batch_of(step, discount), draws_of(step))
        step |= {f"mean of {n}": step[n].float().mean() for n in ("vae_keep", "use_recon") if n in step}
        known = found.keys() & step.keys()
        assert known >= REQUIRED
        for name in sorted(known):
            operands = (step["pi"], step["guide_action"]) if name == "bc_residual" else ()
            check_number(name, found[name].detach().float(), step[name].float(), *operands)
        check_weights(weights_of(learner), step)
        moved += "bc_loss" in known
    assert moved  # the actor was compared, too
