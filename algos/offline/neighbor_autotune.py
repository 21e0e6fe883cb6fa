"""Selection of the nearest-row search: by name, or the fastest by timing.

Legend: M rows, B queries of a batch, k list length. A tree has no preparation and a higher cost per query;
lists cost time once per queried row and little afterwards. The fastest depends on data, machine and run
length. Candidates are timed on the same few queries and extrapolated to the run::

    seconds = batches * seconds of a batch  +  rows ever queried * seconds of a list
    rows ever queried = M (1 - exp(-batches B / M)),   rows are drawn with replacement

All candidates are exact: the choice affects time and ties only. A checkpoint stores it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algos.offline.neighbor_lists import listing_bytes
from algos.offline.neighbor_tree import box_tree_bytes, pair_bytes
from algos.offline.neighbors import (
    BruteSearch,
    ListSearch,
    Search,
    TreeSearch,
    brute_bytes,
    list_bytes,
    tree_bytes,
)
from envs.datasets.free_memory import SHARE, fits, free_memory
from policies.errors import ConfigError

_log = logging.getLogger(__name__)

SEARCHES = ("auto", "lists", "tree", "brute", "approximate")
TIMED_FROM = 50_000  # rows; below this, every search takes less than a gradient step
_TRIED = 256  # timed queries, at most
_REPEATS = 3
_NOISE = 0.3  # std of action noise for the queries near the data; the others are uniform
_GIBI = 2**30

Clock = Callable[[], float]


@dataclass(frozen=True)
class Load:
    """Expected load of a run: number of batches and queries per batch."""

    batches: int
    queries: int

    def rows(self, among: int) -> float:
        """Return the expected number of distinct rows that are queried."""
        return among * -math.expm1(-self.batches * self.queries / among)


@dataclass(frozen=True)
class Rows:
    """The searched rows, and the settings of a search."""

    state: Tensor  # (M, C), standardised
    action: Tensor  # (M, A)
    beta: float  # weight of states
    rank: int = 1  # rank of the neighbour; above 1 requires the tree
    length: int = 64  # k, of lists
    queries: int = 256  # B, which brute force compares at once

    def __len__(self) -> int:
        return len(self.state)

    def bytes_of(self, how: str) -> int:
        """Return the peak bytes of a search, without the rows themselves."""
        num, states, width = len(self), self.state.shape[1], self.state.shape[1] + self.action.shape[1]
        if how == "tree":
            return tree_bytes(num, width)
        if how == "brute":
            return brute_bytes(num, width, self.queries)
        tree, building = box_tree_bytes(num, states, width - states)
        work = max(listing_bytes(num, states), pair_bytes(width))
        return tree + max(building, list_bytes(num, self.length) + work)

    def fits(self, how: str) -> bool:
        """Return whether the search fits into the free memory of its device."""
        if self._is_on_device(how):
            return self.bytes_of(how) <= SHARE * _free_of(self.state.device)
        return fits(self.bytes_of(how))

    def _is_on_device(self, how: str) -> bool:
        """Return whether a search uses accelerator memory (brute force only)."""
        return how == "brute" and self.state.device.type != "cpu"

    def _require_memory(self, how: str) -> None:
        if self.fits(how):
            return
        free = _free_of(self.state.device) if self._is_on_device(how) else free_memory() or 0
        advice = {"brute": "algo.search=tree", "tree": "algo.search=brute"}
        if self.state.device.type == "cpu":
            advice["tree"] = "fewer transitions, or a machine with more memory"
        raise ConfigError(
            f"algo.search={how} takes up to {self.bytes_of(how) / _GIBI:.2f} GiB for {len(self)} rows; "
            f"{free / _GIBI:.2f} GiB are free. Use "
            f"{advice.get(how, 'a shorter algo.list_length, or algo.search=tree')}."
        )

    def search(self, how: str) -> Search:
        """Build a search; log its memory.

        Raises:
            ConfigError: If memory is too small, or there are fewer rows than the rank.
        """
        if self.rank > len(self):
            raise ConfigError(
                f"algo.neighbor_rank must be at most the number of transitions, {len(self)}; got {self.rank}."
            )
        self._require_memory(how)
        _log.info(
            "neighbour search '%s' among %d rows takes up to %.0f MiB.",
            how, len(self), self.bytes_of(how) / 2**20,
        )  # fmt: skip
        if how == "tree":
            return TreeSearch(self.state, self.action, self.beta, rank=self.rank)
        if how == "brute":
            return BruteSearch(self.state, self.action, self.beta)
        exact = how == "lists"
        return ListSearch(self.state, self.action, self.beta, length=self.length, exact=exact)


def _free_of(device: torch.device) -> float:
    """Return the free bytes of an accelerator, including torch's cache; infinite if unknown."""
    if device.type != "cuda":
        return math.inf
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def build_search(
    how: str, rows: Rows, *, load: Load, generator: torch.Generator, clock: Clock | None = None
) -> Search:
    """Return a search over rows.

    Args:
        how: `lists`, `tree`, `brute`, `approximate` (lists without fallback), or `auto`: the faster of lists
            and tree on a CPU, of brute force and tree on an accelerator. Small datasets are not timed: lists
            on a CPU, brute force on an accelerator.
        rows: Rows to search.
        load: Expected load, for `auto`.
        generator: Draws the timed queries.
        clock: Seconds; None: process time on a CPU, else wall time.

    Raises:
        ConfigError: If the name is unknown or does not support the rank, and as `Rows.search`.
    """
    if how not in SEARCHES:
        raise ConfigError(f"algo.search must be one of {', '.join(SEARCHES)}; got '{how}'.")
    if rows.rank > 1 and how not in ("auto", "tree"):
        raise ConfigError(f"algo.neighbor_rank={rows.rank} needs algo.search=tree; got '{how}'.")
    rows = replace(rows, queries=load.queries)
    if how != "auto":
        return rows.search(how)
    on_cpu = rows.state.device.type == "cpu"
    names = _fitting(["lists" if on_cpu else "brute", "tree"] if rows.rank == 1 else ["tree"], rows)
    if len(names) == 1 or len(rows) < TIMED_FROM:
        return rows.search(names[0])
    ticks = clock or (time.process_time if on_cpu else time.perf_counter)
    return _fastest(names, rows, load, generator, ticks)


def _fitting(names: list[str], rows: Rows) -> list[str]:
    """Return the searches that fit into memory; if none does, the last one, which raises."""
    found = [name for name in names if rows.fits(name)]
    for name in names:
        if found and name not in found:
            _log.warning("there is not enough memory for algo.search=%s; it is not tried.", name)
    return found or names[-1:]


def _fastest(names: list[str], rows: Rows, load: Load, generator: torch.Generator, clock: Clock) -> Search:
    """Return the fastest; one at a time is in memory, the one that is mostly fastest last."""
    tried = min(_TRIED, load.queries, len(rows))
    row = torch.randint(len(rows), (tried,), generator=generator).to(rows.state.device)
    action = _actions(rows.action[row], generator)
    search, seconds = None, {}
    for name in reversed(names):
        del search
        search = rows.search(name)
        seconds[name] = expected_seconds(search, row, rows.state[row], action, load, len(rows), clock)
    best = min(names, key=seconds.__getitem__)
    told = ", ".join(f"{name} {seconds[name]:.3g} s" for name in names)
    _log.info("neighbour search '%s'; expected for the whole run: %s.", best, told)
    assert search is not None
    if search.name == best:
        return search
    del search
    return rows.search(best)


def _actions(recorded: Tensor, generator: torch.Generator) -> Tensor:
    """Return actions (B, A) for timing: half near the recorded ones, half far away.

    Tree search depends on the distance: in high dimensions it is several times slower far from the data.
    """
    shape = recorded.shape
    near = recorded + _NOISE * torch.randn(shape, generator=generator).to(recorded)
    anywhere = 2 * torch.rand(shape, generator=generator).to(recorded) - 1
    is_near = torch.arange(shape[0], device=recorded.device) < shape[0] // 2
    return torch.where(is_near[:, None], near.clamp(-1, 1), anywhere)


def expected_seconds(
    search: Search, row: Tensor, state: Tensor, action: Tensor, load: Load, among: int, clock: Clock
) -> float:
    """Return the expected search time of a run among M (`among`) rows, extrapolated from a few queries.

    The search must not have answered the queries (rows (B,), states (B, C), actions (B, A)) before.
    """
    listing = 0.0
    if isinstance(search, ListSearch):
        start = clock()
        search.make_lists(row.cpu())
        listing = (clock() - start) / len(row.unique())
    search.nearest(row, state, action).row.cpu()  # one-time cost of the first call
    times = []
    for _ in range(_REPEATS):
        start = clock()
        search.nearest(row, state, action).row.cpu()
        times.append(clock() - start)
    batch = min(times) * load.queries / len(row)
    return load.batches * batch + load.rows(among) * listing
