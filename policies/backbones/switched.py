"""Backbones composed of two backbones."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from policies.backbones import Backbone
from policies.errors import ConfigError
from policies.networks.packed import PackedSteps, some_of
from policies.networks.weight_cache import WeightCache
from policies.protocols import BoundField, Cond, Features


class SwitchedField(nn.Module):
    """Backbone with one network for the noisy steps and another for the last ones, which are fine-tuned.

    Rows with network time below `switch_time` use `tuned`, all others the frozen `base`. With `tuned_above`,
    for network times that increase towards the action, `tuned` covers times from `switch_time` on.

    Args:
        base: Frozen network; `requires_grad` is disabled.
        tuned: Trained network, without parameters of `base`.
        switch_time: Network time: for diffusion the integer timestep, `tuned` covers 0 ... switch_time - 1.
    """

    def __init__(
        self, base: Backbone, tuned: Backbone, switch_time: float, *, tuned_above: bool = False
    ) -> None:
        super().__init__()
        if {id(weight) for weight in base.parameters()} & {id(weight) for weight in tuned.parameters()}:
            raise ConfigError(
                "SwitchedField needs two networks without common parameters. Pass a deep copy as tuned."
            )
        for weight in base.parameters():
            weight.requires_grad_(False)
        self.base: Any = base
        self.tuned: Any = tuned
        self.switch_time, self.tuned_above = float(switch_time), tuned_above
        self._cache: WeightCache[_Split] = WeightCache()

    def is_tuned(self, time: Tensor) -> Tensor:
        return time >= self.switch_time if self.tuned_above else time < self.switch_time

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
        second_time: Tensor | None = None,
    ) -> Tensor:
        """Evaluate each row with the network of its time; see `policies.backbones.Backbone`.

        On a CPU each row costs one network. On an accelerator (and while tracing) reading the times would
        synchronise with the host, so both networks run and the result is selected.
        """
        is_tuned, arguments = self.is_tuned(time), (x, time, cond, cond_row, time_row, second_time)
        can_read = time.device.type == "cpu" and not _is_traced()
        if can_read and bool(is_tuned.all()):
            return self.tuned(*arguments)
        if can_read and not bool(is_tuned.any()):
            return self.base(*arguments)
        rows = is_tuned if time_row is None else is_tuned.index_select(0, time_row)
        if not can_read:
            return torch.where(rows[:, None, None], self.tuned(*arguments), self.base(*arguments))
        out = torch.empty_like(x)
        for is_own, network in ((rows, self.tuned), (~rows, self.base)):
            index = is_own.nonzero().squeeze(1)

            def pick(part: Tensor | None, index: Tensor = index) -> Tensor | None:
                return None if part is None else part.index_select(0, index)

            part = network(
                x.index_select(0, index),
                pick(time) if time_row is None else time,
                cond.rows(index) if cond_row is None else cond,
                pick(cond_row),
                pick(time_row),
                pick(second_time) if time_row is None else second_time,
            )
            out = out.index_copy(0, index, part)
        return out

    def features(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> Features:
        return self.tuned.features(cond, times, second_times)

    def energy(self, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
        """Return the energy (M,) of every row under the network of its time (M,); both need an energy."""
        energies = self.tuned.energy(x, time, cond), self.base.energy(x, time, cond)
        return torch.where(self.is_tuned(time), *energies)

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundField:
        """Bind each network to its own times; a step runs one network only. See `Backbone`.

        The split is cached per `times` tensor (reading it synchronises an accelerator). A tracer cannot read
        times: unless the split is sealed, both networks run and the result is selected.
        """
        if _is_traced() and not self._cache.sealed:
            is_tuned, networks = self.is_tuned(times), (self.base, self.tuned)
            base, tuned = (network.bind(cond, times, second_times) for network in networks)
            return lambda k, x: torch.where(is_tuned[k], tuned(k, x), base(k, x))
        split = self._split(times, second_times)
        base = self.base.bind(cond, *split.base_times) if split.has_base else None
        tuned = self.tuned.bind(cond, *split.tuned_times) if split.has_tuned else None
        steps: list[tuple[BoundField, int]] = [
            (tuned, place) if is_tuned else (base, place)  # type: ignore[misc]
            for is_tuned, place in zip(split.is_tuned, split.place, strict=True)
        ]

        def bound(k: int, x: Tensor) -> Tensor:
            evaluate, place = steps[k]
            return evaluate(place, x)

        return bound

    def bind_packed(
        self, cond: Cond, times: Tensor, second_times: Tensor | None = None
    ) -> list[PackedSteps] | None:
        """Return `bind` for the loop in C; None where that has to serve."""
        split = self._split(times, second_times)
        nets: dict[bool, list[PackedSteps]] = {}
        for is_tuned, is_used, network, own_times in (
            (False, split.has_base, self.base, split.base_times),
            (True, split.has_tuned, self.tuned, split.tuned_times),
        ):
            if not is_used:
                continue
            bind = getattr(network, "bind_packed", None)
            if bind is None or (bound := bind(cond, *own_times)) is None:
                return None
            nets[is_tuned] = bound
        steps: list[PackedSteps] = []
        for is_tuned, run in groupby(zip(split.is_tuned, split.place, strict=True), key=itemgetter(0)):
            places = [place for _, place in run]
            steps += some_of(nets[is_tuned], places[0], places[-1] + 1)
        return steps

    def _split(self, times: Tensor, second_times: Tensor | None) -> _Split:
        sources = (times,) if second_times is None else (times, second_times)
        split = lambda: _Split(times, second_times, self.is_tuned(times))  # noqa: E731
        return self._cache.get(sources, split, are_tables=True)


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


class _Split:
    """Times (K,) of each network; `is_tuned[k]` is the network of step k, `place[k]` its index among them."""

    def __init__(self, times: Tensor, second_times: Tensor | None, is_tuned: Tensor) -> None:
        self.is_tuned: list[bool] = is_tuned.tolist()
        self.has_tuned, self.has_base = any(self.is_tuned), not all(self.is_tuned)
        steps = [[k for k, tuned in enumerate(self.is_tuned) if tuned == wanted] for wanted in (True, False)]
        self.tuned_times, self.base_times = (
            (times[index], None if second_times is None else second_times[index])
            for index in (torch.tensor(own, dtype=torch.long) for own in steps)
        )
        self.place = [self.is_tuned[:k].count(tuned) for k, tuned in enumerate(self.is_tuned)]
