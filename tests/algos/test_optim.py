"""Laws of schedules and averaged weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import mentions
from torch import nn

from algos.optim import (
    DelayedDecay,
    Ema,
    PowerDecay,
    check_schedule,
    clipped,
    descend,
    regress,
    restore_optimizer,
    take_step,
    warmup_cosine,
    weights_of,
)
from policies.errors import ConfigError
from policies.networks.critics import EnsembleConfig


@given(st.integers(0, 500), st.integers(0, 20), st.integers(21, 200), st.floats(0.01, 1.0), st.floats(0, 1))
def test_schedule_stays_between_its_limits(
    step: int, warmup: int, cycle: int, lr: float, share: float
) -> None:
    rate = warmup_cosine(step, lr=lr, min_lr=share * lr, warmup=warmup, cycle=cycle)
    assert share * lr - 1e-12 <= rate <= lr + 1e-12


def test_schedule_peaks_after_the_warmup_and_restarts() -> None:
    def rate(step: int) -> float:
        return warmup_cosine(step, lr=1.0, min_lr=0.1, warmup=4, cycle=20)

    assert rate(0) == 0.1
    assert rate(4) == 1.0
    assert rate(24) == rate(4)
    assert rate(12) == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 2e-5, "min_lr": 1e-4, "warmup": 0, "cycle": 10}, "actor_min_lr"),
        ({"lr": 0.0, "min_lr": 0.0, "warmup": 0, "cycle": 10}, "actor_lr actor_min_lr 0"),
        ({"lr": 1.0, "min_lr": 0.0, "warmup": 10, "cycle": 10}, "actor_lr_warmup"),
    ],
)
def test_schedule_that_cannot_be_meant_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        check_schedule("actor", **values)  # type: ignore[arg-type]


def test_a_restored_optimizer_keeps_its_moments_and_takes_what_is_configured_now() -> None:
    weight = nn.Parameter(torch.ones(3))
    first = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.tensor([1.0, 2.0, 3.0])
    first.step()
    second = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.3, betas=(0.8, 0.9))
    restore_optimizer(second, first.state_dict())
    assert torch.equal(second.state[weight]["exp_avg"], first.state[weight]["exp_avg"])
    group = second.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.5, 0.3, (0.8, 0.9))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_along_gradients_is_the_optimizers_own_bit_for_bit(
    kind: type[torch.optim.Adam] | type[torch.optim.AdamW],
) -> None:
    g = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=g) for shape in ((3, 4), (4,), (2, 3))]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    groups = ([{"params": side[:2], "lr": 0.3}, {"params": side[2:]}] for side in (ours, theirs))
    mine, plain = (kind(each, lr=0.1, weight_decay=0.2, fused=True) for each in groups)
    for n in range(4):
        grads = [torch.randn(shape, generator=g) for shape in ((4, 3), (), (2, 3))]
        laid = [grads[0].t(), grads[1].expand(4), None if n == 2 else grads[2]]
        take_step(mine, laid)
        for weight, grad in zip(theirs, laid, strict=True):
            weight.grad = None if grad is None else grad.contiguous()
        plain.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(mine.state[a][name], value) for name, value in plain.state[b].items())
    assert all(weight.grad is None for weight in ours)


def test_a_step_takes_numbers_below_the_smallest_normal_one_for_zero_and_nothing_else_does() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    torch.set_flush_denormal(False)
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.Adam([weight], fused=True)
    take_step(optimizer, [torch.zeros(64)])
    for mean in (1e-40, 1e-30):
        optimizer.state[weight]["exp_avg"].fill_(mean)
        take_step(optimizer, [torch.zeros(64)])
        found = optimizer.state[weight]["exp_avg"]
        assert torch.equal(found, torch.zeros(64)) if mean < 1e-38 else found.gt(0).all()
    assert (torch.full((64,), 1e-40) * 0.5).gt(0).all()


@pytest.mark.parametrize(
    "config", [{}, {"layer_norm": True}, {"activation": "gelu"}, {"members": 1}], ids=str
)
@pytest.mark.parametrize("has_encoder", [False, True])
def test_a_regression_is_a_step_on_its_loss(config: dict[str, Any], has_encoder: bool) -> None:
    torch.manual_seed(0)
    cond, action, target = torch.randn(32, 5), torch.randn(32, 2), torch.randn(32)
    critic = EnsembleConfig(hidden_dims=(16, 16), **config).build(4, 2)
    parts = nn.ModuleList([critic, nn.Linear(5, 4)])
    found = []
    for is_closed in (True, False):
        ours, encoder = copy.deepcopy(parts)
        weights = [*ours.parameters(), *(encoder.parameters() if has_encoder else ())]
        optimizer = torch.optim.Adam(weights, lr=0.1, fused=True)
        for _ in range(2):
            state = encoder(cond) if has_encoder else encoder(cond).detach()
            if is_closed:
                evaluation = ours.evaluate(state, action, weights_of(optimizer))
                loss = regress(optimizer, evaluation, target, weight=0.3)
            else:
                error = ours(state, action) - target
                loss = descend(optimizer, 0.3 * error.square().mean(dim=1).sum())
        found.append([loss, *(optimizer.state[weight]["exp_avg"] for weight in weights)])
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


def test_a_slope_of_another_type_and_weights_that_do_not_learn() -> None:
    critic, cond = EnsembleConfig(hidden_dims=(8,)).build(3, 0), torch.randn(4, 3)
    weights, slope = list(critic.parameters()), torch.randn(2, 4)
    found = [critic.evaluate(cond, None, weights).gradients(each) for each in (slope, slope.double())]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    weights[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="require grad"):
        critic.evaluate(cond, None, weights).gradients(slope)


def test_hooks_see_the_values_of_a_regression() -> None:
    critic, seen = EnsembleConfig(hidden_dims=(8,)).build(3, 1), []
    critic.register_forward_hook(lambda net, given, found: seen.append(found.detach()))
    found = critic.evaluate(torch.randn(4, 3), torch.randn(4, 1), list(critic.parameters()))
    assert torch.equal(found.values, seen[0])


@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_gradients_are_clipped_as_pytorch_clips_them(limit: float) -> None:
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    grads = [torch.tensor([1.0, -2.0, 3.0]), torch.full((2, 2), 0.5)]
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad.clone()
    nn.utils.clip_grad_norm_(weights, limit)
    assert all(torch.equal(a, w.grad) for a, w in zip(clipped(grads, limit), weights, strict=True))
    assert clipped(grads, None) is grads


def test_power_decay_follows_its_formula() -> None:
    rule = PowerDecay(power=0.75, max_value=0.9)
    assert [rule.decay(n) for n in (0, 1)] == [0.0, 0.0]
    assert rule.decay(2) == pytest.approx(1 - 2**-0.75)
    assert rule.decay(10_000) == 0.9


def test_ema_equals_the_closed_form_and_resumes() -> None:
    g = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    rows = torch.randn(6, 1, 2, generator=g)
    ema, other = Ema(net, DelayedDecay(value=0.5, start=2, every=1)), None
    for n, row in enumerate(rows):
        with torch.no_grad():
            net[0].weight.copy_(row)
            net[1].running_mean.fill_(n)
        if n == 4:
            other = Ema(net, DelayedDecay(value=0.5, start=2, every=1))
            other.load_state_dict(ema.state_dict())
        ema.update(net)
        if other is not None:
            other.update(net)
    expected = rows[1]
    for row in rows[2:]:
        expected = 0.5 * expected + 0.5 * row
    torch.testing.assert_close(ema.module[0].weight, expected)
    assert other is not None
    assert torch.equal(other.module[0].weight, ema.module[0].weight)
    assert ema.module[1].running_mean.item() == 5.0
    assert not any(p.requires_grad for p in ema.module.parameters())


def test_the_bounds_of_an_ema_rule_are_in_order() -> None:
    with pytest.raises(ConfigError, match=r"ema\.min_value must be"):
        PowerDecay(min_value=0.9, max_value=0.5)
