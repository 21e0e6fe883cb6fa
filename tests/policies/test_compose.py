"""Composition: exactness, translation between paths and units, densities of a mixture, one policy to all."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from pairwise import pairwise, repeated
from torch import Tensor

from policies.composition.compose import compose
from policies.composition.operators import Composition
from policies.composition.policy import ComposedPolicy
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.execution.executor import Execution, Executor
from policies.execution.replanning import WarmStart
from policies.export.export import export_onnx
from policies.processes import RectifiedFlow, VPDiffusion
from policies.processes.edm import Edm
from policies.processes.gaussian import GaussianProcess
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.hooks import Inpaint
from policies.samplers.loop import denoise
from policies.samplers.ode import Ancestral, Euler, Heun
from policies.storage.policy_folder import load_policy, save_policy
from tests.gaussian_field import gaussian_policy, log_density
from tests.small_policies import ACTION_DIM, GOAL_DIM, OBS_DIM, observations, small_policy

PROCESSES = {
    "diffusion": (VPDiffusion(), DDIM(steps=5)),
    "diffusion-x0": (VPDiffusion(prediction="x0"), DDPM()),
    "flow": (RectifiedFlow(), Euler(steps=5)),
    "edm": (Edm(), Heun(steps=4)),
}

SLOW = pytest.mark.slow
UNBOUNDED = Euler(clip_action=None)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def member(name: str, **options: Any) -> DenoisingPolicy:
    process, sampler = PROCESSES[name]
    policy = small_policy(process, sampler, **options)
    assert isinstance(policy, DenoisingPolicy)
    return policy


def other_weights(policy: DenoisingPolicy, factor: float = 1.3) -> DenoisingPolicy:
    """Return a policy that does something else."""
    policy = policy.clone()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(factor)
    return policy


def in_other_units(policy: DenoisingPolicy) -> DenoisingPolicy:
    policy = policy.clone()
    policy.normalizer.get_buffer("action_scale").mul_(torch.tensor([1.3, 0.8]))
    policy.normalizer.get_buffer("action_offset").add_(0.2)
    return policy


def every_kind_of_member() -> list[DenoisingPolicy]:
    return [member(name, obs_steps=1 + (name == "flow")) for name in PROCESSES]


every_lead = pytest.mark.parametrize("lead", PROCESSES)


# -- exactness ------------------------------------------------------------------------------------------


@every_lead
def test_weights_one_and_zero_give_that_member_bit_by_bit(lead: str) -> None:
    policy = member(lead)
    others = [in_other_units(other_weights(member(name))) for name in PROCESSES]
    both = compose([policy, *others], [1.0, *(0.0 for _ in others)])
    obs, noise = observations(4), policy.sample_noise(4, generator=seeded())
    assert both.noise_shape == policy.noise_shape
    assert torch.equal(both.act(obs, noise=noise), policy.act(obs, noise=noise))


@every_lead
@pytest.mark.parametrize("operator", ["convex", "cfg_sum", "product"])
def test_a_policy_composed_with_itself_is_itself_bit_by_bit(lead: str, operator: str) -> None:
    policy = member(lead)
    weights = [1.0, 2.5] if operator == "cfg_sum" else [0.3, 0.7]
    both = compose([policy, policy.clone()], weights, operator=operator)
    obs, noise = observations(4), policy.sample_noise(4, generator=seeded())
    assert torch.equal(both.act(obs, noise=noise), policy.act(obs, noise=noise))


def test_a_mixture_of_one_policy_is_that_policy() -> None:
    policy = member("diffusion-x0")
    both = compose([policy, policy.clone()], [0.3, 0.7], operator="or")
    obs, noise = observations(4), policy.sample_noise(4, generator=seeded())
    assert torch.equal(both.act(obs, noise=noise), policy.act(obs, noise=noise))


def test_members_without_weight_are_not_asked() -> None:
    lead = gaussian_policy(VPDiffusion(), (0.0, 0.0), 1.0)
    other = gaussian_policy(RectifiedFlow(), (1.0, 0.0), 0.5)
    last = (((0.0, 0.0), (0.5, 0.0), (1.0, 1.0)), ((0.0, 1.0), (0.5, 1.0), (1.0, 0.0)))
    steps = lead.table.num_steps
    for weights, calls in (
        ([1.0, 0.0], (steps, 0)),
        ([0.0, 1.0], (0, steps)),
        (last, (steps // 2 - 1, steps)),
    ):
        lead.field.calls = other.field.calls = 0
        compose([lead, other], weights).act(torch.zeros(2, 1, 1), generator=seeded())
        assert (lead.field.calls, other.field.calls) == calls


def test_the_guided_sum_counts_from_its_base() -> None:
    base, one, two = (other_weights(member("flow"), f) for f in (1.0, 1.2, 0.7))
    guided = compose([base, one, two], [1.0, 2.0, -0.5], operator="cfg_sum")
    plain = compose([base, one, two], [-0.5, 2.0, -0.5])
    obs, noise = observations(3), base.sample_noise(3, generator=seeded())
    torch.testing.assert_close(
        guided.act(obs, noise=noise), plain.act(obs, noise=noise), atol=1e-5, rtol=1e-5
    )


# -- paths and units --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lead", "other", "units"),
    pairwise(
        [VPDiffusion(100), VPDiffusion(100, prediction="v"), RectifiedFlow()],
        [VPDiffusion(50, prediction="x0"), RectifiedFlow(), VPDiffusion(100, "linear")],
        [pytest.param(units) for units in [(1.0, 0.0), (0.4, 0.7), (3.0, -2.0)]],
    ),
)
def test_one_distribution_in_two_languages_is_one_policy(
    lead: Any, other: Any, units: tuple[float, float]
) -> None:
    mean, std = (0.3, -0.2), 0.4
    one = gaussian_policy(lead, mean, std, sampler=UNBOUNDED)
    two = gaussian_policy(other, mean, std, scale=units[0], offset=units[1], sampler=UNBOUNDED)
    both, cond = compose([one, two], [0.4, 0.6]), nothing_seen(one, 4)
    x = torch.randn(4, 2, 2, generator=seeded(), dtype=torch.float64)
    for t in (0.1, 0.5, 0.97):
        times = torch.full((4,), t, dtype=torch.float64)
        for kind in ("eps", "x0", "velocity"):
            expected = one.predict(x, times, cond.members[0], kind=kind)
            torch.testing.assert_close(
                both.predict(x, times, cond, kind=kind), expected, atol=1e-7, rtol=1e-7
            )


def nothing_seen(policy: DenoisingPolicy, batch: int) -> Any:
    """The condition of a composition of two policies that observe nothing."""
    both = compose([policy, policy], [0.5, 0.5])
    return both.encode({"state": torch.zeros(batch, 1, 1, dtype=torch.float64)})


@pytest.mark.parametrize("process", [VPDiffusion(100), RectifiedFlow()])
def test_a_convex_sum_of_gaussians_has_the_score_of_their_geometric_mean(process: Any) -> None:
    one, two = gaussian_policy(process, (0.5, 0.0), 0.3), gaussian_policy(RectifiedFlow(), (-0.5, 0.2), 0.6)
    both, cond = compose([one, two], [0.25, 0.75]), nothing_seen(one, 5)
    x = torch.randn(5, 2, 2, generator=seeded(), dtype=torch.float64, requires_grad=True)
    times = torch.full((5,), 0.6, dtype=torch.float64)
    (score,) = torch.autograd.grad(0.25 * log_density(one, x, 0.6).sum(), x)
    alpha, sigma = (float(a[0]) for a in process.alpha_sigma(times))
    t_other = float(two.process.time_of_lambda(torch.tensor(alpha / sigma, dtype=torch.float64).log()))
    scale = (1 - t_other) / sigma
    (other,) = torch.autograd.grad(0.75 * log_density(two, scale * x, t_other).sum(), x)
    found = both.predict(x.detach(), times, cond, kind="score")
    torch.testing.assert_close(found, score + other, atol=1e-9, rtol=1e-9)


@every_lead
def test_the_bound_composition_is_its_field_at_the_steps(lead: str) -> None:
    members = [member(lead), *(in_other_units(other_weights(m)) for m in every_kind_of_member())]
    knots = ((0.0, 0.2), (1.0, 0.6))
    rest = ((0.0, 0.8), (1.0, 0.4))
    both = compose(members, [knots, rest, 0.3, -0.2, -0.1])
    obs = both.observation(observations(3, 2))
    cond, x = both.encode(obs), torch.randn(3, *both.chunk.shape, generator=seeded())
    bound = both.bind(cond)
    for k, t in enumerate(both.table.times[1:-1], 1):  # at pure noise clean chunks are anyone's guess
        said = both.predict(x, torch.full((3,), t), cond, kind=both.process.kind)
        torch.testing.assert_close(bound(k, x), said, atol=2e-4, rtol=2e-4)


def test_a_member_is_not_asked_where_its_path_is_never_as_noisy() -> None:
    flow, other = (gaussian_policy(RectifiedFlow(), (m, m), 0.3, sampler=Euler(steps=4)) for m in (0.0, 0.4))
    far = gaussian_policy(VPDiffusion(), (5.0, 5.0), 0.3, sampler=UNBOUNDED)
    x = torch.randn(1, 2, 2, generator=seeded(), dtype=torch.float64)
    start, noise = torch.zeros(1, dtype=torch.float64), x
    bound, cond = compose([flow, far, other], [0.2, 0.6, 0.2]), nothing_seen(flow, 1)
    expected = compose([flow, other], [0.5, 0.5]).predict(x, start, cond, kind="velocity")
    three = bound.encode({"state": torch.zeros(1, 1, 1, dtype=torch.float64)})
    torch.testing.assert_close(bound.predict(x, start, three, kind="velocity"), expected)
    torch.testing.assert_close(bound.bind(three)(0, noise), expected)
    assert float(bound.bind(three)(1, noise).mean() - expected.mean()) > 1  # from then on it is


def test_a_translated_clean_chunk_keeps_to_the_bound_of_its_own_sampler() -> None:
    flow = gaussian_policy(RectifiedFlow(), (0.0, 0.0), 0.1, sampler=Euler(steps=4))
    for clip, largest in ((1.0, 1.0), (None, 5.0)):
        far = gaussian_policy(VPDiffusion(), (5.0, 5.0), 1e-3, sampler=DDIM(clip_x0=clip))
        alone = compose([flow, far], [0.0, 1.0])
        x, half = torch.zeros(1, 2, 2).double(), torch.tensor([0.5]).double()
        x0 = alone.predict(x, half, nothing_seen(flow, 1), kind="x0")
        torch.testing.assert_close(x0, torch.full_like(x0, largest), atol=1e-3, rtol=0)


# -- mixtures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "units"), repeated([(RectifiedFlow(), (0.5, 0.3)), (VPDiffusion(400), (1.0, 0.0))])
)
def test_densities_are_followed_along_a_whole_chain(other: Any, units: tuple[float, float]) -> None:
    sampler = DDPM(clip_x0=None, min_std=0.0, noise_clip=None)
    one = gaussian_policy(VPDiffusion(400), (0.4, -0.3), 0.5, sampler=sampler)
    two = gaussian_policy(other, (-0.2, 0.1), 0.7, scale=units[0], offset=units[1], sampler=UNBOUNDED)
    reference = gaussian_policy(VPDiffusion(400), (-0.2, 0.1), 0.7, sampler=sampler)
    mixture = compose([one, two], [0.3, 0.7], operator="or", sampler=sampler)
    cond = mixture.encode({"state": torch.zeros(64, 1, 1, dtype=torch.float64)})
    bound: Any = mixture.bind(cond)
    errors, spread = [], []

    def watched(k: int, x: Tensor) -> Tensor:
        out: Tensor = bound(k, x)
        exact = log_density(one, x, mixture.table.times[k]) - log_density(
            reference, x, mixture.table.times[k]
        )
        found = (bound.log_density[0] - bound.log_density[1]).expand(64)
        errors.append((found - exact).square().mean().sqrt())
        spread.append(exact.std())
        return out

    noise = mixture.sample_noise(64, generator=seeded())
    denoise(watched, mixture.table, noise)
    assert max(spread) > 0.7  # the densities do differ
    assert max(errors) < 0.12


def test_a_mixture_of_gaussians_is_sampled_in_its_shares() -> None:
    sampler = Ancestral(steps=200, clip_x0=None, noise_clip=None)
    left, right = (gaussian_policy(RectifiedFlow(), (m, m), 0.3, sampler=sampler) for m in (-1.5, 1.5))
    mixture = compose([left, right], [0.2, 0.8], operator="or")
    chunks = mixture.act(torch.zeros(2000, 1, 1), generator=seeded())
    is_right = chunks[:, 0, 0] > 0
    assert abs(float(is_right.double().mean()) - 0.8) < 0.05
    torch.testing.assert_close(chunks[is_right].mean(), torch.tensor(1.5).double(), atol=0.05, rtol=0)
    torch.testing.assert_close(chunks[is_right].std(), torch.tensor(0.3).double(), atol=0.03, rtol=0)
    blend = compose([left, right], [0.2, 0.8]).act(torch.zeros(500, 1, 1), generator=seeded())
    torch.testing.assert_close(blend.mean(), torch.tensor(0.9).double(), atol=0.05, rtol=0)  # in between


@pytest.mark.parametrize("sampler", [DDIM(steps=5), DDIM(steps=5, eta=0.5), DDPM(variance="fixed_large")])
def test_a_mixture_needs_the_whole_noise(sampler: Any) -> None:
    policy = member("diffusion")
    with pytest.raises(ConfigError, match=mentions("operator=or sampler=ddpm")):
        compose([policy, policy], [0.5, 0.5], operator="or", sampler=sampler)


def test_a_mixture_cannot_be_asked_at_a_single_state() -> None:
    mixture = compose([member("diffusion-x0")] * 2, [0.5, 0.5], operator="or")
    cond = mixture.encode(mixture.observation(observations(2)))
    with pytest.raises(CapabilityError, match=mentions("operator=or operator=convex")):
        mixture.predict(torch.zeros(2, *mixture.chunk.shape), torch.zeros(2), cond, kind="eps")


# -- observations -----------------------------------------------------------------------------------------


def test_every_member_gets_its_own_history_and_columns() -> None:
    short, long = member("flow"), other_weights(member("flow", obs_steps=3))
    obs = observations(4, 3)
    noise = short.sample_noise(4, generator=seeded())
    for weights, alone, seen in (([1.0, 0.0], short, obs[:, -1:]), ([0.0, 1.0], long, obs)):
        both = compose([short, long], weights)
        assert both.chunk.obs_steps == 3 and both.obs_dim == OBS_DIM
        assert torch.equal(both.act(obs, noise=noise), alone.act(seen, noise=noise))
    wide = torch.cat([obs[..., [0]], obs], dim=-1)
    columns = [[3, 2, 1, 5, 4], range(1, 6)]
    both = compose([short, long], [1.0, 0.0], columns=[tuple(one) for one in columns], obs_dim=6)
    expected = short.act(obs[:, -1:, [2, 1, 0, 4, 3]], noise=noise)
    assert both.obs_dim == 6 and torch.equal(both.act(wide, noise=noise), expected)
    scale = both.normalizer.get_buffer("state_scale")
    assert torch.equal(scale[1:4], short.normalizer.get_buffer("state_scale")[[2, 1, 0]]) and scale[0] == 1


def test_a_goal_reaches_the_members_that_have_one() -> None:
    with_goal, without = member("flow", goal_dim=GOAL_DIM), other_weights(member("diffusion"))
    both = compose([without, with_goal], [0.5, 0.5], sampler=DDIM(steps=5))
    noise = both.sample_noise(2, generator=seeded())
    chunks = [
        both.act({"state": observations(2), "goal": torch.full((2, GOAL_DIM), goal)}, noise=noise)
        for goal in (2.0, 4.0)
    ]
    assert both.goal_dim == GOAL_DIM and not torch.equal(*chunks)


# -- one policy to all the rest ------------------------------------------------------------------------------


KINDS = ("convex", "product", "cfg_sum", "or", "scheduled", "nested", "columns")


def variety(kind: str) -> ComposedPolicy:
    """A composition of one kind."""
    diffusion, x0, flow, edm = every_kind_of_member()
    if kind == "product":
        return compose([edm, diffusion], [0.7, 0.6], operator="product")
    if kind == "cfg_sum":
        return compose([flow, x0], [1.0, 1.5], operator="cfg_sum")
    if kind == "or":
        short = small_policy(VPDiffusion(num_levels=4), DDPM())
        return compose([short, flow], [0.4, 0.6], operator="or", temperature=2.0)
    if kind == "scheduled":
        return compose([diffusion, edm], [((0, 1), (1, 0)), ((0, 0), (1, 1))])
    if kind == "columns":
        return compose([flow, x0], [0.5, 0.5], columns=[None, [4, 3, 2, 1, 0]])
    pair = compose([diffusion, in_other_units(flow)], [0.5, 0.5])
    return pair if kind == "convex" else compose([flow, pair], [0.3, 0.7])


every_composition = pytest.mark.parametrize("kind", KINDS)


@every_composition
def test_a_composition_is_saved_copied_and_sent_whole(kind: str, tmp_path: Path) -> None:
    policy = variety(kind)
    obs, noise = observations(3, policy.chunk.obs_steps), policy.sample_noise(3, generator=seeded())
    expected = policy.act(obs, noise=noise)
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    assert isinstance(loaded, ComposedPolicy) and loaded.composition == policy.composition
    for again in (loaded, policy.clone(), pickle.loads(pickle.dumps(policy))):
        assert torch.equal(again.act(obs, noise=noise), expected)
    double = policy.clone().double()
    torch.testing.assert_close(double.act(obs, noise=noise.double()).float(), expected, atol=1e-3, rtol=1e-3)


@every_composition
def test_rows_of_a_composition_do_not_see_each_other(kind: str) -> None:
    policy = variety(kind)
    obs, noise = observations(5, policy.chunk.obs_steps), policy.sample_noise(5, generator=seeded())
    rows = [policy.act(obs[i : i + 1], noise=noise[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(torch.cat(rows), policy.act(obs, noise=noise), atol=1e-4, rtol=1e-4)
    cond = policy.encode(policy.observation(obs))
    picked = policy.decode(cond.rows(torch.tensor([3, 1])), noise[[3, 1]])
    torch.testing.assert_close(picked, policy.decode(cond, noise)[[3, 1]], atol=1e-4, rtol=1e-4)
    repeated = policy.decode(cond.repeat(2), noise.repeat_interleave(2, dim=0))
    torch.testing.assert_close(repeated[::2], policy.decode(cond, noise), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", repeated(["nested", "or"]))  # the former holds a convex one
def test_a_composition_is_exported_to_a_graph_that_reproduces_it(kind: str, tmp_path: Path) -> None:
    policy = variety(kind)
    steps = 2 if kind == "or" else 1  # one step of the former's sampler would return the noise
    policy = policy.with_sampler(replace(policy.sampler, steps=steps))
    report = export_onnx(policy, tmp_path / "out", batch_sizes=(1, 3), latency_batches=())
    assert report.worst <= report.tolerance


@every_lead
def test_hooks_and_warm_starts_work_as_for_single_policies(lead: str) -> None:
    policy = member(lead, horizon=4)
    both = compose([policy, in_other_units(other_weights(member("flow", horizon=4)))], [0.6, 0.4])
    obs = both.observation(observations(3))
    cond, noise = both.encode(obs), both.sample_noise(3, generator=seeded())
    known = torch.full(both.chunk.shape, 0.25)
    mask = torch.zeros(both.chunk.shape)
    mask[0] = 1.0
    chunk = both.decode(cond, noise, hooks=[Inpaint(known, mask)])
    assert torch.equal(chunk[:, 0], known[0].expand(3, ACTION_DIM))
    last = both.table.times[-2]
    start = both.decode(cond, noise, start=(torch.zeros(3, *both.chunk.shape), last))
    assert start.isfinite().all() and not torch.equal(start, both.decode(cond, noise))
    executor = Executor(both, Execution(act_steps=1, warm_start=WarmStart(steps=1)))
    assert executor.act(obs, noise=noise).shape == (3, ACTION_DIM)
    assert executor.act(obs, noise=noise).shape == (3, ACTION_DIM) and executor.calls == [1, 1, 1]


@every_lead
def test_gradients_reach_the_noise_and_every_member_with_a_weight(lead: str) -> None:
    both = compose([member(lead), other_weights(member("flow")), member("edm")], [0.6, 0.4, 0.0])
    noise = both.sample_noise(2, generator=seeded()).requires_grad_()
    both.decode(both.encode(both.observation(observations(2))), noise, grad=True).sum().backward()
    assert noise.grad is not None and bool(noise.grad.abs().sum() > 0)
    grads = [[p.grad for p in one.parameters() if p.grad is not None] for one in both.members]
    assert [any(bool(grad.abs().sum() > 0) for grad in some) for some in grads] == [True, True, False]


def test_other_weights_are_a_view_on_the_same_networks() -> None:
    one, two = member("flow"), other_weights(member("flow"))
    both = compose([one, two], [0.5, 0.5])
    view = both.with_weights(0.1, 0.9)
    assert both.composition.weights == (0.5, 0.5) and view.composition.weights == (0.1, 0.9)
    assert all(a is b for a, b in zip(both.parameters(), view.parameters(), strict=True))


# -- refusals ---------------------------------------------------------------------------------------------


def test_policies_without_a_field_are_refused_by_name() -> None:
    with pytest.raises(CapabilityError, match=mentions("1 GaussianPolicy GaussianProcess")):
        compose([member("flow"), small_policy(GaussianProcess())], [0.5, 0.5])


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"horizon": 4}, "[3, 4]"), ({"action_start": 1}, "policy.action_start 0 1")],
)
def test_members_that_predict_other_chunks_are_refused(changed: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=mentions(said)):
        compose([member("flow"), member("flow", **changed)], [0.5, 0.5])


@pytest.mark.parametrize(
    ("weights", "operator", "said"),
    [
        ([0.5, 0.6], "convex", "operator=convex operator=product 1"),
        ([((0, 0.5), (1, 1.0)), 0.5], "convex", "operator=convex operator=product 1"),
        ([0.5, 0.5], "cfg_sum", "operator=cfg_sum 1"),
        ([1.5, -0.5], "or", "operator=or"),
        ([0.5, 0.5], "sum", "operator cfg_sum"),
        ([float("nan"), 0.5], "product", "finite"),
        ([((1, 0.5), (0, 1.0)), 0.5], "product", "knots weight"),
        ([0.5], "product", "weight"),
        ([2.0, 1.0], "product", "process=diffusion 1"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: Any, operator: str, said: str) -> None:
    with pytest.raises(ConfigError, match=mentions(said)):
        compose([member("flow"), member("flow")], weights, operator=operator)


def test_columns_and_widths_that_do_not_fit_are_refused() -> None:
    policy = member("flow")
    for options, said in (
        ({"columns": [[0, 1], None]}, "columns 5 2"),
        ({"columns": [range(5), range(5)]}, "obs_dim"),
        ({"columns": [range(1, 6), range(5)], "obs_dim": 5}, "columns 0 4"),
    ):
        with pytest.raises(ConfigError, match=mentions(said)):
            compose([policy, policy], [0.5, 0.5], **options)  # type: ignore[arg-type]


def test_a_composition_is_not_fine_tuned() -> None:
    both = compose([member("diffusion"), member("flow")], [0.5, 0.5])
    for ask in (lambda: both.field, lambda: both.sample_chain(None)):  # type: ignore[arg-type]
        with pytest.raises(CapabilityError, match=mentions("network")):
            ask()


def test_a_damaged_description_of_a_composition_is_one_clear_error(tmp_path: Path) -> None:
    place = save_policy(compose([member("flow")] * 2, [0.5, 0.5]), tmp_path / "policy")
    config = (place / "config.json").read_text()
    (place / "config.json").write_text(config.replace('"operator": "convex"', '"operator": "run"'))
    with pytest.raises(CheckpointError, match=mentions("operator")):
        load_policy(place)


def test_knots_are_joined_by_straight_lines() -> None:
    composition = Composition((((0.2, 1.0), (0.6, 0.0)), ((0.2, 0.0), (0.6, 1.0))))
    t = torch.tensor([0.0, 0.2, 0.3, 0.4, 0.6, 1.0], dtype=torch.float64)
    expected = torch.tensor([1.0, 1.0, 0.75, 0.5, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(composition.coefficients(t), torch.stack([expected, 1 - expected]))
