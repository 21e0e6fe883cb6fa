"""Planners: known rows are exact, guides and labels without weight do nothing, what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from torch import Tensor

from envs.rollouts.player import EpisodeRunner
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.composition.compose import compose
from policies.errors import CapabilityError, ConfigError, ExportError
from policies.execution.executor import Execution, Executor
from policies.execution.replanning import Replanner, shifted
from policies.execution.warm_start import WarmStart
from policies.export.export import export_onnx
from policies.policy import PolicyConfig
from policies.processes.consistency import Consistency
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.protocols import Cond, Step
from policies.samplers.hooks import Ascent
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.planner import ComposedPlanner, Planner, PlannerPolicy
from policies.wrappers.sketch_guidance import GuideHook, SketchedPolicy, guide_distance
from policies.wrappers.sketch_settings import SketchSettings
from policies.wrappers.sketches import ActionSketch, WaypointSketch

GUIDED = {"value_widths": (32,), "guide_rest": 1}
DECISION = {"inverse_dims": (8,), "label": 0.9, "temperature": 0.5}
LIMITS = {"state": "limits", "action": "limits"}
ACTIONS = ActionSketch(actions=((0.0, 0.0), (1.0, 1.0)))
WAY = WaypointSketch(waypoints=((0.0, 0.0), (0.5, 0.5), (0.5, 2.0)), pace=0.1)


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
    return {"state": torch.rand(4, 1, 3, generator=generator)} | more


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
    actions = policy.chunk_of(states)
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


# -- from another plan ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [GUIDED, DECISION, {**GUIDED, "plans": 3}], ids=["value", "states", "several"]
)
def test_a_warm_start_carries_the_whole_plan_on(fields: dict[str, Any]) -> None:
    """The state is the present one, the rest is what the last levels make of the plan before."""
    policy = planner(**fields)
    replanner = Replanner(policy, WarmStart(steps=2))
    obs, noise = observed(), noise_of(policy)
    first = replanner.decide(obs, noise=noise)
    cond = policy.encode(obs)
    assert torch.equal(first.plan, policy.trajectory(cond, noise)) and first.calls == 4
    later = observed(state=torch.rand(4, 1, 3, generator=torch.Generator().manual_seed(5)))
    second = replanner.decide(later, noise=noise, previous=first.plan)
    assert second.calls == 2
    state = policy.normalizer.encode("state", later["state"])[:, 0]
    assert torch.equal(second.plan[:, 0, -3:], state)
    start = (shifted(first.plan, 2), policy.table.times[2])
    expected = policy.trajectory(policy.encode(later), noise, start=start)
    assert torch.equal(second.plan, expected)
    assert torch.equal(second.actions, policy.executed(policy.chunk_of(expected)))
    assert not torch.allclose(second.plan, policy.trajectory(policy.encode(later), noise))


def test_a_renoised_start_has_the_planner_s_own_draws_and_temperature() -> None:
    policy = planner(**GUIDED, plans=3, temperature=0.5)
    replanner = Replanner(policy, WarmStart(steps=4, renoise=True))
    obs, noise = observed(), noise_of(policy)
    previous = torch.zeros(4, 6, 5)
    warm = replanner.decide(obs, noise=noise, previous=previous)
    alpha, sigma = policy.table.alpha[0], policy.table.sigma[0]
    start = alpha * 0 + sigma * 0.5 * noise[:, :, 0].flatten(0, 1)
    expected = policy.trajectory(policy.encode(obs), noise, start=(start, policy.table.times[0]))
    torch.testing.assert_close(warm.plan, expected)


@pytest.mark.parametrize("fields", [{}, DECISION, {**GUIDED, "plans": 3}], ids=["rows", "states", "several"])
@pytest.mark.parametrize(
    "execution", [Execution(warm_start=WarmStart(steps=2)), Execution(latency=1, inpaint=True)]
)
def test_a_planner_acts_step_by_step(fields: dict[str, Any], execution: Execution) -> None:
    policy = planner(VPDiffusion(num_levels=4), **fields)
    executor = Executor(policy, execution)
    noise = executor.sample_noise(4, generator=torch.Generator().manual_seed(2))
    first = policy.act(observed(), noise=noise)
    commands = [executor.act(observed(), noise=noise) for _ in range(4)]
    torch.testing.assert_close(torch.stack(commands[:2], dim=1), first)
    assert all(command.shape == (4, 2) and command.isfinite().all() for command in commands)


# -- sketches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "sketch"), [({}, "actions"), ({}, "way"), (DECISION, "way")])
def test_a_sketch_guides_what_it_is_of_and_nothing_else(fields: dict[str, Any], sketch: str) -> None:
    """Plans come nearer to it; a scale of 0 and one candidate are the planner itself."""
    policy = planner(VPDiffusion(num_levels=10), **fields)
    drawn = ACTIONS if sketch == "actions" else WAY
    obs = observed()
    idle = SketchedPolicy(policy, drawn, SketchSettings("guided_diffusion", scale=0.0))
    noise = idle.sample_noise(4, generator=torch.Generator().manual_seed(4))
    assert torch.equal(idle.act(obs, noise=noise), policy.act(obs, noise=noise[:, 0]))
    guide, entries = idle.guide(obs), idle.entries
    assert guide.shape == (4, *policy.base.chunk.shape)
    assert entries is not None and entries.sum() == 2 and not guide[..., entries == 0].any()
    hook = GuideHook(guide, 20.0, "x0", None, entries=entries)
    step, x0 = Step(2, 10, 0.3, 0.4, Cond(guide[:, 0]), alpha=0.5, sigma=0.8, std=0.1), torch.rand_like(guide)
    moved, _ = hook.on_prediction(step, x0, x0, x0)
    assert torch.equal(moved[..., entries == 0], x0[..., entries == 0])
    before, after = (guide_distance(plan, guide, entries) for plan in (x0, moved))
    assert (after < before).all()


def test_a_path_is_guided_from_the_state_itself_in_the_units_of_states() -> None:
    policy = planner()
    obs = observed()
    steered = SketchedPolicy(policy, WAY, SketchSettings("random"))
    guide = policy.normalizer.decode("state", steered.guide(obs)[..., 2:])[..., :2]
    expected = WAY.path.targets(obs, policy.chunk)[:, :-1]
    torch.testing.assert_close(guide, expected)
    torch.testing.assert_close(guide[:, 0], obs["state"][:, 0, :2])


def test_the_plan_nearest_to_a_sketch_is_executed_instead_of_the_most_valuable() -> None:
    policy = planner(**GUIDED, plans=3)
    steered = SketchedPolicy(policy, WAY, SketchSettings("post_hoc_ranking", candidates=5))
    obs = observed()
    noise = steered.sample_noise(4, generator=torch.Generator().manual_seed(4))
    one, cond = policy.with_fields(plans=1), policy.encode(obs)
    plans = torch.stack([one.trajectory(cond, noise[:, i]) for i in range(5)], dim=1)
    distance = guide_distance(plans, steered.guide(obs)[:, None], steered.entries)
    nearest = plans[torch.arange(4), distance.argmin(dim=1)]
    assert len(set(distance.argmin(dim=1).tolist())) > 1
    torch.testing.assert_close(steered.plan(obs, noise), policy.chunk_of(nearest))


def test_a_plan_begins_at_a_sketch_under_its_share_of_the_noise() -> None:
    policy = planner()
    steered = SketchedPolicy(
        policy, WAY, SketchSettings("biased_initialization", start=0.6, noise_share=0.25)
    )
    obs = observed()
    noise = steered.sample_noise(4, generator=torch.Generator().manual_seed(4))
    time = policy.table.times[policy.table.step_at(0.6)]
    start = (steered.guide(obs) + 0.25 * noise[:, 0, 0], time)
    expected = policy.trajectory(policy.encode(obs), noise[:, 0], start=start)
    assert 0 < policy.table.step_at(0.6) < policy.table.num_steps
    assert torch.equal(steered.plan(obs, noise), policy.chunk_of(expected))


def test_rows_of_a_sketched_path_become_actions_by_the_inverse_dynamics() -> None:
    policy = planner(**{**DECISION, "label": None})
    steered = SketchedPolicy(policy, WAY, SketchSettings("output_perturbation", guide_rows=2, candidates=1))
    obs = observed()
    noise = steered.sample_noise(4, generator=torch.Generator().manual_seed(4))
    plan = policy.trajectory(policy.encode(obs), noise[:, 0])
    plan[:, :2, :2] = steered.guide(obs)[:, :2, :2]
    torch.testing.assert_close(steered.plan(obs, noise), policy.chunk_of(plan))


def test_a_sketched_planner_is_exported(tmp_path: Path) -> None:
    policy = SketchedPolicy(
        planner(VPDiffusion(num_levels=2)), WAY, SketchSettings("guided_diffusion", candidates=2)
    )
    report = export_onnx(policy, tmp_path / "exported", batch_sizes=(3,), latency_batches=())
    assert len(report.parity) > 0


# -- compositions ---------------------------------------------------------------------------------------


def other_planner(process: Any = None, **fields: Any) -> PlannerPolicy:
    """Return one of other weights and other units."""
    policy = planner(process, **fields)
    low, high = torch.tensor([-2.0, -3.0, 0.0]), torch.tensor([1.0, 4.0, 4.0])
    policy.fit({key: {"min": low[:n], "max": high[:n]} for key, n in (("state", 3), ("action", 2))})
    with torch.no_grad():
        for weight in policy.base.parameters():
            weight.mul_(1.2)
    return policy


@pytest.mark.parametrize("fields", [{}, GUIDED, DECISION, {**GUIDED, "plans": 3}])
def test_a_composition_of_planners_with_weight_one_is_the_planner(fields: dict[str, Any]) -> None:
    one, two = planner(**fields), other_planner(RectifiedFlow(), **fields)
    obs, noise = observed(), noise_of(one)
    composed = compose([one, two], [1.0, 0.0])
    assert isinstance(composed, ComposedPlanner)
    assert torch.equal(composed.act(obs, noise=noise), one.act(obs, noise=noise))
    half = composed.with_weights(0.5, 0.5)
    assert not torch.allclose(half.act(obs, noise=noise), one.act(obs, noise=noise))


def test_known_entries_of_a_composition_are_exact_and_clean_for_every_member() -> None:
    """Of two members of other units and paths, each reads the state in its own units, without noise."""
    one, two = planner(goal_dim=2), other_planner(RectifiedFlow(), goal_dim=2)
    composed = compose([one, two], [0.5, 0.5])
    goal = torch.tensor([[0.5, 3.0]]).expand(4, 2)
    obs = observed(goal=goal)
    seen: list[Tensor] = []
    field = two.base.field
    field.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    cond = composed.encode(obs)
    evaluated = composed.base.predict(torch.rand(4, 6, 5), torch.full((4,), 0.5), cond, kind="x0")
    assert evaluated.shape == (4, 6, 5)
    (read,) = seen
    torch.testing.assert_close(read[:, 0, 2:], two.normalizer.encode("state", obs["state"])[:, 0])
    torch.testing.assert_close(read[:, -1, 2:4], two.normalizer.encode("goal", goal))
    plan = composed.trajectory(cond, noise_of(one))
    assert torch.equal(plan[:, 0, 2:], one.normalizer.encode("state", obs["state"])[:, 0])
    assert torch.equal(plan[:, -1, 2:4], one.normalizer.encode("goal", goal))


def test_a_composed_planner_saves_starts_warm_follows_sketches_and_exports(tmp_path: Path) -> None:
    composed = compose([planner(VPDiffusion(2)), other_planner(VPDiffusion(2))], [0.5, 0.5]).with_act_steps(3)
    obs = observed()
    noise = composed.sample_noise(4, generator=torch.Generator().manual_seed(2))
    loaded = load_policy(save_policy(composed, tmp_path / "composed"))
    assert loaded.chunk.act_steps == 3
    assert torch.equal(loaded.act(obs, noise=noise), composed.act(obs, noise=noise))
    replanner = Replanner(composed, WarmStart(steps=1))
    plan = replanner.decide(obs, noise=noise).plan
    assert replanner.decide(obs, noise=noise, previous=plan).plan.shape == (4, 6, 5)
    steered = SketchedPolicy(composed, WAY, SketchSettings("guided_diffusion"))
    assert steered.act(obs, generator=torch.Generator().manual_seed(3)).shape == (4, 3, 2)
    report = export_onnx(composed, tmp_path / "exported", batch_sizes=(3,), latency_batches=())
    assert len(report.parity) > 0


def test_what_cannot_be_composed_with_planners_is_refused() -> None:
    one, two = planner(), other_planner()
    with pytest.raises(CapabilityError, match=mentions("operator=or")):
        compose([one, two], [0.5, 0.5], operator="or")
    with pytest.raises(ConfigError, match=mentions("columns")):
        compose([one, two], [0.5, 0.5], columns=[(0, 1, 2), (0, 1, 2)], obs_dim=3)
    with pytest.raises(CapabilityError, match=mentions("all at once")):
        compose([compose([one, two], [0.5, 0.5]), one], [0.5, 0.5])
    inner = build_policy(replace(one.base.config, normalizer=LIMITS), obs_dim=3, action_dim=5)
    with pytest.raises(CapabilityError, match=mentions("planners alone")):
        compose([one, inner], [0.5, 0.5])


# -- what cannot be ---------------------------------------------------------------------------------------


def test_what_a_planner_cannot_is_refused(tmp_path: Path) -> None:
    policy = planner(**GUIDED)
    with pytest.raises(ExportError, match=mentions("algo.guide_repeats=0")):
        export_onnx(policy, tmp_path / "exported")
    of_states = planner(**DECISION)
    with pytest.raises(ConfigError, match=mentions("warm_start.gripper states")):
        Replanner(of_states, WarmStart(steps=1, gripper=(0,)))
    with pytest.raises(CapabilityError, match=mentions("states waypoints")):
        SketchedPolicy(of_states, ACTIONS, SketchSettings(strategy="random"))
    with pytest.raises(CapabilityError, match=mentions("output_perturbation post_hoc_ranking")):
        SketchedPolicy(policy, WAY, SketchSettings(strategy="output_perturbation"))
    with pytest.raises(ConfigError, match=mentions("observed 2")):
        SketchedPolicy(policy, replace(WAY, observed=(0, 3)), SketchSettings(strategy="random"))
    with pytest.raises(CapabilityError, match=mentions("planner process=consistency")):
        planner(Consistency())
    with pytest.raises(ConfigError, match=mentions("inner policy obs_dim")):
        Planner(obs_dim=4, action_dim=2).wrap(policy.base)
    for fields in ({"plans": 2}, {"goal_dim": 4}, {"value_widths": (40,)}):
        with pytest.raises(ConfigError, match=mentions(next(iter(fields)))):
            Planner(obs_dim=3, action_dim=2, **fields)


@pytest.mark.parametrize("process", [VPDiffusion(num_levels=4), RectifiedFlow()], ids=["diffusion", "flow"])
def test_noise_that_an_evaluation_switches_off_is_zero_for_every_plan(process: Any) -> None:
    policy = planner(process, **GUIDED, plans=3)
    has_steps = not policy.is_deterministic

    def noise(start: str, sampling: str) -> Tensor:
        runner = EpisodeRunner(policy, 0, 0, start_noise=start, sampling_noise=sampling, keep=False)
        return runner.noise(torch.Generator().manual_seed(0))

    plain = noise("random", "random")
    starts = plain[..., :1, :, :] if has_steps else plain
    assert starts.abs().amin() > 0 and noise("zero", "zero").eq(0).all()
    still, from_zero = noise("random", "zero"), noise("zero", "random")
    if has_steps:
        assert torch.equal(still[:, :1], starts) and not still[:, 1:].any()
        assert torch.equal(from_zero[:, 1:], plain[:, 1:]) and not from_zero[:, 0].any()
    else:
        assert torch.equal(still, plain) and not from_zero.any()
