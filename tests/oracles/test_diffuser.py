"""Planners equal the released Diffuser and Decision Diffuser: networks, losses, guides, whole plans.

Left out are what we do not copy: attention, discounts and defects of losses, gradients without variance,
inverse dynamics by tokens, and zeros behind the end of an episode.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from official_networks import install
from official_networks import read as read_arrays
from torch import Tensor, nn

from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeDataset
from policies.backbones.unet1d import Unet1dConfig
from policies.build import build_policy
from policies.errors import ConfigError
from policies.importing.diffuser import DiffuserSource
from policies.importing.importing import import_policy
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.protocols import TE, Cond
from policies.samplers.ddpm import DDPM
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.planner import Planner, PlannerPolicy

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
CHAIN = {"rtol": 1e-4, "atol": 1e-4}
_BLOCK = {
    "blocks.0.block.0": "first.conv",
    "blocks.0.block.2": "first.norm",
    "blocks.1.block.0": "second.conv",
    "blocks.1.block.2": "second.norm",
    "time_mlp.1": "film.layers.0",
    "residual_conv": "shortcut",
}
_ENDS = {
    "time_mlp.1": "time_embedding.linear1",
    "time_mlp.3": "time_embedding.linear2",
    "final_conv.0.block.0": "unet.head.conv",
    "final_conv.0.block.2": "unet.head.norm",
    "final_conv.1": "unet.outlet",
    "returns_mlp.0": "cond_encoder.trunk.inlet",
    "returns_mlp.2": "cond_encoder.trunk.layers.0",
    "returns_mlp.4": "cond_encoder.trunk.layers.1",
    "final_block.0": "inner",
    "final_block.2": "outlet",
}


def read(path: Path) -> dict[str, Tensor]:
    """Read every array; numbers that were written in float64 come from float32."""
    arrays = read_arrays(path)
    return {name: a.float() if a.dtype == torch.float64 else a for name, a in arrays.items()}


def ours(name: str, levels: int, unet: str) -> str:
    """Return our name of a released parameter; `unet` stands before blocks."""
    place, kind = name.rsplit(".", 1)
    if place in _ENDS:
        return f"{_ENDS[place]}.{kind}"
    if found := re.fullmatch(r"(downs|blocks|ups)\.(\d)\.\d\.conv|mid_down(\d)\.conv", place):
        up = found[1] == "ups"
        level = found[2] if found[2] else levels + int(found[3]) - 1
        return f"{unet}{'ups' if up else 'downs'}.{level}.{kind}"
    found = re.fullmatch(r"(downs|blocks|ups|mid_block)\.?(\d)\.?(\d)?\.(.*)", place)
    assert found is not None, place
    if found[1] == "mid_block":
        number, inside = 2 * levels + int(found[2]) - 1, ".".join(filter(None, (found[3], found[4])))
    else:
        first = 2 * levels + 2 if found[1] == "ups" else 0
        number, inside = first + 2 * int(found[2]) + int(found[3]), found[4]
    return f"{unet}blocks.{number}.{_BLOCK[inside]}.{kind}"


def load(net: nn.Module, arrays: dict[str, Tensor], prefix: str, unet: str) -> dict[str, str]:
    weights = {name[len(prefix) :]: value for name, value in arrays.items() if name.startswith(prefix)}
    keys = {name: ours(name, 2, unet) for name in weights}
    install(net, keys, weights)
    return keys


class Returns(nn.Module):
    """The released embedding of a return, which is zero for an unknown one."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, vec: Tensor) -> Tensor:
        return self.trunk(vec) * (vec != 0)


def planner_of(
    arrays: dict[str, Tensor], *, goal: bool = False, clip: float | None = None, **changes: Any
) -> PlannerPolicy:
    """Return a planner with the released weights."""
    _, rows, obs, action, levels = arrays["cfg"].tolist()
    is_decision, prediction = "inv.0.weight" in arrays, changes.pop("prediction", "x0")
    known = {"obs_dim": obs, "action_dim": action, "goal_dim": obs if goal else 0, "normalizer": "identity"}
    chosen = {"inverse_dims": (16, 16), "label": 0.9, "temperature": 0.5} if is_decision else {}
    planner = Planner(**known, **chosen, **changes)
    cond = {"cond_dims": (8, 32, 8), "cond_activation": "mish"} if is_decision else {}
    config = PolicyConfig(
        process=VPDiffusion(num_levels=levels, prediction=prediction),
        backbone=Unet1dConfig(widths=(8, 16), film="bias", time_dim=8, **cond),
        sampler=DDPM(clip_x0=clip, clip_action=None, noise_clip=None, min_std=0.0),
        horizon=rows,
        act_steps=1,
        normalizer={"action": "identity", **({"goal": "identity"} if is_decision else {})},
        observation_clip=None,
        **({"goal_dropout": 0.25, "guidance": 1.2} if is_decision else {}),
    )
    base: Any = build_policy(config, obs_dim=0, action_dim=planner.row_dim, goal_dim=int(is_decision))
    if is_decision:
        base.field.cond_encoder = Returns(base.field.cond_encoder)
    load(base.field, arrays, "w.", "unet.")
    policy = planner.wrap(base)
    if policy.inverse is not None:
        names = {"0": "inlet", "2": "layers.0", "4": "layers.1"}
        weights = {name[4:]: value for name, value in arrays.items() if name.startswith("inv.")}
        install(policy.inverse, {n: f"{names[n[0]]}{n[1:]}" for n in weights}, weights)
    if policy.value is not None:
        load(policy.value, arrays, "value.w.", "")
    return policy


def draws(arrays: dict[str, Tensor], t: str, noise: str, policy: PlannerPolicy, **more: Tensor) -> TE:
    level = arrays[t].long()
    return TE(policy.process.levels()[level], arrays[noise], level, more)


def tape(arrays: dict[str, Tensor], name: str) -> Tensor:
    return torch.cat([arrays[f"{name}_x_init"][:, None], arrays[f"{name}_noise"].transpose(0, 1)], dim=1)


@pytest.mark.golden("diffuser_core.npz")
def test_diffuser_networks_losses_and_gradients(golden_path: Path) -> None:
    arrays = read(golden_path)
    policy = planner_of(arrays, value_widths=(8, 32))
    base, time = policy.base, arrays["in.t"].float()
    nothing = Cond(torch.zeros(len(time), 0))
    torch.testing.assert_close(base.field(arrays["in.x"], time, nothing), arrays["net"], **CLOSE)
    torch.testing.assert_close(policy.value(arrays["in.x"], time), arrays["value.out"][:, 0], **CLOSE)
    te, weight = draws(arrays, "loss_t", "loss_noise", policy), arrays["loss_weights"]
    error = policy.matching_loss(nothing, arrays["x0"], te, reduce="none")
    loss = (weight * error).mean()
    loss.backward()
    torch.testing.assert_close(loss.detach(), arrays["loss"], **CLOSE)
    unet = base.field.unet
    torch.testing.assert_close(unet.outlet.weight.grad, arrays["loss_grad_final_conv.1.weight"], **CLOSE)
    expected = arrays["loss_grad_downs.0.0.blocks.0.block.0.weight"]
    torch.testing.assert_close(unet.blocks[0].first.conv.weight.grad, expected, **CLOSE)
    assert (
        policy.known_mask(arrays["x0"])
        .logical_not()
        .equal(weight.new_ones(weight.shape).bool() & free(policy))
    )
    goal = planner_of(arrays, goal=True)
    torch.testing.assert_close(
        goal.matching_loss(nothing, arrays["x0"], te, reduce="mean").detach(), arrays["loss_goal"], **CLOSE
    )


def free(policy: PlannerPolicy) -> Tensor:
    """Return where a plan is not the first state, (H, D)."""
    rows, dims = policy.base.chunk.shape
    mask = torch.ones(rows, dims, dtype=torch.bool)
    mask[0, policy.wrapper.action_dim :] = False
    return mask


@pytest.mark.golden("diffuser_core.npz")
def test_diffuser_values_and_guided_plans(golden_path: Path) -> None:
    arrays = read(golden_path)
    policy = planner_of(arrays, value_widths=(8, 32), guide_scale=0.5)
    te = draws(arrays, "loss_t", "value_noise", policy)
    value = policy.value(policy.corrupted(arrays["x0"], te), arrays["loss_t"].float())
    loss = (value - arrays["value_target"][:, 0]).square().mean()
    loss.backward()
    torch.testing.assert_close(loss.detach(), arrays["value_loss"], **CLOSE)
    gradient = policy.value.outlet.weight.grad
    torch.testing.assert_close(gradient, arrays["value_grad_final_block.2.weight"], **CLOSE)
    plan = policy.trajectory(Cond(arrays["step_s0"]), tape(arrays, "plan"))
    torch.testing.assert_close(plan.detach(), arrays["plan_chain"][:, -1], **CHAIN)
    ends = torch.cat([arrays["goal_start"], arrays["goal_end"]], dim=1)
    plan = planner_of(arrays, goal=True, clip=1.0).trajectory(Cond(ends), tape(arrays, "goal"))
    torch.testing.assert_close(plan.detach(), arrays["goal_chain"][:, -1], **CHAIN)
    noisy = planner_of(arrays, clip=1.0, prediction="eps")
    plan = noisy.trajectory(Cond(arrays["goal_start"]), tape(arrays, "goal"))
    torch.testing.assert_close(plan.detach(), arrays["eps_chain"][:, -1], **CHAIN)


@pytest.mark.golden("diffuser_core.npz")
def test_released_checkpoints_of_network_and_value_are_imported(golden_path: Path, tmp_path: Path) -> None:
    arrays = read(golden_path)
    _, rows, obs, action, levels = arrays["cfg"].tolist()
    for place, prefix in (("state.pt", "w."), ("value.pt", "value.w.")):
        named = {f"model.{k[len(prefix) :]}": v for k, v in arrays.items() if k.startswith(prefix)}
        named |= {"betas": torch.zeros(levels), "loss_fn.weights": torch.zeros(rows, obs + action)}
        torch.save({"step": 7, "model": {k: 0 * v for k, v in named.items()}, "ema": named}, tmp_path / place)
    source = DiffuserSource(
        action_dim=action, horizon=rows, value=str(tmp_path / "value.pt"), plans=1, guide_scale=0.5
    )
    statistics = {f"{name}_{kind}": np.full(n, value) for name, n in (("obs", obs), ("action", action))
                  for kind, value in (("mean", 1.0), ("std", 2.0))}  # fmt: skip
    np.savez(tmp_path / "normalization.npz", **statistics)
    policy: Any = import_policy(tmp_path / "state.pt", source, normalization=tmp_path / "normalization.npz")[
        0
    ]
    noise, state = tape(arrays, "plan"), 2 * arrays["step_s0"] + 1
    found = policy.act({"state": state[:, None]}, noise=noise)
    expected = 2 * arrays["plan_chain"][:, -1, :1, :action] + 1
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    assert torch.equal(loaded.act({"state": state[:, None]}, noise=noise), found)
    with pytest.raises(ConfigError, match=mentions("source.action_dim source.horizon")):
        import_policy(tmp_path / "state.pt", DiffuserSource(), identity=["state", "action"])


@pytest.mark.golden("decision_diffuser_core.npz")
@pytest.mark.parametrize(("prediction", "name"), [("eps", "loss"), ("x0", "loss_x0")])
def test_decision_diffuser_losses_and_gradients(golden_path: Path, prediction: str, name: str) -> None:
    arrays = read(golden_path)
    policy = planner_of(arrays, prediction=prediction)
    cond = Cond(torch.cat([arrays["x0"][:, 0, -policy.wrapper.obs_dim :], arrays["in.returns"]], dim=1))
    te = draws(arrays, "loss_t", "loss_noise", policy, drops_goal=arrays["loss_mask"][:, 0] == 0)
    diffusion = policy.matching_loss(cond, arrays["x0"], te, reduce="mean")
    inverse = policy.inverse_loss(arrays["x0"]).mean()
    torch.testing.assert_close(diffusion.detach(), arrays[f"{name}_diffusion"], **CLOSE)
    torch.testing.assert_close(inverse.detach(), arrays[f"{name}_inverse"], **CLOSE)
    (0.5 * (diffusion + inverse)).backward()
    field: Any = policy.base.field
    for found, place in (
        (field.cond_encoder.trunk.layers[1], "returns_mlp.4"),
        (field.unet.outlet, "final_conv.1"),
        (policy.inverse.layers[1], "inv.4"),
    ):
        torch.testing.assert_close(found.weight.grad, arrays[f"{name}_grad_{place}.weight"], **CLOSE)


@pytest.mark.golden("decision_diffuser_core.npz")
def test_decision_diffuser_networks_and_plans(golden_path: Path) -> None:
    arrays = read(golden_path)
    policy = planner_of(arrays, clip=1.0, prediction="eps")
    field: Any = policy.base.field
    for name, given in (("net_cond", arrays["in.returns"]), ("net_uncond", 0 * arrays["in.returns"])):
        found = field(arrays["in.x"], arrays["in.t"].float(), Cond(given))
        torch.testing.assert_close(found, arrays[name], **CLOSE)
    cond = Cond(torch.cat([arrays["step_s0"], arrays["in.returns"]], dim=1))
    plan = policy.trajectory(cond, tape(arrays, "plan"))
    torch.testing.assert_close(plan.detach(), arrays["plan_chain"][:, -1], **CLOSE)
    torch.testing.assert_close(policy.chunk_of(plan)[:, 0].detach(), arrays["plan_action"], **CLOSE)


@pytest.mark.golden("*diffuser_data.npz")
def test_returns_run_to_the_end_of_an_episode(golden_path: Path) -> None:
    arrays = {name: value.numpy() for name, value in read(golden_path).items()}
    ends = np.cumsum(arrays["lengths"])
    episodes = []
    for start, end, terminal in zip(ends - arrays["lengths"], ends, arrays["ends_in_terminal"], strict=True):
        rewards = arrays["raw_rewards"][start:end].copy()
        rewards[-1] -= 100.0 * terminal
        states = arrays["raw_observations"][[*range(start, end), end - 1]]
        episodes.append(
            Episode(states, arrays["raw_actions"][start:end], rewards, bool(terminal), not terminal)
        )
    to_go = EpisodeDataset.from_episodes(episodes).returns_to_go(0.9)
    first = (ends - arrays["lengths"])[arrays["indices"][:, 0]] + arrays["indices"][:, 1]
    expected, scale = (arrays["values"], 1.0) if "values" in arrays else (arrays["returns"], 40.0)
    np.testing.assert_allclose(to_go[first].numpy() / scale, expected[:, 0], rtol=1e-6, atol=1e-6)
