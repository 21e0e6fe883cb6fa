"""Laws of the pure mathematics of on-policy learning."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import mentions

from algos.onpolicy.losses import (
    RewardScaler,
    approx_kl,
    clip_ranges,
    clip_to_quantiles,
    denoising_discounts,
    dpo_drift_losses,
    explained_variance,
    gae,
    merge_moments,
    normalize_advantage,
    policy_losses,
    ppo_losses,
    successor_values,
    value_losses,
)
from policies.errors import CheckpointError


def rollout(seed: int, steps: int, envs: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    real = {
        name: torch.randn(steps, envs, generator=g, dtype=torch.float64)
        for name in ("reward", "value", "final")
    }
    flags = {name: torch.rand(steps, envs, generator=g) < 0.25 for name in ("terminated", "truncated")}
    return real | flags | {"last": torch.randn(envs, generator=g, dtype=torch.float64)}


def brute_force(r: dict[str, torch.Tensor], gamma: float, lam: float) -> torch.Tensor:
    """Follow every step to the end of its own episode and add up the discounted errors."""
    steps, envs = r["reward"].shape
    out = torch.zeros(steps, envs, dtype=torch.float64)
    for n in range(envs):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                terminated, truncated = bool(r["terminated"][k, n]), bool(r["truncated"][k, n])
                if terminated:
                    following = 0.0
                elif truncated:
                    following = float(r["final"][k, n])
                else:
                    following = float(r["last"][n] if k == steps - 1 else r["value"][k + 1, n])
                delta = float(r["reward"][k, n]) + gamma * following - float(r["value"][k, n])
                out[t, n] += weight * delta
                weight *= gamma * lam
                if terminated or truncated:
                    break
    return out


def estimate(r: dict[str, torch.Tensor], gamma: float, lam: float) -> tuple[torch.Tensor, torch.Tensor]:
    index = r["truncated"].nonzero()
    following = successor_values(r["value"], r["last"], r["final"][r["truncated"]], index)
    return gae(r["reward"], r["value"], following, r["terminated"], r["truncated"], gamma=gamma, lam=lam)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 3), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_following_each_episode(
    seed: int, steps: int, envs: int, gamma: float, lam: float
) -> None:
    r = rollout(seed, steps, envs)
    advantage, target = estimate(r, gamma, lam)
    torch.testing.assert_close(advantage, brute_force(r, gamma, lam))
    torch.testing.assert_close(target, advantage + r["value"])


def test_gae_compat_ignores_truncation() -> None:
    r = rollout(1, 6, 2)
    r["terminated"][:] = False
    following = successor_values(r["value"], r["last"])
    compat, _ = gae(
        r["reward"],
        r["value"],
        following,
        r["terminated"],
        r["truncated"],
        gamma=0.9,
        lam=0.8,
        paper_compat=True,
    )
    r["truncated"][:] = False
    plain, _ = estimate(r, 0.9, 0.8)
    torch.testing.assert_close(compat, plain)


@given(st.integers(2, 30), st.floats(0, 5), st.floats(1e-4, 0.1), st.floats(0, 0.4))
def test_clip_ranges_grow_from_base_to_last(steps: int, rate: float, base: float, growth: float) -> None:
    ranges = clip_ranges(steps, base=base, last=base + growth, rate=rate)
    assert ranges[0].item() == pytest.approx(base, rel=1e-6)
    assert ranges[-1].item() == pytest.approx(base + growth, rel=1e-6)
    assert bool((ranges.diff() >= -1e-9).all())


def test_clip_ranges_published_values_and_one_step() -> None:
    published = [0.001, 0.00119, 0.00145, 0.00181, 0.00232, 0.00303, 0.00401, 0.00539, 0.00732, 0.01]
    torch.testing.assert_close(
        clip_ranges(10, base=0.001, last=0.01, rate=3.0), torch.tensor(published), atol=5e-6, rtol=0
    )
    assert clip_ranges(1, base=0.001, last=0.01, rate=3.0).tolist() == pytest.approx([0.01])


def test_denoising_discounts_spare_the_last_step() -> None:
    assert denoising_discounts(4, 0.5).tolist() == [0.125, 0.25, 0.5, 1.0]
    assert denoising_discounts(3, 0.0).tolist() == [0.0, 0.0, 1.0]


def test_normalize_advantage_of_one_row_is_zero() -> None:
    assert normalize_advantage(torch.tensor([3.0])).tolist() == [0.0]
    many = normalize_advantage(torch.arange(5.0))
    assert many.mean().item() == pytest.approx(0.0, abs=1e-7)
    assert many.std().item() == pytest.approx(1.0, abs=1e-6)


@settings(max_examples=30)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40), st.floats(0, 0.5), st.floats(0.5, 1)
)
def test_clip_to_quantiles_matches_torch(values: list[float], low: float, high: float) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    limits = torch.quantile(x, torch.tensor([low, high], dtype=torch.float64))
    torch.testing.assert_close(clip_to_quantiles(x, low, high), x.clamp(*limits))


def test_ppo_losses_have_no_gradient_beyond_the_clip_range() -> None:
    ratio = torch.tensor([1.3, 0.7, 1.3, 0.7, 1.0, 1.05], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0, 2.0, -2.0])
    losses = ppo_losses(ratio, advantage, torch.tensor(0.1))
    losses.sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0.0, 0.0, 1.0, -1.0, -2.0, 2.0]
    assert torch.equal(losses, torch.maximum(*policy_losses(ratio, advantage, 0.1)))


def test_value_losses_clip_takes_the_worse() -> None:
    value, target, old = torch.tensor([1.0]), torch.tensor([0.9]), torch.tensor([0.0])
    assert value_losses(value, target, old).item() == pytest.approx(0.5 * 0.1**2)
    assert value_losses(value, target, old, clip=0.2).item() == pytest.approx(0.5 * 0.7**2)


@given(st.floats(-3, 3))
def test_approx_kl_is_not_negative(log_ratio: float) -> None:
    value = approx_kl(torch.tensor(log_ratio, dtype=torch.float64)).item()
    assert value >= 0.0
    assert value == pytest.approx(math.exp(log_ratio) - 1 - log_ratio, abs=1e-12)


def test_explained_variance_of_perfect_mean_and_constant() -> None:
    target = torch.arange(6.0)
    assert explained_variance(target, target).item() == 1.0
    assert explained_variance(target.mean().expand(6), target).item() == pytest.approx(0.0)
    assert math.isnan(explained_variance(target, torch.ones(6)).item())


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 20), st.integers(2, 20))
def test_merge_moments_keeps_the_joint_mean(seed: int, first: int, second: int) -> None:
    data = torch.randn(first + second, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    mean, var, count = merge_moments(zero, zero, 0.0, data[:first])
    torch.testing.assert_close(var, data[:first].var())
    mean, _, count = merge_moments(mean, var, count, data[first:])
    torch.testing.assert_close(mean, data.mean())
    assert count == first + second


def test_reward_scaler_is_invariant_to_reward_units_and_resumes() -> None:
    g = torch.Generator().manual_seed(0)
    reward, first = torch.randn(50, 3, generator=g), torch.rand(50, 3, generator=g) < 0.1
    small, large = RewardScaler(3, gamma=0.99, clip=10.0), RewardScaler(3, gamma=0.99, clip=10.0)
    torch.testing.assert_close(small(reward, first), large(1000 * reward, first), rtol=1e-2, atol=1e-2)
    resumed = RewardScaler(3, gamma=0.99, clip=10.0)
    resumed.load_state_dict(small.state_dict())
    assert torch.equal(small(reward, first), resumed(reward, first))
    with pytest.raises(CheckpointError, match=mentions("num_envs")):
        RewardScaler(2, gamma=0.99, clip=10.0).load_state_dict(small.state_dict())


def test_a_ratio_that_underflows_leaves_the_gradients_of_drift_losses_finite() -> None:
    log_ratio = torch.tensor([-200.0, -200.0, -0.1], requires_grad=True)
    losses = dpo_drift_losses(log_ratio.exp(), torch.tensor([1.0, -1.0, 1.0]), torch.tensor(0.2))
    losses.sum().backward()
    assert losses.isfinite().all() and log_ratio.grad is not None and log_ratio.grad.isfinite().all()
