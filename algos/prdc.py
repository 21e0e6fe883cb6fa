"""PRDC: TD3 with a penalty towards the nearest state-action pair of the dataset.

Legend: pi the actor's action at a batch state s, (s_j, a_j) dataset rows::

    j*         = argmin_j beta^2 |s - s_j|^2 + |pi - a_j|^2
    constraint = mean (pi - a_j*)^2 over rows and entries; the neighbour is a constant

Where j* is mostly the batch row itself, or a copy of it, the method reduces to TD3+BC; see
`constraint/own_row`. A larger beta increases that fraction. For a sampling policy, pi is its sampled chunk
and a_j are recorded chunks. In the task (`online_steps`) the neighbours remain rows of the dataset, also of
states that are new.

Source: PRDC, arXiv 2306.06569, and its released code.

Deviations from the released code:
    * the neighbour search is exact but implemented differently (`algos.offline.neighbors`): ties may differ;
    * actions are normalised to [-1, 1] before distances are taken;
    * with `init`, states are standardised for the distances, independently of that policy's normaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from algos.base import Draws, Setup
from algos.offline.neighbor_autotune import SEARCHES, Load, Rows, build_search
from algos.offline.neighbors import Search, usual_length
from algos.offline.td3_update import Actor, ConstrainedTd3Config, Penalty, Regulariser, mean_square, towards
from algos.training.ranks import current
from algos.transitions import Batch, TransitionTable, deviations
from policies.bounds import bounded
from policies.networks.critics import Ensemble
from policies.registry import register
from policies.seeds import seeded_generator


class NearestRow(Regulariser):
    """Penalty mean (pi - a_j*)^2; equations in the module docstring.

    Args:
        search: Nearest-neighbour search over the rows of the table.
        action: (M, A) actions of the rows.
        other: Builds a search by name, to resume with the saved method; None: `search` only.
        scale: (C,) divisor of conditions before distances; None: no scaling.
        state: (M, C) scaled states, to count a duplicate of a row as the row itself; None: no duplicates.
    """

    def __init__(
        self,
        search: Search,
        action: Tensor,
        other: Callable[[str], Search] | None = None,
        *,
        scale: Tensor | None = None,
        state: Tensor | None = None,
    ) -> None:
        self.search, self._action, self._other = search, action, other
        self._scale, self._state = scale, state

    def penalty(self, batch: Batch, action: Tensor, critic: Ensemble, draws: Draws) -> Penalty:
        state = batch.cond if self._scale is None else batch.cond / self._scale
        query = action.detach()
        found = self.search.nearest(batch.row, state, query)
        neighbour = self._action[found.row]
        own = self._is_own(batch, state, found.row, neighbour)
        told = {
            "constraint/own_row": own.float().mean(dim=-1),
            "constraint/certified": found.certified.float().mean(dim=-1),
            "constraint/own_distance": mean_square(neighbour, batch.action).sqrt(),
        }
        return towards(action, neighbour)._replace(metrics=told)

    def _is_own(self, batch: Batch, state: Tensor, found: Tensor, neighbour: Tensor) -> Tensor:
        """Return a mask (B,) bool: found row equals the batch row in index, or in state and action."""
        own = found == batch.row
        if self._state is None:
            return own
        alike = (self._state[found] == state).all(dim=-1)
        return own | (alike & (neighbour == batch.action).all(dim=-1))

    def state_dict(self) -> dict[str, Any]:
        return {"search": self.search.name}  # determines how ties break

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        name = state.get("search", self.search.name)
        if name != self.search.name and self._other is not None:
            self.search = self._other(name)


@register("algo", "prdc")
@dataclass
class PrdcConfig(ConstrainedTd3Config):
    """PRDC with the published settings of hopper and walker2d.

    Published: alpha 40 and beta 2 for halfcheetah; 2.5 and 2 for hopper and walker2d; 7.5 and 7.5, with
    reward_scale 10000 and reward_shift -1, for antmaze.

    Source:
        arXiv 2306.06569 and its released code.
    """

    beta: float = bounded(2.0, gt=0)  # weight of the state in the distance
    neighbor_rank: int = bounded(1, ge=1)  # rank of the neighbour; published: 1; `k` of the released code
    search: str = bounded("auto", choices=SEARCHES)  # neighbour search; auto: fastest exact one, by timing
    list_length: int | None = bounded(None, ge=2)  # neighbours per list; null: 64, less above 437,500 rows

    def __post_init__(self) -> None:
        super().__post_init__()
        is_any = not self.online_steps or self.search not in ("lists", "approximate")
        rule = "auto, tree or brute with algo.online_steps: lists hold neighbours of recorded states"
        self.require("search", is_any, rule)

    def resume_invariants(self) -> dict[str, Any]:
        distance = {"algo.beta": self.beta, "algo.neighbor_rank": self.neighbor_rank}
        return super().resume_invariants() | distance

    def regulariser(self, actor: Actor, table: TransitionTable, setup: Setup) -> NearestRow:
        return table.cached("nearest rows", lambda: self._nearest_row(table, setup))

    def _nearest_row(self, table: TransitionTable, setup: Setup) -> NearestRow:
        scale = None if setup.init is None else deviations(table.cond)  # a new actor standardises
        state = table.cond if scale is None else table.cond / scale
        search = self.search
        if search == "auto" and self.online_steps:  # states that no list is for
            search = "tree" if state.device.type == "cpu" or self.neighbor_rank > 1 else "brute"
        length = self.list_length or usual_length(len(table))
        rows = Rows(state, table.action, self.beta, self.neighbor_rank, length)
        build = partial(
            build_search,
            rows=rows,
            load=Load(max(1, self.steps // self.policy_delay), setup.num_seeds * self.batch_size),
            generator=seeded_generator(setup.seed, "neighbour search"),
        )
        keeps_saved = self.search == "auto" and not self.online_steps  # which may be lists
        other = build if keeps_saved else None
        found = build(search)
        if found.name != (name := current().share(found.name)):  # timed otherwise on another rank
            found = build(name)
        return NearestRow(found, rows.action, other, scale=scale, state=rows.state)
