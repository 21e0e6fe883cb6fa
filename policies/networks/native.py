"""Networks on one thread of a CPU, in C: stacks of layers, normalisation with Mish; for others in this room.

Networks of a few hundred units cost PyTorch more in calls and passes over memory than in products.
`native.c` evaluates and differentiates a stack of linear layers in one call each, with the BLAS of PyTorch
and a cheaper tanh, and does what a temporal U-Net (`convolutions`) and a residual network (`residual`) need
between products. Without it (see `compiled`), on accelerators, other types, with several threads of torch
(but for a few decisions, see `serves`), autocast, tracing or transforms, plain operations serve: the same
numbers to rounding. They also serve where gradients are differentiated again.

Legend: R rows, E members, L layers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from policies.networks.activations import ACTIVATIONS, mish
from policies.networks.compiled import addresses, program

SOURCE = Path(__file__).with_name("native.c")
KINDS = {"relu": 0, "tanh": 1, "gelu": 2, "mish": 3, "silu": 4}
"""Activations, as the C program numbers them."""
KEEP_VALUE = ("relu", "tanh")
"""Activations whose slopes follow from their values; of the others they follow from their arguments."""
_AFTER = 2  # where a stack normalises, as the C program numbers it
_BLOCK = (
    512  # rows at once where no weight learns: what is kept of more leaves the cache, and costs page faults
)
_TYPES = {"i": ctypes.c_int, "l": ctypes.c_long, "f": ctypes.c_float, "p": ctypes.c_void_p}
_ARGUMENTS = {
    "work_of": "iii", "pack": "iiipp", "packed_field": "piipppp", "take_steps": "ppiiiipppp",
    "stack_forward": "piiiiiiif" + 7 * "p", "stack_backward": "piiiiiii" + 10 * "p" + "l",
    "norm_mish_forward": "iiiif" + 6 * "p", "norm_mish_backward": "iiii" + 10 * "p",
    "conv_forward": 8 * "i" + 5 * "p", "conv_backward": 8 * "i" + 7 * "p",
    "residual_forward": 8 * "i" + 12 * "p", "residual_backward": 6 * "i" + 17 * "p",
}  # fmt: skip
_at = Tensor.data_ptr


def library() -> Any:
    """Return the compiled program; None where there is none, `unavailable` says why."""
    return _found()[0]


def unavailable() -> str | None:
    """Say why networks are evaluated by plain operations; None: they are not."""
    return _found()[1]


@functools.cache
def _found() -> tuple[Any, str | None]:
    found, why = program(SOURCE, ("use_gemm", *_ARGUMENTS))
    if found is None:
        return None, why
    try:
        gemm = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).sgemm_
    except (OSError, AttributeError) as error:
        return None, f"the BLAS of PyTorch is not found: {error}"
    for name, types in _ARGUMENTS.items():
        getattr(found, name).argtypes = [_TYPES[t] for t in types]
    found.use_gemm(ctypes.cast(gemm, ctypes.c_void_p))
    return found, None


def serves(x: Tensor, *, with_threads: bool = False) -> bool:
    """Say whether the program takes a call on this tensor: see the top of the file.

    It is one thread; `with_threads` lets it serve where torch has several.
    """
    return (
        not torch.compiler.is_compiling()
        and x.is_cpu
        and x.dtype is torch.float32
        and type(x) is Tensor
        and (with_threads or torch.get_num_threads() == 1)
        and not torch.is_autocast_enabled("cpu")
        and not torch.jit.is_tracing()
        and not (torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack())
        and not torch._C._functorch.is_legacy_batchedtensor(x)  # of `is_grads_batched`
        and not (x.is_neg() or x._is_zerotensor())
        and forward_ad._current_level < 0
        and library() is not None
    )


def reads(part: Tensor) -> bool:
    """Say whether the program can read these weights."""
    return (
        type(part) in (Tensor, torch.nn.Parameter)
        and part.dtype is torch.float32
        and part.is_cpu
        and part.is_contiguous()
    )


def reads_rows(part: Tensor) -> bool:
    """Say whether the program can read this matrix, rows of which may lie apart."""
    return (
        type(part) in (Tensor, torch.nn.Parameter)
        and part.dtype is torch.float32
        and part.is_cpu
        and part.ndim == 2
        and part.stride(1) == 1
        and part.stride(0) >= part.shape[1]
    )


class Evaluation(NamedTuple):
    """Values without a graph, and the function from their gradient to those of weights, or of inputs."""

    values: Tensor
    gradients: Callable[[Tensor], Sequence[Tensor | None]]


class Stack(NamedTuple):
    """Shape of E equal networks of L linear layers, with an activation (and LayerNorm) between them.

    Weights are (E, in, out) and biases (E, 1, out); if `transposed`, (E, out, in) and (E, out), without the
    first axis of one network; scales and shifts of normalisations as the biases.
    """

    members: int
    activation: str
    has_norm: bool = False
    eps: float = 1e-5  # added to variances
    transposed: bool = False
    norm_after: bool = False  # the activation, with has_norm

    def __call__(self, x: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return the outputs (E, R, out) of x (R, in); parts: weights, biases, scales, shifts.

        Of x (G, R, in) each of the G matrices is read by E / G members that follow each other.
        """
        x = x.contiguous()
        dims = self._dims(x, parts)
        if dims is None:
            return self.plain(x, parts)
        has_graph = torch.is_grad_enabled()
        if x.shape[-2] > _BLOCK and not (has_graph and any(part.requires_grad for part in parts)):
            return torch.cat([self(block, parts) for block in x.split(_BLOCK, dim=-2)], dim=1)
        if not has_graph:
            return self.run(x, parts, dims)[0]
        found: Tensor = _Stack.apply(x, self, dims, *parts)
        return found

    def _dims(self, x: Tensor, parts: Sequence[Tensor]) -> tuple[int, ...] | None:
        """Return the widths before, between and behind the layers; None: the program cannot read its input.

        Plain operations refuse, or serve, what it cannot read.
        """
        shapes = []
        for part in (x, *parts):
            if not reads(part):
                return None
            shapes.append(part.shape)
        return _chain(self, tuple(shapes)) if x.ndim in (2, 3) and x.shape[-2] else None

    def evaluate(self, x: Tensor, parts: Sequence[Tensor], *, of_inputs: bool = False) -> Evaluation | None:
        """Return the outputs, and the function from their gradient to those of the parts, without a graph.

        With `of_inputs` to that of x alone. None: the program cannot read its input.
        """
        x = x.contiguous()
        dims = self._dims(x, parts)
        if dims is None:
            return None
        out, *seen = self.run(x, parts, dims)

        def gradients(grad: Tensor) -> Sequence[Tensor | None]:
            of_x, of_parts = self.gradients(x, parts, dims, seen, grad, (of_inputs, not of_inputs))
            return [of_x] if of_inputs else of_parts

        return Evaluation(out, gradients)

    def run(self, x: Tensor, parts: Sequence[Tensor], dims: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return outputs, and what the backward pass reads.

        These are the inputs of layers, what the slopes of activations are computed from, and for norms units
        and factors; one that is not read is another.
        """
        layers, rows = len(dims) - 1, x.shape[-2]
        hidden = x.new_empty(self.members * rows * sum(dims[1:-1]))
        out = x.new_empty(self.members, rows, dims[-1])
        is_apart = self.activation not in KEEP_VALUE or self._norm == _AFTER
        steep = torch.empty_like(hidden) if is_apart else hidden
        unit, factor = hidden, hidden
        if self.has_norm:
            unit, factor = torch.empty_like(hidden), x.new_empty(self.members * rows * (layers - 1))
        library().stack_forward(
            _numbers(dims), layers, self.members, self._sharing(x), rows, self.transposed,
            KINDS[self.activation], self._norm, self.eps,
            _at(x), addresses(parts), _at(hidden), _at(steep), _at(unit), _at(factor), _at(out),
        )  # fmt: skip
        return out, hidden, steep, unit, factor

    @property
    def _norm(self) -> int:
        """Where the program normalises: not at all, before or after the activation."""
        return (_AFTER if self.norm_after else 1) if self.has_norm else 0

    def gradients(
        self,
        x: Tensor,
        parts: Sequence[Tensor],
        dims: tuple[int, ...],
        seen: Sequence[Tensor],
        grad: Tensor,
        wants: tuple[bool, bool],
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Return gradients of x and of the parts, as far as wanted, for those of the outputs."""
        layers, rows = len(dims) - 1, x.shape[-2]
        grad = grad.to(x.dtype).expand(self.members, rows, dims[-1]).contiguous()
        of_x = torch.empty_like(x) if wants[0] else None
        of_parts = [torch.empty_like(part) for part in parts] if wants[1] else []
        size = rows * max(dims[1:-1], default=0)
        work = x.new_empty(2 * size)
        library().stack_backward(
            _numbers(dims), layers, self.members, self._sharing(x), rows, self.transposed,
            KINDS[self.activation], self._norm,
            _at(x), addresses(parts), *map(_at, seen), _at(grad),
            addresses(of_parts) if of_parts else None, None if of_x is None else _at(of_x), _at(work), size,
        )  # fmt: skip
        return of_x, of_parts or [None] * len(parts)

    def _sharing(self, x: Tensor) -> int:
        """Return how many members read the same rows."""
        return self.members if x.ndim == 2 else self.members // len(x)

    def plain(self, x: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return the outputs by plain operations."""
        layers = (len(parts) + 2) // 4 if self.has_norm else len(parts) // 2
        whole = [part.unsqueeze(0) for part in parts] if parts[0].ndim == 2 else parts
        groups = x if x.ndim == 3 else x.unsqueeze(0)
        inputs = [rows for rows in groups for _ in range(len(whole[0]) // len(groups))]
        out = []
        for h, *member in zip(inputs, *(part.unbind(0) for part in whole), strict=True):
            weight, bias, norms = member[:layers], member[layers : 2 * layers], member[2 * layers :]
            for i in range(layers):
                h = torch.addmm(bias[i], h, weight[i].t() if self.transposed else weight[i])
                if i < layers - 1:
                    h = self._between(h, norms[i :: layers - 1])
            out.append(h)
        return torch.stack(out)

    def _between(self, h: Tensor, norm: Sequence[Tensor]) -> Tensor:
        """Return what the next layer reads; norm: scale and shift, if there are any."""
        activate, _ = ACTIVATIONS[self.activation]
        if not norm:
            return activate(h)
        h = activate(h) if self._norm == _AFTER else h
        h = F.layer_norm(h, h.shape[-1:], norm[0].flatten(), norm[1].flatten(), self.eps)
        return h if self._norm == _AFTER else activate(h)


@functools.lru_cache(maxsize=256)
def _chain(stack: Stack, shapes: tuple[torch.Size, ...]) -> tuple[int, ...] | None:
    """Return the widths before, between and behind the layers; None: the shapes of x and the parts differ."""
    (*groups, _, fan_in), *parts = shapes
    layers = (len(parts) + 2) // 4 if stack.has_norm else len(parts) // 2
    ends = (-2, -1) if not stack.transposed else (-1, -2)
    is_alone = stack.transposed and stack.members == 1 and bool(parts) and len(parts[0]) == 2
    lead = () if is_alone else (stack.members,)
    row = () if stack.transposed else (1,)
    dims = (fan_in, *(shape[ends[1]] for shape in parts[:layers]))
    pairs = [pair if not stack.transposed else pair[::-1] for pair in pairwise(dims)]
    rows = [(*lead, *row, width) for width in dims[1:]]
    wanted = [*((*lead, *pair) for pair in pairs), *rows, *(2 * rows[:-1] if stack.has_norm else [])]
    fits = stack.members > 0 and not any(size == 0 or stack.members % size for size in groups)
    return dims if fits and [tuple(shape) for shape in parts] == wanted else None


class _Stack(torch.autograd.Function):
    """A `Stack` with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: Stack, dims: tuple[int, ...], *parts: Tensor) -> Tensor:
        out, *ctx.seen = stack.run(x, parts, dims)
        ctx.stack, ctx.dims = stack, dims
        ctx.save_for_backward(x, *parts)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *parts = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]]
        is_as_before = ctx.stack._dims(x, parts) == ctx.dims
        if torch.is_grad_enabled() or not (is_as_before and serves(grad)):
            of_x, *of_parts = again(ctx.stack.plain, (x, *parts), grad, needed)
        else:
            wants = needed[0], any(needed[1:])
            of_x, of_parts = ctx.stack.gradients(x, parts, ctx.dims, ctx.seen, grad, wants)
        return of_x, None, None, *of_parts


def again(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return gradients by plain operations; where gradients are enabled, they can be differentiated again.

    They are those of views of the inputs, one of which may depend on another, in the precision of the
    program's.
    """
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        views = [part.view_as(part) if needs else part for part, needs in zip(inputs, needed, strict=True)]
        out = plain(views[0], views[1:])
        wanted = [part for part, needs in zip(views, needed, strict=True) if needs]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=differentiable))
    return [next(found) if needs else None for needs in needed]


def serves_norm(x: Tensor, norm: torch.nn.GroupNorm) -> bool:
    """Say whether `norm_mish` takes these rows (B, T, C) and this normalisation."""
    return serves(x) and all(
        part is not None and reads(part) and part.shape == x.shape[2:] for part in (norm.weight, norm.bias)
    )


def norm_mish(x: Tensor, norm: torch.nn.GroupNorm) -> Tensor:
    """Return Mish of a group normalisation of rows (B, T, C), over rows and the channels of a group."""
    parts = x.contiguous(), norm.weight, norm.bias, norm.num_groups, norm.eps
    if not torch.is_grad_enabled():
        return _norm_mish(*parts)[0]
    found: Tensor = _NormMish.apply(*parts)
    return found


def _norm_mish(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return `norm_mish`, and means and inverse deviations (2, B, C)."""
    (batch, rows, channels), out = x.shape, torch.empty_like(x)
    moments = x.new_empty(2, batch, channels)
    library().norm_mish_forward(
        batch, rows, channels, groups, eps,
        _at(x), _at(weight), _at(bias), _at(out), _at(moments), _at(moments) + 4 * batch * channels,
    )  # fmt: skip
    return out, moments


class _NormMish(torch.autograd.Function):
    """`norm_mish` with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        out, ctx.moments = _norm_mish(x, weight, bias, groups, eps)
        ctx.groups, ctx.eps = groups, eps
        ctx.save_for_backward(x, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        is_as_before = all(map(reads, (x, weight, bias))) and weight.shape == bias.shape == x.shape[2:]
        if torch.is_grad_enabled() or not (is_as_before and serves(grad)):

            def plain(x: Tensor, parts: Sequence[Tensor]) -> Tensor:
                return mish(
                    F.group_norm(x.transpose(1, 2), ctx.groups, parts[0], parts[1], ctx.eps).transpose(1, 2)
                )

            return *again(plain, (x, weight, bias), grad, ctx.needs_input_grad[:3]), None, None
        (batch, rows, channels), grad = x.shape, grad.contiguous()
        found = [torch.empty_like(part) for part in (x, weight, bias)]
        work = weight.new_empty(2 * channels)
        library().norm_mish_backward(
            batch, rows, channels, ctx.groups, _at(x), _at(weight), _at(bias),
            _at(ctx.moments[0]), _at(ctx.moments[1]), _at(grad), *map(_at, found), _at(work),
        )  # fmt: skip
        return *found, None, None


@functools.lru_cache(maxsize=256)
def _numbers(values: tuple[int, ...]) -> Any:
    return (ctypes.c_int * len(values))(*values)
