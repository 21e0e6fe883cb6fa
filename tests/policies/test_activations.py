"""Mish in its cheap form is Mish."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from policies.errors import ConfigError
from policies.networks.activations import ACTIVATIONS, mish
from policies.networks.mlp_blocks import TrunkConfig

MANY = (64, 128)


def _spread(dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(-100.0, 100.0, MANY[0] * MANY[1], dtype=dtype).view(MANY)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.float64, 2e-14)])
@pytest.mark.parametrize("grad", [False, True])
def test_mish_equals_the_stock_function(dtype: torch.dtype, atol: float, grad: bool) -> None:
    x = _spread(dtype)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(mish(x), F.mish(x), rtol=1e-6, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_mish_has_the_gradient_of_the_stock_function(dtype: torch.dtype, atol: float) -> None:
    x = _spread(dtype).requires_grad_()
    (ours,) = torch.autograd.grad(mish(x).sum(), x)
    (stock,) = torch.autograd.grad(F.mish(x).sum(), x)
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=atol)


def test_mish_can_be_differentiated_twice() -> None:
    x = torch.linspace(-5, 5, MANY[0] * MANY[1], dtype=torch.float64).requires_grad_()
    (first,) = torch.autograd.grad(mish(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    (stock_first,) = torch.autograd.grad(F.mish(x).sum(), x, create_graph=True)
    (stock_second,) = torch.autograd.grad(stock_first.square().sum(), x)
    torch.testing.assert_close(second, stock_second)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_mish_supports_functional_transforms() -> None:
    x = torch.linspace(-5, 5, MANY[0] * MANY[1], dtype=torch.float64).view(MANY)
    tangent = torch.ones_like(x)
    value, derivative = torch.func.jvp(mish, (x,), (tangent,))
    torch.testing.assert_close(value, F.mish(x))
    torch.testing.assert_close(derivative, torch.func.jvp(F.mish, (x,), (tangent,))[1])
    rows = torch.func.vmap(torch.func.grad(lambda row: mish(row).sum()))(x.repeat(1, 40))
    torch.testing.assert_close(
        rows, torch.func.vmap(torch.func.grad(lambda row: F.mish(row).sum()))(x.repeat(1, 40))
    )


def test_mish_leaves_its_argument_alone() -> None:
    x = _spread(torch.float32)
    before = x.clone()
    with torch.no_grad():
        mish(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_both_forms_of_an_activation_agree(name: str) -> None:
    plain, overwriting = ACTIVATIONS[name]
    x = torch.randn(MANY, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(overwriting(x.clone()), plain(x), rtol=0, atol=0)


def test_unknown_activation_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"activation must be .*gelu, .*; got 'swish'"):
        TrunkConfig(activation="swish")
