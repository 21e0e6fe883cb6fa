"""A residual network in C equals plain operations, and leaves them what it cannot read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from policies.networks import native
from policies.networks.residual import FirstLayer, ResidualBlock

WIDTH, OUT, INPUTS = 24, 5, 7

pytestmark = pytest.mark.skipif(native.library() is None, reason="no program in C")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(
    rows: int,
    tables: int,
    activation: str = "relu",
    *,
    dtype: torch.dtype = torch.float32,
    learns: bool = True,
) -> tuple[FirstLayer, ResidualBlock, list[Tensor]]:
    """Return the parts of z with 0, 1 or 2 shared tables, a block, and all tensors with gradients."""
    generator = torch.Generator().manual_seed(rows + tables)

    def drawn(*shape: int, size: float = 1.0) -> Tensor:
        value = torch.randn(*shape, generator=generator, dtype=torch.float64) * size
        return value.to(dtype).requires_grad_(learns)

    width = WIDTH + OUT
    x, weight = drawn(rows, INPUTS), drawn(width, INPUTS + 3, size=INPUTS**-0.5)
    first = FirstLayer(x, weight[:, 1 : 1 + INPUTS], ((drawn(1, width), None),))
    if tables:
        sizes = (4, max(1, rows // 3))[:tables]
        index = [torch.randint(size, (rows,), generator=generator) for size in sizes]
        first = first._replace(
            tables=tuple((drawn(size, width), row) for size, row in zip(sizes, index, strict=True))
        )
    parts = drawn(WIDTH, WIDTH, size=WIDTH**-0.5), drawn(WIDTH), drawn(OUT, WIDTH, size=WIDTH**-0.5)
    shared = [table for table, _ in first.tables]
    return first, ResidualBlock(*parts, activation), [x, weight, *shared, *parts]


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("tables", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 9, 256, 600])
def test_values_and_gradients_are_those_of_plain_operations(rows: int, tables: int, activation: str) -> None:
    first, block, leaves = network(rows, tables, activation)
    exact_first, exact_block, exact = network(rows, tables, activation, dtype=torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(leaves, exact, strict=True):
            theirs.copy_(mine)
    y, expected = block(first), exact_block.plain(exact_first)
    assert y is not None
    with torch.no_grad():
        without_graph = block(first)
    assert without_graph is not None and torch.equal(y, without_graph)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad(y, leaves, slope.float())
    for mine, theirs in zip(found, torch.autograd.grad(expected, exact, slope), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def summed(block: ResidualBlock, first: FirstLayer) -> Tensor:
    y = block(first)
    assert y is not None
    return y.sum()


def test_gradients_of_some_parts_are_those_of_all() -> None:
    first, block, leaves = network(300, 2)
    every = torch.autograd.grad(summed(block, first), leaves)
    for wanted in ([0], [1], [2, 3], [4, 5, 6], [0, 6]):
        frozen_first, frozen, parts = network(300, 2, learns=False)
        for place in wanted:
            parts[place].requires_grad_()
        frozen_first = frozen_first._replace(weight=parts[1][:, 1 : 1 + INPUTS])
        found = torch.autograd.grad(summed(frozen, frozen_first), [parts[place] for place in wanted])
        torch.testing.assert_close(found, tuple(every[place] for place in wanted), rtol=1e-4, atol=1e-4)


def test_gradients_can_be_differentiated_again() -> None:
    first, block, leaves = network(40, 2, "tanh")

    def second(y: Tensor) -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad(y.square().sum(), leaves[:1], create_graph=True)
        return torch.autograd.grad(slope.square().sum(), leaves)

    y = block(first)
    assert y is not None
    for mine, theirs in zip(second(y), second(block.plain(first)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_what_changes_before_the_gradients_is_noticed() -> None:
    first, block, leaves = network(9, 1)
    y, row = summed(block, first), first.tables[0][1]
    assert row is not None
    row.fill_(1000)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, leaves)
    first, block, leaves = network(9, 1)
    y = summed(block, first)
    block.weight.data = torch.zeros(1, 1)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(y, leaves)


def test_saved_tensors_of_another_layout_give_the_same_gradients() -> None:
    first, block, leaves = network(9, 1)
    expected = torch.autograd.grad(summed(block, first), leaves)

    def turned(part: Tensor) -> Tensor:
        return part.t().contiguous() if part.ndim == 2 else part

    with torch.autograd.graph.saved_tensors_hooks(turned, lambda part: part.t() if part.ndim == 2 else part):
        y = summed(block, first)
    torch.testing.assert_close(torch.autograd.grad(y, leaves), expected, rtol=1e-4, atol=1e-4)


def test_gradients_under_autocast_are_those_of_full_precision() -> None:
    first, block, leaves = network(300, 2)
    y = summed(block, first)
    expected = torch.autograd.grad(y, leaves, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(y, leaves)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_activations_are_released_with_the_graph() -> None:
    first, block, leaves = network(600, 1)
    y = block(first)
    assert y is not None and y.grad_fn is not None
    torch.autograd.grad(y.sum(), leaves)
    with pytest.raises(RuntimeError, match="second time"):
        _ = y.grad_fn.saved_tensors  # type: ignore[attr-defined]


@pytest.mark.parametrize("row", [-1, 4])
@pytest.mark.parametrize("learns", [True, False])
def test_a_row_that_is_in_no_table_is_not_read(row: int, learns: bool) -> None:
    first, block, _ = network(9, 1, learns=learns)
    table, index = first.tables[0]
    assert index is not None
    outside = first._replace(tables=((table, index.index_fill(0, torch.tensor([5]), row)),))
    assert block(outside) is None
    with pytest.raises(IndexError):
        block.plain(outside)


def test_what_does_not_fit_is_left_to_plain_operations() -> None:
    first, block, _ = network(9, 1)
    (table, row), x = first.tables[0], first.inputs
    assert row is not None
    others = [
        first._replace(inputs=x.double()),
        first._replace(inputs=x[:0], tables=((table, row[:0]),)),
        first._replace(inputs=x[:, 1:]),
        first._replace(weight=first.weight.t().contiguous().t()),
        first._replace(tables=((table[:, 1:], row),)),
        first._replace(tables=((table, row[1:]),)),
        first._replace(tables=((table, row.int()),)),
        first._replace(tables=((table, None),)),
        first._replace(tables=((table, row),) * 3),
        first._replace(tables=((table[:1], None), (table, row))),
        first._replace(inputs=x[:, :0], weight=first.weight[:, :0]),
        first._replace(inputs=torch._neg_view(x)),
    ]
    assert all(block(other) is None for other in others)
    assert block._replace(activation="mish")(first) is None
    assert block._replace(bias=block.bias[1:])(first) is None
    assert block._replace(weight=block.weight[1:])(first) is None
    torch.set_num_threads(2)
    assert block(first) is None
