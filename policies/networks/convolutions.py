"""Convolutions along the rows of a short chunk, each as one matrix product.

Rows are contiguous: (B, T, channels) instead of PyTorch's (B, channels, T). A window concatenates the rows in
the receptive field of an output row, and the weights become one matrix::

    out[t] = W [x[t - r] | ... | x[t + r]] + b

built once instead of per call: at batch 1 the stock convolutions spend most of their time on reordering
weights. Windows are at most as long as the chunk. Values and gradients equal those of the stock modules,
which hold the weights. No view depends on the batch size, so a traced graph is valid for any.

Legend: B batch, T rows, k kernel size, C and C' channels before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd import forward_ad

from policies.networks import native

Rows = Callable[[Tensor], Tensor]
"""Maps (B, T, C) to (B, T', C'), with prepared weights."""


def same(conv: nn.Conv1d, rows: int) -> Rows:
    """Return a convolution, weights (C', C, k) with k odd, that keeps the T = rows of its input."""
    middle = conv.kernel_size[0] // 2
    reach = min(middle, rows - 1)
    matrix = _matrix(conv.weight[:, :, middle - reach : middle + reach + 1])
    return lambda x: native.linear(_windows(x, reach, 2 * reach + 1), matrix, conv.bias)


def halving(conv: nn.Conv1d, rows: int) -> Rows:
    """Return the convolution of stride 2, weights (C', C, 3), around rows 0, 2, … of an even number."""
    reach = min(1, rows - 2)
    matrix = _matrix(conv.weight[:, :, 1 - reach :])
    return lambda x: native.linear(_windows(x, reach, reach + 2, stride=2), matrix, conv.bias)


def doubling(conv: nn.ConvTranspose1d, rows: int) -> Rows:
    """Return the transposed convolution of kernel 4, stride 2 and padding 1, (B, T, C) -> (B, 2 T, C').

    Row 2 t is w[1] x[t] + w[3] x[t - 1], row 2 t + 1 is w[2] x[t] + w[0] x[t + 1] with weights (C, C', 4): a
    window of three rows gives both.
    """
    w = rearrange(conv.weight, "C D k -> k D C")  # D: C'
    reach = min(1, rows - 1)
    even, odd = w[1], w[2]
    if reach:
        nothing = torch.zeros_like(even)
        even, odd = torch.cat([w[3], w[1], nothing], dim=1), torch.cat([nothing, w[2], w[0]], dim=1)
    matrix, bias = torch.cat([even, odd]), conv.bias.repeat(2)  # type: ignore[union-attr]
    shape = (2 * rows, conv.out_channels)

    def double(x: Tensor) -> Tensor:
        return native.linear(_windows(x, reach, 2 * reach + 1), matrix, bias).view(-1, *shape)

    return double


def pointwise(conv: nn.Conv1d) -> Rows:
    """Return a convolution of kernel 1."""
    matrix = conv.weight.squeeze(2)
    return lambda x: native.linear(x, matrix, conv.bias)


def group_norm(norm: nn.GroupNorm) -> Rows:
    """Return group normalisation over rows and the channels of a group."""
    groups, weight, bias, eps = norm.num_groups, norm.weight, norm.bias, norm.eps
    channels = norm.num_channels

    def normalise(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            # Stock operations would fix the batch size of an exported graph, and the derivative of layer
            # normalisation is traced with wrong strides.
            rows = x.shape[1]
            grouped = x.reshape(-1, rows, groups, channels // groups)
            centred = grouped - grouped.mean((1, 3), keepdim=True)
            unit = centred * torch.rsqrt(centred.square().mean((1, 3), keepdim=True) + eps)
            return torch.addcmul(bias, unit.view(-1, rows, channels), weight)
        # An image one pixel high with channels last has a kernel without copies.
        image = x.transpose(1, 2).unsqueeze(2)
        if forward_ad.unpack_dual(x).tangent is not None:
            image = image.contiguous()  # forward-mode derivatives need channels first
        return torch.group_norm(image, groups, weight, bias, eps).squeeze(2).transpose(1, 2)

    return normalise


def _matrix(weight: Tensor) -> Tensor:
    return rearrange(weight, "D C k -> D (k C)")


def _windows(x: Tensor, before: int, size: int, stride: int = 1) -> Tensor:
    """Concatenate windows from `before` rows on; (B, T, C) -> (B, T / stride, k C), padded by zeros."""
    if size == 1:
        return x
    if torch.is_grad_enabled():
        windows: Tensor = _Windows.apply(x, before, size, stride)
        return windows
    return _gathered(x, before, size, stride)


def _gathered(x: Tensor, before: int, size: int, stride: int) -> Tensor:
    if native.serves(x):
        return native.windows(x, before, size, stride)
    padded = F.pad(x, (0, 0, before, size - before - stride))
    windows = padded.unfold(1, size, stride).transpose(2, 3).contiguous()  # (B, T / stride, k, C)
    return windows.view(-1, windows.shape[1], size * x.shape[2])


class _Windows(torch.autograd.Function):
    """`_gathered`, whose own backward pass is slow: rows get the sum of what their places in windows got."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, before: int, size: int, stride: int) -> Tensor:
        return _gathered(x, before, size, stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int, int], output: Tensor) -> None:
        x, *ctx.places = inputs
        ctx.rows = x.shape[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        before, size, stride = ctx.places
        if native.serves(grad) and not torch.is_grad_enabled():
            return native.windows_grad(grad, ctx.rows, before, size, stride), None, None, None
        parts = grad.unflatten(2, (size, -1))
        rows = parts.new_zeros(len(parts), ctx.rows + size - stride, parts.shape[3])
        last = rows.shape[1] - size + 1
        for i in range(size):
            rows[:, i : last + i : stride] += parts[:, :, i]
        return rows[:, before : before + ctx.rows], None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _gathered(tangent, *ctx.places)
