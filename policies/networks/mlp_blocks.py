"""The fully connected network shared by the denoising backbone, the critic and the Gaussian actor.

A trunk maps inputs to z (its first layer's output) and z to the result, so that callers may assemble z from
parts that are already known. Residual trunk, with activation a and normalisation n (identity, or LayerNorm
with eps 1e-6)::

    h_0 = W s + b,   u_i = a(n(W1_i a(n(h_i)) + b1_i)),   h_{i+1} = h_i + W2_i u_i + b2_i,   out = Wo h_N + bo

Nothing non-linear stands between the last W2 and Wo, hence exactly::

    out = Wo h_{N-1} + (Wo W2) u_{N-1} + (bo + Wo b2)

and the widest product shrinks to the width of the output. With one block the term Wo h_0 is linear in the
input as well and becomes extra rows of the first layer. Gradients are those of the unfolded network.

Source: the networks of DPPO (arXiv 2409.00588), released code: one activation-free linear layer, (number of
hidden layers - 1) / 2 pre-activation blocks, one linear layer; and its plain variant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.networks import native
from policies.networks.activations import ACTIVATIONS
from policies.networks.attention import LayerNorm
from policies.networks.packed import PackedBlock, packed_block
from policies.networks.residual import FirstLayer, ResidualBlock
from policies.networks.weight_cache import WeightCache

Finish = Callable[[Tensor], Tensor]
"""Maps z (B, H') to the output (B, out)."""
NAMES = ("weight", "bias")


@dataclass(frozen=True)
class TrunkConfig(Checked):
    """Shape of a trunk."""

    width: int = bounded(512, ge=1)  # of the residual stream
    num_blocks: int = bounded(1, ge=1)  # residual blocks of two layers; DPPO's [512, 512, 512] is one of 512
    activation: str = bounded("relu", choices=tuple(ACTIVATIONS))
    layer_norm: bool = False  # normalise before each activation
    residual: bool = True  # false: a plain stack of `hidden_dims`
    hidden_dims: tuple[int, ...] = bounded((), ge=1)  # widths of the plain stack; empty: residual trunk

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual and self.hidden_dims:
            raise ConfigError(
                "a residual trunk takes width and num_blocks, and no hidden_dims; got hidden_dims="
                f"{tuple(self.hidden_dims)}. Set residual=false or remove hidden_dims."
            )
        if not self.residual and not self.hidden_dims:
            raise ConfigError("residual=false needs hidden_dims, e.g. hidden_dims=[256,256]; got none.")

    def unused(self) -> dict[str, str]:
        plain = dict.fromkeys(("width", "num_blocks"), f"without {self._key_of('residual')}")
        return super().unused() | ({} if self.residual else plain)

    def build_trunk(self, in_dim: int, out_dim: int) -> Trunk:
        if self.residual:
            dims = (in_dim, self.width, out_dim)
            return ResidualTrunk(dims, self.num_blocks, self.activation, self.layer_norm)
        return PlainTrunk((in_dim, *self.hidden_dims, out_dim), self.activation, self.layer_norm)

    def official_trunk_keys(self, official: str, ours: str) -> dict[str, str]:
        """Map the parameter names of DPPO's released networks to ours, e.g. `mlp_mean.` to `trunk.`."""
        if not self.residual:
            return official_plain_keys(len(self.hidden_dims) + 1, official, ours, layer_norm=self.layer_norm)
        names = {"layers.0": "inlet", f"layers.{self.num_blocks + 1}": "outlet"}
        for i in range(self.num_blocks):
            names |= {f"layers.{i + 1}.l{n}": f"blocks.{i}.linear{n}" for n in (1, 2)}
            if self.layer_norm:
                names |= {f"layers.{i + 1}.norm{n}": f"blocks.{i}.norm{n}" for n in (1, 2)}
        return _weights_and_biases(names, official, ours)


def official_plain_keys(
    num_layers: int, official: str, ours: str, *, layer_norm: bool = False
) -> dict[str, str]:
    """Map the parameter names of DPPO's released plain MLP to those of a `PlainTrunk`."""
    names = {f"moduleList.{i}.linear_1": f"layers.{i - 1}" if i else "inlet" for i in range(num_layers)}
    if layer_norm:
        names |= {f"moduleList.{i}.norm_1": f"norms.{i}" for i in range(num_layers - 1)}
    return _weights_and_biases(names, official, ours)


def _weights_and_biases(names: dict[str, str], official: str, ours: str) -> dict[str, str]:
    return {
        f"{official}{theirs}.{kind}": f"{ours}{own}.{kind}"
        for theirs, own in names.items()
        for kind in ("weight", "bias")
    }


class Fold(NamedTuple):
    """Precomputed values of a trunk that depend only on its weights: z = weight s + bias.

    Shapes:
        weight, bias: (H', in), (H',); H' may exceed the width: see the top of the file.
        feature: (out, H), reads out the last features; None for a plain trunk.
        skip: (out,), constant part of the output; None where `bias` holds it.
    """

    weight: Tensor
    bias: Tensor
    feature: Tensor | None = None
    skip: Tensor | None = None

    def first(self, inputs: Tensor) -> FirstLayer:
        """Return the parts of z for rows of inputs (M, in)."""
        return FirstLayer(inputs, self.weight, ((self.bias[None], None),))


class Block(nn.Module):
    """Pre-activation residual block of two linear layers."""

    def __init__(self, width: int, activation: str, layer_norm: bool) -> None:
        super().__init__()
        self.linear1 = nn.Linear(width, width)
        self.linear2 = nn.Linear(width, width)
        self.norm1 = LayerNorm(width, eps=1e-6) if layer_norm else None
        self.norm2 = LayerNorm(width, eps=1e-6) if layer_norm else None
        self.activation = activation
        self.activate, self.activate_ = ACTIVATIONS[activation]

    def features_of(self, *, overwrite: bool) -> Finish:
        """Return the function h (B, H) -> u (B, H); with `overwrite` it may destroy h."""
        weight, bias = self.linear1.weight, self.linear1.bias
        norm1, norm2, activate_ = self.norm1, self.norm2, self.activate_
        if norm1 is not None and norm2 is not None:
            return lambda h: activate_(norm2(F.linear(activate_(norm1(h)), weight, bias)))
        activate = activate_ if overwrite else self.activate
        return lambda h: activate_(F.linear(activate(h), weight, bias))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.linear2(self.features_of(overwrite=False)(h))


class ResidualTrunk(nn.Module):
    """Residual network with its last block folded into the output layer."""

    def __init__(
        self, dims: tuple[int, int, int], num_blocks: int, activation: str, layer_norm: bool = False
    ) -> None:
        super().__init__()
        in_dim, width, out_dim = dims
        self.inlet = nn.Linear(in_dim, width)
        self.blocks = nn.ModuleList(Block(width, activation, layer_norm) for _ in range(num_blocks))
        self.outlet = nn.Linear(width, out_dim)
        self._cache: WeightCache[Fold] = WeightCache()

    @property
    def last_block(self) -> Block:
        return self.blocks[-1]  # type: ignore[return-value]

    def fold(self) -> Fold:
        """Return the values that depend only on weights, cached while gradients are disabled."""
        inlet, outlet, last = self.inlet, self.outlet, self.last_block.linear2
        sources = (inlet.weight, inlet.bias, outlet.weight, outlet.bias, last.weight, last.bias)
        return self._cache.get(sources, self._fold)

    def _fold(self) -> Fold:
        weight, bias, wo = self.inlet.weight, self.inlet.bias, self.outlet.weight
        feature = wo @ self.last_block.linear2.weight
        skip = torch.addmv(self.outlet.bias, wo, self.last_block.linear2.bias)
        if len(self.blocks) > 1:
            return Fold(weight, bias, feature, skip)
        return Fold(torch.cat([weight, wo @ weight]), torch.cat([bias, torch.addmv(skip, wo, bias)]), feature)

    def finish_of(self, fold: Fold) -> Finish:
        """Return the function z (B, H') -> out (B, out); it overwrites z unless a graph is being built."""
        feature = fold.feature.t()  # type: ignore[union-attr]
        if fold.skip is None:
            return self._finish_one_block(feature)
        middle, skip, wo = list(self.blocks)[:-1], fold.skip, self.outlet.weight.t()
        features = self.last_block.features_of(overwrite=False)

        def finish(z: Tensor) -> Tensor:
            for block in middle:
                z = block(z)
            return torch.addmm(torch.addmm(skip, z, wo), features(z), feature)

        return finish

    def _finish_one_block(self, feature: Tensor) -> Finish:
        width, out = self.outlet.in_features, self.outlet.out_features
        may_overwrite = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        features = self.last_block.features_of(overwrite=may_overwrite)

        def finish(z: Tensor) -> Tensor:
            if may_overwrite:  # what `split` returns refuses writes wherever a graph is built
                h, linear = z.narrow(1, 0, width), z.narrow(1, width, out)
            else:
                h, linear = z.split((width, out), dim=1)
            return torch.addmm(linear, features(h), feature)

        return finish

    def packed(self, fold: Fold, cond: Tensor, chunk: Tensor) -> PackedBlock | None:
        """Return the network for the loop in C, from the parts of its first layer; None: it has more."""
        block = self.last_block
        if len(self.blocks) > 1 or block.norm1 is not None:
            return None
        assert fold.feature is not None
        linear = block.linear1
        return packed_block(cond, chunk, linear.weight, linear.bias, fold.feature, block.activation)

    def evaluate(self, first: FirstLayer, fold: Fold) -> Tensor:
        """Return the output (B, out) from the parts of z."""
        block = self.last_block
        if len(self.blocks) == 1 and block.norm1 is None:
            assert fold.feature is not None
            linear = block.linear1
            y = ResidualBlock(linear.weight, linear.bias, fold.feature, block.activation)(first)
            if y is not None:
                return y
        return self.finish_of(fold)(first.z())

    def forward(self, inputs: Tensor) -> Tensor:
        fold = self.fold()
        if inputs.ndim == 2:
            return self.evaluate(fold.first(inputs), fold)
        return self.finish_of(fold)(F.linear(inputs, fold.weight, fold.bias))


class PlainTrunk(nn.Module):
    """A stack of linear layers with (LayerNorm and) an activation between them, none at the end."""

    def __init__(self, dims: Sequence[int], activation: str, layer_norm: bool = False) -> None:
        super().__init__()
        hidden = tuple(dims[1:-1])
        self.inlet = nn.Linear(dims[0], dims[1])
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(dims[1:]))
        norms = [LayerNorm(dim) for dim in hidden] if layer_norm else []
        self.norms = nn.ModuleList(norms) if layer_norm else None
        self.activate, self.activate_ = ACTIVATIONS[activation]
        self._stack = None
        if activation in native.KINDS:
            eps = norms[0].eps if norms else 0.0
            self._stack = native.Stack(1, activation, bool(norms), eps, transposed=True)

    def fold(self) -> Fold:
        return Fold(self.inlet.weight, self.inlet.bias)

    def finish_of(self, fold: Fold) -> Finish:
        """Return the function z (B, H) -> out (B, out), which overwrites z."""
        layers, norms, activate_ = list(self.layers), self.norms, self.activate_

        def finish(z: Tensor) -> Tensor:
            for i, layer in enumerate(layers):
                z = layer(activate_(z if norms is None else norms[i](z)))
            return z

        return finish

    def evaluate(self, first: FirstLayer, fold: Fold) -> Tensor:
        """Return the output (B, out) from the parts of z."""
        return self.finish_of(fold)(first.z())

    def forward(self, inputs: Tensor) -> Tensor:
        if self._stack is not None and inputs.ndim in (2, 3) and native.serves(inputs):
            parts = self._parts()
            if inputs.ndim == 2:
                return self._stack(inputs, parts)[0]
            if parts[0].ndim == 3:  # of several seeds
                return self._stack._replace(members=len(inputs))(inputs, parts)
        return self.finish_of(self.fold())(self.inlet(inputs))

    def evaluate_without_graph(self, inputs: Tensor, weights: Sequence[Tensor]) -> native.Evaluation | None:
        """Return outputs (B, out), and the function from their gradient to those of weights, without a graph.

        None: only a graph gives it.
        """
        is_heard = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks
        is_flat = inputs.ndim == 2 and not inputs.requires_grad
        if self._stack is None or is_heard or not (is_flat and native.serves(inputs)):
            return None
        parts = self._parts()
        place = {id(part): i for i, part in enumerate(parts)}
        learns = all(id(w) in place and w.requires_grad and w._backward_hooks is None for w in weights)
        if len(place) < len(parts) or not learns:
            return None
        found = self._stack.evaluate(inputs, parts)
        if found is None:
            return None
        out, gradients = found

        def in_order(slope: Tensor) -> Sequence[Tensor | None]:
            grads = gradients(slope)
            return [grads[place[id(weight)]] for weight in weights]

        return native.Evaluation(out[0], in_order)

    def _parts(self) -> list[Tensor]:
        """Return weights, biases, scales and shifts; modules are slow to look them up."""
        layers: list[Any] = [self.inlet, *self.layers._modules.values()]
        norms: list[Any] = [] if self.norms is None else [*self.norms._modules.values()]
        return [part._parameters[name] for kind in (layers, norms) for name in NAMES for part in kind]


class ExpandedBlock(nn.Module):
    """h + W2 n(a(W1 n(h))), wider inside by a factor."""

    def __init__(self, width: int, expansion: int, activation: str) -> None:
        super().__init__()
        self.norm1 = LayerNorm(width)
        self.linear1 = nn.Linear(width, expansion * width)
        self.norm2 = LayerNorm(expansion * width)
        self.linear2 = nn.Linear(expansion * width, width)
        self.activate, _ = ACTIVATIONS[activation]

    def forward(self, h: Tensor) -> Tensor:
        return h + self.linear2(self.norm2(self.activate(self.linear1(self.norm1(h)))))


class ExpandedTrunk(nn.Module):
    """Residual network that normalises throughout.

    h_0 = a(n(W s + b)), then expanded blocks, out = Wo n(h_N) + bo.

    Source: MIP (arXiv 2512.01809), `MLP` of the released code. Deviation: no dropout.
    """

    def __init__(self, dims: tuple[int, int, int], num_blocks: int, expansion: int, activation: str) -> None:
        super().__init__()
        in_dim, width, out_dim = dims
        self.inlet = nn.Linear(in_dim, width)
        self.norm = LayerNorm(width)
        self.blocks = nn.ModuleList(ExpandedBlock(width, expansion, activation) for _ in range(num_blocks))
        self.last_norm = LayerNorm(width)
        self.outlet = nn.Linear(width, out_dim)
        self.activate, _ = ACTIVATIONS[activation]

    def fold(self) -> Fold:
        return Fold(self.inlet.weight, self.inlet.bias)

    def finish_of(self, fold: Fold) -> Finish:
        """Return the function z (B, H) -> out (B, out)."""

        def finish(z: Tensor) -> Tensor:
            h = self.activate(self.norm(z))
            for block in self.blocks:
                h = block(h)
            return self.outlet(self.last_norm(h))

        return finish

    def evaluate(self, first: FirstLayer, fold: Fold) -> Tensor:
        """Return the output (B, out) from the parts of z."""
        return self.finish_of(fold)(first.z())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.finish_of(self.fold())(self.inlet(inputs))


Trunk = ResidualTrunk | PlainTrunk | ExpandedTrunk
