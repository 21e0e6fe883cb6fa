"""A switched field is two networks divided by time, and one network per row."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from messages import mentions
from pairwise import everything
from torch import Tensor, nn

from policies.backbones import switched
from policies.backbones.mlp import MlpConfig
from policies.backbones.switched import SwitchedField
from policies.errors import ConfigError
from policies.networks.weight_cache import without_caches
from policies.protocols import BoundField, Cond

SWITCH, STEPS = 3.0, 7


class Counting(nn.Module):
    """Wraps a backbone and counts the rows it evaluates."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.rows = 0

    def forward(self, x: Tensor, *arguments: Tensor, **named: Tensor) -> Tensor:
        self.rows += x.shape[0]
        return self.net(x, *arguments, **named)

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundField:
        inner = self.net.bind(cond, times, second_times)

        def bound(k: int, x: Tensor) -> Tensor:
            self.rows += x.shape[0]
            return inner(k, x)

        return bound


@pytest.fixture
def field() -> SwitchedField:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base, tuned = (MlpConfig(width=8, time_dim=4).build((2, 3), 5) for _ in range(2))
    return SwitchedField(Counting(base), Counting(tuned), SWITCH)


def inputs(n: int) -> tuple[Tensor, Cond]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 2, 3, generator=generator), Cond(torch.randn(n, 5, generator=generator))


def expected(field: SwitchedField, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
    tuned, base = field.tuned.net(x, time, cond), field.base.net(x, time, cond)
    return torch.where((time < SWITCH)[:, None, None], tuned, base)


def test_each_row_sees_the_network_of_its_time_once(field: SwitchedField) -> None:
    x, cond = inputs(STEPS)
    time = torch.arange(STEPS).float().flip(0)
    torch.testing.assert_close(field(x, time, cond), expected(field, x, time, cond))
    assert (field.tuned.rows, field.base.rows) == (3, STEPS - 3)


def test_where_times_rise_towards_the_action_the_other_side_is_tuned(field: SwitchedField) -> None:
    above = SwitchedField(field.base.net, field.tuned.net, SWITCH, tuned_above=True)
    (x, cond), times = inputs(STEPS), torch.arange(float(STEPS))
    tuned, base = (net(x, times, cond) for net in (above.tuned, above.base))
    wanted = torch.where((times >= SWITCH)[:, None, None], tuned, base)
    torch.testing.assert_close(above(x, times, cond), wanted)
    bound = above.bind(cond, times)
    rows = torch.stack([bound(k, x)[k] for k in range(STEPS)])
    torch.testing.assert_close(rows, wanted)


@pytest.mark.parametrize(("time", "rows"), [(0.0, (4, 0)), (2.0, (4, 0)), (3.0, (0, 4)), (6.0, (0, 4))])
def test_rows_on_one_side_run_one_network(field: SwitchedField, time: float, rows: tuple[int, int]) -> None:
    x, cond = inputs(4)
    times = torch.full((4,), time)
    torch.testing.assert_close(field(x, times, cond), expected(field, x, times, cond))
    assert (field.tuned.rows, field.base.rows) == rows


def test_shared_rows_equal_repeated_rows(field: SwitchedField) -> None:
    x, cond = inputs(8)
    few, row = Cond(cond.vec[:3]), torch.tensor([0, 1, 2, 2, 1, 0, 0, 1])
    times, step = torch.arange(STEPS).float(), torch.tensor([6, 0, 3, 2, 5, 1, 1, 4])
    ours = field(x, times, few, cond_row=row, time_row=step)
    torch.testing.assert_close(ours, expected(field, x, times[step], few.rows(row)))


def test_bind_equals_forward_and_runs_one_network_per_step(field: SwitchedField) -> None:
    x, cond = inputs(2)
    times = torch.tensor([6.0, 1.0, 5.0, 0.0, 3.0])  # any order
    with torch.no_grad():
        bound = field.bind(cond, times)
        for k, time in enumerate(times):
            torch.testing.assert_close(bound(k, x), expected(field, x, time.expand(2), cond))
    assert (field.tuned.rows, field.base.rows) == (4, 6)


def test_kernels_that_are_recorded_do_not_read_the_times(
    field: SwitchedField, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x, cond), times = inputs(3), torch.linspace(6.0, 0.0, STEPS)
    with torch.no_grad():
        before = field.bind(cond, times)(2, x)
        monkeypatch.setattr(switched, "_Split", lambda *_: pytest.fail("the times were read"))
        with without_caches():
            assert torch.equal(field.bind(cond, times)(2, x), before)


def test_times_that_recorded_kernels_read_outlive_those_of_another_sampler(field: SwitchedField) -> None:
    (_, cond), times = inputs(3), torch.linspace(6.0, 0.0, STEPS)
    with torch.no_grad():
        field.bind(cond, times)
        with without_caches() as tables:
            field.bind(cond, times)
        read = weakref.ref(field._split(times, None))
        field.bind(cond, times.flip(0))
        assert read() is not None and read() in tables
        tables.clear()
        assert read() is None


@pytest.mark.parametrize("times", [[0.0, 1.0], [5.0, 4.0]])
def test_bind_works_when_all_steps_are_on_one_side(field: SwitchedField, times: list[float]) -> None:
    x, cond = inputs(2)
    out = field.bind(cond, torch.tensor(times))(1, x)
    torch.testing.assert_close(out, expected(field, x, torch.full((2,), times[1]), cond))


def test_a_second_time_reaches_the_network_of_its_row() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base, tuned = (MlpConfig(width=8, time_dim=4).build((2, 3), 5, second_time=True) for _ in range(2))
    field, (x, cond) = SwitchedField(base, tuned, SWITCH), inputs(STEPS)
    times, seconds = torch.tensor([6.0, 1.0, 5.0, 0.0, 3.0, 2.0, 4.0]), torch.arange(STEPS) / 2.0
    rows = {
        "base": base(x, times, cond, second_time=seconds),
        "tuned": tuned(x, times, cond, second_time=seconds),
    }
    wanted = torch.where((times < SWITCH)[:, None, None], rows["tuned"], rows["base"])
    torch.testing.assert_close(field(x, times, cond, second_time=seconds), wanted)
    row = torch.arange(STEPS)
    torch.testing.assert_close(field(x, times, cond, time_row=row, second_time=seconds), wanted)
    with torch.no_grad():
        bound = field.bind(cond, times, seconds)
        for k in range(STEPS):
            torch.testing.assert_close(bound(k, x)[k], wanted[k])


def test_gradients_reach_the_tuned_network_only(field: SwitchedField) -> None:
    x, cond = inputs(STEPS)
    field(x, torch.arange(STEPS).float(), cond).square().sum().backward()
    assert all(weight.grad is None and not weight.requires_grad for weight in field.base.parameters())
    assert all(weight.grad is not None for weight in field.tuned.parameters())


def test_bound_steps_follow_the_tuned_weights(field: SwitchedField) -> None:
    x, cond = inputs(2)
    times = torch.arange(STEPS).float()
    with torch.no_grad():
        before = field.bind(cond, times)
        before = [before(k, x) for k in range(STEPS)]
        field.tuned.net.trunk.outlet.bias.add_(1.0)
        bound = field.bind(cond, times)
        for k in range(STEPS):
            torch.testing.assert_close(bound(k, x), before[k] + (1.0 if k < SWITCH else 0.0))


def test_a_copy_is_independent(field: SwitchedField) -> None:
    x, cond = inputs(2)
    times = torch.arange(STEPS).float()
    with torch.no_grad():
        out = field.bind(cond, times)(0, x)
        twin = copy.deepcopy(field)
        twin.tuned.net.trunk.outlet.bias.add_(1.0)
        torch.testing.assert_close(twin.bind(cond, times)(0, x), out + 1)
        assert torch.equal(field.bind(cond, times)(0, x), out)


def test_networks_that_share_weights_are_refused() -> None:
    net = MlpConfig(width=8, time_dim=4).build((2, 3), 5)
    with pytest.raises(ConfigError, match=mentions("SwitchedField networks")):
        SwitchedField(net, net, SWITCH)


@pytest.mark.skipif(not everything, reason="with --all: without it the contracts compile two networks")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_compiled_without_a_graph_break_equals_eager(field: SwitchedField) -> None:
    x, cond = inputs(STEPS)
    time = torch.arange(STEPS).float()
    field = SwitchedField(field.base.net, field.tuned.net, SWITCH)

    def run(x: Tensor, vec: Tensor) -> Tensor:
        return field(x, time, Cond(vec))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, cond.vec), run(x, cond.vec))
