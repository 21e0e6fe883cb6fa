"""Which way of finding nearest rows a run takes: the one that is named, or the fastest, by trying once.

Legend: M rows, B queries of a batch, k list length. A tree needs no preparation and more time for every
query; lists cost time once for every row that is ever asked for, and little after that. So what is the faster
depends on the data, on the machine and on the length of the run. Both are asked for the same few queries, and
the times are multiplied by what the run will ask::

    seconds = batches * seconds of a batch  +  rows ever asked for * seconds of a list
    rows ever asked for = M (1 - exp(-batches B / M)),   rows being drawn with replacement

All ways are exact, so the choice decides about time and about ties only; a checkpoint keeps it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algos.offline.neighbor_lists import listing_bytes
from algos.offline.neighbor_tree import boxes_bytes
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
TIMED_FROM = 50_000  # rows; among fewer, every way takes less than a gradient step
_TRIED = 256  # queries, at most
_REPEATS = 3
_NOISE = 0.3  # of the actions of half of them, as of an actor near the data; the others lie anywhere
_GIBI = 2**30
_FEWER = "fewer transitions, or a machine with more memory"
_SHORTER = "a shorter algo.list_length, or algo.search=tree"

Clock = Callable[[], float]


@dataclass(frozen=True)
class Load:
    """What a run will ask for: so many batches of so many queries."""

    batches: int
    queries: int

    def rows(self, among: int) -> float:
        """Return the expected number of different rows that are queried."""
        return among * -math.expm1(-self.batches * self.queries / among)


@dataclass(frozen=True)
class Rows:
    """What is searched.

    Args:
        state: (M, C), standardised. action: (M, A).
        beta: Weight of states.
        rank: Which neighbour; only a tree finds others than the nearest.
        length: k, of lists.
        queries: B, which brute force compares at once.
    """

    state: Tensor
    action: Tensor
    beta: float
    rank: int = 1
    length: int = 64
    queries: int = 256

    def __len__(self) -> int:
        """Return M."""
        return len(self.state)

    def bytes_of(self, how: str) -> int:
        """Return the memory that a way takes at most, beside the rows themselves."""
        num, states, width = len(self), self.state.shape[1], self.state.shape[1] + self.action.shape[1]
        if how == "tree":
            return tree_bytes(num, width)
        if how == "brute":
            return brute_bytes(num, width, self.queries)
        lists, listing = list_bytes(num, self.length), listing_bytes(num, states)
        if how == "approximate":
            return lists + listing
        copies = 8 * num * width  # of the rows while boxes are made of them, before there are lists
        return max(lists, copies) + listing + boxes_bytes(num, width)

    def has_room(self, how: str) -> bool:
        """Return whether there is memory for a way of searching, on the device where it searches."""
        if self._is_there(how):
            return self.bytes_of(how) <= SHARE * _free_of(self.state.device)
        return fits(self.bytes_of(how))

    def _is_there(self, how: str) -> bool:
        """Return whether a way uses accelerator memory: only brute force does."""
        return how == "brute" and self.state.device.type != "cpu"

    def _require_room(self, how: str) -> None:
        """Refuse a way of searching without room."""
        if self.has_room(how):
            return
        free = _free_of(self.state.device) if self._is_there(how) else free_memory() or 0
        here = self.state.device.type == "cpu"
        instead = {"tree": _FEWER if here else "algo.search=brute", "brute": "algo.search=tree"}
        raise ConfigError(
            f"algo.search={how} takes up to {self.bytes_of(how) / _GIBI:.2f} GiB for {len(self)} rows; "
            f"{free / _GIBI:.2f} GiB are free. Take {instead.get(how, _SHORTER)}."
        )

    def search(self, how: str) -> Search:
        """Return a way of searching, after saying what it takes.

        Raises:
            ConfigError: If the way is unknown, cannot find the neighbour of that rank, has no room, or there
                are fewer rows than that.
        """
        _require_possible(how, self.rank)
        if self.rank > len(self):
            raise ConfigError(
                f"algo.neighbor_rank must be at most the number of transitions, {len(self)}; got {self.rank}."
            )
        self._require_room(how)
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
    """Return the free bytes of an accelerator, kept ones of torch included; infinite where none is known."""
    if device.type != "cuda":
        return math.inf
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _require_possible(how: str, rank: int) -> None:
    if how not in SEARCHES:
        raise ConfigError(f"algo.search must be one of {', '.join(SEARCHES)}; got '{how}'.")
    if rank > 1 and how not in ("auto", "tree"):
        raise ConfigError(f"algo.neighbor_rank={rank} needs algo.search=tree; got '{how}'.")


def build_search(
    how: str, rows: Rows, *, load: Load, generator: torch.Generator, clock: Clock | None = None
) -> Search:
    """Return a search over rows.

    Args:
        how: `lists`, `tree`, `brute`, `approximate` (lists alone), or `auto`: on a CPU the faster of lists
            and tree, on an accelerator that of brute force and tree. Few rows are not tried: lists on a CPU,
            brute force on an accelerator.
        rows: What is searched.
        load: What will be asked, for `auto`.
        generator: Draws the queries that are tried.
        clock: Seconds; None: of this process on a CPU, else of the wall.

    Raises:
        ConfigError: See `Rows.search`.
    """
    _require_possible(how, rows.rank)
    rows = replace(rows, queries=load.queries)
    if how != "auto":
        return rows.search(how)
    here = rows.state.device.type == "cpu"
    ways = ["lists" if here else "brute", "tree"] if rows.rank == 1 else ["tree"]
    ways = _with_room(ways, rows)
    if len(ways) == 1 or len(rows) < TIMED_FROM:
        return rows.search(ways[0])
    ticks = clock or (time.process_time if here else time.perf_counter)
    searches = (rows.search(way) for i, way in enumerate(ways) if not i or rows.has_room(way))
    return _fastest(searches, rows, load, generator, ticks)


def _with_room(ways: list[str], rows: Rows) -> list[str]:
    """Return the ways for which there is memory; without any the last one, which raises."""
    possible = [way for way in ways if rows.has_room(way)]
    for way in ways:
        if possible and way not in possible:
            _log.warning("there is no room for algo.search=%s; it is not tried.", way)
    return possible or ways[-1:]


def _fastest(
    searches: Iterable[Search], rows: Rows, load: Load, generator: torch.Generator, clock: Clock
) -> Search:
    tried = min(_TRIED, load.queries, len(rows))
    row = torch.randint(len(rows), (tried,), generator=generator).to(rows.state.device)
    action = _actions(rows.action[row], generator)
    best, least, said = None, math.inf, []
    for search in searches:
        seconds = expected_seconds(search, row, rows.state[row], action, load, len(rows), clock)
        said.append(f"{search.name} {seconds:.3g} s")
        if seconds < least:
            best, least = search, seconds
    assert best is not None
    _log.info("neighbour search '%s' is taken; expected of the whole run: %s.", best.name, ", ".join(said))
    return best


def _actions(recorded: Tensor, generator: torch.Generator) -> Tensor:
    """Return actions (B, A) like those of actors: half of them near the recorded ones, half far away.

    How long a tree takes depends on it: among many dimensions it is several times slower far from the data.
    """
    shape = recorded.shape
    near = recorded + _NOISE * torch.randn(shape, generator=generator).to(recorded)
    anywhere = 2 * torch.rand(shape, generator=generator).to(recorded) - 1
    is_near = torch.arange(shape[0], device=recorded.device) < shape[0] // 2
    return torch.where(is_near[:, None], near.clamp(-1, 1), anywhere)


def expected_seconds(
    search: Search, row: Tensor, state: Tensor, action: Tensor, load: Load, among: int, clock: Clock
) -> float:
    """Return what all searches of a run will take, from a few; see the top of the file.

    Args:
        search: One that has not been asked yet.
        row: (B,) of the queries that are tried.
        state: (B, C).
        action: (B, A).
        load: What the run will ask.
        among: M.
        clock: Seconds.
    """
    listing = 0.0
    if isinstance(search, ListSearch):
        start = clock()
        search.make_lists(row.cpu())
        listing = (clock() - start) / len(row.unique())
    search.nearest(row, state, action).row.cpu()  # what only the first call does
    times = []
    for _ in range(_REPEATS):
        start = clock()
        search.nearest(row, state, action).row.cpu()
        times.append(clock() - start)
    batch = min(times) * load.queries / len(row)
    return load.batches * batch + load.rows(among) * listing
