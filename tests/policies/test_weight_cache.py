"""A cache of folded weights is never stale and never shows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from policies.networks.weight_cache import WeightCache, forget, seal


class Sum(nn.Module):
    """The smallest owner of a cache: remembers the sum of its weights and counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.cache: WeightCache[torch.Tensor] = WeightCache()
        self.computed = 0

    def fresh(self) -> torch.Tensor:
        return self.linear.weight.double().sum() + self.linear.bias.double().sum()

    def forward(self) -> torch.Tensor:
        def compute() -> torch.Tensor:
            self.computed += 1
            return self.fresh()

        return self.cache.get((self.linear.weight, self.linear.bias), compute)


def _step(optimizer: type[torch.optim.Optimizer], **options: bool) -> Callable[[Sum], None]:
    def change(module: Sum) -> None:
        for weight in module.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer(module.parameters(), lr=0.1, **options).step()

    return change


def _load(*, assign: bool) -> Callable[[Sum], None]:
    def change(module: Sum) -> None:
        module.load_state_dict(Sum().state_dict(), assign=assign)

    return change


def _write_through_an_alias(module: Sum) -> None:
    module.linear.weight.detach().fill_(1.0)


def _under_inference(module: Sum) -> None:
    with torch.inference_mode():
        module.linear.weight.add_(1.0)


@torch.no_grad()
def _foreach_lerp(module: Sum) -> None:
    weights = list(module.parameters())
    torch._foreach_lerp_(weights, [torch.ones_like(w) for w in weights], 0.5)


def _swap_data(module: Sum) -> None:
    module.linear.weight.data, module.linear.bias.data = torch.ones(3, 3), torch.ones(3)


def _lossy_round_trip(module: Sum) -> None:
    module.to(torch.bfloat16).to(torch.float32)


def _replace(module: Sum) -> None:
    module.linear.weight = nn.Parameter(torch.ones(3, 3))


def _reuse_address(module: Sum) -> None:
    module.linear.weight.data = torch.zeros(0)
    module.linear.weight.data = torch.ones(3, 3)


CHANGES: dict[str, Callable[[Sum], None]] = {
    **{
        f"{optimizer.__name__}-{name}": _step(optimizer, **options)
        for optimizer in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
        for name, options in {
            "fused": {"fused": True},
            "foreach": {"foreach": True},
            "single": {"foreach": False},
        }.items()
    },
    "load_state_dict": _load(assign=False),
    "load_state_dict-assign": _load(assign=True),
    "write-through-an-alias": _write_through_an_alias,
    "inference-mode": _under_inference,
    "foreach-lerp": _foreach_lerp,
    "swap-data": _swap_data,
    "lossy-round-trip": _lossy_round_trip,
    "replace": _replace,
    "reuse-address": _reuse_address,
    "vector-to-parameters": lambda m: nn.utils.vector_to_parameters(torch.ones(12), m.parameters()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_weight_invalidates(change: Callable[[Sum], None]) -> None:
    module = Sum()
    with torch.no_grad():
        before = module()
    change(module)
    with torch.no_grad():
        after, fresh = module(), module.fresh()
    assert torch.equal(after, fresh)
    assert not torch.equal(after, before)


def test_unchanged_weights_are_computed_once() -> None:
    module = Sum()
    with torch.no_grad():
        values = [module() for _ in range(3)]
    assert module.computed == 1
    assert values[0] is values[2]


def test_steps_on_other_weights_change_nothing_here() -> None:
    module, other = Sum(), Sum()
    with torch.no_grad():
        module()
        _step(torch.optim.Adam, fused=True)(other)
        module()
    assert module.computed == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_steps_on_the_same_storage_are_seen(frozen: bool) -> None:
    module, twin = Sum(), Sum()
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        theirs.data = mine.data
    module.requires_grad_(not frozen)
    with torch.no_grad():
        before = module()
        _step(torch.optim.Adam, fused=True)(twin)
        assert torch.equal(module(), module.fresh()) and not torch.equal(module(), before)


def test_gradients_are_never_cut_by_the_cache() -> None:
    module = Sum()
    with torch.no_grad():
        module()
    module().backward()
    torch.testing.assert_close(module.linear.weight.grad, torch.ones(3, 3))


def test_frozen_weights_are_remembered_under_grad() -> None:
    module = Sum().requires_grad_(False)
    module(), module()
    assert module.computed == 1


def test_a_value_made_in_inference_mode_serves_autograd_later() -> None:
    module = Sum().requires_grad_(False)
    with torch.inference_mode():
        module()
    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    (x * module()).backward()
    assert module.computed == 1
    torch.testing.assert_close(x.grad, module.fresh())


def test_autocast_does_not_leak_into_a_remembered_value() -> None:
    weight, cache = torch.randn(4, 4), WeightCache[torch.Tensor]()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        value = cache.get((weight,), lambda: weight @ weight)
    assert value.dtype == torch.float32


def test_copies_and_pickles_start_empty() -> None:
    module = Sum()
    with torch.no_grad():
        module()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.cache._entry is None
        with torch.no_grad():
            twin.linear.weight.add_(1.0)
            assert torch.equal(twin(), twin.fresh())
    assert set(module.state_dict()) == {"linear.weight", "linear.bias"}


def test_forget_empties_the_caches_below_a_module() -> None:
    module = Sum()
    with torch.no_grad():
        module()
        module.linear.weight.data.add_(1.0)  # not reported by PyTorch
        forget(nn.Sequential(module))
        assert torch.equal(module(), module.fresh())


def test_a_sealed_value_is_returned_unchecked_and_a_copy_is_open() -> None:
    module = Sum()
    with torch.no_grad():
        before = module()
        seal(module)
        module.linear.weight.add_(1.0)
        assert module() is before and module.computed == 1
        assert copy.deepcopy(module)() == module.fresh()


def test_sealing_before_the_first_value_still_computes_it() -> None:
    module = Sum()
    seal(module)
    assert module() == module.fresh() and module.computed == 1


def test_nothing_is_remembered_inside_a_functional_transform() -> None:
    """Values in there are wrapped and die with the call: the next use would fail."""
    module, x = Sum(), torch.ones(2, dtype=torch.float64)
    with torch.no_grad():
        _, change = torch.func.jvp(lambda x: x * module(), (x,), (x,))
        assert torch.equal(change, module().expand(2))
        assert module.computed == 2
        torch.func.vmap(lambda x: x * module())(x)
        assert module.computed == 3


def test_functional_call_sees_its_own_weights() -> None:
    module = Sum()
    with torch.no_grad():
        module()
        ones = {name: torch.ones_like(weight) for name, weight in module.named_parameters()}
        assert torch.func.functional_call(module, ones, ()).item() == 12
        assert torch.equal(module(), module.fresh())


class _Interrupted(tuple[torch.Tensor, ...]):
    """Sources at whose n-th reading something else happens, as if another thread had been scheduled."""

    countdown = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.countdown -= 1
        if self.countdown == 0:
            self.meanwhile()
        return super().__iter__()

    def meanwhile(self) -> None:
        raise AssertionError("to be replaced")


@pytest.mark.parametrize("reading", [1, 2, 3, 4])
def test_a_use_with_other_sources_at_any_moment_never_shows(reading: int) -> None:
    cache: WeightCache[str] = WeightCache()
    mine, others = (torch.zeros(2),), (torch.ones(2),)
    cache.get(mine, lambda: "mine")
    sources = _Interrupted(mine)
    sources.countdown = reading
    sources.meanwhile = lambda: cache.get(others, lambda: "others")  # type: ignore[method-assign]
    assert cache.get(sources, lambda: "mine") == "mine"
    assert cache.get(mine, lambda: "mine") == "mine"
    assert cache.get(others, lambda: "others") == "others"
