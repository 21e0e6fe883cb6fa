"""Energy networks: a scalar per chunk, with its gradient as network output.

Legend: f(x, t) a backbone, x chunk (B, Th, Da), E (B,) energy of every chunk, low where chunks are likely::

    dot    E = <x, f>              sums over Th and Da
    dae    E = |x - f|^2 / 2
    mean   E = mean of f

An evaluation is one forward and one backward pass of the network; `bind` precomputes what depends on
condition and time alone. With gradients enabled it can be differentiated again.

Source: dot and dae, arXiv 2302.11552 (section 4); mean, arXiv 2510.27545.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from policies.networks.attention import set_attention
from policies.protocols import BoundField, Cond, Features

ENERGIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dot": lambda x, out: (x * out).sum(dim=(-2, -1)),
    "dae": lambda x, out: 0.5 * (x - out).square().sum(dim=(-2, -1)),
    "mean": lambda x, out: out.mean(dim=(-2, -1)),
}
"""(x, f(x)), both (B, Th, Da) -> E (B,)."""

BoundEnergy = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""`bound(k, x)`: energy (B,) and gradient (B, Th, Da) at the k-th bound time for the bound condition."""


class EnergyField(nn.Module):
    """The gradient of an energy (`form`) with respect to the chunk; itself a backbone.

    Attention and normalisation of `net` are set to operations that can be differentiated twice.
    """

    evaluates_gradients = True  # of the energy, in every evaluation

    def __init__(self, net: Any, form: str) -> None:
        super().__init__()
        self.net = net
        self.form = form
        set_attention(net, "math")

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
        second_time: Tensor | None = None,
    ) -> Tensor:
        time, second, cond = _lasting(time), _lasting(second_time), _lasting_cond(cond)
        cond_row, time_row = _lasting(cond_row), _lasting(time_row)
        return energy_and_gradient(lambda y: self.energy(y, time, cond, cond_row, time_row, second), x)[1]

    def energy(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
        second_time: Tensor | None = None,
    ) -> Tensor:
        """Return the energy (M,); arguments as for `policies.backbones.Backbone`."""
        return self._read(x, self.net(x, time, cond, cond_row, time_row, second_time))

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundField:
        bound = self.bind_energy(cond, times, second_times)
        return lambda k, x: bound(k, x)[1]

    def bind_energy(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundEnergy:
        """Bind energy and gradient to conditions and times; shapes as for `bind`."""
        if torch.compiler.is_compiling():
            net = self.net.bind(cond, times, second_times)
        else:
            with _graphs(torch.is_grad_enabled()):
                net = self.net.bind(_lasting_cond(cond), times, second_times)
        return lambda k, x: energy_and_gradient(lambda y: self._read(y, net(k, y)), x)

    def features(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> Features:
        return self.net.features(cond, times, second_times)

    def _read(self, x: Tensor, out: Tensor) -> Tensor:
        return ENERGIES[self.form](x, out)


def energy_and_gradient(energy: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the energy (B,) of chunks x (B, Th, Da) and its gradient, with their graphs if they are on."""
    if torch.compiler.is_compiling():
        return _traced_gradient(energy, x)
    keeps_graph = torch.is_grad_enabled()
    with _graphs(True):
        y = x if keeps_graph and x.requires_grad else _lasting(x).detach().requires_grad_()
        value = energy(y)
        (gradient,) = torch.autograd.grad(value.sum(), y, create_graph=keeps_graph)
    return (value if keeps_graph else value.detach()), gradient


def _traced_gradient(energy: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    def total(y: Tensor) -> tuple[Tensor, Tensor]:
        value = energy(y)
        return value.sum(), value

    gradient, value = torch.func.grad(total, has_aux=True)(x)
    return value, gradient


@contextlib.contextmanager
def _graphs(are_on: bool) -> Iterator[None]:
    """Build graphs or not, without tensors of inference mode, which cannot be part of one."""
    with torch.inference_mode(False), torch.set_grad_enabled(are_on):
        yield


def _lasting(x: Any) -> Any:
    """Return a tensor that a graph may keep; None stays None."""
    if x is None or torch.compiler.is_compiling() or not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


def _lasting_cond(cond: Cond) -> Cond:
    if torch.compiler.is_compiling() or not cond.vec.is_inference():
        return cond
    with torch.inference_mode(False):
        return cond.repeat(1)
