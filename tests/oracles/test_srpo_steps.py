"""SRPO against the released classes: steps of values and actor; the force on an actor between two modes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from official_critics import arrays_of
from torch import Tensor, nn

from algos.critics.srpo import SrpoConfig, SrpoLearner, noise_weight, score_direction
from algos.transitions import Batch
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.networks.critics import Ensemble
from policies.policy import PolicyConfig
from policies.processes.base import over_rows
from policies.processes.continuous import VPContinuous
from policies.protocols import BoundField, Cond

PATH = VPContinuous(schedule="linear", prediction="eps", time_scale=1.0)
HOW = {"VDS": "vds", "stable": "stable", "score": "score"}


@dataclass(frozen=True)
class Field:
    """Builds a denoiser of a function (x, u, cond) of the noise, u being 1 - t."""

    predict: Any

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> Predicted:
        return Predicted(self.predict)


class Predicted(nn.Module):
    def __init__(self, predict: Any) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, x: Tensor, u: Tensor, cond: Cond, *_: Any, time_row: Any = None, **__: Any) -> Tensor:
        found: Tensor = self.predict(x[:, 0], u, cond.vec)
        return found[:, None]

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> BoundField:
        return lambda k, x: self(x, times[k].expand(len(x)), cond)


def clone_of(predict: Any, obs_dim: int, action_dim: int) -> DenoisingPolicy:
    parts = {"normalizer": {"state": "identity", "action": "identity"}, "observation_clip": None}
    config = PolicyConfig(process=PATH, backbone=Field(predict), horizon=1, act_steps=1, **parts)
    made = build_policy(config, obs_dim=obs_dim, action_dim=action_dim)
    assert isinstance(made, DenoisingPolicy)
    return made


def released_score(w: Mapping[str, Tensor], blocks: int) -> Any:
    """Return the noise model of a file."""

    def linear(name: str, h: Tensor) -> Tensor:
        return F.linear(h, w[f"{name}.weight"], w[f"{name}.bias"])

    def predict(x: Tensor, u: Tensor, s: Tensor) -> Tensor:
        phase = 2 * math.pi * u[:, None] * w["embed.0.W"]
        h = F.mish(linear("cond_model.0", torch.cat([phase.sin(), phase.cos()], dim=1)))
        h = linear("main.fc", torch.cat([x, s, linear("cond_model.2", h)], dim=1))
        for i in range(blocks):
            block = f"main.blocks.{i}"
            norm = w[f"{block}.layer_norm.weight"], w[f"{block}.layer_norm.bias"]
            inner = linear(f"{block}.fc1", F.layer_norm(h, h.shape[1:], *norm))
            h = h + linear(f"{block}.fc2", F.mish(inner))
        return linear("main.out_fc", F.mish(h))

    return predict


def below(arrays: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}


def layers(weights: Mapping[str, Tensor], prefix: str, action_dim: int = 0) -> list[dict[str, Tensor]]:
    """Return the linear layers below a prefix in order, the first with actions behind the state."""
    own = below(weights, prefix)
    numbers = sorted({int(key.partition(".")[0]) for key in own})
    found = [{"weight": own[f"{n}.weight"], "bias": own[f"{n}.bias"]} for n in numbers]
    found[0]["weight"] = found[0]["weight"].roll(-action_dim, dims=1)
    return found


def load(net: Ensemble, weights: Mapping[str, Tensor], names: tuple[str, ...], action_dim: int = 0) -> None:
    net.load_members([layers(weights, f"{name}.", action_dim) for name in names])


def compare(
    net: Ensemble, weights: Mapping[str, Tensor], names: tuple[str, ...], action_dim: int = 0
) -> None:
    for member, name in enumerate(names):
        for ours, theirs in zip(net.layers_of(member), layers(weights, f"{name}.", action_dim), strict=True):
            for key, value in ours.items():
                torch.testing.assert_close(value, theirs[key], atol=1e-6, rtol=0)


def learner_of(base: DenoisingPolicy, hidden: int, **values: Any) -> SrpoLearner:
    width = (hidden, hidden)
    given = {"steps": 2_000_000, "warmup_steps": 1_000_000, "hidden_dims": width, "critic_dims": width}
    return SrpoConfig(**given | values).learner_of(base, seed=0)


def batch_of(s: Tensor, action: Tensor, **parts: Tensor) -> Batch:
    none = torch.zeros(len(s))
    given = {"reward": none, "next_cond": s, "discount": none, **parts}
    plan, real = action, torch.ones(len(s), 1)
    return Batch(s, action, next_action=action, has_next=none, plan=plan, real=real, row=none.long(), **given)


@pytest.mark.golden("srpo_policy.npz")
@pytest.mark.parametrize("variant", ["vds", "maze", "score", "stable"])
def test_steps_of_the_actor_are_the_official_ones(golden_path: Path, variant: str) -> None:
    arrays = arrays_of(golden_path)
    own = below(arrays, f"{variant}/")
    obs, width, hidden, _, blocks, depth, q_depth, beta, normalized = own["cfg"].tolist()
    word, a = own["WT"], int(width)
    base = clone_of(released_score(below(own, "init/score/"), int(blocks)), int(obs), a)
    learner = learner_of(
        base,
        int(hidden),
        hidden_dims=(int(hidden),) * int(depth),
        critic_dims=(int(hidden),) * int(q_depth),
        beta=beta,
        normalize_gradient=bool(normalized),
        time_weight=HOW[word.removesuffix("noise")],
    )
    load(learner.target_critic, below(own, "init/q_target/"), ("q1", "q2"), a)
    linear = [part for part in learner.policy.trunk.modules() if isinstance(part, nn.Linear)]  # type: ignore[union-attr]
    learner.steps = 1_000_000
    for step in (f"step{k}/" for k in (1, 2, 3)):
        known = below(own, step)
        t, z = 1 - known["t"], known["z"][:, None]
        if step == "step1/":
            for ours, theirs in zip(linear, layers(below(own, "init/policy/"), "net."), strict=True):
                ours.load_state_dict(theirs)
        cond, plan = base.condition(known["s"]), known["a"][:, None]
        torch.testing.assert_close(base.process.corrupt(plan, z, t)[:, 0], known["x_t"], atol=1e-6, rtol=1e-5)
        alpha, sigma = base.process.alpha_sigma(t)
        weight = over_rows(noise_weight(alpha, sigma, learner.config.time_weight), plan)
        found = score_direction(base, cond, plan, t, z, learner.config.time_weight)
        torch.testing.assert_close(found, weight * (known["eps"][:, None] - z), atol=1e-5, rtol=1e-4)
        if not word.endswith("noise"):  # the release adds w z, whose mean is 0
            continue
        out = learner.step(batch_of(known["s"], known["a"]), {"t": t, "z": z})
        assert float(out["actor/value"]) == pytest.approx(float(known["q_mean"]), rel=1e-5)
        for ours, theirs in zip(linear, layers(below(known, "after/"), "net."), strict=True):
            for key, value in theirs.items():
                torch.testing.assert_close(getattr(ours, key).detach(), value, atol=1e-6, rtol=0)


@pytest.mark.golden("srpo_behavior_iql.npz")
@pytest.mark.parametrize("name", ["iql_hopper", "iql_antmaze"])
def test_steps_of_the_values_are_the_official_ones(golden_path: Path, name: str) -> None:
    own = below(arrays_of(golden_path), f"{name}/")
    obs, a = own["step1/s"].shape[1], own["step1/a"].shape[1]
    hidden = own["init/v/v.0.bias"].shape[0]
    learner = learner_of(clone_of(None, obs, a), hidden, expectile=0.7 if name == "iql_hopper" else 0.9)
    for net, part in ((learner.critic, "q"), (learner.target_critic, "q_target")):
        load(net, below(own, f"init/{part}/"), ("q1", "q2"), a)
    load(learner.value, below(own, "init/v/"), ("v",))
    for step in ("step1/", "step2/"):
        known = below(own, step)
        discount = 0.99 * (1 - known["d"][:, 0])
        parts = {"reward": known["r"][:, 0], "next_cond": known["s_"], "discount": discount}
        out = learner.step(batch_of(known["s"], known["a"], **parts), {})
        assert float(out["value/loss"]) == pytest.approx(float(known["v_loss"]), rel=1e-5)
        assert float(out["critic/loss"]) == pytest.approx(float(known["q_loss"]), rel=1e-5)
        compare(learner.critic, below(known, "after/q/"), ("q1", "q2"), a)
        compare(learner.target_critic, below(known, "after/q_target/"), ("q1", "q2"), a)
        compare(learner.value, below(known, "after/v/"), ("v",))


@pytest.mark.golden("srpo_two_modes.npz")
def test_the_force_between_two_modes_is_the_closed_form(golden_path: Path) -> None:
    """The published weights rest between modes that are near each other, at an action that nobody took."""
    with np.load(golden_path) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    u = 0.02 + 0.96 * (torch.arange(600, dtype=torch.float64) + 0.5) / 600
    nodes, shares = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(61))
    for case in sorted({key.partition("/")[0] for key in arrays}):
        own = below(arrays, f"{case}/")
        base = clone_of(two_mode_noise(float(own["mode"]), float(own["std"])), 1, 1).double()
        action = own["action"][::32]
        plan, time, z = torch.meshgrid(action, 1 - u, nodes, indexing="ij")
        cond = base.condition(torch.zeros(plan.numel(), 1, dtype=torch.float64))
        parts = plan.reshape(-1, 1, 1), time.flatten(), z.reshape(-1, 1, 1)
        for word, how in HOW.items():
            found = score_direction(base, cond, *parts, how).view(plan.shape)
            force = (found * shares / shares.sum()).sum(dim=2).mean(dim=1)
            torch.testing.assert_close(force, own[word][::32], atol=1e-6, rtol=1e-6)


def two_mode_noise(mode: float, std: float) -> Any:
    def predict(x: Tensor, u: Tensor, s: Tensor) -> Tensor:
        alpha, sigma = (part[:, None] for part in PATH.alpha_sigma(1 - u))
        spread = alpha**2 * std**2 + sigma**2
        right = torch.sigmoid(2 * alpha * mode * x / spread)
        return sigma * (x - alpha * mode * (2 * right - 1)) / spread

    return predict
