"""ReinFlow: its noise, its chains, what a run ships and keeps, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import mentions
from point_flows import REINFLOW, make_flow, make_run

from algos.onpolicy.reinflow_ratio import NoiseConfig, PathTerm, ReinflowRatio
from algos.reinflow import ReinFlowConfig
from policies.backbones.mlp import MlpConfig
from policies.backbones.switched import SwitchedField
from policies.build import build_policy
from policies.errors import CapabilityError, ConfigError
from policies.networks.distributions import gaussian_log_prob
from policies.policy import PolicyConfig
from policies.processes.gaussian import GaussianProcess
from policies.processes.shortcut import Shortcut
from policies.protocols import Cond
from policies.samplers.ode import Euler
from policies.storage.policy_folder import load_policy, save_policy


@torch.no_grad()
def noise_of(config: NoiseConfig, batch: int = 5, steps: int = 3) -> torch.Tensor:
    net = config.build((4, 2), 6, 3)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(steps, 6, generator=generator)
    return net(features, 10 * torch.randn(batch, 3, generator=generator))


def test_deviations_lie_between_their_bounds_and_start_near_the_middle() -> None:
    config = NoiseConfig(min_std=0.1, max_std=0.24)
    std = noise_of(config)
    assert std.shape == (5, 3, 4, 2)
    assert 0.1 <= float(std.min()) < float(std.max()) <= 0.24
    net = config.build((4, 2), 6, 3)
    assert net.layers is not None
    with torch.no_grad():
        for weight in net.layers[-1].parameters():
            weight.zero_()
    middle = net(torch.zeros(1, 6), torch.zeros(1, 3))
    torch.testing.assert_close(middle, torch.full_like(middle, math.sqrt(0.1 * 0.24)))


def test_a_constant_level_is_the_upper_bound_and_learns_nothing() -> None:
    config = NoiseConfig(level="constant", max_std=0.2)
    assert not list(config.build((4, 2), 6, 3).parameters())
    assert bool((noise_of(config) == 0.2).all())


def test_no_gradient_reaches_the_time_embedding_through_the_noise() -> None:
    net = NoiseConfig().build((4, 2), 6, 3)
    times, cond = torch.ones(2, 6, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    net(times, cond).sum().backward()
    assert times.grad is None and cond.grad is not None and bool(cond.grad.any())


def test_noise_of_the_state_alone_is_the_same_at_every_step() -> None:
    std = noise_of(NoiseConfig(input="state"))
    torch.testing.assert_close(std[:, 0], std[:, 1])  # a product of matrices may round its rows differently
    assert not torch.allclose(std[0], std[1])


@given(progress=st.floats(0, 1), hold=st.floats(0, 1), final=st.floats(0, 1))
def test_the_upper_bound_falls_from_its_value_to_its_last_share(
    progress: float, hold: float, final: float
) -> None:
    config = NoiseConfig(min_std=0.1, max_std=0.3, hold=hold, final_share=final)
    bound, last = config.max_std_at(progress), final * 0.3 + (1 - final) * 0.1
    assert last - 1e-12 <= bound <= 0.3 + 1e-12
    if progress <= hold:
        assert bound == pytest.approx(0.3)


def test_bounds_of_the_noise_are_in_order() -> None:
    with pytest.raises(ConfigError, match=mentions("min_std noise.max_std 0.3 0.2")):
        NoiseConfig(min_std=0.3, max_std=0.2)


# -- chains ---------------------------------------------------------------------------------------------


def chain_of(reduction: str = "mean", *, count_start: bool = True, **chunk: Any) -> ReinflowRatio:
    config = replace(REINFLOW, log_prob_reduction=reduction, count_start=count_start)
    policy = make_flow(**chunk)
    policy = policy.with_sampler(config.samplers(policy)[0])
    return config.noisy_chain(policy, seed=0)


def walked(ratio: ReinflowRatio, rows: int = 6) -> tuple[Cond, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    cond = Cond(torch.randn(rows, 2, generator=generator))
    steps, shape = ratio.policy.table.num_steps, ratio.policy.chunk.shape
    with torch.no_grad():
        chain, mean, std = ratio.walk(cond, torch.randn(rows, steps + 1, *shape, generator=generator))
    return cond, chain, gaussian_log_prob(chain[:, 1:], mean, std)


def test_a_quiet_chain_is_the_policy() -> None:
    ratio = chain_of()
    cond = Cond(torch.randn(3, 2, generator=torch.Generator().manual_seed(0)))
    draws = torch.zeros(3, 5, 3, 2)
    draws[:, 0] = torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        chain, _, _ = ratio.walk(cond, draws)
    torch.testing.assert_close(chain[:, -1], ratio.policy.decode(cond, draws[:, 0]))


def test_reductions_count_each_factor_once_and_leave_out_what_influences_nothing() -> None:
    _, chain, log_prob = walked(chain_of())
    ends = log_prob[:, -1, :2].sum(dim=(1, 2))  # two of three rows are executed
    total = log_prob[:, :-1].sum(dim=(1, 2, 3)) + ends
    start = gaussian_log_prob(chain[:, 0], torch.zeros(()), torch.ones(())).sum(dim=(1, 2))
    for reduction, plain, with_start in (
        ("joint", 1, 1),
        ("mean", 22, 28),
        ("per_step", 4, 5),
        ("per_dim", 6, 6),
    ):
        torch.testing.assert_close(
            chain_of(reduction, count_start=False).reduce(log_prob, chain), total / plain
        )
        ratio = chain_of(reduction)
        torch.testing.assert_close(ratio.reduce(log_prob, chain), (total + start) / with_start)
        assert ratio.factors == with_start


def test_rows_that_are_never_executed_do_not_count_at_the_last_step() -> None:
    ratio = chain_of("joint")
    _, chain, log_prob = walked(ratio)
    changed = log_prob.clone()
    changed[:, -1, 2] += 5.0
    assert torch.equal(ratio.reduce(changed, chain), ratio.reduce(log_prob, chain))
    changed[:, 0, 2] += 5.0
    assert not torch.equal(ratio.reduce(changed, chain), ratio.reduce(log_prob, chain))


def test_the_distance_from_itself_is_zero_and_grows_with_the_weights() -> None:
    policy = make_flow()
    frozen = policy.clone()
    cond, noise = Cond(torch.ones(4, 2)), torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    kept = noise.clone()
    assert PathTerm(frozen, policy).losses(cond, noise).max() < 1e-10  # squares of rounding
    with torch.no_grad():
        policy.field.trunk.outlet.bias.add_(0.1)
    # Four Euler steps of a constant 0.1 / 4: the chunks differ by 0.1 where no bound acts.
    losses = PathTerm(frozen, policy).losses(cond, 0.1 * noise)
    torch.testing.assert_close(losses, torch.full((4,), 0.01), rtol=0.3, atol=0)
    losses.sum().backward()
    assert policy.field.trunk.outlet.bias.grad is not None and torch.equal(noise, kept)


# -- runs -----------------------------------------------------------------------------------------------


def test_a_run_trains_velocity_and_noise_and_ships_the_policy_alone() -> None:
    run = make_run(REINFLOW)
    trainable = run.ratio.trainable  # type: ignore[attr-defined]
    before = {name: value.clone() for name, value in trainable.named_parameters()}
    metrics = run.advance()
    moved = {name for name, value in trainable.named_parameters() if not torch.equal(before[name], value)}
    assert {name.split(".")[0] for name in moved} == {"0", "1"}
    assert float(metrics["policy/joint_clip"]) == pytest.approx(0.01 * 28)
    export_policy = run.snapshot()
    assert not any("noise" in name for name in export_policy.state_dict())
    assert export_policy.sampler == Euler(steps=4) and export_policy.is_deterministic  # type: ignore[attr-defined]
    run.close()


def test_what_is_shipped_before_learning_is_the_initial_policy_at_these_steps() -> None:
    init = make_flow()
    wide = init.with_sampler(Euler(steps=4, clip_action=None))
    with torch.no_grad():
        wide.field.trunk.outlet.bias.add_(2.0)  # far beyond the usual bound
    obs, noise = torch.zeros(3, 1, 2), torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(0))
    run = make_run(REINFLOW, wide)
    expected = wide.act(obs, noise=noise)
    assert torch.equal(run.snapshot().act(obs, noise=noise), expected) and float(expected.abs().max()) > 1.5
    run.close()


@pytest.mark.parametrize("env_steps", [None, 300], ids=["iterations", "env_steps"])
def test_the_noise_follows_the_share_of_the_run(env_steps: int | None) -> None:
    noise = NoiseConfig(min_std=0.1, max_std=0.3, hold=0.0, final_share=0.0)
    run = make_run(replace(REINFLOW, noise=noise, env_steps=env_steps))
    shares, bounds = [], []
    for iteration in range(4):
        shares.append(iteration / 4 if env_steps is None else run.progress / env_steps)
        run.advance()
        bounds.append(run.ratio.noise.max_std)  # type: ignore[attr-defined]
    assert bounds == pytest.approx([noise.max_std_at(share) for share in shares])
    assert bounds[0] == 0.3 and bounds[-1] < 0.2
    run.close()


TAIL = replace(REINFLOW, tuned_steps=1, denoising_steps=3)


def test_frozen_steps_and_their_weights_stay_bit_for_bit_and_the_last_ones_move() -> None:
    init = make_flow(steps=3)
    run = make_run(TAIL, init)
    for _ in range(2):
        run.advance()
    export_policy = run.snapshot()
    run.close()
    assert isinstance(export_policy.field, SwitchedField)  # type: ignore[attr-defined]
    before, base, tuned = (
        net.state_dict() for net in (init.field, export_policy.field.base, export_policy.field.tuned)
    )  # type: ignore[attr-defined]
    assert all(torch.equal(base[name], before[name]) for name in before)
    assert not any(torch.equal(tuned[name], before[name]) for name in before if "weight" in name)
    cond = Cond(torch.randn(5, 2, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = (policy.bind(cond) for policy in (export_policy, init))  # type: ignore[attr-defined]
        same = [torch.equal(ours(k, x), theirs(k, x)) for k in range(3)]
    assert same == [True, True, False]


def test_frozen_steps_add_no_noise_and_count_nothing() -> None:
    run = make_run(TAIL)
    ratio: Any = run.ratio
    cond = Cond(torch.randn(6, 2, generator=torch.Generator().manual_seed(0)))
    draws = torch.randn(6, 2, 3, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        chain, mean, std = ratio.walk(cond, draws)
        bound = run.policy.bind(cond)  # type: ignore[attr-defined]
    assert chain.shape == (6, 4, 3, 2) and mean.shape == std.shape == (6, 1, 3, 2)
    for k in range(2):
        torch.testing.assert_close(chain[:, k + 1], chain[:, k] + bound(k, chain[:, k]).detach() / 3)
    noise = draws[:, 1].clamp(-3, 3) * std[:, 0]
    torch.testing.assert_close(chain[:, 3], (mean[:, 0] + noise).clamp(-1, 1))
    assert ratio.factors == (1 * 3 + 2) * 2 and ratio.evaluations == 1  # the start, and two executed rows
    run.close()


def test_a_policy_whose_last_steps_were_tuned_is_saved_and_tuned_again_alike(tmp_path: Path) -> None:
    run = make_run(TAIL)
    run.advance()
    export_policy: Any = run.snapshot()
    run.close()
    loaded: Any = load_policy(save_policy(export_policy, tmp_path / "policy"))
    noise = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    obs = torch.zeros(4, 1, 2)
    assert torch.equal(loaded.act(obs, noise=noise), export_policy.act(obs, noise=noise))
    again = make_run(TAIL, loaded)
    again.advance()
    first = again.snapshot().field.base.state_dict()  # type: ignore[attr-defined]
    again.close()
    assert all(
        torch.equal(first[name], value) for name, value in export_policy.field.base.state_dict().items()
    )
    for other in (replace(TAIL, tuned_steps=2), replace(TAIL, tuned_steps=None)):
        with pytest.raises(ConfigError, match=mentions("algo.tuned_steps")):
            make_run(other, loaded)


def test_a_shortcut_model_takes_the_steps_it_learned_only() -> None:
    init = make_flow(process=Shortcut(max_steps=8))
    make_run(replace(REINFLOW, denoising_steps=2), init).close()
    with pytest.raises(ConfigError, match=mentions("process=shortcut t=0")):
        make_run(replace(REINFLOW, denoising_steps=3), init)


def test_a_policy_without_steps_is_refused_by_name() -> None:
    config = PolicyConfig(process=GaussianProcess(), backbone=MlpConfig(width=8), act_steps=2)
    init: Any = build_policy(config, obs_dim=2, action_dim=2)
    with pytest.raises(CapabilityError, match=mentions("algo=reinflow GaussianProcess algo=ppo")):
        make_run(REINFLOW, init)


def test_no_more_steps_are_tuned_than_there_are() -> None:
    with pytest.raises(ConfigError, match=mentions("algo.tuned_steps 1 4 empty 5")):
        ReinFlowConfig(tuned_steps=5)
