"""Ensembles of equal networks for action values, and aggregation of their outputs.

Legend: E members, B batch, C condition width, A width of a flattened chunk, K bins. Weights of a layer are
stacked, (E, in, out); all members are one batched product, or one product each where products are large on a
CPU. With K > 0 a member is a histogram of returns, and its value the mean of it::

    Q = sum over k of softmax(logits)_k c_k,    c_k = low + (k + 1/2) (high - low) / K

With M > 0 cosines a member knows the quantiles Z of returns at fractions tau in (0, 1), and its value is
their mean over 32 midpoints; f are its layers before the last two, g those, n its normalisation::

    Z(tau) = g(f(s, a) * sigmoid(n(W cos(pi m tau) + b))),    m = 1 ... M

Source: implicit quantiles, arXiv 1806.06923, their layers as in the released code of CFPI.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor, nn

from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.networks import native
from policies.networks.activations import ACTIVATIONS
from policies.networks.native import Evaluation

AGGREGATES = ("min", "mean", "subset_min", "mean_std")
USED_BY = {"subset": "subset_min", "pessimism": "mean_std"}
"""Setting of a reduction -> the reduction that uses it."""
Members = int | Tensor | None
"""Which members of an ensemble: so many leading ones, those of indices (S,), or all."""
_LARGE = 32_768  # rows times width
_MIDPOINTS = 32


@dataclass(frozen=True)
class EnsembleConfig(Checked):
    """Shape and initialisation of an ensemble of action values Q(s, a)."""

    key: ClassVar[str] = "critic"

    members: int = bounded(2, ge=1)  # E
    hidden_dims: tuple[int, ...] = bounded((256, 256), ge=1, some=True)  # widths of the hidden layers
    activation: str = bounded("relu", choices=tuple(ACTIVATIONS))
    layer_norm: bool = False  # normalise before each activation
    norm_after: bool = False  # normalise after each activation instead
    norm_eps: float = bounded(1e-5, gt=0)  # added to variances
    hidden_bias: float | None = None  # initial biases of hidden layers; null: as PyTorch draws them
    last_bound: float | None = bounded(None, ge=0)  # bound of the last layer's initial weights; null: default
    bins: int = bounded(0, ge=0)  # K, bins of a histogram of returns; 0: the value itself
    low: float = bounded(0.0, ge=float("-inf"))  # lower edge of the first bin
    high: float = bounded(1.0, ge=float("-inf"))  # upper edge of the last bin
    cosines: int = bounded(0, ge=0)  # M of a fraction, for quantiles of returns; 0: the value itself

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("norm_after", self.layer_norm or not self.norm_after, "false without critic.layer_norm")
        self.require("bins", self.bins != 1, "0, or 2 and more")
        self.require("cosines", not self.cosines or not self.bins, "0 with critic.bins")
        deep = len(self.hidden_dims) > 1 or not self.cosines
        self.require("hidden_dims", deep, "two widths or more with critic.cosines")
        self.require("high", self.high > self.low, f"above critic.low={self.low:g}")

    def centres(self) -> Tensor | None:
        """Return the centres (K,) of the bins."""
        half = (self.high - self.low) / max(2 * self.bins, 1)
        return torch.linspace(self.low + half, self.high - half, self.bins) if self.bins else None

    def build(self, cond_dim: int, action_dim: int) -> Ensemble:
        return (QuantileEnsemble if self.cosines else Ensemble)(self, cond_dim + action_dim)


class Ensemble(nn.Module):
    """E networks from (B, in) to one number each.

    Members are initialised one by one as PyTorch initialises linear layers, unless configured otherwise.
    Under autocast the last layer and means keep the type of its weights: values of hundreds need more than
    the eight bits of bfloat16.

    Attributes:
        centres: Centres (K,) of the bins; None without bins.
    """

    centres: Tensor | None

    def __init__(self, config: EnsembleConfig, in_dim: int) -> None:
        super().__init__()
        self.config = config
        self.activate, self.activate_ = ACTIVATIONS[config.activation]
        sizes, members = (in_dim, *config.hidden_dims, config.bins or 1), config.members
        self.weight, self.bias = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise(sizes):
            bound = fan_in**-0.5
            self.weight.append(torch.empty(members, fan_in, fan_out).uniform_(-bound, bound))
            self.bias.append(torch.empty(members, 1, fan_out).uniform_(-bound, bound))
        self._initialize()
        self.scale, self.shift = nn.ParameterList(), nn.ParameterList()
        for width in config.hidden_dims if config.layer_norm else ():
            self.scale.append(torch.ones(members, 1, width))
            self.shift.append(torch.zeros(members, 1, width))
        self.register_buffer("centres", config.centres(), persistent=False)

    @torch.no_grad()
    def _initialize(self) -> None:
        *hidden, last = self.bias
        if self.config.hidden_bias is not None:
            for bias in hidden:
                bias.fill_(self.config.hidden_bias)
        if (bound := self.config.last_bound) is not None:
            for part in (self.weight[-1], last):
                part.uniform_(-bound, bound)

    @property
    def members(self) -> int:
        return self.config.members

    def forward(
        self,
        cond: Tensor,
        action: Tensor | None = None,
        *,
        members: Members = None,
        frozen: bool = False,
    ) -> Tensor:
        """Return values (E, B) of conditions (B, C) and flattened chunks (B, A); None: of conditions alone.

        `members` evaluates so many leading ones, or those of indices (S,), only; `frozen` detaches the
        weights, not the inputs.
        """
        return self.mean(self.outputs(cond, action, members=members, frozen=frozen))

    def evaluate(self, cond: Tensor, action: Tensor | None, weights: Sequence[Tensor]) -> Evaluation:
        """Return values (E, B) and the function from their gradient to those of weights; see `forward`."""
        x, parts = inputs_of(cond, action), self._in_order()
        if self._needs_no_graph(x, parts, weights):
            found = self._stack(self.members).evaluate(x, parts)
            if found is not None:
                out, gradients = found
                return Evaluation(out.squeeze(-1), lambda slope: gradients(slope.unsqueeze(-1)))
        values = self(cond, action)
        return Evaluation(
            values.detach(), lambda slope: torch.autograd.grad(values, weights, slope, allow_unused=True)
        )

    def evaluate_along(
        self, cond: Tensor, action: Tensor, members: int | None = None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
        """Return values (E, B) and the function from their gradient to that of chunks (B, A); see `forward`.

        None: only a graph gives it.
        """
        x, count = inputs_of(cond, action), self.members if members is None else members
        if not self._is_plain(x):
            return None
        parts = self._in_order()
        if count < self.members:
            parts = [part.detach()[:count] for part in parts]
        found = self._stack(count).evaluate(x, parts, of_inputs=True)
        if found is None:
            return None

        def along(slope: Tensor) -> Tensor:
            (grad,) = found.gradients(slope.unsqueeze(-1))
            assert grad is not None
            return grad[:, cond.shape[-1] :]

        return found.values.squeeze(-1), along

    def _needs_no_graph(self, x: Tensor, parts: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
        """Say whether gradients of these parts, all of them in order, and of nothing else are wanted."""
        owns = len(parts) == len(weights) and all(map(operator.is_, parts, weights))
        learns = all(part.requires_grad and part._backward_hooks is None for part in parts)
        return owns and learns and self._is_plain(x)

    def _is_plain(self, x: Tensor) -> bool:
        """Say whether the values of inputs without a graph are what the program in C computes."""
        config = self.config
        is_heard = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks
        return not (config.bins or config.cosines or x.requires_grad or is_heard) and self._is_native(x)

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the values (E, B) of what `outputs` returns."""
        if self.centres is None:
            return outputs
        with _full_precision(outputs.device.type):
            return outputs.softmax(dim=-1) @ self.centres

    def outputs(
        self,
        cond: Tensor,
        action: Tensor | None = None,
        *,
        members: Members = None,
        frozen: bool = False,
    ) -> Tensor:
        """Return values (E, B), or the logits (E, B, K) of the bins; see `forward`."""
        x = inputs_of(cond, action)
        if self._is_native(x):
            return self._evaluate_natively(x, members, frozen)
        parts, count = (self._stacks(part, members, frozen) for part in self._parts), self._count(members)
        if count == 1 or self._large(x):
            return self._evaluate_each(x, count, *parts)
        return self._evaluate(torch.baddbmm, repeat(x, "B C -> E B C", E=count), *parts)

    def _count(self, members: Members) -> int:
        if members is None:
            return self.members
        return members if isinstance(members, int) else len(members)

    def _is_native(self, x: Tensor) -> bool:
        config = self.config
        return config.activation in native.KINDS and native.serves(x)

    def _large(self, x: Tensor) -> bool:
        if torch.compiler.is_compiling():  # a graph serves every batch
            return False
        return x.device.type == "cpu" and x.shape[0] * min(self.config.hidden_dims) >= _LARGE

    def _evaluate_natively(self, x: Tensor, members: Members, frozen: bool) -> Tensor:
        parts = [taken(part, members) for part in self._in_order()]
        if frozen:
            parts = [part.detach() for part in parts]
        found = self._stack(self._count(members))(x, parts)
        return found if self.config.bins else found.squeeze(-1)

    def _stack(self, members: int) -> native.Stack:
        config = self.config
        norm = (config.layer_norm, config.norm_eps)
        return native.Stack(members, config.activation, *norm, norm_after=config.norm_after)

    def _evaluate_each(self, x: Tensor, count: int, *stacks: list[Tensor]) -> Tensor:
        parts = [[stack.unbind(0) for stack in part] for part in stacks]
        members = ([[layer[e] for layer in part] for part in parts] for e in range(count))
        return torch.stack([self._evaluate(torch.addmm, x, *member) for member in members])

    def _evaluate(
        self,
        product: Any,
        h: Tensor,
        weight: list[Tensor],
        bias: list[Tensor],
        scale: list[Tensor],
        shift: list[Tensor],
    ) -> Tensor:
        h = self._hidden(product, h, weight[:-1], bias[:-1], scale, shift)
        with _full_precision(h.device.type):
            found = self._read_out(product, bias[-1], h, weight[-1])
        return found if self.config.bins else found.squeeze(-1)

    def _hidden(
        self,
        product: Any,
        h: Tensor,
        weight: list[Tensor],
        bias: list[Tensor],
        scale: list[Tensor],
        shift: list[Tensor],
    ) -> Tensor:
        after = self.config.norm_after
        for i in range(len(weight)):
            h = product(bias[i], h, weight[i])
            if scale and not after:
                h = self._normalized(h, scale[i], shift[i])
            h = self.activate_(h)
            if after:
                h = self._normalized(h, scale[i], shift[i])
        return h

    def _read_out(self, product: Any, bias: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        """Evaluate the last layer: large batched products of so narrow an output are slow on a CPU."""
        if h.ndim == 2 or not self._large(h[0]):
            value: Tensor = product(bias, h.to(weight.dtype), weight)
            return value
        parts = zip(bias.unbind(0), h.unbind(0), weight.unbind(0), strict=True)
        return torch.stack([torch.addmm(b, x.to(w.dtype), w) for b, x, w in parts])

    def _normalized(self, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        eps = self.config.norm_eps
        if h.ndim == 2 and h.device.type == "cpu":  # one kernel, which reads and writes the type of h
            with _full_precision("cpu"):
                return F.layer_norm(h, h.shape[-1:], scale[0], shift[0], eps)
        if self._large(h[0]):
            parts = zip(h.unbind(0), scale.unbind(0), shift.unbind(0), strict=True)
            return torch.stack([self._normalized(*part) for part in parts])
        return torch.addcmul(shift, F.layer_norm(h, h.shape[-1:], eps=eps), scale)

    @property
    def _parts(self) -> tuple[nn.ParameterList, ...]:
        return self.weight, self.bias, self.scale, self.shift

    def _stacks(self, parts: nn.ParameterList, members: Members, frozen: bool) -> list[Tensor]:
        layers: Any = parts._parameters.values()  # a list of parameters is slow to iterate over
        stacks = (taken(part, members) for part in layers)
        return [stack.detach() if frozen else stack for stack in stacks]

    def _in_order(self) -> list[Tensor]:
        """Return weights, biases, scales and shifts; attributes and lists of modules are slow to read."""
        lists: Any = self._modules.values()
        return [part for one in lists for part in one._parameters.values()]

    @torch.no_grad()
    def load_members(self, members: Sequence[Sequence[Mapping[str, Tensor]]]) -> None:
        """Set the weights of members, each a list of layers as `nn.Linear` holds them.

        A layer has `weight` (out, in), `bias` (out,) and, if normalised, `scale` and `shift` (out,).
        """
        for e, layers in enumerate(members):
            for i, layer in enumerate(layers):
                self.weight[i][e].copy_(layer["weight"].t())
                self.bias[i][e, 0].copy_(layer["bias"])
                if "scale" in layer:
                    self.scale[i][e, 0].copy_(layer["scale"])
                    self.shift[i][e, 0].copy_(layer["shift"])

    def layers_of(self, member: int) -> list[dict[str, Tensor]]:
        """Return the layers of a member; see `load_members`."""
        layers = [
            {"weight": weight[member].t(), "bias": bias[member, 0]}
            for weight, bias in zip(self.weight, self.bias, strict=True)
        ]
        for layer, scale, shift in zip(layers, self.scale, self.shift, strict=False):
            layer |= {"scale": scale[member, 0], "shift": shift[member, 0]}
        return layers


class QuantileEnsemble(Ensemble):
    """E networks from (B, in) to a distribution each, by its quantiles.

    Attributes:
        fraction: Weight (E, M, W), bias, scale and shift (E, 1, W) of the layer of fractions.
    """

    midpoints: Tensor
    cosine: Tensor

    def __init__(self, config: EnsembleConfig, in_dim: int) -> None:
        super().__init__(config, in_dim)
        count, width, bound = config.cosines, config.hidden_dims[-2], config.cosines**-0.5
        drawn = (torch.empty(config.members, rows, width).uniform_(-bound, bound) for rows in (count, 1))
        one = torch.ones(config.members, 1, width)
        self.fraction = nn.ParameterList([*drawn, one, torch.zeros_like(one)])
        self.register_buffer("midpoints", (torch.arange(_MIDPOINTS) + 0.5) / _MIDPOINTS, persistent=False)
        self.register_buffer("cosine", math.pi * torch.arange(1.0, count + 1), persistent=False)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.mean(dim=-1)

    def outputs(
        self,
        cond: Tensor,
        action: Tensor | None = None,
        *,
        members: Members = None,
        frozen: bool = False,
    ) -> Tensor:
        """Return the quantiles (E, B, 32) at the midpoints; see `Ensemble.forward`."""
        return self.quantiles(cond, action, self.midpoints[None], members=members, frozen=frozen)

    def quantiles(
        self,
        cond: Tensor,
        action: Tensor | None,
        tau: Tensor,
        *,
        members: Members = None,
        frozen: bool = False,
    ) -> Tensor:
        """Return Z (E, B, n) at fractions (B, n), or (1, n) for all rows."""
        count = self._count(members)
        parts = (self._stacks(part, members, frozen) for part in (*self._parts, self.fraction))
        weight, bias, scale, shift, (w, b, *norm) = parts
        x = repeat(inputs_of(cond, action), "B C -> E B C", E=count)
        h = self._hidden(torch.baddbmm, x, weight[:-2], bias[:-2], scale[:-1], shift[:-1])
        angle = repeat(tau[..., None] * self.cosine, "B n M -> E (B n) M", E=count)
        of_tau = self._normalized(torch.baddbmm(b, angle.cos(), w), *norm).sigmoid()
        h = (h.unsqueeze(2) * of_tau.unflatten(1, tau.shape)).flatten(1, 2)
        z = self._evaluate(torch.baddbmm, h, weight[-2:], bias[-2:], scale[-1:], shift[-1:])
        return z.unflatten(1, (-1, tau.shape[1]))


def inputs_of(cond: Tensor, action: Tensor | None) -> Tensor:
    """Return conditions (..., B, C) and chunks (..., B, A) as the input of an ensemble."""
    return cond if action is None else torch.cat([cond, action], dim=-1)


def taken(part: Tensor, members: Members, axis: int = 0) -> Tensor:
    """Return the entries of members along an axis; see `Ensemble.forward`."""
    if members is None:
        return part
    if isinstance(members, int):
        return part.narrow(axis, 0, members)
    return part.index_select(axis, members)


def _full_precision(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def aggregate(values: Tensor, how: str, *, subset: Tensor | None = None, pessimism: float = 0.5) -> Tensor:
    """Reduce values (E, ...) over the members to (...).

    `how`: `min`, `mean`, `subset_min` over the members `subset` (S,), or `mean_std`, the mean minus
    `pessimism` uncorrected deviations.
    """
    match how:
        case "min":
            return values.amin(dim=0) if values.shape[0] != 2 else torch.minimum(values[0], values[1])
        case "mean":
            return values.mean(dim=0)
        case "subset_min" if subset is not None:
            return values.index_select(0, subset).amin(dim=0)
        case "mean_std":
            return values.mean(dim=0) - pessimism * values.std(dim=0, correction=0)
    raise ConfigError(
        f"an aggregate must be one of {', '.join(AGGREGATES)} (subset_min with a subset); got '{how}'."
    )


def aggregate_of(
    evaluate: Callable[..., Tensor], how: str, *, subset: Tensor | None = None, pessimism: float = 0.5
) -> Tensor:
    """Return `aggregate` of the values that `evaluate(members=...)` returns, of the members that count."""
    if how == "subset_min" and subset is not None:
        return aggregate(evaluate(members=subset), "min")
    return aggregate(evaluate(), how, pessimism=pessimism)


def aggregate_with_slopes(
    values: Tensor, how: str, *, subset: Tensor | None = None, pessimism: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Return `aggregate` of values (E, ...) without a graph, and its gradient with respect to them, (E, ...).

    Equal least values share the gradient, as in PyTorch.
    """
    values = values.detach()
    if how not in ("min", "mean"):
        with torch.enable_grad():
            leaf = values.requires_grad_()
            value = aggregate(leaf, how, subset=subset, pessimism=pessimism)
        (slopes,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
        return value.detach(), slopes
    value = aggregate(values, how)
    if how == "mean":
        return value, torch.full_like(values, 1 / len(values))
    is_least = (values == value).to(values.dtype)
    return value, is_least / is_least.sum(dim=0)


def polyak(target: nn.Module, online: nn.Module, tau: float) -> None:
    """Update `target` towards `online` with Polyak coefficient `tau`."""
    with torch.no_grad():
        torch._foreach_lerp_(_weights(target), _weights(online), tau)


def _weights(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module as `parameters` does, which also builds their names."""
    if type(module) is Ensemble:
        return module._in_order()
    found: dict[int, Tensor] = {}
    waiting, seen = [module], set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        found |= {id(weight): weight for weight in part._parameters.values() if weight is not None}
        waiting.extend(reversed([child for child in part._modules.values() if child is not None]))
    return list(found.values())
