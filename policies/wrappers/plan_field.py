"""A planner as a denoising policy of its plans: what a composition evaluates.

Legend: B batch, H rows of a plan, D their width; A and O widths of actions and states.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from policies.denoising import DenoisingPolicy
from policies.normalizer import Normalizer
from policies.protocols import BoundField, Cond, Evaluate, Kind, Observation, Rng


class PlanField(DenoisingPolicy):
    """View of a planner whose chunks are plans (B, H, D) and whose condition holds state, goal and label.

    Known entries are clean wherever the network reads them, in the planner's own units; so a state may come
    from another planner's path. One normaliser, named as that of actions, maps whole rows.
    """

    def __init__(self, planner: Any) -> None:
        nn.Module.__init__(self)
        base = planner.base
        self.planner = planner
        self.config, self.chunk, self.process = base.config, base.chunk, base.process
        self.normalizer = _of_rows(planner)
        self._use_sampler(base.sampler, tuned_steps=None, log_prob_min_std=None)

    encoder: Any = property(lambda self: self.planner.encoder)
    goal_dim: Any = property(lambda self: self.planner.goal_dim)
    field: Any = property(lambda self: self.planner.base.field)

    def encode(self, obs: Observation, *, generator: Rng = None) -> Cond:
        cond: Cond = self.planner.encode(obs, generator=generator)
        return cond

    def condition(self, vec: Tensor) -> Cond:
        return Cond(vec)

    def with_act_steps(self, act_steps: int) -> Self:
        view = super().with_act_steps(act_steps)
        view.planner = self.planner.with_act_steps(act_steps)
        return view

    def bind_at(self, cond: Cond, *times: Tensor) -> BoundField:
        known, mask = self.planner.known(cond)
        bound: BoundField = self.planner.base.bind_at(self.planner.inner(cond), *times)
        return lambda k, x: bound(k, torch.where(mask, known, x))

    def bind_packed(self, cond: Cond) -> None:
        """Known entries are written by `bind_at` alone."""

    def evaluate(self, cond: Cond) -> Evaluate:
        known, mask = self.planner.known(cond)
        net: Evaluate = self.planner.base.evaluate(self.planner.inner(cond))
        return lambda x, *times, **level: net(torch.where(mask, known, x), *times, **level)

    def predict(self, x: Tensor, t: Tensor, cond: Cond, *, kind: Kind) -> Tensor:
        known, mask = self.planner.known(cond)
        clean = torch.where(mask, known, x)
        found: Tensor = self.planner.base.predict(clean, t, self.planner.inner(cond), kind=kind)
        return found


def _of_rows(planner: Any) -> Normalizer:
    """Return the maps of state and goal, and those of a plan's rows as `action`."""
    own, sizes = planner.normalizer, planner.wrapper
    dims = {"state": sizes.obs_dim, "action": sizes.row_dim, "goal": sizes.goal_dim}
    rows = Normalizer(own.modes, dims)
    for name in own.modes:
        parts = (["state"] if sizes.inverse_dims else ["action", "state"]) if name == "action" else [name]
        for kind in ("scale", "offset"):
            whole = torch.cat([own.get_buffer(f"{part}_{kind}") for part in parts])
            rows.register_buffer(f"{name}_{kind}", whole.clone())
    return rows
