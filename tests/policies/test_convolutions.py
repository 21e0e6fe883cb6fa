"""Convolutions over rows are those of PyTorch, with less to read and nothing to bring into another order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from policies.networks import native
from policies.networks.convolutions import Rows, doubling, group_norm, halving, pointwise, same

ROWS = (1, 2, 3, 4, 5, 8)


@pytest.fixture(params=["float64", "float32", "many in float32"])
def kind(request: pytest.FixtureRequest) -> tuple[torch.dtype, int]:
    """Plain operations, and the program in C for small and large batches: type and batch size."""
    if request.param != "float64" and native.unavailable() is not None:
        pytest.skip(f"plain operations: {native.unavailable()}")
    return (
        torch.float64 if request.param == "float64" else torch.float32,
        50 if "many" in request.param else 3,
    )


def draw(rows: int, channels: int = 6, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(batch, rows, channels, generator=generator, dtype=torch.float64)


def assert_equal_with_gradients(
    ours: Callable[[Any], Rows], stock: Any, rows: int, kind: tuple[torch.dtype, int]
) -> None:
    """Compare a function of rows with a module of channels first, and the gradients of weights and input."""
    dtype, batch = kind
    convolve, x = ours(stock.to(dtype)), draw(rows, batch=batch).to(dtype).requires_grad_()
    close = partial(
        torch.testing.assert_close, **{"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    )
    with torch.no_grad():
        close(convolve(x), stock(x.transpose(1, 2)).transpose(1, 2))
    results = []
    for out in (convolve(x), stock(x.transpose(1, 2)).transpose(1, 2)):
        weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
        results.append((out, *torch.autograd.grad((out * weight).sum(), [x, *stock.parameters()])))
    for one, other in zip(*results, strict=True):
        close(one, other)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_same_equals_the_stock_convolution(rows: int, kernel: int, kind: tuple[torch.dtype, int]) -> None:
    conv = nn.Conv1d(6, 4, kernel, padding=kernel // 2)
    assert_equal_with_gradients(lambda conv: same(conv, rows), conv, rows, kind)


@pytest.mark.parametrize("rows", [2, 4, 6, 8])
def test_halving_equals_the_stock_convolution(rows: int, kind: tuple[torch.dtype, int]) -> None:
    conv = nn.Conv1d(6, 6, 3, stride=2, padding=1)
    assert_equal_with_gradients(lambda conv: halving(conv, rows), conv, rows, kind)


@pytest.mark.parametrize("rows", ROWS)
def test_doubling_equals_the_stock_transposed_convolution(rows: int, kind: tuple[torch.dtype, int]) -> None:
    conv = nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1)
    assert_equal_with_gradients(lambda conv: doubling(conv, rows), conv, rows, kind)


def test_pointwise_equals_the_stock_convolution(kind: tuple[torch.dtype, int]) -> None:
    assert_equal_with_gradients(pointwise, nn.Conv1d(6, 4, 1), 5, kind)


@pytest.mark.parametrize("rows", ROWS)
def test_group_norm_equals_the_stock_one(rows: int) -> None:
    norm = nn.GroupNorm(3, 6, eps=1e-4)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 1.5)
    assert_equal_with_gradients(group_norm, norm, rows, (torch.float64, 3))


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (2, 1), (3, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize(("channels", "kernel"), [(519, 1), (301, 3), (112, 5)])
def test_few_rows_times_large_weights(rows: int, batch: int, channels: int, kernel: int) -> None:
    """Of widths that no vector of the processor divides."""
    conv, x = nn.Conv1d(channels, 513, kernel, padding=kernel // 2), draw(rows, channels, batch)
    with torch.no_grad():
        found, expected = same(conv, rows)(x.float()), conv.double()(x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_many_weights_and_a_large_batch() -> None:
    conv, x = nn.Conv1d(304, 600, 3, padding=1), draw(3, 304, 50)
    with torch.no_grad():
        found, expected = same(conv, 3)(x.float()), conv.double()(x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [2, 50])
@pytest.mark.parametrize("frozen", ["x", "weight", "both"])
def test_what_is_frozen_gets_no_gradient(frozen: str, batch: int) -> None:
    conv, x = nn.Conv1d(6, 4, 3, padding=1), draw(4, batch=batch).float()
    conv.weight.requires_grad_(frozen == "x")
    x.requires_grad_(frozen == "weight")
    same(conv, 4)(x).sum().backward()
    assert [x.grad is None, conv.weight.grad is None] == [frozen != "weight", frozen != "x"]
    torch.testing.assert_close(conv.bias.grad, torch.full((4,), 4.0 * batch))


def test_what_is_kept_without_gradients_has_none_for_its_weights() -> None:
    """The gradient of x alone costs no gradient of weights, as energies need it at every step."""
    conv, x = nn.Conv1d(6, 4, 3, padding=1), draw(4).float().requires_grad_()
    with torch.no_grad():
        kept = same(conv, 4)
    kept(x).sum().backward()
    assert x.grad is not None and conv.weight.grad is None and conv.bias.grad is None
    (expected,) = torch.autograd.grad(conv(x.transpose(1, 2)).sum(), x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("wrong", ["channels", "type", "bias", "device"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    conv, x = nn.Conv1d(6, 4, 3, padding=1), draw(4, channels=5 if wrong == "channels" else 6)
    if wrong in ("bias", "device"):
        conv.bias = nn.Parameter(torch.zeros(2) if wrong == "bias" else torch.zeros(4, device="meta"))
    with pytest.raises(RuntimeError), torch.no_grad():
        same(conv, 4)(x if wrong == "type" else x.float())


def test_other_kinds_of_weights_are_left_to_plain_operations() -> None:
    conv, x = nn.Conv1d(6, 4, 3, padding=1), draw(4).float()
    expected = same(conv, 4)(x)
    conv.weight = nn.Parameter(TwoTensor(conv.weight.detach(), conv.weight.detach().clone()))
    torch.testing.assert_close(same(conv, 4)(x).a, expected)


def test_a_group_of_one_number_is_normalised_to_the_bias() -> None:
    norm = nn.GroupNorm(6, 6)
    out = group_norm(norm)(draw(1, batch=1).float())
    torch.testing.assert_close(out, torch.zeros_like(out))


def test_weights_that_would_meet_nothing_but_padding_are_not_read() -> None:
    kept, half = nn.Conv1d(6, 4, 5, padding=2).double(), nn.Conv1d(6, 4, 3, stride=2, padding=1).double()
    x = draw(2)
    expected = [conv(x.transpose(1, 2)).transpose(1, 2) for conv in (kept, half)]
    with torch.no_grad():
        kept.weight[:, :, [0, 4]] = torch.nan
        half.weight[:, :, 0] = torch.nan
    torch.testing.assert_close(same(kept, 2)(x), expected[0])
    torch.testing.assert_close(halving(half, 2)(x), expected[1])


def test_an_empty_batch_stays_empty() -> None:
    x = torch.zeros(0, 4, 6)
    with torch.no_grad():
        assert same(nn.Conv1d(6, 4, 3, padding=1), 4)(x).shape == (0, 4, 4)
        assert halving(nn.Conv1d(6, 4, 3, stride=2, padding=1), 4)(x).shape == (0, 2, 4)
        assert doubling(nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1), 4)(x).shape == (0, 8, 4)
        assert group_norm(nn.GroupNorm(2, 6))(x).shape == (0, 4, 6)


@pytest.mark.parametrize("batch", [2, 50])
def test_gradients_of_the_program_in_c_are_differentiated_again(batch: int) -> None:
    conv, x = nn.Conv1d(2, 2, 3, padding=1), draw(4, channels=2, batch=batch)
    found = []
    for dtype in (torch.float32, torch.float64):
        convolve, inputs = same(conv.to(dtype), 4), x.to(dtype).requires_grad_()
        (slope,) = torch.autograd.grad(convolve(convolve(inputs)).square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [inputs, *conv.parameters()]))
    for single, double in zip(*found, strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-4 * float(double.abs().max()))


def test_a_convolution_has_every_derivative() -> None:
    """Energies differentiate twice, mean flows forwards, several seeds through `vmap`."""
    convolve = same(nn.Conv1d(2, 2, 3, padding=1).double().requires_grad_(False), 4)
    x = draw(4, channels=2, batch=2).requires_grad_()
    assert torch.autograd.gradcheck(convolve, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: convolve(x).square(), (x,))
    both = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.func.vmap(convolve)(both), torch.stack(list(map(convolve, both))))


def test_gradients_are_taken_in_batches(kind: tuple[torch.dtype, int]) -> None:
    dtype, batch = kind
    convolve, x = (
        same(nn.Conv1d(6, 2, 3, padding=1).to(dtype), 4),
        draw(4, batch=batch).to(dtype).requires_grad_(),
    )
    out = convolve(x)
    grads = torch.eye(out.numel(), dtype=dtype).view(-1, *out.shape)
    (found,) = torch.autograd.grad(out, x, grads, is_grads_batched=True)
    (whole,) = torch.autograd.grad(convolve(x).sum(), x)
    torch.testing.assert_close(found.sum(dim=0), whole)
