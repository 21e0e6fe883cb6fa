"""Backbones made of backbones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from policies.backbones import Backbone
from policies.errors import ConfigError
from policies.protocols import BoundField, Cond
from policies.weight_cache import WeightCache


class SwitchedField(nn.Module):
    """One network for the noisy steps and another for the last ones; itself a backbone.

    Rows whose network time is below `switch_time` see `tuned`, all others the frozen `base`. Used by DPPO,
    which fine-tunes only the last denoising steps. The two networks must not share parameters.

    Args:
        base: Frozen network; its parameters stop requiring gradients.
        tuned: Network that is trained.
        switch_time: In network time (for diffusion the integer timestep, so that `tuned` sees timesteps
            0 ... switch_time - 1).

    Raises:
        ConfigError: If the two networks share a parameter.
    """

    def __init__(self, base: Backbone, tuned: Backbone, switch_time: float) -> None:
        super().__init__()
        if {id(weight) for weight in base.parameters()} & {id(weight) for weight in tuned.parameters()}:
            raise ConfigError(
                "SwitchedField needs two networks without common parameters; got networks that share some. "
                "Pass a deep copy as tuned."
            )
        for weight in base.parameters():
            weight.requires_grad_(False)
        self.base: Any = base
        self.tuned: Any = tuned
        self.switch_time = float(switch_time)
        self._cache: WeightCache[_Split] = WeightCache()

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
    ) -> Tensor:
        """Evaluate each row with the network of its time; see `policies.backbones.Backbone`.

        On a CPU every row costs one network. On an accelerator (and while tracing) looking at the times would
        stall the host, so both networks run and the result is selected; callers that know on which side all
        of their rows lie should call `tuned` or `base` directly.

        Shapes:
            x: (M, Th, Da) -> (M, Th, Da). Others as for `Backbone`.
        """
        is_tuned = time < self.switch_time
        if _is_traced() or time.device.type != "cpu":
            rows = is_tuned if time_row is None else is_tuned.index_select(0, time_row)
            arguments = (x, time, cond, cond_row, time_row)
            return torch.where(rows[:, None, None], self.tuned(*arguments), self.base(*arguments))
        if bool(is_tuned.all()):
            return self.tuned(x, time, cond, cond_row, time_row)
        if not bool(is_tuned.any()):
            return self.base(x, time, cond, cond_row, time_row)
        rows = is_tuned if time_row is None else is_tuned.index_select(0, time_row)
        return self._by_side(rows, x, time, cond, cond_row, time_row)

    def _by_side(
        self,
        is_tuned: Tensor,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None,
        time_row: Tensor | None,
    ) -> Tensor:
        """Evaluate the rows of each side with its network and put them back in order."""
        out = torch.empty_like(x)
        for side, network in ((is_tuned, self.tuned), (~is_tuned, self.base)):
            index = side.nonzero().squeeze(1)
            rows = network(
                x.index_select(0, index),
                time.index_select(0, index) if time_row is None else time,
                cond.rows(index) if cond_row is None else cond,
                None if cond_row is None else cond_row.index_select(0, index),
                None if time_row is None else time_row.index_select(0, index),
            )
            out = out.index_copy(0, index, rows)
        return out

    def bind(self, cond: Cond, times: Tensor) -> BoundField:
        """Bind each network to its own times; a step runs one network only. See `Backbone`.

        Pass the same `times` tensor every time: its split is kept (on an accelerator, reading it waits).
        A tracer cannot read times: unless the split is sealed, both networks run and the result is selected.
        """
        if _is_traced() and not self._cache.sealed:
            return self._bind_both(cond, times)
        split = self._cache.get((times,), lambda: _Split(times, self.switch_time))
        base = self.base.bind(cond, split.base_times) if split.base_times.numel() else None
        tuned = self.tuned.bind(cond, split.tuned_times) if split.tuned_times.numel() else None
        steps: list[tuple[BoundField, int]] = [
            (tuned, place) if is_tuned else (base, place)  # type: ignore[misc]
            for is_tuned, place in zip(split.is_tuned, split.place, strict=True)
        ]

        def bound(k: int, x: Tensor) -> Tensor:
            evaluate, place = steps[k]
            return evaluate(place, x)

        return bound

    def _bind_both(self, cond: Cond, times: Tensor) -> BoundField:
        is_tuned = times < self.switch_time
        base, tuned = self.base.bind(cond, times), self.tuned.bind(cond, times)
        return lambda k, x: torch.where(is_tuned[k], tuned(k, x), base(k, x))


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


class _Split:
    """Times (K,) divided into those of the tuned and those of the base network.

    `is_tuned[k]` tells the side of step k, `place[k]` its position among the times of that side.
    """

    def __init__(self, times: Tensor, switch_time: float) -> None:
        self.is_tuned = [time < switch_time for time in times.tolist()]
        sides = [[k for k, side in enumerate(self.is_tuned) if side == wanted] for wanted in (True, False)]
        self.tuned_times, self.base_times = (times[torch.tensor(side, dtype=torch.long)] for side in sides)
        self.place = [self.is_tuned[:k].count(side) for k, side in enumerate(self.is_tuned)]


__all__ = ["SwitchedField"]
