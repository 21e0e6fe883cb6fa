"""Receding horizon: what a decision takes over from the plan before, and what it does not."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from messages import mentions
from small_policies import ACTION_DIM, observations, small_policy
from torch import Tensor

from policies.composition.compose import compose
from policies.errors import CapabilityError, ConfigError
from policies.execution.executor import Execution, Executor, committed
from policies.execution.replanning import Replanner, WarmStart, shifted, with_act_steps
from policies.policy import Policy
from policies.processes import RectifiedFlow, VPDiffusion
from policies.processes.gaussian import GaussianProcess
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.hooks import Inpaint
from policies.samplers.ode import Euler
from policies.wrappers.noise_policy import Steering
from policies.wrappers.score_correction import Correction

B, K, TH = 4, 6, 5
SAMPLERS = {
    "ddpm": (VPDiffusion(num_levels=K), DDPM()),
    "ddim": (VPDiffusion(num_levels=K), DDIM(steps=K)),
    "flow": (RectifiedFlow(), Euler(steps=K)),
}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def policy_of(name: str, **chunk: int) -> Policy:
    return small_policy(*SAMPLERS[name], **({"horizon": TH, "act_steps": 2} | chunk))


def noise_of(replanner: Replanner, n: int = B, seed: int = 0) -> Tensor:
    return replanner.sample_noise(n, generator=torch.Generator().manual_seed(seed))


def plans(seed: int = 7, n: int = B) -> Tensor:
    """Plans with grippers on both sides."""
    return 0.6 * torch.randn(n, TH, ACTION_DIM, generator=torch.Generator().manual_seed(seed))


# -- the guess ------------------------------------------------------------------------------------------


def test_a_shifted_plan_begins_with_what_was_not_executed() -> None:
    plan = plans()
    assert torch.equal(shifted(plan, 0), plan)
    assert torch.equal(shifted(plan, 2), torch.cat([plan[:, 2:], plan[:, -1:], plan[:, -1:]], dim=1))
    assert torch.equal(shifted(shifted(plan, 1), 2), shifted(plan, 3))
    assert torch.equal(shifted(plan, 99), plan[:, -1:].expand_as(plan))


def test_grippers_are_open_or_closed_in_the_guess_and_at_the_end_of_their_range_in_the_command() -> None:
    replanner = Replanner(policy_of("ddim"), WarmStart(steps=2, gripper=(1,), gripper_guess=0.1))
    plan = plans()
    plan[0, 0, 1] = 0.0
    guess, moved = replanner.guess(plan), shifted(plan, 2)
    assert torch.equal(guess[..., 0], moved[..., 0])
    assert torch.equal(guess[..., 1], torch.where(moved[..., 1] < 0, -0.1, 0.1))
    assert len(guess[..., 1].unique()) == 2
    command = policy_of("ddim").normalize_action(replanner.command(plan))
    torch.testing.assert_close(command[..., 0], plan[:, :2, 0])
    torch.testing.assert_close(command[..., 1], torch.where(plan[:, :2, 1] < 0, -1.0, 1.0))
    assert command[0, 0, 1] == pytest.approx(1.0)


# -- the short run --------------------------------------------------------------------------------------


@every_sampler
def test_a_first_decision_is_the_policy_itself(name: str) -> None:
    policy = policy_of(name)
    replanner = Replanner(policy, WarmStart(steps=2))
    noise = noise_of(replanner)
    decision = replanner.decide(observations(B), noise=noise)
    assert replanner.noise_shape == policy.noise_shape and decision.calls == K
    assert torch.equal(decision.actions, policy.act(observations(B), noise=noise))
    assert torch.equal(decision.actions, policy.executed(decision.plan))


def test_all_steps_from_pure_noise_are_the_whole_sampling() -> None:
    """A flow begins at alpha = 0, where a corrupted guess is the noise alone."""
    policy = policy_of("flow")
    replanner = Replanner(policy, WarmStart(steps=K, renoise=True))
    noise = noise_of(replanner)
    warm = replanner.decide(observations(B), noise=noise, previous=plans())
    assert warm.calls == K and torch.equal(warm.actions, policy.act(observations(B), noise=noise))


def test_all_levels_are_all_steps() -> None:
    policy = policy_of("ddpm")
    runs = [Replanner(policy, w) for w in (WarmStart(steps=K), WarmStart(levels=tuple(range(K - 1, -1, -1))))]
    noise = noise_of(runs[0])
    first, second = (run.decide(observations(B), noise=noise, previous=plans()) for run in runs)
    assert torch.equal(first.plan, second.plan)
    whole = policy.decode(
        policy.encode({"state": observations(B)}),
        torch.cat([shifted(plans(), 2)[:, None], noise[:, 1:]], dim=1),
    )
    assert torch.equal(first.plan, whole)


@every_sampler
@pytest.mark.parametrize("renoise", [False, True])
def test_a_short_run_is_the_end_of_the_whole_one(name: str, renoise: bool) -> None:
    policy = policy_of(name)
    replanner = Replanner(policy, WarmStart(steps=2, renoise=renoise))
    noise, cond = noise_of(replanner), policy.encode({"state": observations(B)})
    warm = replanner.decide(observations(B), noise=noise, previous=plans())
    t = policy.table.times[K - 2]
    x = shifted(plans(), 2)
    if renoise:
        eps = noise[:, 0] if noise.dim() == 4 else noise
        x = policy.process.corrupt(x, eps, torch.full((B,), t))
    torch.testing.assert_close(warm.plan, policy.decode(cond, noise, start=(x, t)))
    assert warm.calls == 2
    assert not torch.allclose(warm.plan, replanner.decide(observations(B), noise=noise).plan)


def test_listed_levels_run_on_a_deterministic_policy_with_noise_of_their_own() -> None:
    policy = policy_of("ddim")
    replanner = Replanner(policy, WarmStart(levels=(3, 1, 0)))
    assert policy.noise_shape == (TH, ACTION_DIM) and replanner.noise_shape == (4, TH, ACTION_DIM)
    noise = noise_of(replanner)
    first = replanner.decide(observations(B), noise=noise)
    assert torch.equal(first.actions, policy.act(observations(B), noise=noise[:, 0]))
    assert replanner.decide(observations(B), noise=noise, previous=first.plan).calls == 3


def test_listed_levels_keep_the_limits_of_the_policy() -> None:
    loose, tight = (
        Replanner(
            small_policy(VPDiffusion(K), DDIM(steps=2, clip_x0=c), horizon=TH), WarmStart(levels=(2, 0))
        )
        for c in (None, 0.3)
    )
    noise = noise_of(tight)
    plan = tight.decide(observations(B), noise=noise, previous=plans()).plan
    assert plan.abs().max() <= 0.3 + 1e-6
    assert loose.decide(observations(B), noise=noise, previous=plans()).plan.abs().max() > 0.3


@every_sampler
def test_steps_from_a_time_on_lead_from_there_to_the_action(name: str) -> None:
    policy = policy_of(name)
    replanner = Replanner(policy, WarmStart(steps=3, start=0.4, renoise=True))
    noise = noise_of(replanner)
    warm = replanner.decide(observations(B), noise=noise, previous=plans())
    assert warm.calls == 3
    times = [0.4, 0.6, 0.8]
    eps = noise[:, 0] if noise.dim() == 4 else noise
    x = policy.process.corrupt(shifted(plans(), 2), eps, torch.full((B,), 0.4))
    cond = policy.encode({"state": observations(B)})
    limit = policy.sampler.clip_x0
    for t, t_next in pairwise([*times, 1.0]):
        now, then = torch.full((B,), t), torch.full((B,), t_next)
        x0 = policy.predict(x, now, cond, kind="x0")
        x0 = x0 if limit is None else x0.clamp(-limit, limit)
        alpha, sigma = policy.process.alpha_sigma(now[:1])
        x = policy.process.corrupt(x0, (x - alpha * x0) / sigma, then)
    clip = policy.sampler.clip_action
    torch.testing.assert_close(warm.plan, x if clip is None else x.clamp(-clip, clip), atol=1e-5, rtol=1e-4)


def test_a_short_run_of_equal_steps_bounds_states_as_the_whole_one() -> None:
    policy = small_policy(RectifiedFlow(), Euler(steps=K, clip_state=0.01), horizon=TH, act_steps=2)
    replanner = Replanner(policy, WarmStart(steps=3, start=0.4))
    decision = replanner.decide(observations(B), noise=noise_of(replanner), previous=plans())
    assert float(decision.plan.abs().max()) <= 0.01


# -- lanes ----------------------------------------------------------------------------------------------

MODES = {
    "fresh": Execution(),
    "warm": Execution(act_steps=1, warm_start=WarmStart(steps=2)),
    "warm-late": Execution(latency=2, warm_start=WarmStart(steps=3, renoise=True, gripper=(0,))),
    "inpaint": Execution(latency=2, inpaint=True),
    "mixed": Execution(act_steps=1, ensemble=0.3, latency=1),
}


@every_sampler
@pytest.mark.parametrize("mode", MODES)
def test_lanes_do_not_see_each_other(name: str, mode: str) -> None:
    """A lane acts the same alone and beside others that began earlier or later."""
    together, alone = (Executor(policy_of(name), MODES[mode]) for _ in range(2))
    noise = [together.sample_noise(B, generator=torch.Generator().manual_seed(s)) for s in range(6)]
    obs = [observations(B, seed=s) for s in range(6)]
    together.act(obs[0][1:2], lanes=[9], noise=noise[0][1:2])
    for step in range(1, 6):
        both = together.act(obs[step][:2], lanes=[7, 9], noise=noise[step][:2])
        torch.testing.assert_close(both[:1], alone.act(obs[step][:1], noise=noise[step][:1]))
    together.reset([7])
    alone.reset()
    again = together.act(obs[0][:1], lanes=[7], noise=noise[0][:1])
    torch.testing.assert_close(again, alone.act(obs[0][:1], noise=noise[0][:1]))


@every_sampler
def test_without_latency_it_is_the_policy_executed_chunk_by_chunk(name: str) -> None:
    policy, seen = policy_of(name), [observations(B, seed=s) for s in range(4)]
    executor = Executor(policy, Execution())
    noise = [policy.sample_noise(B, generator=torch.Generator().manual_seed(s)) for s in range(4)]
    got = torch.stack([executor.act(o, noise=n) for o, n in zip(seen, noise, strict=True)], dim=1)
    chunks = [policy.act(seen[i], noise=noise[i]) for i in (0, 2)]
    torch.testing.assert_close(got, torch.cat(chunks, dim=1))


@pytest.mark.parametrize("compensate", [True, False])
def test_a_late_plan_was_made_for_the_observation_of_its_beginning(compensate: bool) -> None:
    """The second decision begins at step 2 and arrives at step 4."""
    policy, seen = policy_of("flow"), [observations(B, seed=s) for s in range(6)]
    executor = Executor(policy, Execution(latency=2, compensate=compensate))
    noise = policy.sample_noise(B, generator=torch.Generator().manual_seed(1))
    got = [executor.act(o, noise=noise) for o in seen[:5]]
    plans = [policy.physical(policy.decode(policy.encode({"state": seen[i]}), noise)) for i in (0, 2)]
    for step in range(4):
        torch.testing.assert_close(got[step], plans[0][:, step])
    torch.testing.assert_close(got[4], plans[1][:, 2 if compensate else 0])


def test_where_all_rows_are_executed_the_next_plan_is_asked_for_the_latency_before_they_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Five rows, all executed: with d = 2 decisions begin every 3 steps, and no step is without a row."""
    policy = policy_of("flow", act_steps=TH)
    executor = Executor(policy, Execution(latency=2))
    assert [record.args for record in caplog.records] == [(TH, TH, 2, 3)]
    generator, calls = torch.Generator().manual_seed(0), []
    for step in range(10):
        executor.act(observations(B, seed=step), generator=generator)
        calls.append(executor.calls[0] > 0)
    assert np.flatnonzero(calls).tolist() == [0, 3, 6, 9] and executor.track(0).starved == 0
    caplog.clear()
    Executor(policy, Execution())
    Executor(policy_of("flow", act_steps=2), Execution(latency=2))
    assert not caplog.records
    with pytest.raises(ConfigError, match="must last for act_steps=5 steps and latency=2 more"):
        Executor(policy, Execution(latency=2, act_steps=TH))


@every_sampler
def test_what_is_committed_is_what_the_next_plan_begins_with(name: str) -> None:
    """With every row pinned that is executed before it arrives, a plan goes on from the one before."""
    policy = policy_of(name)
    executor = Executor(policy, Execution(latency=2, inpaint=True))
    noise = [executor.sample_noise(B, generator=torch.Generator().manual_seed(s)) for s in range(5)]
    for step in range(3):
        executor.act(observations(B, seed=step), noise=noise[step])
    first = policy.decode(policy.encode({"state": observations(B, seed=0)}), noise[0])
    second = policy.decode(
        policy.encode({"state": observations(B, seed=2)}),
        noise[2],
        hooks=[Inpaint(shifted(first, 2), committed(TH, 2, 2)[:, None])],
    )
    torch.testing.assert_close(second[:, :2], first[:, 2:4])
    got = [executor.act(observations(B, seed=step), noise=noise[step]) for step in (3, 4)]
    torch.testing.assert_close(got[1], policy.physical(second)[:, 2])


def test_the_mask_is_one_where_committed_falls_after_and_ends_where_the_old_plan_does() -> None:
    mask = committed(10, 4, 3)
    assert mask[:3].tolist() == [1.0] * 3 and mask[6:].tolist() == [0.0] * 4
    assert all(a > b > 0 for a, b in pairwise(mask[2:6].tolist()))
    c = (6 - 3) / (6 - 3 + 1)
    assert mask[3].item() == pytest.approx(c * (np.exp(c) - 1) / (np.e - 1))
    assert committed(10, 4, 3, start=2).tolist() == [1.0, 1.0, *mask.tolist()]
    assert committed(8, 5, 4).tolist() == [1.0] * 4 + [0.0] * 4  # nothing is left to hold on to softly


def test_a_decision_that_takes_longer_than_the_interval_is_followed_by_the_next_at_once() -> None:
    executor, calls = (
        Executor(policy_of("ddim", horizon=6, act_steps=1), Execution(latency=3, inpaint=True)),
        [],
    )
    for step in range(8):
        executor.act(observations(B, seed=step), generator=torch.Generator().manual_seed(step))
        calls.append(executor.calls[0])
    assert calls == [K, K, 0, 0, K, 0, 0, K] and executor.track(0).starved == 0


def test_commands_keep_to_limits_and_the_network_is_asked_where_it_decides() -> None:
    executor = Executor(policy_of("ddim"), Execution(max_jump=0.05), low=[-0.1, -0.1], high=[0.1, 0.1])
    generator, calls, got = torch.Generator().manual_seed(0), [], []
    for step in range(5):
        got.append(executor.act(observations(B, seed=step), generator=generator))
        calls.append(executor.calls)
    actions = torch.stack(got)
    assert actions.abs().max() <= 0.1 + 1e-6 and actions.diff(dim=0).abs().max() <= 0.05 + 1e-6
    assert calls == [[K] * B, [0] * B, [K] * B, [0] * B, [K] * B]
    assert executor.track(0).limited > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_that_is_not_finite_is_held_through_and_forgotten(mode: str) -> None:
    """Lane 1 sees NaN once; later plans take nothing over from that, and lane 0 does not notice."""
    policy, other = policy_of("ddim"), Executor(policy_of("ddim"), MODES[mode])
    executor, got = Executor(policy, MODES[mode]), []
    noise = [executor.sample_noise(2, generator=torch.Generator().manual_seed(s)) for s in range(12)]
    for step in range(12):
        obs = observations(2, seed=step)
        alone = other.act(obs[:1], noise=noise[step][:1])
        if step == 2:
            obs[1] = torch.nan
        got.append(executor.act(obs, noise=noise[step]))
        torch.testing.assert_close(got[-1][:1], alone)
    actions, held = torch.stack(got)[:, 1], executor.track(1).not_finite
    assert actions.isfinite().all() and 1 <= held <= 5
    assert (actions[1:] == actions[:-1]).all(dim=1).sum() >= held and executor.track(0).not_finite == 0


def test_a_first_plan_that_is_not_finite_commands_nothing() -> None:
    with pytest.raises(ValueError, match="the first action of an episode must be finite"):
        Executor(policy_of("flow"), Execution()).act(observations(1) * torch.nan)


def test_a_decision_depends_on_its_noise_only() -> None:
    def act(seed: int) -> Tensor:
        executor = Executor(policy_of("ddpm"), Execution(act_steps=1, warm_start=WarmStart(levels=(2, 0))))
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([executor.act(observations(B, seed=s), generator=generator) for s in range(3)])

    assert torch.equal(act(0), act(0)) and not torch.equal(act(0), act(1))


@pytest.mark.parametrize("is_steered", [False, True])
def test_a_policy_that_does_not_denoise_is_executed_too(is_steered: bool) -> None:
    policy = small_policy(GaussianProcess(), horizon=TH, act_steps=2)
    policy = Steering().wrap(policy_of("ddim")) if is_steered else policy
    executor, noise = Executor(policy, Execution(latency=1)), policy.sample_noise(B)
    actions = [executor.act(observations(B), noise=noise) for _ in range(3)]
    expected = policy.act(observations(B), noise=noise)
    torch.testing.assert_close(torch.stack(actions[:2], dim=1), expected)
    assert executor.calls == [1] * B


# -- executed rows --------------------------------------------------------------------------------------


def test_another_number_of_executed_steps_takes_other_rows_of_the_same_plan() -> None:
    policy = policy_of("ddim", act_steps=3)
    noise = policy.sample_noise(B, generator=torch.Generator().manual_seed(0))
    few = with_act_steps(policy, 1)
    assert with_act_steps(policy, None) is policy and policy.chunk.act_steps == 3
    assert torch.equal(few.act(observations(B), noise=noise), policy.act(observations(B), noise=noise)[:, :1])
    assert few.chunk.act_steps == few.config.act_steps == 1 and policy.config.act_steps == 3
    with pytest.raises(ConfigError, match=r"must fit into policy\.horizon=5; got 0 \+ 6"):
        with_act_steps(policy, 6)
    with pytest.raises(CapabilityError, match="act_steps=2 needs a policy that predicts a horizon; object"):
        with_act_steps(object(), 2)


def test_policies_around_a_policy_execute_other_rows_too() -> None:
    base = policy_of("ddim", act_steps=3)
    steered, corrected = Steering().wrap(base), Correction().wrap(base)
    few = with_act_steps(steered, 1)
    assert few.chunk.act_steps == 1 and few.act(observations(B)).shape[1] == 1
    assert steered.chunk.act_steps == 3
    assert with_act_steps(corrected, 3) is corrected
    with pytest.raises(CapabilityError, match=mentions("trained 3 executed steps act_steps=1")):
        with_act_steps(corrected, 1)
    composed = compose([base, base], [0.5, 0.5])
    few = with_act_steps(composed, 1)
    assert few.act(observations(B)).shape[1] == 1 and composed.chunk.act_steps == 3
    assert few.fields[0].chunk.act_steps == 1 and base.chunk.act_steps == 3


# -- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: WarmStart(steps=2, levels=(1, 0)), ConfigError, r"short run; got \[1, 0\] and 2"),
        (lambda: WarmStart(start=0.5), ConfigError, r"start=0\.5 needs warm_start\.steps; got null"),
        (lambda: WarmStart(start=1.0, steps=2), ConfigError, r"start must be in \[0, 1\); got 1\.0"),
        (lambda: WarmStart(renoise=True), ConfigError, "renoise has no effect without warm_start.steps"),
        (lambda: WarmStart(gripper=(1,)), ConfigError, "gripper has no effect without warm_start.steps"),
        (lambda: WarmStart(steps=0), ConfigError, "warm_start.steps must be at least 1; got 0"),
        (lambda: WarmStart(steps=2, executed=True), ConfigError, "executed takes all steps"),
        (
            lambda: Replanner(policy_of("ddim"), WarmStart(executed=True)),
            ConfigError,
            "executed needs rows before the newest observation; got policy.action_start=0",
        ),
        (lambda: WarmStart(gripper_guess=0.0), ConfigError, "gripper_guess must be above 0; got 0"),
        (lambda: Execution(latency=-1), ConfigError, "latency must be at least 0; got -1"),
        (lambda: Execution(act_steps=0), ConfigError, "act_steps must be at least 1; got 0"),
        (lambda: Execution(ensemble=-1.0), ConfigError, "ensemble must be at least 0"),
        (lambda: Execution(max_jump=0.0), ConfigError, "max_jump must be above 0"),
        (lambda: Execution(inpaint=True, compensate=False), ConfigError, "needs compensate=true"),
        (
            lambda: Execution(inpaint=True, warm_start=WarmStart(steps=1)),
            ConfigError,
            "inpaint and warm_start both",
        ),
        (
            lambda: Executor(policy_of("flow"), Execution(latency=4)),
            ConfigError,
            "a plan of 5 rows must last for act_steps=2 steps and latency=4 more",
        ),
        (
            lambda: Executor(small_policy(GaussianProcess(), horizon=TH), Execution(inpaint=True)),
            CapabilityError,
            "inpaint needs a policy that denoises its plan; GaussianPolicy does not",
        ),
        (lambda: Replanner(policy_of("ddim"), WarmStart()), ConfigError, "needs a short run"),
        (lambda: Replanner(policy_of("ddim"), WarmStart(steps=7)), ConfigError, "at most 6, .* got 7"),
        (
            lambda: Replanner(policy_of("ddim", act_steps=5), WarmStart(steps=2)),
            ConfigError,
            "needs planned actions that were not executed; of horizon=5 rows",
        ),
        (
            lambda: Replanner(policy_of("ddim"), WarmStart(steps=2, gripper=(2,))),
            ConfigError,
            r"must name action dimensions, 0 to 1; got \[2\]",
        ),
        (
            lambda: Replanner(policy_of("flow"), WarmStart(levels=(1, 0))),
            ConfigError,
            r"no such short run, .*levels=\(1, 0\).*: sampler=ddpm needs process=diffusion",
        ),
        (
            lambda: Replanner(policy_of("ddim"), WarmStart(levels=(6, 0))),
            ConfigError,
            r"no such short run, .*levels=\(6, 0\).*: .* lie in 0\.\.5",
        ),
        (
            lambda: Replanner(small_policy(GaussianProcess(), horizon=TH), WarmStart(steps=2)),
            CapabilityError,
            "needs a policy that denoises its plan; GaussianPolicy does not",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_warm_started_is_refused(make, error, message: str) -> None:
    with pytest.raises(error, match=message):
        make()
