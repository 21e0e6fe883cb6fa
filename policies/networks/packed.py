"""A residual network of one block, laid out for the denoising loop in C (`policies.samplers.native_loop`).

Its last layers are one, as in `residual`; with activation a, step k, condition s and chunk x::

    z = table[k] + s S' + x W',   h = a(z[:H]),   u = a(h A' + b),   y = z[H:] + u F'

Matrices are packed: copied to the order in which products read them. They are multiplied by the program
itself, in an order of summation that does not depend on the number of rows.

Legend: K steps, B rows, C numbers of a condition, n numbers of a chunk, H width, H' = H + n.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.networks import native

KINDS = native.KINDS | {"mish": 3}
"""Activations, as the C program numbers them."""
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
    """The network: table (K, H'), packed S, W and A, the bias b (H,), and packed F."""

    table: Tensor
    cond: Tensor
    chunk: Tensor
    weight: Tensor
    bias: Tensor
    feature: Tensor
    activation: str

    def net(self, cond: Tensor) -> Net:
        """Return the network for conditions (B, C), or one for all (1, C); both have to outlive it."""
        matrices = (cond, self.cond, self.chunk, self.weight, self.bias, self.feature)
        kind, width = KINDS[self.activation], len(self.bias)
        return Net(width, kind, cond.shape[1], len(cond) == 1, *map(_at, matrices))

    def time(self, place: int) -> int:
        """Return the address of a row of the table."""
        return _at(self.table) + 4 * place * self.table.shape[1]

    def work(self) -> Tensor:
        """Return memory for a call."""
        return self.bias.new_empty(native.CHUNKS * (2 * self.table.shape[1] + len(self.bias)))

    def field(self, place: int, x: Tensor, cond: Tensor) -> Tensor:
        """Return y (B, n) for x (B, n) and conditions as for `net`, at a row of the table."""
        y, work, net = torch.empty_like(x), self.work(), self.net(cond)
        shape = len(x), x.shape[1]
        native.library().packed_field(ctypes.byref(net), *shape, self.time(place), *map(_at, (x, y, work)))
        return y


def packed_block(
    table: Tensor, cond: Tensor, chunk: Tensor, weight: Tensor, bias: Tensor, feature: Tensor, activation: str
) -> PackedBlock | None:
    """Pack S (H', C), W (H', n), A (H, H) and F (n, H); None: the program cannot read them."""
    matrices = (cond, chunk, weight, feature)
    is_read = all(map(native.reads, (table, bias))) and all(map(native.reads_rows, matrices))
    if activation not in KINDS or native.library() is None or not is_read:
        return None
    s, w, a, f = map(pack, matrices)
    return PackedBlock(table, s, w, a, bias, f, activation)


def pack(weight: Tensor) -> Tensor:
    """Return a matrix (out, in), rows of which may lie apart, in the order in which products read it."""
    out, depth = weight.shape
    packed = torch.empty(depth * -(-out // _LANES) * _LANES)
    native.library().pack(out, depth, weight.stride(0), _at(weight), _at(packed))
    return packed
