"""Shortcut models: what is drawn, what is learned from what, and which steps are allowed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from arcs import score, trained
from gaussian_flow import average_velocity
from pairwise import everything
from small_policies import observations, small_policy
from torch import Tensor

from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.processes import RectifiedFlow, Shortcut
from policies.protocols import TE
from policies.samplers.ode import Euler

SIZES = (2, 4, 16, 64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(process: Shortcut, n: int) -> TE:
    te = TE(torch.rand(n, generator=seeded(1)), torch.randn(n, 3, 2, generator=seeded(2)))
    return dataclasses.replace(te, more=process.more_draws(te, generator=seeded(3)))


class Recorder:
    """A network of zeros that remembers where it was asked, with and without a gradient."""

    def __init__(self, process: Shortcut) -> None:
        self.process = process
        self.asked: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}

    def __call__(self, x: Tensor, t: Tensor, until: Tensor | None = None, **_: Any) -> Tensor:
        second = self.process.second_net_time(t, t if until is None else until)
        self.asked[torch.is_grad_enabled()].append((self.process.net_time(t), second))
        return torch.zeros_like(x)


def lengths(pairs: list[tuple[Tensor, Tensor]]) -> set[float]:
    return {length for _, second in pairs for length in second.unique().tolist()}


@pytest.mark.parametrize("max_steps", SIZES)
def test_every_length_that_is_asked_for_is_trained(max_steps: int) -> None:
    process = Shortcut(max_steps=max_steps, time_scale=1.0)
    recorder = Recorder(process)
    process.losses(recorder, torch.zeros(4000, 3, 2), draws(process, 4000))
    trained_on, targets = lengths(recorder.asked[True]), lengths(recorder.asked[False])
    sampled = set()
    for steps in (2**j for j in range(max_steps.bit_length())):
        second = Euler(steps=steps).table(process).second_time
        assert second is not None and len(second.unique()) == 1
        sampled.add(float(second[0]))
    assert len(sampled) == max_steps.bit_length()
    assert sampled == trained_on
    assert targets <= trained_on


@pytest.mark.parametrize("max_steps", SIZES)
def test_starts_of_steps_are_those_of_sampling(max_steps: int) -> None:
    process = Shortcut(max_steps=max_steps, time_scale=1.0, consistency_share=0.5)
    te, recorder = draws(process, 4000), Recorder(process)
    process.losses(recorder, torch.zeros(4000, 3, 2), te)
    ((time, length),) = recorder.asked[True]
    is_step = te.more["length"] > 0
    assert torch.equal(length, te.more["length"]) and torch.equal(time[~is_step], te.t[~is_step])
    for d in length.unique().tolist()[1:]:
        found = (time[length == d] / d).unique()
        assert torch.equal(found, torch.arange(round(1 / d)).float())


def test_the_share_of_rows_and_their_lengths() -> None:
    length = draws(Shortcut(max_steps=8), 40_000).more["length"]
    values, counts = length.unique(return_counts=True)
    assert values.tolist() == [0.0, 0.25, 0.5, 1.0]
    torch.testing.assert_close(
        counts / 40_000, torch.tensor([0.75, 1 / 12, 1 / 12, 1 / 12]), rtol=0, atol=0.01
    )


def test_the_exact_flow_map_is_what_consistency_rows_ask_for() -> None:
    process = Shortcut(consistency_share=0.5)
    te = draws(process, 256)
    t, eps, length = te.t.double(), te.eps.double(), te.more["length"].double()
    te, action = TE(t, eps, more={"length": length}), torch.rand(256, 3, 2, generator=seeded(4)).double()
    loss = process.losses(average_velocity, action, te)
    is_step = length > 0
    torch.testing.assert_close(loss[is_step], torch.zeros_like(loss[is_step]), rtol=0, atol=1e-20)
    flow = RectifiedFlow().losses(average_velocity, action, te)
    torch.testing.assert_close(loss[~is_step], flow[~is_step])


def test_targets_come_from_two_halves_and_carry_no_gradient() -> None:
    policy = small_policy(Shortcut(max_steps=4, time_scale=3.0)).double()
    assert isinstance(policy, DenoisingPolicy)
    action = torch.rand(2, *policy.chunk.shape, generator=seeded(4)).double()
    cond, te = policy.encode({"state": observations(2).double()}), policy.sample_te(2, generator=seeded(5))
    te = dataclasses.replace(
        te, t=torch.tensor([0.6, 0.6]).double(), more={"length": torch.tensor([0.5, 0.0]).double()}
    )
    net, half = policy.evaluate(cond), torch.full((2,), 0.25).double()
    x = policy.process.corrupt(action, te.eps, 2 * half)
    first = net(x, 2 * half, 3 * half)
    second = net(x + 0.25 * first, 3 * half, 4 * half)
    target = ((first + second) / 2).detach()
    by_hand = (net(x, 2 * half, 4 * half) - target).square()[0]
    loss = policy.matching_loss(cond, action, te, reduce="none")[0]
    torch.testing.assert_close(loss, by_hand)
    weights = list(policy.field.parameters())
    ours, theirs = (torch.autograd.grad(value.sum(), weights) for value in (loss, by_hand))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_prediction_at_a_time_is_that_of_the_finest_step() -> None:
    process = Shortcut(max_steps=8)
    policy = small_policy(process, Euler(steps=8))
    assert isinstance(policy, DenoisingPolicy)
    cond, noise = policy.encode({"state": observations(2)}), policy.sample_noise(2, generator=seeded())
    velocity = policy.predict(noise, torch.zeros(2), cond, kind="velocity")
    torch.testing.assert_close(policy.bind(cond)(0, noise), velocity)
    assert policy.table.second_time is not None and not bool(policy.table.second_time.any())


@pytest.mark.skipif(not everything, reason="with --all: without it other maps learn")
def test_many_steps_land_on_both_modes_and_few_on_more_than_a_flow_s() -> None:
    policy = trained(Shortcut(max_steps=8), iterations=600)
    one, two, eight = (score(policy, Euler(steps=steps, clip_action=None)) for steps in (1, 2, 8))
    assert eight[0] >= 0.75 and 0.35 <= eight[1] <= 0.65
    assert one[0] >= 0.05 and two[0] >= 0.4  # a flow: 0 and 0.22


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", ["auto", "uniform"])
@pytest.mark.parametrize("steps", [3, 10, 32])
def test_steps_that_were_not_learned_are_refused(grid: str, steps: int) -> None:
    with pytest.raises(ConfigError, match=r"1, 2, 4, 8, 16 of them.*sampler.steps"):
        Euler(steps=steps, grid=grid).table(Shortcut())


@pytest.mark.parametrize("grid", ["karras", "exponential", "linear"])
def test_uneven_grids_are_refused(grid: str) -> None:
    with pytest.raises(ConfigError, match=r"even steps.*sampler.grid=auto"):
        Euler(steps=4, grid=grid, noise_max=10.0, noise_min=0.1).table(Shortcut())


def test_steps_of_any_learned_length_may_follow_each_other() -> None:
    Shortcut(max_steps=8).check_steps([0.0, 0.5, 0.5, 0.75, 0.875, 1.0])
    for times in ([0.25, 0.75, 1.0], [0.0, 1 / 16], [0.1, 0.225], [0.0, 0.3, 1.0]):
        with pytest.raises(ConfigError, match="got a step from"):
            Shortcut(max_steps=8).check_steps(times)


def test_steps_are_a_power_of_two() -> None:
    with pytest.raises(ConfigError, match="max_steps must be a power of two; got 20"):
        Shortcut(max_steps=20)
