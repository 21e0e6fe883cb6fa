"""Convolutions along the rows of a short chunk, each as matrix products.

Rows are contiguous: (B, T, channels) instead of PyTorch's (B, channels, T). A window holds the rows in the
receptive field of an output row, channel by channel as the weights of the stock modules::

    out[t] = W [x[t - r, 0], …, x[t + r, 0], x[t - r, 1], …] + b

so weights need no other order, on which the stock convolutions spend most of their time at batch 1. Windows
are at most as long as the chunk. Values and gradients equal those of the stock modules, which hold the
weights. No view depends on the batch size, so a traced graph is valid for any. Where `native` serves, a call
is one of the program in C.

Legend: B batch, T rows, k kernel size, C and C' channels before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd import forward_ad

from policies.networks import native

Rows = Callable[[Tensor], Tensor]
"""Maps (B, T, C) to (B, T', C')."""

_at = Tensor.data_ptr


def same(conv: nn.Conv1d, rows: int) -> Rows:
    """Return a convolution, weights (C', C, k) with k odd, that keeps the T = rows of its input."""
    middle = conv.kernel_size[0] // 2
    reach = min(middle, rows - 1)
    weight = _taps(conv.weight, middle - reach, middle + reach + 1)
    return _convolution(weight, conv.bias, reach)


def halving(conv: nn.Conv1d, rows: int) -> Rows:
    """Return the convolution of stride 2, weights (C', C, 3), around rows 0, 2, … of an even number."""
    reach = min(1, rows - 2)
    weight = _taps(conv.weight, 1 - reach, 3)
    return _convolution(weight, conv.bias, reach, stride=2)


def doubling(conv: nn.ConvTranspose1d, rows: int) -> Rows:
    """Return the transposed convolution of kernel 4, stride 2 and padding 1, (B, T, C) -> (B, 2 T, C').

    Row 2 t is w[1] x[t] + w[3] x[t - 1], row 2 t + 1 is w[2] x[t] + w[0] x[t + 1] with weights (C, C', 4): a
    window of three rows gives both.
    """
    w = rearrange(conv.weight, "C D k -> k D C")  # D: C'
    reach = min(1, rows - 1)
    even, odd = [w[1]], [w[2]]
    if reach:
        nothing = torch.zeros_like(w[0])
        even, odd = [w[3], w[1], nothing], [nothing, w[2], w[0]]
    weight, bias = torch.cat([torch.stack(even, 2), torch.stack(odd, 2)]), conv.bias.repeat(2)  # type: ignore[union-attr]
    both, shape = _convolution(weight, bias, reach), (2 * rows, conv.out_channels)
    return lambda x: both(x).view(-1, *shape)


def pointwise(conv: nn.Conv1d) -> Rows:
    """Return a convolution of kernel 1."""
    return _convolution(conv.weight, conv.bias, 0)


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


def _taps(weight: Tensor, first: int, end: int) -> Tensor:
    """Return some of the taps of weights (C', C, k): those that do not meet padding alone."""
    return weight if end - first == weight.shape[2] else weight[:, :, first:end].contiguous()


def _convolution(weight: Tensor, bias: Any, before: int, stride: int = 1) -> Rows:
    """Return products of weights (C', C, k) and windows that start `before` rows before every stride-th."""
    if not torch.is_grad_enabled():  # what is kept of weights is not differentiated through
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    window, channels, parts = _Window(before, weight.shape[2], stride), weight.shape[1], (weight, bias)
    has_bias = bias is not None and bias.shape == weight.shape[:1]

    def convolve(x: Tensor) -> Tensor:
        fits = has_bias and x.ndim == 3 and x.shape[2] == channels and x.numel() > 0
        if not (fits and all(map(native.reads, parts)) and native.serves(x)):
            return window.plain(x, parts)
        x = x.contiguous()
        if not torch.is_grad_enabled():
            return window.run(x, weight, bias)
        found: Tensor = _Convolution.apply(x, weight, bias, window)
        return found

    return convolve


class _Window(NamedTuple):
    """Windows of `size` rows that start `before` rows before every stride-th row."""

    before: int
    size: int
    stride: int

    def plain(self, x: Tensor, parts: Sequence[Any]) -> Tensor:
        """Return the convolution with weights and bias by plain operations."""
        weight, bias = parts
        windows = x
        if self.size > 1:  # torch.compile takes no function with a derivative of its own along a direction
            is_plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
            windows = _windows(x, *self) if is_plain else _Windows.apply(x, *self)
        return F.linear(windows, weight.flatten(1), bias)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return it by the program in C."""
        shape = self._shape(x, weight)
        batch, _, channels, *_, windows, fan_out = shape
        width, rows = channels * self.size, batch * windows
        work = x.new_empty(max(rows * width, fan_out * width + x.numel() + rows * fan_out))
        out = x.new_empty(batch, windows, fan_out)
        native.library().conv_forward(*shape, *map(_at, (x, weight, bias, work, out)))
        return out

    def gradients(
        self, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of all three, those of the first two if needed."""
        wanted = zip((x, weight, bias), (*needed[:2], True), strict=True)
        grads = [torch.empty_like(part) if needs else None for part, needs in wanted]
        batch, _, channels, *_, windows, fan_out = shape = self._shape(x, weight)
        width, rows = channels * self.size, batch * windows
        work = x.new_empty(max(rows * width, 2 * fan_out * width + 2 * x.numel() + rows * fan_out))
        grad = grad.contiguous()
        places = [None if one is None else _at(one) for one in (x, weight, grad, work, *grads)]
        native.library().conv_backward(*shape, *places)
        return grads

    def _shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """Return the integers of a call."""
        return (*x.shape, *self, x.shape[1] // self.stride, len(weight))


class _Convolution(torch.autograd.Function):
    """`_Window.run` with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, window: _Window) -> Tensor:
        ctx.window, ctx.shapes = window, [part.shape for part in (x, weight, bias)]
        ctx.save_for_backward(x, weight, bias)
        return window.run(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts, needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
        is_as_before = all(map(native.reads, parts)) and ctx.shapes == [part.shape for part in parts]
        if torch.is_grad_enabled() or not (is_as_before and native.serves(grad)):
            return *native.again(ctx.window.plain, parts, grad, needed), None
        return *ctx.window.gradients(*parts, grad, needed), None


def _windows(x: Tensor, before: int, size: int, stride: int) -> Tensor:
    """Return windows of rows (B, T, C), zero beyond them, as (B, T / stride, C size)."""
    padded = F.pad(x, (0, 0, before, size - before - stride))
    windows = padded.unfold(1, size, stride).contiguous()  # (B, T / stride, C, size)
    return windows.view(-1, windows.shape[1], x.shape[2] * size)


class _Windows(torch.autograd.Function):
    """`_windows`, whose own backward pass is slow: rows get the sum of what their places in windows got."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, before: int, size: int, stride: int) -> Tensor:
        return _windows(x, before, size, stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int, int], output: Tensor) -> None:
        x, *ctx.places = inputs
        ctx.rows = x.shape[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        before, size, stride = ctx.places
        parts = grad.reshape(*grad.shape[:2], -1, size)
        rows = parts.new_zeros(len(parts), ctx.rows + size - stride, parts.shape[2])
        last = rows.shape[1] - size + 1
        for i in range(size):
            rows[:, i : last + i : stride] += parts[..., i]
        return rows[:, before : before + ctx.rows], None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _windows(tangent, *ctx.places)
