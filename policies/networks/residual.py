"""A residual network of one block from the parts of its first layer: one call of the program in C.

Its last layers are one (see `mlp_blocks`), so that, with activation a::

    z = x W' + sum_i table_i[row_i],   h = a(z[:H]),   u = a(h A' + b),   y = z[H:] + u F'

Rows that share a part of their input, as a time or a condition, read its product from a table; the gradient
of a table sums over the rows that read it. Rows are evaluated in blocks that stay in a cache. Where `native`
does not serve, plain operations do: the same numbers to rounding.

Legend: M rows, K inputs, H width, H' = H + outputs, R rows of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from policies.networks import native

Table = tuple[Tensor, Tensor | None]
"""Rows (R, H') and the index (M,) int64 of the one that a row of z reads; None: all read the only one."""
_BLOCK = 256  # rows, as in native.c
_at = Tensor.data_ptr


class FirstLayer(NamedTuple):
    """The parts of z: inputs (M, K), weight W (H', K), and one or two tables."""

    inputs: Tensor
    weight: Tensor
    tables: tuple[Table, ...]

    def z(self) -> Tensor:
        """Return z (M, H')."""
        (table, row), *more = self.tables
        if row is None:
            return F.linear(self.inputs, self.weight, table[0])
        offset = table.index_select(0, row)
        for other, other_row in more:
            assert other_row is not None
            offset = offset + other.index_select(0, other_row)
        return torch.addmm(offset, self.inputs, self.weight.t())


class ResidualBlock(NamedTuple):
    """What follows z: weight A (H, H), bias b (H,), read-out F (outputs, H), and the activation's name."""

    weight: Tensor
    bias: Tensor
    feature: Tensor
    activation: str

    def __call__(self, first: FirstLayer) -> Tensor | None:
        """Return y (M, outputs); None: plain operations have to serve."""
        serves = self.activation in native.KEEP_VALUE and native.serves(first.inputs)
        if not (serves and self._fits(first)):
            return None
        if not torch.is_grad_enabled():
            found = self._run(first)
            return None if found is None else found[0]
        tables, rows = zip(*first.tables, strict=True)
        parts = (*first[:2], *tables, *self[:3])
        kept = (*parts, *(row for row in rows if row is not None))
        if any(part.is_inference() for part in kept):  # they cannot be kept for the backward pass
            return None
        y: Tensor | None = _Residual.apply(self.activation, rows, *parts)
        return y

    def _fits(self, first: FirstLayer) -> bool:
        """Say whether types and shapes are as the program takes them for granted."""
        (x, weight, tables), (out, width) = first, self.feature.shape
        rows = [row for _, row in tables if row is not None]
        return (
            all(map(native.reads, (x, *(table for table, _ in tables), *self[:3])))
            and native.reads_rows(weight)
            and len(tables) in (1, len(rows))
            and len(tables) <= 2
            and x.ndim == 2
            and x.numel() > 0
            and out > 0
            and weight.shape == (width + out, x.shape[1])
            and (self.weight.shape, self.bias.shape) == ((width, width), (width,))
            and all(table.ndim == 2 and table.shape[1] == width + out for table, _ in tables)
            and all(len(table) == 1 for table, row in tables if row is None)
            and all(row.shape == x.shape[:1] and row.dtype is torch.int64 for row in rows)
            and all(row.is_cpu and row.is_contiguous() for row in rows)
        )

    def plain(self, first: FirstLayer) -> Tensor:
        """Return y by plain operations."""
        out, width = self.feature.shape
        h, linear = first.z().split((width, out), dim=1)
        activate = torch.relu if self.activation == "relu" else torch.tanh
        u = activate(F.linear(activate(h), self.weight, self.bias))
        return torch.addmm(linear, u, self.feature.t())

    def _run(self, first: FirstLayer) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return y, h with the linear part behind it (M, H'), and u (M, H); None: a row is in no table."""
        (x, weight, tables), (out, width) = first, self.feature.shape
        z, u, y = (x.new_empty(len(x), n) for n in (width + out, width, out))
        (table, row), (other, other_row) = (*tables, (None, None))[:2]
        is_known = native.library().residual_forward(
            *self._numbers(first), *(0 if one is None else len(one) for one in (table, other)),
            *_places(x, weight, table, row, other, other_row, *self[:3], z, u, y),
        )  # fmt: skip
        return (y, z, u) if is_known else None

    def _gradients(
        self, first: FirstLayer, seen: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of inputs, weight, tables and the block's parts, as far as needed."""
        (x, weight, tables), (out, width) = first, self.feature.shape
        grad = grad.contiguous()
        of_x = torch.empty_like(x) if needed[0] else None
        of_weight = weight.new_zeros(weight.shape) if needed[1] else None
        of_tables = [torch.zeros_like(table) if any(needed[2:-3]) else None for table, _ in tables]
        of_block = [torch.zeros_like(part) if any(needed[-3:]) else None for part in self[:3]]
        (_, row), (_, other_row) = (*tables, (None, None))[:2]
        work = x.new_empty(_BLOCK * (2 * width + out))
        native.library().residual_backward(
            *self._numbers(first),
            *_places(x, weight, row, other_row, self.weight, self.feature, *seen, grad, work),
            *_places(of_x, of_weight, *(*of_tables, None)[:2], *of_block),
        )  # fmt: skip
        return [of_x, of_weight, *of_tables, *of_block]

    def _numbers(self, first: FirstLayer) -> tuple[int, ...]:
        """Return the integers of a call: M, K, H, outputs, activation, and how far apart rows of W are."""
        (rows, inputs), (out, width) = first.inputs.shape, self.feature.shape
        return rows, inputs, width, out, native.KINDS[self.activation], first.weight.stride(0)


class _Residual(torch.autograd.Function):
    """`ResidualBlock` with its gradients."""

    @staticmethod
    def forward(ctx: Any, activation: str, rows: Sequence[Tensor | None], *parts: Tensor) -> Tensor | None:
        ctx.activation = activation
        first, block = _parted(activation, rows, parts)
        found = block._run(first)
        if found is None:
            return None
        y, *seen = found
        ctx.save_for_backward(*seen, *rows, *parts)
        ctx.shapes, ctx.num_rows = [part.shape for part in (*seen, *parts)], len(rows)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        z, u, *others = ctx.saved_tensors
        rows, parts = others[: ctx.num_rows], others[ctx.num_rows :]
        needed = ctx.needs_input_grad[2:]
        first, block = _parted(ctx.activation, rows, parts)
        is_as_before = ctx.shapes == [part.shape for part in (z, u, *parts)]
        reads = is_as_before and all(map(native.reads, (z, u))) and block._fits(first)
        if torch.is_grad_enabled() or not (reads and native.serves(grad)):

            def plain(x: Tensor, rest: Sequence[Tensor]) -> Tensor:
                first, block = _parted(ctx.activation, rows, (x, *rest))
                return block.plain(first)

            return None, None, *native.again(plain, parts, grad, needed)
        return None, None, *block._gradients(first, (z, u), grad, needed)


def _parted(
    activation: str, rows: Sequence[Tensor | None], parts: Sequence[Tensor]
) -> tuple[FirstLayer, ResidualBlock]:
    """Return the first layer and the block of inputs, weight, tables, and the block's three parts."""
    x, weight, *tables, block_weight, bias, feature = parts
    first = FirstLayer(x, weight, tuple(zip(tables, rows, strict=True)))
    return first, ResidualBlock(block_weight, bias, feature, activation)


def _places(*tensors: Tensor | None) -> list[int | None]:
    return [None if one is None else _at(one) for one in tensors]
