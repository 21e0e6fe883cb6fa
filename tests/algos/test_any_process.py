"""Algorithms on processes that they were not published for: how they explore, and what they score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from messages import mentions
from point_dppo import SMALL as DPPO
from point_env import PointEnv
from point_flows import FPO, REINFLOW

from algos.base import Setup
from algos.ppo import PpoConfig
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import ConfigError
from policies.networks.distributions import tanh_draw
from policies.policy import Policy, PolicyConfig
from policies.processes.consistency import Consistency
from policies.processes.continuous import VPContinuous
from policies.processes.diffusion import VPDiffusion
from policies.processes.edm import Edm
from policies.processes.energy import ScoreEnergy
from policies.processes.flow import RectifiedFlow
from policies.processes.mixture import MixtureProcess
from policies.processes.regression import Mip, Regression
from policies.processes.schedules import time_of_level
from policies.processes.squashed import TanhGaussianProcess
from policies.samplers.consistency import Renoise
from policies.samplers.ddpm import DDIM
from policies.samplers.ode import Ancestral, DPMpp2M, Euler, Heun

PPO = PpoConfig(num_envs=4, steps_per_iteration=8, iterations=4, batch_size=16)


def init_of(process: Any, sampler: Any = None) -> Any:
    limits = {"min": -torch.ones(2), "max": torch.ones(2), "mean": torch.zeros(2), "std": torch.ones(2)}
    config = PolicyConfig(
        process=process, backbone=MlpConfig(width=16, time_dim=4), sampler=sampler, horizon=3, act_steps=2
    )
    statistics = {"state": limits, "action": limits}
    return build_policy(config, obs_dim=2, action_dim=2, statistics=statistics, seed=3)


def make_run(config: Any, init: Policy) -> Any:
    return config.build(Setup(env=PointEnv(), init=init, seed=5, num_workers=0, num_threads=1))


# -- exploration ----------------------------------------------------------------------------------------


def test_an_ancestral_chain_keeps_the_grid_and_the_bounds_of_the_policy() -> None:
    own = Euler(steps=6, grid="karras", noise_max=5.0, clip_x0=2.0, clip_action=0.9)
    explore, evaluate = replace(DPPO, eta=0.5).samplers(init_of(Edm(), own))
    floor = {"min_std": 0.1, "clip_action": None}
    assert explore == Ancestral(steps=6, grid="karras", noise_max=5.0, clip_x0=2.0, eta=0.5, **floor)
    assert evaluate == replace(explore, eta=0.0, min_std=0.0, clip_action=0.9)


def test_a_tuned_policy_is_evaluated_by_the_steps_of_its_base() -> None:
    """Without noise an ancestral step is an Euler step."""
    init = init_of(Edm(), Euler(steps=6, clip_action=None))
    run = make_run(DPPO, init)
    noise = init.sample_noise(4, generator=torch.Generator().manual_seed(0))
    obs = torch.zeros(4, 1, 2)
    torch.testing.assert_close(run.snapshot().act(obs, noise=noise), init.act(obs, noise=noise))
    run.close()


def test_a_floor_of_noise_makes_a_chain_of_any_sampler() -> None:
    for process, steps in ((Mip(), 2), (Regression(), 1), (Consistency(), 2)):
        init = init_of(process)
        run = make_run(replace(DPPO, tuned_steps=steps), init)
        std = run.policy.table.std
        assert run.policy.table.num_steps == steps and float(std.min()) == pytest.approx(0.1)
        assert run.snapshot().sampler == init.sampler
        run.close()


@pytest.mark.parametrize(
    ("process", "own", "expected"),
    [
        (Edm(), Heun(steps=3, clip_action=0.8), Euler(steps=4, clip_action=0.8)),
        (VPContinuous(), DPMpp2M(steps=3), Euler(steps=4, clip_action=None)),
        (VPDiffusion(8), None, DDIM(steps=4)),
        (ScoreEnergy(8), None, DDIM(steps=4)),
        (
            VPDiffusion(8),
            DDIM(steps=8, eta=1.0, min_std=0.1, spacing="trailing"),
            DDIM(steps=4, spacing="trailing"),
        ),
        (RectifiedFlow(), Euler(steps=9, min_std=0.1), Euler(steps=4)),
        (Consistency(), None, Renoise(steps=1)),
    ],
)
def test_learned_noise_follows_the_steps_of_a_sampler_without_noise(
    process: Any, own: Any, expected: Any
) -> None:
    explore, evaluate = REINFLOW.samplers(init_of(process, own))
    assert explore == evaluate == expected


def test_a_start_at_zero_is_no_factor_of_the_density() -> None:
    run = make_run(REINFLOW, init_of(Mip()))
    assert not run.policy.table.start_std and not run.ratio.counts_start
    assert run.ratio.factors == (1 * 3 + 2) * 2  # the rows of the guess, and the executed ones
    run.close()


# -- densities and losses -------------------------------------------------------------------------------


def test_draws_before_tanh_have_the_ratios_of_actions() -> None:
    policy = init_of(TanhGaussianProcess()).double()
    cond = policy.encode(policy.observation(torch.zeros(6, 1, 2)))
    with torch.no_grad():
        chain = policy.sample_chain(cond, generator=torch.Generator().manual_seed(0))
        old = _joint(policy, cond, chain.x[:, 1])
        for weight in policy.head.parameters():
            weight.mul_(1.1)
        new, scored = _joint(policy, cond, chain.x[:, 1]), policy.chain_log_prob(cond, chain.x)[0]
    assert torch.equal(chain.action, chain.x[:, -1].tanh())
    torch.testing.assert_close((scored - chain.log_prob).sum(dim=(1, 2, 3)), new - old)


def _joint(policy: Any, cond: Any, draw: torch.Tensor) -> torch.Tensor:
    mean, log_std = policy.head(cond.vec)
    eps = (draw.flatten(1) - mean) * (-log_std).exp()
    return tanh_draw(mean, log_std, eps)[1]


@pytest.mark.parametrize(
    "process",
    [
        *(VPDiffusion(8, prediction=kind) for kind in ("eps", "x0", "v")),
        ScoreEnergy(8), Edm(), VPContinuous(), VPContinuous(schedule="linear"),
    ],
)  # fmt: skip
def test_losses_compared_are_those_of_cloning(process: Any) -> None:
    run = make_run(FPO, init_of(process))
    policy, count = run.policy.double(), 20
    generator = torch.Generator().manual_seed(0)
    te = policy.sample_te(count, generator=generator)
    action = torch.randn(count, 3, 2, generator=generator, dtype=torch.float64)
    cond = policy.encode(policy.observation(torch.zeros(count, 1, 2)))
    with torch.no_grad():
        ours = run.ratio.losses(cond, action, te.eps, te.t)
        theirs = policy.matching_loss(cond, action, te, reduce="none")
    torch.testing.assert_close(ours, theirs[:, :2].mean(dim=(1, 2)))
    run.close()


@pytest.mark.parametrize("times", ["grid", "density"])
@pytest.mark.parametrize("process", [VPDiffusion(8), VPDiffusion(8, prediction="x0"), Edm(), VPContinuous()])
def test_drawn_times_were_trained(process: Any, times: str) -> None:
    run = make_run(replace(FPO, times=times), init_of(process))
    t = run.ratio.draw_times((500,), torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(process.nearest_time(t), t, rtol=0, atol=1e-6)
    assert float(t.min()) >= 0 and float(t.max()) < 1
    run.close()


def test_the_nearest_time_is_a_level_or_in_the_range_of_noise() -> None:
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    levels = time_of_level(torch.arange(8, dtype=torch.float64), 8)
    nearest = VPDiffusion(8).nearest_time(t)
    distance = (t[:, None] - levels).abs().min(dim=1).values
    torch.testing.assert_close((nearest - t).abs(), distance)
    noise = Edm(noise_max=4.0, noise_min=0.25).nearest_time(t)
    assert noise.min() == 0.2 and noise.max() == 0.8 and torch.equal(noise[20:81], t[20:81])
    assert torch.equal(RectifiedFlow().nearest_time(t), t)


# -- refusals: what is named instead is accepted --------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "init", "message", "instead"),
    [
        (
            replace(DPPO, sampler="ddpm"), init_of(Edm()), "algo.sampler=ddpm process=edm algo.sampler=auto",
            replace(DPPO, sampler="auto"),
        ),
        (
            replace(DPPO, sampler="ancestral", tuned_steps=2), init_of(Mip()),
            "process=mip algo.sampler=auto",
            replace(DPPO, tuned_steps=2),
        ),
        *(
            (replace(DPPO, tuned_steps=10), init_of(process), f"algo.tuned_steps 10 algo.tuned_steps={steps}",
             replace(DPPO, tuned_steps=steps))
            for process, steps in ((Mip(), 2), (Regression(), 1), (Consistency(), 2))
        ),
        (
            replace(REINFLOW, tuned_steps=2), init_of(Regression()), "algo.tuned_steps 2 algo.tuned_steps=1",
            replace(REINFLOW, tuned_steps=1),
        ),
        (replace(REINFLOW, denoising_steps=4), init_of(Mip()), "algo.denoising_steps 2 null 4", REINFLOW),
        (
            replace(REINFLOW, denoising_steps=2), init_of(Consistency()),
            "algo.denoising_steps 1 null process=consistency 2 algo=dppo", replace(DPPO, tuned_steps=2),
        ),
        (
            replace(REINFLOW, clip_state=1.0), init_of(VPDiffusion(8)),
            "algo.clip_state sampler=ddim algo.clip_state=null", REINFLOW,
        ),
        (replace(PPO, entropy_coef=0.1), init_of(MixtureProcess()), "algo.entropy_coef 0 MixturePolicy", PPO),
        (replace(PPO, entropy_coef=0.1), init_of(TanhGaussianProcess()), "algo.entropy_coef 0", PPO),
    ],
)  # fmt: skip
def test_what_a_process_lacks_is_refused_and_what_is_named_instead_is_taken(
    config: Any, init: Any, message: str, instead: Any
) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        make_run(config, init)
    make_run(instead, init).close()
