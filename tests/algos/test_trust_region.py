"""Laws of surrogates and trust regions, on every kind of ratio."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from messages import mentions
from point_dppo import SMALL as DPPO
from point_dppo import make_init
from point_env import PointEnv
from point_flows import FPO, REINFLOW, make_flow
from torch import Tensor, nn

from algos.base import Setup
from algos.onpolicy.advantages import Experience
from algos.onpolicy.losses import SURROGATES, TRUST_REGIONS, normalize_advantage
from algos.onpolicy.ppo_update import GeneratorDraws, PpoUpdate
from algos.onpolicy.ratios import ChainRatio, Rows
from algos.onpolicy.trust_region import UPDATES
from algos.ppo import PpoConfig
from algos.training.observations import encode
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import ConfigError
from policies.networks.distributions import correlated, correlated_log_prob
from policies.policy import PolicyConfig
from policies.processes.gaussian import GaussianProcess
from policies.processes.squashed import TanhGaussianProcess

SIZES = {
    "num_envs": 4,
    "steps_per_iteration": 8,
    "iterations": 2,
    "batch_size": 16,
    "update_epochs": 2,
    "microbatch_size": 500,
}


def gaussian(**process: Any) -> Any:
    return build(GaussianProcess(**process))


def build(process: Any) -> Any:
    config = PolicyConfig(process=process, backbone=MlpConfig(width=8, time_dim=4), horizon=3, act_steps=2)
    limits = {"min": -torch.ones(2), "max": torch.ones(2)}
    return build_policy(
        config, obs_dim=2, action_dim=2, statistics=dict.fromkeys(("state", "action"), limits)
    )


RATIOS = {
    "gaussian": (PpoConfig(), gaussian),
    "dppo": (DPPO, make_init),
    "reinflow": (REINFLOW, make_flow),
    "fpo": (FPO, make_flow),
}
"""Name -> configuration and initial policy."""


def make_run(name: str, **changes: Any) -> Any:
    config, init = RATIOS[name]
    return replace(config, **SIZES, **changes).build(
        Setup(env=PointEnv(), init=init(), seed=5, num_workers=0, num_threads=1)
    )


@pytest.mark.parametrize("name", SURROGATES)
def test_on_fresh_data_every_surrogate_climbs_the_policy_gradient(name: str) -> None:
    """Its slope along the log ratio is -A where all ratios are one."""
    advantage = torch.tensor([-2.0, -0.3, 0.4, 1.5], dtype=torch.float64)
    log_ratio = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    loss = SURROGATES[name](log_ratio.exp(), advantage, torch.full((4,), 0.2, dtype=torch.float64))
    (slope,) = torch.autograd.grad(loss.sum(), log_ratio)
    torch.testing.assert_close(slope, -advantage)


@pytest.mark.parametrize(("name", "inside"), [("ppo", True), ("spo", False), ("bpo", False)])
def test_what_pulls_a_ratio_back_that_has_gone_too_far(name: str, inside: bool) -> None:
    """PPO lets it be; SPO and BPO have their least loss at the edge of the range, so they pull."""
    ratio = torch.tensor([1.5], requires_grad=True)
    loss = SURROGATES[name](ratio, torch.ones(1), torch.full((1,), 0.2))
    (slope,) = torch.autograd.grad(loss.sum(), ratio)
    assert (float(slope) == 0) if inside else (float(slope) > 0)


class Constant(nn.Module):
    """A critic that knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, seen: Tensor) -> Tensor:
        return self.value.expand(len(seen))


@pytest.mark.parametrize("name", [name for name in SURROGATES if name not in ("aspo", "fixpo")])
def test_on_a_bandit_all_surrogates_climb_and_some_hold_the_ratio(name: str) -> None:
    """Of a clip range of 0.2: PPO and its discovered kin let ratios out, SPO and BPO keep them in."""
    generator, rows = torch.Generator().manual_seed(0), 1024
    policy, bound = gaussian(init_std=0.5, max_std=0.6, learn_std=False), name in TRUST_REGIONS
    ratio = ChainRatio(policy, log_prob_range=None, reduction="joint")
    obs = {"state": 2 * torch.rand(rows, 1, 2, generator=generator) - 1}
    action, record = ratio.act(obs, generator)
    advantage = -(action - torch.tanh(2 * obs["state"])).square().sum(dim=(1, 2))
    config = PpoConfig(
        surrogate=name, clip_range=0.2, log_prob_range=None, log_prob_reduction="joint", batch_size=256,
        update_epochs=12, actor_lr=1e-2, target_kl=0.05 if bound else None,
    )  # fmt: skip
    actor = list(policy.head.parameters())
    update = UPDATES.get(name, PpoUpdate)(config, ratio=ratio, actor=actor, critic=Constant())
    experience = Experience(encode(policy, obs), record, advantage, 0 * advantage, 0 * advantage)
    update.update(experience, iteration=20, draws=GeneratorDraws(generator))
    with torch.no_grad():
        found = ratio.score(experience, Rows.sorted_from(torch.arange(rows), 1)).log_ratio.exp()
    outside = float(((found - 1).abs() > 0.2).float().mean())
    assert float((found * normalize_advantage(advantage)).mean()) > 0.02
    if name in ("spo", "bpo"):
        assert outside < 0.15
    elif not bound:
        assert outside > 0.25


@pytest.mark.parametrize("name", RATIOS)
def test_fixpo_leaves_no_row_beyond_the_bound(name: str) -> None:
    run = make_run(name, surrogate="fixpo", target_kl=1e-3, actor_lr=2e-3)
    learner, seen = run.learner, []
    collect, learner.with_reference = learner.with_reference, lambda x: seen.append(collect(x)) or seen[-1]
    metrics = run.advance()
    assert (seen[0].reference is not None) == (name in ("gaussian", "dppo"))
    assert 0 < float(learner.divergences(seen[0]).max()) <= 1e-3
    assert float(metrics["policy/fixes"]) > 0
    run.close()


@pytest.mark.parametrize("name", RATIOS)
def test_trpo_moves_once_and_as_far_as_the_bound(name: str) -> None:
    run = make_run(name, surrogate="trpo", target_kl=1e-4)
    learner, seen = run.learner, []
    collect, learner.with_reference = learner.with_reference, lambda x: seen.append(collect(x)) or seen[-1]
    metrics = run.advance()
    assert 0 < float(learner.divergences(seen[0]).mean()) <= 1e-4
    assert 0 < float(metrics["policy/step"]) <= 1
    run.close()


def test_the_acting_policy_is_no_distance_from_itself() -> None:
    for name in ("gaussian", "dppo"):
        run = make_run(name, surrogate="fixpo", target_kl=1e-4)
        experience = run.learner.with_reference(run.experience(run.collect()))
        assert float(run.learner.divergences(experience).abs().max()) < 1e-6
        run.close()


def test_beta_goes_on_where_it_was() -> None:
    first, second = (make_run("gaussian", surrogate="fixpo", target_kl=1e-2) for _ in range(2))
    first.advance()
    second.load_state_dict(first.state_dict())
    assert float(first.learner.beta.detach()) != 1.0
    assert torch.equal(first.learner.beta, second.learner.beta)
    assert torch.equal(first.advance()["policy/beta"], second.advance()["policy/beta"])
    first.close()
    second.close()


def test_correlated_noise_has_the_density_of_its_covariance() -> None:
    """Against a multivariate normal of all rows of an action entry, and of the first rows alone."""
    generator = torch.Generator().manual_seed(0)
    x, mean = torch.randn(2, 3, 4, 2, generator=generator, dtype=torch.float64)
    std = torch.rand(3, 4, 2, generator=generator, dtype=torch.float64) + 0.5
    gap = torch.arange(4)
    found = correlated_log_prob(x, mean, std, 0.6)
    for rows in (4, 2):
        shape = 0.6 ** (gap[:rows, None] - gap[:rows]).abs().double()
        spread = std[:, :rows].transpose(1, 2)  # (B, Da, rows)
        normal = torch.distributions.MultivariateNormal(
            mean[:, :rows].transpose(1, 2), spread[..., :, None] * shape * spread[..., None, :]
        )
        expected = normal.log_prob(x[:, :rows].transpose(1, 2))
        torch.testing.assert_close(found[:, :rows].sum(dim=1), expected)
    noise = torch.randn(20_000, 4, 1, generator=generator)
    moments = torch.corrcoef(correlated(noise, 0.6)[..., 0].T)
    torch.testing.assert_close(moments, (0.6 ** (gap[:, None] - gap).abs()).float(), atol=0.03, rtol=0)


@pytest.mark.parametrize("name", ["gaussian", "dppo"])
def test_correlated_exploration_has_a_ratio_of_one_on_fresh_data(name: str) -> None:
    run = make_run(name, noise_correlation=0.7)
    experience = run.experience(run.collect())
    total = len(experience) * run.ratio.inner_steps
    with torch.no_grad():
        score = run.ratio.score(experience, Rows.sorted_from(torch.arange(total), run.ratio.inner_steps))
    assert float(score.log_ratio.abs().max()) <= 1e-4
    assert run.ratio.reference(experience, None) is None  # no closed form is known for single entries
    run.close()


def test_noise_of_other_kinds_is_not_correlated() -> None:
    with pytest.raises(ConfigError, match=mentions("algo.noise_correlation 0 algo.noise")):
        replace(REINFLOW, noise_correlation=0.5)
    setup = Setup(env=PointEnv(), init=build(TanhGaussianProcess()), num_workers=0, num_threads=1)
    with pytest.raises(ConfigError, match=mentions("algo.noise_correlation 0 TanhGaussianPolicy 0.5")):
        PpoConfig(noise_correlation=0.5).build(setup)


@pytest.mark.parametrize("name", TRUST_REGIONS)
def test_a_trust_region_needs_its_bound_and_a_fixed_encoder(name: str) -> None:
    for options, message in (
        ({"target_kl": None}, "algo.target_kl the bound"),
        ({"target_kl": float("inf")}, "algo.target_kl the bound"),
        ({"encoder": "trained"}, "algo.encoder frozen"),
    ):
        with pytest.raises(ConfigError, match=mentions(message)):
            PpoConfig(surrogate=name, **options)
