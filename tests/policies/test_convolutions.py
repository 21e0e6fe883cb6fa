"""Convolutions over rows are those of PyTorch, with less to read and nothing to bring into another order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from policies.networks.convolutions import Rows, doubling, group_norm, halving, pointwise, same

ROWS = (1, 2, 3, 4, 5, 8)


def draw(rows: int, channels: int = 6, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(batch, rows, channels, generator=generator, dtype=torch.float64)


def assert_equal_with_gradients(ours: Rows, stock: nn.Module, x: Tensor) -> None:
    """Compare a function of rows with a module of channels first, and the gradients of weights and input."""
    x.requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(ours(x), stock(x.transpose(1, 2)).transpose(1, 2))
    results = []
    for out in (ours(x), stock(x.transpose(1, 2)).transpose(1, 2)):
        weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
        results.append((out, *torch.autograd.grad((out * weight).sum(), [x, *stock.parameters()])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_same_equals_the_stock_convolution(rows: int, kernel: int) -> None:
    conv = nn.Conv1d(6, 4, kernel, padding=kernel // 2).double()
    assert_equal_with_gradients(same(conv, rows), conv, draw(rows))


@pytest.mark.parametrize("rows", [2, 4, 6, 8])
def test_halving_equals_the_stock_convolution(rows: int) -> None:
    conv = nn.Conv1d(6, 6, 3, stride=2, padding=1).double()
    assert_equal_with_gradients(halving(conv, rows), conv, draw(rows))


@pytest.mark.parametrize("rows", ROWS)
def test_doubling_equals_the_stock_transposed_convolution(rows: int) -> None:
    conv = nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1).double()
    assert_equal_with_gradients(doubling(conv, rows), conv, draw(rows))


def test_pointwise_equals_the_stock_convolution() -> None:
    conv = nn.Conv1d(6, 4, 1).double()
    assert_equal_with_gradients(pointwise(conv), conv, draw(5))


@pytest.mark.parametrize("rows", ROWS)
def test_group_norm_equals_the_stock_one(rows: int) -> None:
    norm = nn.GroupNorm(3, 6, eps=1e-4).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 1.5)
    assert_equal_with_gradients(group_norm(norm), norm, draw(rows))


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


def test_a_convolution_has_every_derivative() -> None:
    """Energies differentiate twice, mean flows forwards, several seeds through `vmap`."""
    convolve = same(nn.Conv1d(2, 2, 3, padding=1).double().requires_grad_(False), 4)
    x = draw(4, channels=2, batch=2).requires_grad_()
    assert torch.autograd.gradcheck(convolve, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: convolve(x).square(), (x,))
    both = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.func.vmap(convolve)(both), torch.stack(list(map(convolve, both))))
