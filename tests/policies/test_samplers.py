"""Samplers: laws of single steps, of whole trajectories, and of recorded chains."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from diffusers import DDIMScheduler
from messages import mentions
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from policies.errors import ConfigError
from policies.networks.distributions import gaussian_log_prob
from policies.processes import GaussianPath, RectifiedFlow, VPDiffusion
from policies.processes.gaussian import GaussianProcess
from policies.protocols import Cond, Hook
from policies.registry import from_json, to_json
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.loop import denoise
from policies.samplers.ode import Euler
from policies.samplers.step_table import StepTable, transition

B, TH, DA = 5, 4, 3
COND = Cond(torch.zeros(B, 1))

PAIRS = [
    *((s, VPDiffusion(20, prediction=p)) for p in ("eps", "x0", "v") for s in (
        DDPM(),
        DDPM(min_std=0.1, final_std=None, clip_action=0.5),
        DDPM(steps=5, variance="fixed_large", clip_x0=None, noise_clip=None),
        DDPM(levels=(7, 3, 1, 0)),
        DDIM(steps=10),
        DDIM(steps=5, eta=1.0, min_std=0.1),
        DDIM(steps=5, eta_per_dim=(0.2, 0.5, 1.0), recompute_eps=False),
        DDIM(steps=5, eta=0.7, eps_clip=0.8, final_alpha="first"),
        DDIM(steps=4, recompute_eps=False, eps_clip=0.8),
        DDIM(steps=7, clip_x0=None, spacing="trailing"),
    )),
    *((s, RectifiedFlow()) for s in (Euler(), Euler(steps=4, clip_x0=1.0), Euler(steps=3, min_std=0.1))),
]  # fmt: skip
IDS = [f"{type(s).__name__}-{p.kind}-{i}" for i, (s, p) in enumerate(PAIRS)]
every_pair = pytest.mark.parametrize(("sampler", "process"), PAIRS, ids=IDS)


def network(table: StepTable, dtype: torch.dtype = torch.float64) -> Callable[[int, Tensor], Tensor]:
    """A smooth, per-row nonlinear stand-in, large enough that clips act."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(TH * DA, TH * DA, generator=generator, dtype=torch.float64).to(dtype) / 3
    return lambda k, x: 1.5 * torch.tanh(x.flatten(1) @ weight + 0.1 * k).view_as(x)


def draw(table: StepTable, dtype: torch.dtype = torch.float64, n: int = B) -> Tensor:
    shape = (n, TH, DA) if table.is_deterministic else (n, table.num_steps + 1, TH, DA)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def gaussian_field(
    process: GaussianPath, table: StepTable, mean: float, std: float
) -> Callable[[int, Tensor], Tensor]:
    """The exact predictor for data ~ Normal(mean, std^2)."""

    def bound(k: int, x: Tensor) -> Tensor:
        alpha, sigma = table.alpha[k], table.sigma[k]
        eps = sigma * (x - alpha * mean) / (alpha**2 * std**2 + sigma**2)
        x0 = mean + alpha * std**2 * (x - alpha * mean) / (alpha**2 * std**2 + sigma**2)
        return {"eps": eps, "x0": x0, "v": alpha * eps - sigma * x0, "velocity": x0 - eps}[process.kind]

    return bound


# -- single steps ---------------------------------------------------------------------------------------


@every_pair
def test_the_loop_and_the_scorer_compute_the_same_mean(sampler, process) -> None:
    table = sampler.table(process)
    steps = torch.arange(table.num_steps)
    generator = torch.Generator().manual_seed(0)
    x, pred = (torch.randn(len(steps), TH, DA, generator=generator, dtype=torch.float64) for _ in range(2))
    scored = transition(table, steps, x, pred)
    looped = torch.cat([transition(table, k, x[k : k + 1], pred[k : k + 1]) for k in range(len(steps))])
    torch.testing.assert_close(scored, looped, rtol=1e-12, atol=1e-12)


@every_pair
def test_a_scored_chain_has_the_density_it_was_drawn_with(sampler, process) -> None:
    table = sampler.table(process)
    bound = network(table)
    out = denoise(bound, table, draw(table), record_from=0)
    for k in range(table.num_steps):
        x = out.chain[:, k]
        step = torch.full((B,), k)
        std = table.std[k].clamp(min=0.1)
        drawn = gaussian_log_prob(out.chain[:, k + 1], out.mean[:, k], std)
        scored = gaussian_log_prob(out.chain[:, k + 1], transition(table, step, x, bound(k, x)), std)
        ratio = (scored - drawn).mean(dim=(1, 2)).exp()
        torch.testing.assert_close(ratio, torch.ones(B, dtype=ratio.dtype), rtol=0, atol=1e-10)


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
@pytest.mark.parametrize("clip", [1.0, None])
def test_ddim_with_all_ancestral_noise_is_ddpm(prediction: str, clip: float | None) -> None:
    process = VPDiffusion(20, prediction=prediction)
    ddpm = DDPM(clip_x0=clip, min_std=0.0).table(process)
    ddim = DDIM(steps=20, eta=1.0, clip_x0=clip).table(process)
    torch.testing.assert_close(ddim.std, ddpm.std, rtol=1e-9, atol=1e-9)
    generator = torch.Generator().manual_seed(0)
    x, pred = (torch.randn(20, TH, DA, generator=generator, dtype=torch.float64) for _ in range(2))
    steps = torch.arange(20)
    torch.testing.assert_close(
        transition(ddim, steps, x, pred), transition(ddpm, steps, x, pred), rtol=1e-9, atol=1e-9
    )


def test_floors_change_the_noise_and_not_the_mean() -> None:
    process = VPDiffusion(20)
    free, floored = DDIM(eta=1.0).table(process), DDIM(eta=1.0, min_std=0.2).table(process)
    assert torch.equal(free.coefficients, floored.coefficients)
    assert torch.equal(floored.std, free.schedule_std.clamp(min=0.2))
    assert torch.equal(floored.schedule_std, free.schedule_std)


def test_noise_is_clipped_before_it_is_scaled() -> None:
    process, noise = VPDiffusion(20), 4.0 * draw(DDPM().table(VPDiffusion(20)))
    tight, free = (DDPM(noise_clip=clip).table(process) for clip in (2.0, None))
    clipped = torch.cat([noise[:, :1], noise[:, 1:].clamp(-2.0, 2.0)], dim=1)
    got = denoise(network(tight), tight, noise).action
    torch.testing.assert_close(got, denoise(network(free), free, clipped).action, rtol=0, atol=0)
    assert not torch.equal(got, denoise(network(free), free, noise).action)


def test_ddpm_defaults_are_the_evaluation_of_dppo() -> None:
    table = DDPM().table(VPDiffusion(20))
    assert table.std[-1] == 0
    assert table.std[:-1].min() >= 1e-3
    assert not table.is_deterministic
    explore = DDPM(min_std=0.1, final_std=None).table(VPDiffusion(20))
    assert explore.std[-1] == 0.1
    assert torch.equal(explore.std, table.schedule_std.clamp(min=0.1))


def test_a_table_keeps_no_tensor_of_a_trace() -> None:
    table = DDPM(steps=3, spacing="trailing").table(VPDiffusion(num_levels=5))
    with FakeTensorMode(allow_non_fake_inputs=True):
        table.to_device("std", torch.zeros(1))
    assert type(table.to_device("std", torch.zeros(1))) is torch.Tensor


def test_a_table_travels_without_its_copies_on_devices() -> None:
    table = DDPM(steps=4).table(VPDiffusion(20))
    expected = table.to_device("std", torch.zeros(1))
    other = pickle.loads(pickle.dumps(table))
    assert table._copies and not other._copies
    assert other.rows == table.rows and torch.equal(other.to_device("std", torch.zeros(1)), expected)
    assert copy.deepcopy(table) is table, "nothing changes a table"


def test_the_density_is_that_of_a_normal() -> None:
    x, mean = torch.randn(7, 2, generator=torch.Generator().manual_seed(0)), torch.full((7, 2), 0.3)
    std = torch.tensor([0.1, 2.0])
    want = torch.distributions.Normal(mean, std).log_prob(x)
    torch.testing.assert_close(gaussian_log_prob(x, mean, std), want)


# -- whole trajectories ---------------------------------------------------------------------------------


def test_euler_is_exact_on_straight_paths() -> None:
    goal, start = torch.full((B, TH, DA), 0.4, dtype=torch.float64), draw(Euler().table(RectifiedFlow()))
    for steps, clip in itertools.product((1, 3, 10), (None, 1.0)):
        table = Euler(steps=steps, clip_x0=clip).table(RectifiedFlow())
        out = denoise(lambda k, x: goal - start, table, start).action
        torch.testing.assert_close(out, goal, rtol=0, atol=1e-14)


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
def test_ddim_equals_a_live_diffusers_scheduler(prediction: str) -> None:
    names = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
    scheduler = DDIMScheduler(
        20, beta_schedule="squaredcos_cap_v2", prediction_type=names[prediction], clip_sample=True
    )
    scheduler.set_timesteps(5)
    table = DDIM(steps=5).table(VPDiffusion(20, prediction=prediction))
    bound = network(table, torch.float32)
    start = draw(table, torch.float32)
    x = start
    for k, tau in enumerate(scheduler.timesteps):
        x = scheduler.step(bound(k, x), tau, x, use_clipped_model_output=True).prev_sample
    torch.testing.assert_close(denoise(bound, table, start).action, x, rtol=0, atol=2e-5)


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
def test_ddpm_with_the_exact_score_samples_the_data(prediction: str) -> None:
    process = VPDiffusion(200, prediction=prediction)
    table = DDPM(clip_x0=None, noise_clip=None, min_std=0.0).table(process)
    noise = torch.randn(4000, 201, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    action = denoise(gaussian_field(process, table, 0.5, 0.2), table, noise).action
    assert abs(action.mean() - 0.5) < 0.015
    assert abs(action.std() - 0.2) < 0.01


@pytest.mark.parametrize(
    ("process", "sampler"),
    [(VPDiffusion(1000), DDIM), (VPDiffusion(1000, prediction="v"), DDIM), (RectifiedFlow(), Euler)],
)
def test_deterministic_samplers_converge_to_the_flow_at_first_order(process, sampler) -> None:
    mean, std = 0.5, 0.2
    errors = []
    for steps in (25, 50, 100):
        table = sampler(steps=steps, clip_x0=None).table(process)
        start = torch.linspace(-2, 2, B, dtype=torch.float64).view(B, 1, 1)
        got = denoise(gaussian_field(process, table, mean, std), table, start).action
        alpha, sigma = table.alpha[0], table.sigma[0]
        exact = mean + std * (start - alpha * mean) / math.sqrt(alpha**2 * std**2 + sigma**2)
        errors.append((got - exact).abs().max().item())
    assert errors[2] < 0.02
    assert 1.6 < errors[0] / errors[1] < 2.6
    assert 1.6 < errors[1] / errors[2] < 2.6


@every_pair
def test_rows_do_not_influence_each_other(sampler, process) -> None:
    table = sampler.table(process)
    noise, bound = draw(table), network(table)
    together = denoise(bound, table, noise).action
    apart = torch.cat([denoise(bound, table, noise[i : i + 1]).action for i in range(B)])
    torch.testing.assert_close(together, apart, rtol=1e-11, atol=1e-11)


@every_pair
def test_recording_and_idle_hooks_change_nothing(sampler, process) -> None:
    table = sampler.table(process)
    noise, bound = draw(table), network(table)
    plain = denoise(bound, table, noise)
    assert plain.chain is None
    recorded = denoise(bound, table, noise, record_from=1)
    hooked = denoise(bound, table, noise, hooks=[Hook()], cond=COND, record_from=1)
    assert recorded.chain.shape == (B, table.num_steps, TH, DA)
    assert recorded.mean.shape == (B, table.num_steps - 1, TH, DA)
    torch.testing.assert_close(recorded.action, plain.action, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(hooked.action, plain.action, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(hooked.mean, recorded.mean, rtol=1e-9, atol=1e-9)
    assert torch.equal(recorded.chain[:, -1], recorded.action)


@every_pair
def test_single_precision_stays_close_to_double(sampler, process) -> None:
    table = sampler.table(process)
    wide = denoise(network(table), table, draw(table)).action
    narrow = denoise(network(table, torch.float32), table, draw(table, torch.float32)).action
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, rtol=0, atol=2e-4 * max(1.0, wide.abs().max().item()))


@every_pair
def test_continuing_a_recorded_chain_reaches_its_action(sampler, process) -> None:
    table = sampler.table(process)
    noise, bound = draw(table), network(table)
    out = denoise(bound, table, noise, record_from=0)
    entry = out.chain[:, 2]
    warm = entry if table.is_deterministic else torch.cat([entry[:, None], noise[:, 1:]], dim=1)
    again = denoise(bound, table, warm, first_step=2)
    torch.testing.assert_close(again.action, out.action, rtol=1e-11, atol=1e-11)


def test_the_inputs_are_left_untouched_and_gradients_flow() -> None:
    table = DDIM(steps=5).table(VPDiffusion(20))
    start = (0.3 * draw(table)).requires_grad_()
    kept = start.detach().clone()
    bound = network(table)
    assert torch.autograd.gradcheck(lambda x: denoise(bound, table, x).action, (start,), atol=1e-5)
    assert torch.equal(start.detach(), kept)


def test_a_warm_start_enters_at_the_first_step_that_is_clean_enough() -> None:
    table = Euler(steps=4).table(RectifiedFlow())
    assert [table.step_at(t) for t in (0.0, 0.1, 0.25, 0.6, 0.75)] == [0, 1, 1, 3, 3]
    with pytest.raises(ConfigError, match=mentions("0.75 0.9")):
        table.step_at(0.9)


# -- settings -------------------------------------------------------------------------------------------


@every_pair
def test_a_saved_sampler_is_the_same_sampler(sampler, process) -> None:
    assert from_json("sampler", to_json("sampler", sampler)) == sampler


@pytest.mark.parametrize(
    ("sampler", "process", "message"),
    [
        (DDIM(), RectifiedFlow(), "sampler=ddim process=diffusion"),
        (
            Euler(),
            GaussianProcess(),
            "sampler=euler process=diffusion process=gaussian sampler=mean",
        ),
        (Euler(steps=21), VPDiffusion(20), "1 process.num_levels=20 21"),
        (DDIM(steps=21), VPDiffusion(20), "1 process.num_levels=20 21"),
        (DDPM(steps=50), VPDiffusion(20), "1 process.num_levels=20 50"),
        (DDPM(levels=(20, 3)), VPDiffusion(20), "0 19 [20, 3]"),
        (DDPM(levels=(3, -1)), VPDiffusion(20), "sampler.levels 0 19 3 -1"),
    ],
)
def test_a_sampler_that_does_not_fit_is_refused(sampler, process, message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        sampler.table(process)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDPM(levels=(3, 3, 0)), "[3, 3, 0]"),
        (lambda: DDPM(levels=(3, 0), steps=2), "steps=2 levels= [3, 0]"),
    ],
)
def test_bad_settings_are_named(make, message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        make()


def test_listed_levels_are_the_steps_of_the_whole_run_at_these_levels() -> None:
    """Each leads to the level below it, whatever is listed next."""
    lists = (tuple(reversed(range(20))), (7, 3, 0))
    whole, few = (DDPM(levels=levels).table(VPDiffusion(20)) for levels in lists)
    rows = [19 - 7, 19 - 3, 19]
    assert torch.equal(whole.coefficients, DDPM().table(VPDiffusion(20)).coefficients)
    assert torch.equal(few.coefficients, whole.coefficients[:, rows])
    assert few.net_time.tolist() == [7, 3, 0]
    assert few.times == pytest.approx([whole.times[k] for k in (*rows, 20)])


def test_noise_and_steps_that_do_not_fit_the_table_are_refused() -> None:
    ddpm, ddim = DDPM().table(VPDiffusion(20)), DDIM(steps=5).table(VPDiffusion(20))
    with pytest.raises(ConfigError, match=mentions("shape (B, 21, Th, Da) (5, 4, 3)")):
        denoise(network(ddpm), ddpm, torch.zeros(B, TH, DA))
    with pytest.raises(ConfigError, match=mentions("shape (B, Th, Da) (5, 6, 4, 3)")):
        denoise(network(ddim), ddim, torch.zeros(B, 6, TH, DA))
    with pytest.raises(ConfigError, match=mentions("first_step 0 4 5")):
        denoise(network(ddim), ddim, torch.zeros(B, TH, DA), first_step=5)
    with pytest.raises(ConfigError, match=mentions("record_from 2 4 1")):
        denoise(network(ddim), ddim, torch.zeros(B, TH, DA), first_step=2, record_from=1)
    wrong = DDIM(steps=5, eta_per_dim=(1.0, 0.5)).table(VPDiffusion(20))
    with pytest.raises(ConfigError, match=mentions("eta_per_dim 2 3")):
        denoise(network(wrong), wrong, torch.zeros(B, 6, TH, DA))


def test_a_prediction_that_leaves_x0_open_at_a_visited_time_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Euler().table(RectifiedFlow())
    monkeypatch.setattr(RectifiedFlow, "kind", "eps")
    with pytest.raises(ConfigError, match=mentions("process=flow 'eps' 0. velocity grid")):
        Euler().table(RectifiedFlow())
