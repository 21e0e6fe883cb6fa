"""Planners: known rows are exact, guides and labels without weight do nothing, what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from torch import Tensor

from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError, ConfigError, ExportError
from policies.execution.executor import Execution, Executor
from policies.execution.warm_start import WarmStart
from policies.export.export import export_onnx
from policies.policy import PolicyConfig
from policies.processes.consistency import Consistency
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.protocols import Cond, Step
from policies.samplers.hooks import Ascent
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.planner import Planner, PlannerPolicy
from policies.wrappers.sketch_guidance import SteeredPolicy
from policies.wrappers.sketches import ActionSketch
from policies.wrappers.steering import Steering

GUIDED = {"value_widths": (32,), "guide_rest": 1}
DECISION = {"inverse_dims": (8,), "label": 0.9, "temperature": 0.5}


def planner(process: Any = None, *, guidance: float = 1.2, **fields: Any) -> PlannerPolicy:
    """Return a planner of rows of 2 actions and 3 states with random weights."""
    wrapper = Planner(obs_dim=3, action_dim=2, **fields)
    labels = int(wrapper.label is not None)
    config = PolicyConfig(
        process=process or VPDiffusion(num_levels=4),
        backbone=MlpConfig(width=16, time_dim=4),
        horizon=6,
        act_steps=2,
        normalizer={"action": "identity"} | ({"goal": "identity"} if labels else {}),
        observation_clip=None,
        goal_dropout=0.25 * labels,
        guidance=guidance if labels else 1.0,
    )
    policy = wrapper.wrap(build_policy(config, obs_dim=0, action_dim=wrapper.row_dim, goal_dim=labels))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    low, high = torch.tensor([-1.0, -2.0, 0.0]), torch.tensor([1.0, 4.0, 3.0])
    policy.fit({key: {"min": low[:n], "max": high[:n]} for key, n in (("state", 3), ("action", 2))})
    return policy.eval()


def observed(**more: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"state": torch.rand(4, 1, 3, generator=generator), **more}


def noise_of(policy: PlannerPolicy) -> Tensor:
    return policy.sample_noise(4, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("process", [VPDiffusion(num_levels=4), RectifiedFlow()], ids=["diffusion", "flow"])
@pytest.mark.parametrize("fields", [GUIDED, {**DECISION, "label": None}], ids=["values", "states"])
def test_state_and_goal_are_exact_in_every_plan(process: Any, fields: dict[str, Any]) -> None:
    policy = planner(process, goal_dim=2, **fields)
    goal = torch.tensor([[0.5, 3.0]]).expand(4, 2)
    obs = observed(goal=goal)
    plan = policy.trajectory(policy.encode(obs), noise_of(policy))[..., -3:]
    assert torch.equal(plan[:, 0], policy.normalizer.encode("state", obs["state"])[:, 0])
    assert torch.equal(plan[:, -1, :2], policy.normalizer.encode("goal", goal))
    found = policy.normalizer.decode("state", plan)
    torch.testing.assert_close(found[:, -1, :2], goal)
    mask = policy.known_mask(plan)
    assert mask.sum() == 5 and not mask[1:-1].any()


def test_a_guide_without_scale_is_no_guide_bit_by_bit() -> None:
    policy = planner(**GUIDED)
    cond, noise = policy.encode(observed()), noise_of(policy)
    plain = policy.with_fields(guide_repeats=0).trajectory(cond, noise)
    assert torch.equal(policy.with_fields(guide_scale=0.0).trajectory(cond, noise), plain)
    assert not torch.equal(policy.with_fields(guide_scale=0.5).trajectory(cond, noise), plain)


def test_states_climb_the_slope_times_the_variance_but_not_where_they_are_fixed() -> None:
    x, slope = torch.rand(4, 6, 5), torch.rand(6, 5)
    fixed = torch.zeros(6, 5, dtype=torch.bool)
    fixed[0, 2:] = True
    guide = Ascent(lambda y, t: (slope * y).sum((1, 2)), scale=2.0, repeats=3, rest=1, fixed=fixed)
    step = Step(0, 2, 0.0, 0.5, Cond(x[:, 0]), alpha=0.1, sigma=0.9, std=0.5)
    moved = guide.before_prediction(step, x)
    torch.testing.assert_close(moved, torch.where(fixed, x, x + 3 * 2.0 * 0.25 * slope))
    assert guide.before_prediction(replace(step, k=1), x) is x


def test_of_several_plans_the_most_valuable_is_executed() -> None:
    policy = planner(**GUIDED, plans=3)
    cond, noise = policy.encode(observed()), noise_of(policy)
    alone = [policy.with_fields(plans=1).trajectory(cond, noise[:, i]) for i in range(3)]
    worth = torch.stack([policy.worth(plan, policy.base.table.times[-2]) for plan in alone], dim=1)
    best = worth.argmax(dim=1)
    plan = policy.trajectory(cond, noise)
    torch.testing.assert_close(plan, torch.stack(alone, dim=1)[torch.arange(4), best])
    assert torch.equal(policy.executed(policy.decode(cond, noise)), policy.physical(plan[:, :2, :2]))


def test_a_label_of_weight_zero_is_none_and_dropped_rows_have_none() -> None:
    policy = planner(**DECISION, guidance=0.0)
    noise = noise_of(policy)
    with_label, other = (policy.encode(observed(label=torch.full((4, 1), y))) for y in (0.3, 1.7))
    torch.testing.assert_close(policy.decode(with_label, noise), policy.decode(other, noise))
    strong = policy.with_guidance(2.0)
    assert not torch.allclose(strong.decode(with_label, noise), strong.decode(other, noise))
    rows, te = torch.rand(4, 6, 5), policy.sample_te(4, generator=torch.Generator().manual_seed(3))
    dropped = replace(te, more={"drops_goal": torch.ones(4, dtype=torch.bool)})
    losses = [policy.matching_loss(cond, rows, dropped) for cond in (with_label, other)]
    assert torch.equal(*losses)


def test_actions_lie_between_states() -> None:
    policy = planner(**DECISION)
    states = torch.rand(4, 6, 3)
    actions = policy.actions(states)
    wanted = policy.inverse(torch.cat([states[:, 2], states[:, 3]], dim=1))
    torch.testing.assert_close(actions[:, 2], wanted)
    assert torch.equal(actions[:, -1], actions[:, -2])
    rows = torch.cat([actions, states], dim=-1)
    assert policy.inverse_loss(rows).abs().max() < 1e-10
    wrong = torch.cat([actions + 2, states], dim=-1)
    torch.testing.assert_close(policy.inverse_loss(wrong).mean(), torch.tensor(4.0))


def test_a_planner_saves_loads_and_exports(tmp_path: Path) -> None:
    policy = planner(VPDiffusion(num_levels=2), goal_dim=2)
    obs, noise = observed(goal=torch.zeros(4, 2)), noise_of(policy)
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    assert torch.equal(loaded.act(obs, noise=noise), policy.act(obs, noise=noise))
    report = export_onnx(policy, tmp_path / "exported", batch_sizes=(3,), latency_batches=())
    assert len(report.parity) > 0


def test_what_a_planner_cannot_is_refused(tmp_path: Path) -> None:
    policy = planner(**GUIDED)
    with pytest.raises(ExportError, match=mentions("algo.guide_repeats=0")):
        export_onnx(policy, tmp_path / "exported")
    with pytest.raises(CapabilityError, match=mentions("warm_start PlannerPolicy")):
        Executor(policy, Execution(warm_start=WarmStart(steps=1)))
    sketch = ActionSketch(actions=((0.0, 0.0), (1.0, 1.0)))
    with pytest.raises(CapabilityError, match=mentions("steer PlannerPolicy")):
        SteeredPolicy(policy, sketch, Steering(strategy="guided_diffusion"))
    with pytest.raises(CapabilityError, match=mentions("hooks base")):
        policy.decode(policy.encode(observed()), noise_of(policy), start=(torch.zeros(4, 6, 5), 0.5))
    with pytest.raises(CapabilityError, match=mentions("planner process=consistency")):
        planner(Consistency())
    with pytest.raises(ConfigError, match=mentions("inner policy obs_dim")):
        Planner(obs_dim=4, action_dim=2).wrap(policy.base)
    for fields in ({"plans": 2}, {"goal_dim": 4}, {"value_widths": (40,)}):
        with pytest.raises(ConfigError, match=mentions(next(iter(fields)))):
            Planner(obs_dim=3, action_dim=2, **fields)
