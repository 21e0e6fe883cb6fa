"""Activation functions by name, and a Mish with a third of the stock cost on a CPU.

Mish(x) = x tanh(softplus(x)). With p = sigmoid(x) and q = p (2 - p) this is x q / (2 - q) exactly, one
cheap transcendental function instead of three; and with t = q / (2 - q) its slope is
t + x p ((1 - p) (1 + t))^2. Both forms are free of overflow and of harmful cancellation. Accelerators and
compilers have a fused kernel, so the stock function is used there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]

_FEW = 4096  # elements below which the call overhead of several small kernels outweighs their arithmetic


def _gate(x: Tensor) -> tuple[Tensor, Tensor]:  # p = sigmoid(x), t = tanh(softplus(x))
    p = torch.sigmoid(x)
    q = (2 - p).mul_(p)
    return p, q.div_(2 - q)


def _slope(x: Tensor) -> Tensor:
    """Return the derivative of Mish out of place, so that it can be differentiated again."""
    p = torch.sigmoid(x)
    q = p * (2 - p)
    t = q / (2 - q)
    return t + x * p * ((1 - p) * (1 + t)).square()


class _Mish(torch.autograd.Function):
    """Mish with the two intermediate values of its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p, t = _gate(x)
        return x * t, p, t

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, p, t = output
        ctx.mark_non_differentiable(p, t)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0], p, t)
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> Tensor:
        x, p, t = ctx.saved_tensors
        if torch.is_grad_enabled():
            return grad * _slope(x)  # differentiable once more
        edge = 1 - p
        edge = edge.addcmul_(edge, t).square_().mul_(p)
        return torch.addcmul(t, edge, x).mul_(grad)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return tangent * _slope(x), None, None


def mish(x: Tensor) -> Tensor:
    """Return x tanh(softplus(x)) (arXiv 1908.08681), on a CPU in the equal form above."""
    compiled = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if compiled or not x.is_cpu or x.numel() < _FEW or x.dtype not in (torch.float32, torch.float64):
        return F.mish(x)
    if torch.is_grad_enabled():
        return _Mish.apply(x)[0]
    return _gate(x)[1].mul_(x)


def gelu(x: Tensor) -> Tensor:
    """Return GELU(x) in its tanh approximation, as released JAX programs use it."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, tuple[Activation, Activation]] = {
    "relu": (torch.relu, torch.relu_),
    "mish": (mish, mish),
    "tanh": (torch.tanh, torch.tanh_),
    "silu": (F.silu, F.silu),
    "gelu": (gelu, gelu),
    "gelu_erf": (F.gelu, F.gelu),
    "leaky_relu": (F.leaky_relu, F.leaky_relu),
}
"""Name -> (function, the same function allowed to overwrite its argument)."""
