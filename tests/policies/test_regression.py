"""Regression and MIP: paths, guesses and refinements, and what they cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_cloning import finish
from small_policies import observations, small_policy
from torch import Tensor
from two_modes import LEVEL, two_mode_setup

from algos.bc import BcConfig
from policies.errors import CapabilityError, ConfigError
from policies.processes import Mip, Regression, VPDiffusion
from policies.protocols import TE
from policies.samplers.ddpm import DDIM
from policies.samplers.direct import Direct
from policies.samplers.hooks import Guidance, Inpaint
from policies.samplers.loop import denoise
from policies.samplers.ode import Euler

TH, DA = 3, 2
ALL = [Regression(), Regression(start_noise=True), Mip(), Mip("origin"), Mip("tsd")]
IDS = ["regression", "straight", "mip", "origin", "tsd"]
every_process = pytest.mark.parametrize("process", ALL, ids=IDS)


def network(shift: Tensor) -> Callable[..., Tensor]:
    """f(x, t) = x / 2 + shift + t, as losses ask for it."""
    return lambda x, t, *_, **__: 0.5 * x + shift + t[:, None, None]


def draw(process: Any, n: int = 5) -> tuple[Tensor, TE]:
    generator = torch.Generator().manual_seed(3)
    action, eps = (torch.randn(n, TH, DA, generator=generator, dtype=torch.float64) for _ in range(2))
    te = TE(process.sample_time(n, dtype=torch.float64), eps)
    return action, TE(te.t, eps, more=process.more_draws(te, generator=generator))


@every_process
def test_the_path_begins_without_an_action_and_rates_are_its_derivatives(process: Any) -> None:
    alpha, sigma = process.alpha_sigma(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert alpha.tolist() == [0.0, 1.0] and sigma.tolist() == [1.0, 0.0]
    t, step = torch.arange(20, dtype=torch.float64) / 20 + 0.003, 1e-6
    for rate, high, low in zip(
        process.rates(t), process.alpha_sigma(t + step), process.alpha_sigma(t - step), strict=True
    ):
        torch.testing.assert_close(rate, (high - low) / (2 * step), rtol=1e-6, atol=1e-6)


def test_steps_are_those_of_the_publication() -> None:
    shift = torch.randn(4, TH, DA, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(4, TH, DA, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = {
        "regression": shift,
        "straight": 0.5 * noise + shift,
        "mip": 0.5 * shift + shift + 0.9,
        "origin": 0.5 * 0.9 * shift + shift + 0.9,
        "tsd": 0.5 * (0.5 * noise + shift) + shift + 0.9,
    }
    net = network(shift)
    for name, process in zip(IDS, ALL, strict=True):
        table = Direct().table(process)
        chunk = denoise(
            lambda k, x, table=table: net(x, torch.tensor(table.times[k]).expand(4)), table, noise
        )
        torch.testing.assert_close(chunk.action, want[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("process", ALL[2:], ids=IDS[2:])
def test_each_evaluation_weighs_by_the_inverse_of_what_it_lacks(process: Any) -> None:
    action, te = draw(process)
    near = process.corrupt(action, te.eps, te.t)
    aim = {"mip": action, "origin": 0.9 * action, "tsd": near}[process.variant]

    def loss_of(guess: float, refined: float) -> Tensor:
        off = {0.0: aim + guess, 0.9: action + refined}
        return process.losses(lambda x, t, **_: off[round(float(t[0]), 6)], action, te)

    assert not loss_of(0.0, 0.0).any()
    torch.testing.assert_close(loss_of(0.3, 0.0), torch.full_like(action, (0.3 / 0.9) ** 2))
    torch.testing.assert_close(loss_of(0.0, 0.3), torch.full_like(action, (0.3 / 0.1) ** 2))


@pytest.mark.parametrize("name", ["l1", "smooth_l1"])
def test_other_measures_of_error(name: str) -> None:
    error = torch.tensor([-2.0, 0.5], dtype=torch.float64)
    want = {"l1": [2.0, 0.5], "smooth_l1": [1.5, 0.125]}[name]
    assert Regression(error=name).measure(error).tolist() == want


@pytest.mark.parametrize("process", [Regression(), Mip()], ids=["regression", "mip"])
def test_the_chunk_lies_between_two_modes(process: Any) -> None:
    config = BcConfig(steps=150, batch_size=128, lr=3e-3, validation_fraction=0.1)
    algorithm = config.build(two_mode_setup(process=process, width=32))
    last = finish(algorithm)[-1]
    x = torch.linspace(-0.9, 0.9, 50)
    obs = torch.stack([x, torch.ones_like(x)], dim=1).unsqueeze(1)
    action = algorithm.snapshot().act(obs, generator=torch.Generator().manual_seed(0))
    assert action.abs().mean() < 0.25 * LEVEL
    assert last["validation/action_mse_best"] > 0.5 * LEVEL**2


def test_noise_matters_where_it_is_the_first_input_or_injected() -> None:
    sensitive = [small_policy(process).noise_sensitive for process in ALL]
    assert sensitive == [False, True, False, False, True]
    policy = small_policy(Mip())
    exploring = policy.with_sampler(Direct(min_std=0.1))
    assert exploring.noise_sensitive and not policy.noise_sensitive
    cond = policy.encode({"state": observations(3)})
    with pytest.raises(CapabilityError, match="deterministic, so its chain has no density"):
        policy.sample_chain(cond)
    assert exploring.sample_chain(cond).log_prob.shape == (3, 2, TH, DA)


def test_a_start_at_the_second_evaluation_refines_a_plan() -> None:
    policy = small_policy(Mip())
    cond, noise = policy.encode({"state": observations(4)}), policy.sample_noise(4)
    plan = torch.randn(4, TH, DA, generator=torch.Generator().manual_seed(5))
    t = torch.full((4,), 0.9)
    refined = policy.decode(cond, noise, start=(plan, 0.9))
    torch.testing.assert_close(refined, policy.predict(plan, t, cond, kind="x0"), rtol=1e-5, atol=1e-5)
    guess = policy.predict(torch.zeros_like(plan), torch.zeros(4), cond, kind="x0")
    whole = policy.decode(cond, noise)
    torch.testing.assert_close(whole, policy.decode(cond, noise, start=(guess, 0.9)), rtol=1e-5, atol=1e-5)


@every_process
def test_hooks_reach_every_evaluation(process: Any) -> None:
    policy = small_policy(process)
    cond, noise = policy.encode({"state": observations(4)}), policy.sample_noise(4)
    known, mask = torch.full((TH, DA), 0.25), torch.zeros(TH, DA)
    mask[0] = 1.0
    free, pinned = policy.decode(cond, noise), policy.decode(cond, noise, hooks=[Inpaint(known, mask)])
    torch.testing.assert_close(pinned[:, 0], known[0].expand(4, DA))
    assert ((pinned[:, 1:] - free[:, 1:]).abs().max() > 1e-4) == (len(process.stops) > 1)
    pushed = policy.decode(cond, noise, hooks=[Guidance(lambda x0, _: torch.ones_like(x0), scale=0.1)])
    if len(process.stops) == 1:
        torch.testing.assert_close(pushed, free - 0.1)
    assert (pushed < free).all()


def test_other_samplers_and_other_processes_are_refused() -> None:
    for process, sampler in ((Mip(), Euler()), (Regression(), DDIM())):
        with pytest.raises(ConfigError, match=r"process=(mip|regression)\. Use sampler="):
            small_policy(process, sampler)
    with pytest.raises(ConfigError, match="sampler=direct needs process=regression or mip"):
        small_policy(VPDiffusion(), Direct())
