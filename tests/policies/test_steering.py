"""Following a sketch: guides, guidance, resampling, and the strategies made of them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import repeated
from small_policies import observations, small_policy
from torch import Tensor

import burnish
from policies.errors import CapabilityError, ConfigError
from policies.export.exported_policy import ExportedPolicy
from policies.policy_config import ChunkSpec
from policies.processes import Edm, RectifiedFlow, VPDiffusion
from policies.processes.consistency import Consistency
from policies.processes.gaussian import GaussianProcess
from policies.protocols import Cond, Step
from policies.samplers import step_table
from policies.samplers.consistency import Renoise
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.loop import denoise
from policies.samplers.ode import Ancestral, Euler, Heun
from policies.storage.policy_folder import save_policy
from policies.wrappers.sketch_guidance import (
    GuideHook,
    Resampling,
    SketchedPolicy,
    SketchSettings,
    guide_distance,
    guide_gradient,
    steered,
)
from policies.wrappers.sketch_settings import STRATEGIES
from policies.wrappers.sketches import ActionSketch, PositionSketch, WaypointSketch, read_sketch

PAIRS = [
    (VPDiffusion(10, prediction="eps"), DDPM(min_std=0.1)),
    (VPDiffusion(10, prediction="v"), DDIM(steps=4)),
    (RectifiedFlow(), Euler(steps=5)),
    (RectifiedFlow(), Ancestral(steps=5, eta=0.5)),
]
every_pair = pytest.mark.parametrize(("process", "sampler"), PAIRS)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
SKETCH = ActionSketch(((1.0, 5.0), (2.0, 4.0), (4.0, 3.0), (6.0, 2.0)))
WAY = PositionSketch(((0.0, 0.0), (3.0, 0.0), (3.0, 4.0)), pace=0.5, reach=0.2)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noise_of(policy: SketchedPolicy, batch: int) -> Tensor:
    return policy.sample_noise(batch, generator=torch.Generator().manual_seed(3))


# -- sketches -------------------------------------------------------------------------------------------


def test_the_nearest_place_on_a_way_is_that_of_a_fine_search() -> None:
    position = 3.0 * draw(40, 2)
    fine = torch.linspace(0.0, 7.0, 70_001, dtype=torch.float64)
    brute = (position[:, None] - WAY.place(fine)).norm(dim=-1)
    torch.testing.assert_close(WAY.distance(position), brute.min(dim=1).values, rtol=0, atol=1e-4)
    torch.testing.assert_close(WAY.nearest(position), fine[brute.argmin(dim=1)], rtol=0, atol=1e-3)


@pytest.mark.parametrize("action_start", [0, 2])
def test_actions_along_a_way_arrive_on_it(action_start: int) -> None:
    chunk = ChunkSpec(2, horizon=8, act_steps=4, obs_steps=action_start + 1, action_start=action_start)
    position = torch.tensor([[1.0, 0.3], [0.2, -0.4]], dtype=torch.float64)
    obs = {"state": torch.cat([position, torch.zeros_like(position)], dim=1)[:, None]}
    guide = WAY.guide(obs, chunk)
    assert guide.shape == (2, 8, 2)
    moved = position + WAY.reach * guide[:, action_start:].sum(dim=1)
    covered = WAY.pace * (8 - action_start)
    left = action_start / 8
    on_way = WAY.place(WAY.nearest(position) + covered)
    off = position - WAY.place(WAY.nearest(position))
    torch.testing.assert_close(moved, on_way + left * off)


@pytest.mark.parametrize("action_start", [0, 2])
def test_waypoints_are_where_the_changes_of_position_lead(action_start: int) -> None:
    chunk = ChunkSpec(2, horizon=8, act_steps=4, obs_steps=action_start + 1, action_start=action_start)
    position = torch.tensor([[1.0, 0.3], [0.2, -0.4]], dtype=torch.float64)
    obs = {"state": position[:, None]}
    waypoints = WaypointSketch(WAY.positions, WAY.pace).guide(obs, chunk)
    changes = WAY.reach * WAY.guide(obs, chunk)
    torch.testing.assert_close(waypoints.diff(dim=1), changes[:, 1:])
    moved = position + changes[:, action_start:].sum(dim=1)
    torch.testing.assert_close(waypoints[:, -1], moved)


def test_a_way_ends_where_it_ends() -> None:
    obs = {"state": torch.tensor([[[3.0, 4.5, 0.0, 0.0]]])}
    guide = WAY.guide(obs, ChunkSpec(2, horizon=5))
    torch.testing.assert_close(guide.sum(dim=1), torch.tensor([[0.0, -0.5 / 0.2]]))


@pytest.mark.parametrize("suffix", ["json", "npz"])
def test_sketches_are_read_from_files(tmp_path, suffix: str) -> None:
    content = {
        "positions": [[0.0, 0.0], [3.0, 0.0], [3.0, 4.0]],
        "pace": 0.5,
        "reach": 0.2,
        "observed": [0, 1],
    }
    path = tmp_path / f"way.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(content))
    else:
        np.savez(path, **content)
    assert read_sketch(path) == WAY
    path.unlink()
    (tmp_path / "plan.json").write_text(json.dumps({"actions": [[1.0, 2.0]]}))
    assert read_sketch(tmp_path / "plan.json") == ActionSketch(((1.0, 2.0),))
    (tmp_path / "plan.json").write_text(json.dumps({"waypoints": WAY.positions, "pace": 0.5}))
    assert read_sketch(tmp_path / "plan.json") == WaypointSketch(WAY.positions, pace=0.5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"points": []}', "steer.sketch="),
        ('{"actions": []}', "steer.sketch= 1"),
        ('{"actions": [[1.0], [1.0, 2.0]]}', "steer.sketch="),
        ('{"positions": [[0, 0], [0, 0]], "pace": 1, "reach": 1}', "steer.sketch= 2"),
        ('{"positions": [[0, 0], [1, 0]], "pace": 0, "reach": 1}', "steer.sketch= 0"),
        ('{"positions": [[0, 0], [1, 0]], "pace": 1, "reach": 1, "observed": [0]}', "2"),
        ('{"positions": [[0, 0], [1, 0]]}', "pace"),
        ('{"waypoints": [[0, 0], [0, 0]], "pace": 1}', "steer.sketch= 2"),
        ('{"waypoints": [[0, 0], [1, 0]], "pace": -1}', "steer.sketch= 0"),
        ('{"waypoints": [[0, 0], [1, 0]], "pace": 1, "reach": 1}', "reach"),
        ('{"actions": [[NaN]]}', "finite"),
        ('{"actions": [[1.0]], "speed": 1}', "speed"),
        ("no json", "steer.sketch="),
    ],
)
def test_what_is_no_sketch_is_refused_with_the_reason(tmp_path, text: str, reason: str) -> None:
    path = tmp_path / "sketch.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=mentions(reason)):
        read_sketch(path)


def test_a_missing_file_and_a_wrong_width_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=mentions("steer.sketch")):
        read_sketch(tmp_path / "nothing.json")
    policy = SketchedPolicy(small_policy(), ActionSketch(((1.0, 2.0, 3.0),)), SketchSettings("random"))
    with pytest.raises(ConfigError, match=mentions("2")):
        policy.act(observations(1))


# -- distance and gradient ------------------------------------------------------------------------------


def test_the_gradient_is_that_of_the_distance() -> None:
    plan, guide = draw(3, 5, 2).requires_grad_(), draw(3, 5, 2, seed=1)
    (expected,) = torch.autograd.grad(guide_distance(plan, guide).sum(), plan)
    torch.testing.assert_close(guide_gradient(plan.detach(), guide), expected)
    step, at = 1e-6, plan.detach().clone()
    for row, dim in ((0, 0), (4, 1)):
        ahead, behind = at.clone(), at.clone()
        ahead[0, row, dim] += step
        behind[0, row, dim] -= step
        slope = (guide_distance(ahead, guide) - guide_distance(behind, guide))[0] / (2 * step)
        torch.testing.assert_close(expected[0, row, dim], slope, rtol=1e-6, atol=1e-9)


def test_rows_on_the_guide_are_not_pushed() -> None:
    guide = draw(1, 4, 2)
    assert torch.equal(guide_gradient(guide, guide), torch.zeros_like(guide))


# -- guidance inside the loop ---------------------------------------------------------------------------


@every_pair
@pytest.mark.parametrize("gradient", ["x", "x0"])
def test_guidance_of_scale_zero_changes_no_bit(process, sampler, gradient: str) -> None:
    policy, obs = small_policy(process, sampler), observations(3)
    plain = SketchedPolicy(policy, SKETCH, SketchSettings("random"))
    idle = SketchedPolicy(policy, SKETCH, SketchSettings("guided_diffusion", scale=0.0, gradient=gradient))
    noise = noise_of(plain, 3)
    assert torch.equal(idle.act(obs, noise=noise), plain.act(obs, noise=noise))
    assert torch.equal(plain.act(obs, noise=noise), policy.act(obs, noise=noise[:, 0]))


@every_pair
@pytest.mark.parametrize("gradient", ["x", "x0"])
def test_stronger_guidance_ends_nearer_to_the_guide(process, sampler, gradient: str) -> None:
    policy, obs = small_policy(process, sampler), {"state": observations(16)}
    found = []
    for scale in (0.0, 0.3, 3.0):
        steering = SketchSettings("guided_diffusion", scale=scale, gradient=gradient)
        guided = SketchedPolicy(policy, SKETCH, steering)
        with torch.no_grad():
            found.append(guide_distance(guided.plan(obs, noise_of(guided, 16)), guided.guide(obs)).mean())
    assert found[2] < found[1] < found[0]


@pytest.mark.parametrize("gradient", ["x", "x0"])
def test_guidance_explains_the_state_and_leaves_the_last_level_alone(gradient: str) -> None:
    table = DDIM(steps=4).table(VPDiffusion(8))
    hook = GuideHook(draw(2, 3, 2, seed=5), 2.0, gradient, None)
    seen = []

    class Watch(GuideHook):
        def on_prediction(self, step, x, x0, eps):
            moved = hook.on_prediction(step, x, x0, eps)
            seen.append(float((step.alpha * moved[0] + step.sigma * moved[1] - x).abs().max()))
            seen.append(float((moved[0] - x0).abs().max()))
            return moved

    denoise(
        lambda k, x: 0.5 * x,
        table,
        draw(2, 3, 2),
        hooks=[Watch(hook.guide, 0.0)],
        cond=Cond(torch.zeros(2, 1)),
    )
    assert max(seen[0::2]) < 1e-10
    assert all(move > 0 for move in seen[1:-2:2])
    assert seen[-1] == 0


def test_a_clean_plan_goes_as_far_as_told_but_never_beyond_the_guide() -> None:
    x0, guide = draw(2, 3, 2), draw(2, 3, 2, seed=5)
    step = Step(0, 4, 0.2, 0.4, Cond(torch.zeros(2, 1)), 0.6, 0.8)
    far, _ = GuideHook(guide, 1e6, "x0", None).on_prediction(step, x0, x0, x0)
    torch.testing.assert_close(far, guide)
    near, _ = GuideHook(guide, 0.01, "x0", None).on_prediction(step, x0, x0, x0)
    torch.testing.assert_close((near - x0).norm(dim=-1), torch.full((2, 3), 0.01 * 0.8 / 0.6 / 3).double())


# -- resampling ---------------------------------------------------------------------------------------------

GAUSSIAN = [
    (VPDiffusion(5), DDPM(clip_x0=None, noise_clip=None, min_std=0.0)),
    (VPDiffusion(10), DDIM(steps=5, clip_x0=None, noise_clip=None)),
    (RectifiedFlow(), Euler(steps=5, clip_action=None, noise_clip=None)),
    (Edm(), Ancestral(steps=5, clip_x0=None, noise_clip=None)),
]
every_gaussian = pytest.mark.parametrize(("process", "sampler"), GAUSSIAN)
MEAN = 0.4


def exact_network(process, table, spread: float):
    """Return the best network for clean chunks drawn from Normal(MEAN, spread)."""
    times = torch.tensor(table.times[:-1], dtype=torch.float64)

    def bound(k: int, x: Tensor) -> Tensor:
        alpha, sigma = table.alpha[k], table.sigma[k]
        gain = alpha * spread**2 / (alpha**2 * spread**2 + sigma**2)
        x0 = MEAN + gain * (x - alpha * MEAN)
        t = times[k].expand(len(x))
        return process.convert(x, t, x0, "x0", process.kind)

    return bound


def resampled(process, sampler, spread: float, *, steps: int, noise: float, k: int) -> tuple[Tensor, Tensor]:
    """Put states of the right distribution at level k and return them before and after visiting it."""
    table = Resampling(sampler, steps, noise).table(process)
    first = k * steps
    clean = MEAN + spread * draw(200_000, 1, 1, seed=1)
    x = table.alpha[first] * clean + table.sigma[first] * draw(200_000, 1, 1, seed=2)
    noise = draw(200_000, table.num_steps + 1, 1, 1, seed=3)
    if table.is_deterministic:
        noise = noise[:, 0]
    bound = exact_network(process, table, spread)
    out = denoise(bound, table, noise, start=x, first_step=first, record_from=first)
    assert out.chain is not None
    return x, out.chain[:, steps - 1]


@every_gaussian
def test_resampling_keeps_the_distribution_of_a_level_around_a_single_plan(process, sampler) -> None:
    before, after = resampled(process, sampler, 0.0, steps=4, noise=1.0, k=2)
    torch.testing.assert_close(after.mean(), before.mean(), rtol=0, atol=0.01)
    torch.testing.assert_close(after.std(), before.std(), rtol=0.01, atol=0)


@every_gaussian
def test_resampling_shrinks_wide_data_as_the_closed_form_says(process, sampler) -> None:
    spread = 0.5
    before, after = resampled(process, sampler, spread, steps=2, noise=1.0, k=2)
    table = sampler.table(process)
    alpha, sigma = table.alpha[2], table.sigma[2]
    full = alpha**2 * spread**2 + sigma**2
    expected = (alpha * spread) ** 4 / full + sigma**2
    torch.testing.assert_close(after.mean(), before.mean(), rtol=0, atol=0.01)
    assert after.var().item() == pytest.approx(expected, rel=0.01)
    assert expected < full


@every_gaussian
def test_langevin_resampling_keeps_wide_data(process, sampler) -> None:
    before, after = resampled(process, sampler, 0.5, steps=5, noise=0.2, k=2)
    torch.testing.assert_close(after.mean(), before.mean(), rtol=0, atol=0.01)
    torch.testing.assert_close(after.var(), before.var(), rtol=0.015, atol=0)


@pytest.mark.parametrize(
    ("process", "sampler"),
    [
        (RectifiedFlow(), Euler(steps=3, released_times=True, clip_action=None)),
        (RectifiedFlow(), Euler(steps=3, clip_state=0.5)),
        (Consistency(), Renoise(steps=3, start_noise=1.0, clip_x0=None)),
        (VPDiffusion(9), DDIM(steps=3, eta=0.5, eps_clip=2.0, recompute_eps=False)),
    ],
)
def test_one_visit_per_level_is_the_sampler_with_all_its_settings(process, sampler) -> None:
    own, once = sampler.table(process), Resampling(sampler, 1).table(process)
    noise, x = draw(5, own.num_steps + 1, 4, 2, seed=0), draw(5, 4, 2, seed=1)
    noise = noise[:, 0] if own.is_deterministic else noise
    net = lambda table: lambda k, x: 0.3 * x + 1e-3 * table.net_time[k]  # noqa: E731
    for start in (None, x):
        one, other = (denoise(net(table), table, noise, start=start).action for table in (own, once))
        torch.testing.assert_close(one, other)


@every_pair
def test_a_visit_that_draws_nothing_anew_changes_nothing(process, sampler) -> None:
    policy, obs = small_policy(process, sampler), observations(3)
    patient = policy.with_sampler(Resampling(sampler, 3, noise=0.0))
    noise = policy.sample_noise(3, generator=torch.Generator().manual_seed(1))
    tape = noise
    if not policy.is_deterministic:
        steps = noise[:, 1:].repeat_interleave(3, dim=1)
        tape = torch.cat([noise[:, :1], steps], dim=1)
    limit = getattr(sampler, "clip_x0", None)
    if limit is None:  # else a clipped x0 moves the state already
        torch.testing.assert_close(patient.act(obs, noise=tape), policy.act(obs, noise=noise))
    assert patient.table.num_steps == 3 * policy.table.num_steps


def test_levels_are_left_where_the_sampler_leaves_them() -> None:
    own = DDPM().table(VPDiffusion(6))
    table = Resampling(DDPM(), 4).table(VPDiffusion(6))
    assert table.times[::4] == own.times
    assert table.times[1] == own.times[0]
    torch.testing.assert_close(table.coefficients[:, 3::4], own.coefficients)
    torch.testing.assert_close(table.std[3::4], own.std)
    torch.testing.assert_close(table.std[:3, 0], torch.full((3,), own.sigma[0], dtype=torch.float64))
    assert table.step_at(own.times[2]) == 8
    once = Resampling(DDPM(), 1).table(VPDiffusion(6))
    assert torch.equal(once.coefficients, own.coefficients)


def test_a_sampler_with_a_memory_cannot_visit_levels_again() -> None:
    with pytest.raises(ConfigError, match="one evaluation per step"):
        Resampling(Heun(steps=4), 2).table(RectifiedFlow())
    outside = replace(Euler(steps=4).table(RectifiedFlow()), loop=lambda bound, noise: noise)
    with pytest.raises(ConfigError, match="not heun, midpoint, dpmpp_2m or diffusers"):
        step_table.resampled(outside, RectifiedFlow(), Euler(steps=4), steps=2)
    with pytest.raises(ConfigError, match="steps of at least 1"):
        Resampling(Euler(steps=4), 0).table(RectifiedFlow())


# -- strategies -----------------------------------------------------------------------------------------


@every_strategy
@every_pair
def test_an_observation_s_plan_does_not_depend_on_the_others(process, sampler, strategy: str) -> None:
    policy = SketchedPolicy(small_policy(process, sampler), SKETCH, SketchSettings(strategy))
    obs, noise = observations(3), noise_of(policy, 3)
    together = policy.act(obs, noise=noise)
    assert torch.equal(together, policy.act(obs, noise=noise))
    for i in range(3):
        alone = policy.act(obs[i : i + 1], noise=noise[i : i + 1])
        torch.testing.assert_close(alone[0], together[i], rtol=1e-4, atol=1e-4)


@every_strategy
@every_pair
def test_every_strategy_but_random_comes_nearer_to_the_sketch(process, sampler, strategy: str) -> None:
    base, obs = small_policy(process, sampler), {"state": observations(32)}
    found = {}
    for name in ("random", strategy):
        policy = SketchedPolicy(base, SKETCH, SketchSettings(name))
        with torch.no_grad():
            found[name] = guide_distance(policy.plan(obs, noise_of(policy, 32)), policy.guide(obs)).mean()
    assert strategy == "random" or found[strategy] < found["random"]


@pytest.mark.parametrize(
    ("strategy", "resample_steps"), repeated([("stochastic_sampling", 2), ("output_perturbation", None)])
)
def test_a_sketch_is_served_and_exported(strategy: str, resample_steps: int | None, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra 'export'")
    pytest.importorskip("zmq", reason="needs the extra 'serve'")
    from burnish.commands.serve import ServeConfig, served_by
    from policies.serving.served_policy import ServedPolicy

    (tmp_path / "way.json").write_text(json.dumps(asdict(WAY)))
    keys = {"strategy": strategy, "sketch": str(tmp_path / "way.json"), "candidates": 2}
    keys |= {"resample_steps": resample_steps}
    steer = SketchSettings(**keys)
    policy = small_policy(RectifiedFlow(), Euler(steps=1, clip_action=None))
    followed = steered(policy, steer)
    obs, noise = observations(4), followed.sample_noise(4, generator=torch.Generator().manual_seed(2))
    actions = followed.act(obs, noise=noise)
    served = ServedPolicy(followed).decide({"observation": obs.numpy()}, noise.numpy())
    np.testing.assert_array_equal(served, actions.numpy())
    plain = save_policy(policy, tmp_path / "policy")
    report = burnish.export(plain, out=str(tmp_path / "exported"), steer=keys)
    assert report.worst < 1e-5
    exported = ExportedPolicy(tmp_path / "exported")
    torch.testing.assert_close(exported.act(obs, noise=noise), actions, rtol=0, atol=1e-4)
    assert exported.description.provenance["steer"]["sketch"]["pace"] == WAY.pace
    served_folder = served_by(ServeConfig(policy=str(plain), steer=steer))
    np.testing.assert_array_equal(served_folder.decide({"observation": obs.numpy()}, noise.numpy()), served)
    with pytest.raises(ConfigError, match=mentions("steer")):
        served_by(ServeConfig(policy=str(tmp_path / "exported"), steer=steer))


def test_ranking_takes_the_nearest_of_all_plans() -> None:
    policy = SketchedPolicy(small_policy(), SKETCH, SketchSettings("post_hoc_ranking", candidates=6))
    obs, noise = {"state": observations(5)}, noise_of(policy, 5)
    with torch.no_grad():
        plans = policy.candidates(obs, noise)
        distance = guide_distance(plans, policy.guide(obs)[:, None])
        torch.testing.assert_close(
            guide_distance(policy.plan(obs, noise), policy.guide(obs)), distance.min(dim=1).values
        )


def test_output_perturbation_begins_with_the_guide() -> None:
    steering = SketchSettings("output_perturbation", candidates=2, guide_rows=2)
    policy = SketchedPolicy(small_policy(), SKETCH, steering)
    obs = observations(2)
    torch.testing.assert_close(policy.act(obs), SKETCH.guide({"state": obs}, policy.chunk)[:, :2])
    with pytest.raises(ConfigError, match=mentions("act_steps=2")):
        SketchedPolicy(small_policy(), SKETCH, SketchSettings("output_perturbation", guide_rows=3))


def test_biased_initialization_without_noise_begins_at_the_guide_itself() -> None:
    base = small_policy(VPDiffusion(10), DDIM(steps=5))
    steering = SketchSettings("biased_initialization", noise_share=0.0, start=0.5)
    policy = SketchedPolicy(base, SKETCH, steering)
    obs = {"state": observations(2)}
    with torch.no_grad():
        plan = policy.plan(obs, noise_of(policy, 2))
        first = base.table.step_at(0.5)
        start = (policy.guide(obs), base.table.times[first])
        torch.testing.assert_close(plan, base.decode(base.encode(obs), 0 * plan, start=start))
    assert policy.calls == 5 - first


def test_switches_replace_those_of_the_strategy() -> None:
    steering = SketchSettings("stochastic_sampling", candidates=3, scale=1.0, resample_steps=2)
    policy = SketchedPolicy(small_policy(VPDiffusion(10), DDIM(steps=5)), SKETCH, steering)
    assert policy.noise_shape == (3, 11, 3, 2)
    assert policy.calls == 10
    assert math.isclose(policy.recipe.scale, 1.0)


def test_a_policy_without_denoising_and_a_strategy_without_sketch_are_refused() -> None:
    with pytest.raises(CapabilityError, match=mentions("denoises plan")):
        SketchedPolicy(small_policy(GaussianProcess()), SKETCH, SketchSettings("random"))
    policy = small_policy()
    assert steered(policy, SketchSettings()) is policy
    with pytest.raises(ConfigError, match=mentions("steer.sketch")):
        steered(policy, SketchSettings("random"))


def test_a_sketch_without_strategy_is_refused() -> None:
    for values in ({"sketch": "way.json"}, {"scale": 5.0}):
        with pytest.raises(
            ConfigError, match=mentions(f"steer.{next(iter(values))} no effect steer.strategy")
        ):
            SketchSettings(**values)  # type: ignore[arg-type]
