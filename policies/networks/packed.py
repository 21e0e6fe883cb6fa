"""A residual network of one block, laid out for the denoising loop in C (`policies.samplers.native_loop`).

Its last layers are one, as in `residual`; with activation a, step k, condition s and chunk x::

    z = table[k] + s S' + x W',   h = a(z[:H]),   u = a(h A' + b),   y = z[H:] + u F'

Matrices are packed: copied to the order in which products read them. They are multiplied by the program
itself, in an order of summation that does not depend on the number of rows.

Legend: K steps, B rows, C numbers of a condition, n numbers of a chunk, H width, H' = H + n.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from policies.networks import native

_LANES = 16  # numbers to which panels are filled, at most
_at = Tensor.data_ptr


class Net(ctypes.Structure):
    """`packed_t` of the C program: a network and its conditions."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("width", "kind", "conds", "is_shared")),
        *((name, ctypes.c_void_p) for name in ("s", "cond_w", "w", "a", "b", "f")),
    ]


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """The network: packed S, W and A, the bias b (H,), and packed F."""

    cond: Tensor
    chunk: Tensor
    weight: Tensor
    bias: Tensor
    feature: Tensor
    activation: str
    conds: int  # C
    outputs: int  # n


def packed_block(
    cond: Tensor, chunk: Tensor, weight: Tensor, bias: Tensor, feature: Tensor, activation: str
) -> PackedBlock | None:
    """Pack S (H', C), W (H', n), A (H, H) and F (n, H); None: the program cannot read them."""
    matrices = (cond, chunk, weight, feature)
    is_read = native.reads(bias) and all(map(native.reads_rows, matrices))
    if activation not in native.KINDS or native.library() is None or not is_read:
        return None
    s, w, a, f = map(pack, matrices)
    return PackedBlock(s, w, a, bias, f, activation, cond.shape[1], len(feature))


class PackedSteps(NamedTuple):
    """A network bound to conditions (B, C), or one for all (1, C), and to times of steps, table (K, H')."""

    block: PackedBlock
    cond: Tensor
    table: Tensor

    def net(self) -> Net:
        """Return the network for a call of the program; what it is made of has to outlive it."""
        block, matrices = self.block, (self.block.cond, self.block.chunk, self.block.weight)
        places = map(_at, (self.cond, *matrices, block.bias, block.feature))
        return Net(len(block.bias), native.KINDS[block.activation], block.conds, len(self.cond) == 1, *places)

    def work(self, rows: int) -> Tensor:
        """Return memory for a call."""
        block = self.block
        return block.bias.new_empty(native.library().work_of(rows, len(block.bias), block.outputs))

    def serves(self, rows: int, outputs: int) -> bool:
        """Say whether chunks (rows, outputs) are what the network takes."""
        return len(self.cond) in (1, rows) and outputs == self.block.outputs

    def field(self, k: int, x: Tensor) -> Tensor:
        """Return y (B, n) for x (B, n) at time k of the table."""
        y, work, net = torch.empty_like(x), self.work(len(x)), self.net()
        table, shape = self.table[k], (len(x), x.shape[1])
        native.library().packed_field(ctypes.byref(net), *shape, *map(_at, (table, x, y, work)))
        return y


def packed_steps(block: PackedBlock | None, cond: Tensor, table: Tensor) -> list[PackedSteps] | None:
    """Bind a network; None: there is none, or the program cannot read these numbers."""
    if block is None or not (native.reads(cond) and native.reads(table)):
        return None
    fits = cond.ndim == 2 and cond.shape[1] == block.conds
    return [PackedSteps(block, cond, table)] if fits else None


def some_of(steps: Sequence[PackedSteps], first: int, last: int) -> list[PackedSteps]:
    """Return the steps from one to another of networks that follow each other."""
    found: list[PackedSteps] = []
    k = 0
    for one in steps:
        begin, end = max(first - k, 0), min(last - k, len(one.table))
        if begin < end:
            found.append(one._replace(table=one.table[begin:end]))
        k += len(one.table)
    return found


def pack(weight: Tensor) -> Tensor:
    """Return a matrix (out, in), rows of which may lie apart, in the order in which products read it."""
    out, depth = weight.shape
    packed = weight.new_empty(depth * -(-out // _LANES) * _LANES)
    native.library().pack(out, depth, weight.stride(0), _at(weight), _at(packed))
    return packed
