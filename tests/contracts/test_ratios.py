"""The law of every ratio estimator: on fresh data, under the weights that acted, every ratio is one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairwise import pairwise
from small_policies import ACTION_DIM, OBS_DIM, observations, statistics

from algos.fpo import AwmConfig, FpoConfig
from algos.onpolicy.advantages import Experience
from algos.onpolicy.ratios import ChainRatio, RatioEstimator, Rows
from algos.onpolicy.reinflow_ratio import NoiseConfig
from algos.policyflow import PolicyFlowConfig
from algos.reinflow import ReinFlowConfig
from algos.training.observations import encode
from policies import registry
from policies.build import build_policy
from policies.policy import Policy, PolicyConfig
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.ode import Euler

SMALL = {"width": 16, "widths": (8, 16), "groups": 4, "depth": 1, "heads": 2, "time_dim": 8, "max_steps": 8}
STEPS = (1, 2, 4)
ROWS = 6
NOISE: Any = {"min_std": 0.1, "final_std": None, "clip_action": None}
EXPLORE = DDPM(**NOISE)
LEVELS = 10
BOUND = 2.0

BACKBONES = sorted(registry.parts("backbone"))
CHAINS = ("flow", "shortcut", "meanflow", "flow_map")


def small(group: str, name: str, **changes: Any) -> Any:
    part = registry.lookup(group, name)
    known = {field for field in part.__dataclass_fields__}
    return part(**{key: value for key, value in (SMALL | changes).items() if key in known})


def policy_of(process: str, backbone: str, sampler: Any, **changes: Any) -> Policy:
    config = PolicyConfig(
        process=small("process", process, **changes),
        backbone=small("backbone", backbone),
        sampler=sampler,
        horizon=4,
        act_steps=3,
    )
    policy = build_policy(config, obs_dim=OBS_DIM, action_dim=ACTION_DIM, statistics=statistics(), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in policy.parameters():  # some start at zero
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return policy.eval()


def estimators() -> Iterator[Any]:
    """Yield (estimator, process, backbone, K, reduction) as builders of a policy and its estimator."""
    for backbone in BACKBONES:
        for steps in STEPS:
            for process in CHAINS:
                for reduction in ("mean", "joint"):
                    yield _case(noisy_chain, process, backbone, steps, reduction)
                if steps > 1:
                    yield _case(noisy_tail, process, backbone, steps, "mean")
            for reduction in ("mean", "joint"):
                yield _case(diffusion_chain, "diffusion", backbone, steps, reduction)
                yield _case(matching, "flow", backbone, steps, reduction)
                yield _case(matching_of_draws, "flow", backbone, steps, reduction)
                yield _case(straight_path, "flow", backbone, steps, reduction)
            yield _case(advantage_weighted, "flow", backbone, steps, "mean")
    yield _case(gaussian, "gaussian", "mlp", 1, "mean")
    yield _case(gaussian, "gaussian", "mlp", 1, "joint")
    yield from variations()


def variations() -> Iterator[Any]:
    """Yield what does not depend on the network, on one of them."""
    for steps in STEPS:
        for build in (every_level, implicit_levels):
            yield _case(build, "diffusion", "mlp", steps, "per_step")
        for build in (matching_of_velocities, bounded_matching):
            yield _case(build, "flow", "mlp", steps, "mean")
    for build in (matching, matching_of_draws, bounded_matching):
        for reduction in ("sqrt", "per_step"):
            yield _case(build, "flow", "mlp", 2, reduction)
    for reduction in ("per_step", "per_dim"):
        yield _case(noisy_chain, "flow", "mlp", 2, reduction)
    yield _case(straight_path, "flow", "mlp", 2, "per_step")
    yield _case(gaussian, "gaussian", "mlp", 1, "per_step")


def _case(build: Any, *rest: Any) -> Any:
    return pytest.param(build, *rest, id="-".join([build.__name__, *map(str, rest)]))


def noisy_chain(process: str, backbone: str, steps: int, reduction: str, dtype: Any) -> RatioEstimator:
    noise = NoiseConfig(hidden_dims=(8,), min_std=0.05, max_std=0.3)
    config = ReinFlowConfig(denoising_steps=steps, noise=noise, log_prob_reduction=reduction)
    policy: Any = policy_of(process, backbone, Euler(steps=steps)).to(dtype)
    return config.noisy_chain(policy, seed=0)


def noisy_tail(process: str, backbone: str, steps: int, reduction: str, dtype: Any) -> RatioEstimator:
    noise = NoiseConfig(hidden_dims=(8,), min_std=0.05, max_std=0.3)
    config = ReinFlowConfig(
        denoising_steps=steps, tuned_steps=max(1, steps - 1), noise=noise, log_prob_reduction=reduction
    )
    init: Any = policy_of(process, backbone, Euler(steps=steps)).to(dtype)
    return config.noisy_chain(config.exploring(init, Euler(steps=steps)), seed=0)


def diffusion_chain(process: str, backbone: str, steps: int, reduction: str, dtype: Any) -> RatioEstimator:
    policy: Any = policy_of(process, backbone, EXPLORE, num_levels=5)
    view = policy.with_sampler(EXPLORE, tuned_steps=steps, log_prob_min_std=0.1)
    return ChainRatio(view.to(dtype), log_prob_range=None, reduction=reduction)


def every_level(process: str, backbone: str, steps: int, reduction: str, dtype: Any) -> RatioEstimator:
    policy: Any = policy_of(process, backbone, EXPLORE, num_levels=2 * steps)
    view = policy.with_sampler(EXPLORE, tuned_steps=2 * steps, log_prob_min_std=0.1)
    return ChainRatio(view.to(dtype), log_prob_range=None, reduction=reduction)


def implicit_levels(process: str, backbone: str, steps: int, reduction: str, dtype: Any) -> RatioEstimator:
    sampler = DDIM(steps=2 * steps, eta=1.0, **NOISE)
    policy: Any = policy_of(process, backbone, sampler, num_levels=LEVELS)
    view = policy.with_sampler(sampler, tuned_steps=steps, log_prob_min_std=0.1)
    return ChainRatio(view.to(dtype), log_prob_range=None, reduction=reduction)


def matching(process: str, backbone: str, steps: int, reduction: str, dtype: Any) -> RatioEstimator:
    return _matching(FpoConfig(loss_reduction=reduction, num_draws=3), process, backbone, steps, dtype)


def matching_of_draws(process: str, backbone: str, steps: int, reduction: str, dtype: Any) -> RatioEstimator:
    config = FpoConfig(
        loss_reduction=reduction, num_draws=3, per_draw=True, times="density", prediction="velocity"
    )
    return _matching(config, process, backbone, steps, dtype)


def matching_of_velocities(
    process: str, backbone: str, steps: int, reduction: str, dtype: Any
) -> RatioEstimator:
    config = FpoConfig(loss_reduction=reduction, num_draws=3, prediction="velocity")
    return _matching(config, process, backbone, steps, dtype)


def bounded_matching(process: str, backbone: str, steps: int, reduction: str, dtype: Any) -> RatioEstimator:
    config = FpoConfig(
        loss_reduction=reduction, num_draws=3, per_draw=True, times="density", prediction="velocity",
        max_loss=BOUND, max_difference=0.5, huber=1.0, action_noise=0.1,
    )  # fmt: skip
    return _matching(config, process, backbone, steps, dtype)


def advantage_weighted(process: str, backbone: str, steps: int, reduction: str, dtype: Any) -> RatioEstimator:
    return _matching(AwmConfig(num_draws=3, weight="huber"), process, backbone, steps, dtype)


def straight_path(process: str, backbone: str, steps: int, reduction: str, dtype: Any) -> RatioEstimator:
    config = PolicyFlowConfig(log_prob_reduction=reduction, num_draws=3, brownian_coef=0.1)
    policy: Any = policy_of(process, backbone, Euler(steps=steps, clip_action=None))
    return config.estimator(policy.to(dtype))


def _matching(config: Any, process: str, backbone: str, steps: int, dtype: Any) -> RatioEstimator:
    # One step asks the network at pure noise only, where the eps loss has no weight.
    least = 2 if isinstance(config, FpoConfig) and config.prediction is None and config.times == "grid" else 1
    sampler = Euler(steps=max(least, steps), clip_action=None)
    policy: Any = policy_of(process, backbone, sampler)
    return config.estimator(policy.to(dtype))


def gaussian(process: str, backbone: str, steps: int, reduction: str, dtype: Any) -> RatioEstimator:
    policy: Any = policy_of(process, backbone, None)
    return ChainRatio(policy.to(dtype), log_prob_range=None, reduction=reduction)


ROUNDING = 16 * torch.finfo(torch.float32).eps / 0.05
"""Of the log-density of a draw one deviation from its mean, which passes up to sixteen layers, each of
which rounds by eps, and the smallest deviation is 0.05. A sum of n such terms rounds by sqrt(n) as much."""


def fresh(ratio: RatioEstimator, seed: int = 0) -> tuple[Experience, Rows]:
    """Act, and return the experience with all its rows."""
    obs = observations(ROWS).to(ratio.policy.dtype)
    action, record = ratio.act({"state": obs}, torch.Generator().manual_seed(seed))
    assert action.shape == (ROWS, 3, ACTION_DIM)
    unused = torch.zeros(ROWS, dtype=obs.dtype)
    experience = Experience(encode(ratio.policy, {"state": obs}), record, unused, unused, unused)
    return experience, Rows.sorted_from(torch.arange(ROWS * ratio.inner_steps), ratio.inner_steps)


@pytest.mark.parametrize(
    ("build", "process", "backbone", "steps", "reduction", "dtype"),
    pairwise(estimators(), [torch.float64, torch.float32]),
)
def test_the_ratio_of_fresh_data_is_one(
    build: Any, process: str, backbone: str, steps: int, reduction: str, dtype: torch.dtype
) -> None:
    ratio = build(process, backbone, steps, reduction, dtype)
    experience, rows = fresh(ratio)
    score = ratio.score(experience, rows)
    factors = 1 if reduction in ("mean", "sqrt") else max(STEPS) * math.prod(ratio.policy.chunk.shape)
    allowed = ROUNDING * math.sqrt(factors) if dtype == torch.float32 else 1e-6
    assert float((score.log_ratio.detach().double().exp() - 1).abs().max()) <= allowed
    assert {part.shape for part in (score.log_ratio, score.saturated, score.entropy)} == {rows.step.shape}
    gradients = torch.autograd.grad(score.log_ratio.sum(), list(trainable(ratio)), allow_unused=True)
    assert any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def trainable(ratio: Any) -> Any:
    module = getattr(ratio, "trainable", None)
    return (ratio.policy if module is None else module).parameters()


def test_bounds_of_losses_are_met_on_fresh_data() -> None:
    ratio: Any = bounded_matching("flow", "mlp", 4, "mean", torch.float64)
    experience, rows = fresh(ratio)
    saturated = ratio.score(experience, rows).saturated
    assert 0 < float(saturated.mean()) < 1
    assert torch.equal(saturated.bool(), experience.record["loss"].flatten() > BOUND)


@pytest.mark.parametrize("build", [noisy_chain, matching, matching_of_draws, straight_path])
def test_a_ratio_moves_with_the_weights(build: Any) -> None:
    ratio = build("flow", "mlp", 4, "mean", torch.float64)
    experience, rows = fresh(ratio)
    with torch.no_grad():
        for weight in ratio.policy.field.parameters():
            weight.mul_(1.05)
    assert float(ratio.score(experience, rows).log_ratio.abs().max()) > 1e-4
