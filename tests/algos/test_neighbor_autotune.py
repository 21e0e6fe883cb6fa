"""The choice of a search: measured once, kept in checkpoints, and memory is stated before it is taken."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from test_neighbors import costs, table

from algos.offline import neighbor_autotune
from algos.offline.neighbor_autotune import Load, Rows, build_search, expected_seconds
from algos.offline.neighbor_lists import listing_bytes
from algos.offline.neighbor_tree import pair_bytes
from algos.offline.neighbors import BruteSearch, ListSearch, TreeSearch, usual_length
from policies.errors import ConfigError


def rows_of(m: int = 60, **changes: Any) -> Rows:
    state, action = table(m, 0)
    return Rows(state, action, 1.0, **changes)


def chosen(how: str, rows: Rows, batches: int = 10, clock: Any = None) -> Any:
    load = Load(batches, 16)
    return build_search(how, rows, load=load, generator=torch.Generator().manual_seed(0), clock=clock)


class Machine:
    """A clock that searches move forward: a list costs 5 s, a query of lists 1 s, one of a tree `tree` s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tree: float) -> None:
        self.now = 0.0
        monkeypatch.setattr(neighbor_autotune, "TIMED_FROM", 10)
        self._slow_down(monkeypatch, ListSearch, "make_lists", lambda rows: 5.0 * len(rows.unique()))
        self._slow_down(monkeypatch, ListSearch, "nearest", lambda row, *_: 1.0)
        self._slow_down(monkeypatch, TreeSearch, "nearest", lambda row, *_: tree)

    def _slow_down(self, monkeypatch: pytest.MonkeyPatch, part: type, name: str, cost: Any) -> None:
        plain, seen = getattr(part, name), set()

        def slow(search: Any, row: Any, *rest: Any) -> Any:
            fresh = name != "make_lists" or tuple(row.tolist()) not in seen
            seen.add(tuple(row.tolist()))
            self.now += cost(row, *rest) if fresh else 0.0
            return plain(search, row, *rest)

        monkeypatch.setattr(part, name, slow)

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("tree", "batches", "best"), [(0.5, 1000, "tree"), (3.0, 1000, "lists")])
def test_the_faster_way_is_taken(
    tree: float, batches: int, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen("auto", rows_of(), batches, Machine(monkeypatch, tree)).name == best


def test_a_short_run_does_not_pay_for_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 lists of 5 s are worth it if 1000 batches save 2 s each, and not if 10 do."""
    clock = Machine(monkeypatch, tree=3.0)
    assert chosen("auto", rows_of(), 10, clock).name == "tree"
    assert chosen("auto", rows_of(), 1000, clock).name == "lists"


def test_expected_seconds_are_those_of_batches_and_of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, row = rows_of(), torch.arange(8)
    clock = Machine(monkeypatch, tree=3.0)
    query = (row, rows.state[row], rows.action[row], Load(100, 16), 60, clock)
    assert expected_seconds(rows.search("tree"), *query) == pytest.approx(100 * 3.0 * 16 / 8)
    asked = 60 * (1 - torch.tensor(-100 * 16 / 60).exp().item())
    assert expected_seconds(rows.search("lists"), *query) == pytest.approx(100 * 1.0 * 16 / 8 + 5.0 * asked)


def test_actions_that_are_tried_are_near_the_data_and_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree is quick near the data alone, and actors of large weights of Q are far from it for long."""
    rows, asked = rows_of(500), []

    def noted(search: Any, row: Any, state: Any, action: Any, *_: Any) -> float:
        asked.append((row, action))
        return 1.0

    monkeypatch.setattr(neighbor_autotune, "TIMED_FROM", 10)
    monkeypatch.setattr(neighbor_autotune, "expected_seconds", noted)
    build_search("auto", rows, load=Load(10, 200), generator=torch.Generator().manual_seed(0))
    row, action = asked[0]
    off = (action - rows.action[row]).abs().mean(1)
    assert off[:100].mean() < 0.3 < 0.5 < off[100:].mean()
    assert action.abs().max() <= 1


def test_so_many_rows_are_asked_for() -> None:
    asked = torch.randint(500, (40 * 16,), generator=torch.Generator().manual_seed(0)).unique()
    assert Load(40, 16).rows(500) == pytest.approx(len(asked), rel=0.05)


def test_few_rows_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbor_autotune, "expected_seconds", None)
    assert chosen("auto", rows_of()).name == "lists"


def test_every_way_that_is_named_is_taken() -> None:
    for how in ("lists", "tree", "brute", "approximate"):
        assert chosen(how, rows_of()).name == how
    assert chosen("auto", rows_of(rank=3)).name == "tree"


@pytest.mark.parametrize("how", ["lists", "tree", "brute", "auto"])
def test_whatever_is_taken_is_exact(how: str) -> None:
    rows, row = rows_of(), torch.arange(60)
    query = rows.action + 0.4
    found = chosen(how, rows).nearest(row, rows.state, query).row
    every = costs(rows.state, rows.action, row, query, 1.0)
    torch.testing.assert_close(every.gather(1, found[:, None]).squeeze(1), every.amin(1))


@pytest.mark.parametrize(
    ("how", "rank", "message"),
    [("best", 1, "algo.search"), ("lists", 3, "neighbor_rank=3"), ("tree", 61, "algo.neighbor_rank 60 61")],
)
def test_impossible_searches_are_refused(how: str, rank: int, message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        chosen(how, rows_of(rank=rank))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the searches that were made."""
    made: list[str] = []
    for part in (ListSearch, TreeSearch, BruteSearch):
        plain = part.__init__

        def noted(
            self: Any, *args: Any, _plain: Any = plain, _name: str = part.__name__, **more: Any
        ) -> None:
            made.append(_name)
            _plain(self, *args, **more)

        monkeypatch.setattr(part, "__init__", noted)
    yield made


def test_memory_is_stated_before_it_is_taken(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, said = rows_of(2**15), []
    monkeypatch.setattr(
        neighbor_autotune._log, "info", lambda text, *facts: said.append((text % facts, list(built)))
    )
    chosen("lists", rows)
    megabytes = rows.bytes_of("lists") / 2**20
    assert megabytes > 16 and said == [
        (f"neighbour search 'lists' among 32768 rows takes up to {megabytes:.0f} MiB.", [])
    ]
    assert built == ["ListSearch"]


def test_what_has_no_room_is_refused_before_it_is_made(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(1000)
    monkeypatch.setattr("envs.datasets.free_memory.free_memory", lambda: rows.bytes_of("tree") * 2)
    with pytest.raises(ConfigError, match=mentions("algo.search=lists algo.list_length")):
        chosen("lists", rows)
    assert built == []
    assert chosen("auto", rows).name == "tree"
    for function in ("envs.datasets.free_memory.free_memory", "algos.offline.neighbor_autotune.free_memory"):
        monkeypatch.setattr(function, lambda: 0)
    for how, instead in (("auto", "transitions"), ("brute", "algo.search=tree")):
        with pytest.raises(ConfigError, match=mentions(f"0.00 GiB {instead}")):
            chosen(how, rows)


def test_brute_force_asks_its_own_device_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows on an accelerator are compared there; a tree of them is in the memory of the machine."""
    rows = rows_of(1000)
    monkeypatch.setattr("envs.datasets.free_memory.free_memory", lambda: 0)
    monkeypatch.setattr(Rows, "_is_on_device", lambda self, how: how == "brute")
    for free, fits in ((10 * rows.bytes_of("brute"), True), (rows.bytes_of("brute"), False)):
        monkeypatch.setattr(neighbor_autotune, "_free_of", lambda device, free=free: free)
        assert rows.fits("brute") == fits and not rows.fits("tree")


def test_brute_force_states_the_tile_of_the_batches_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, asked = rows_of(1000), []
    monkeypatch.setattr(neighbor_autotune, "fits", lambda size: asked.append(size) or True)
    for queries in (16, 256):
        build_search("brute", rows, load=Load(1, queries), generator=torch.Generator())
    assert asked[1] - asked[0] == 8 * (256 - 16) * 1000


def peak() -> int:
    """Return the largest memory [bytes] of this process."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(1024 * int(line[1]) for line in lines if line[0] == "VmHWM:")


def state_and_take(how: str, num: int) -> tuple[int, int]:
    """Search among `num` rows; return the stated and the taken memory [bytes]."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(num, 11, generator=generator)
    action = 2 * torch.rand(num, 3, generator=generator) - 1

    def search(m: int) -> int:
        rows = Rows(state[:m], action[:m], 2.0)
        row = torch.randint(m, (256,), generator=generator)
        made = rows.search(how)
        for _ in range(2):
            made.nearest(row, state[row], (action[row] + 0.3).clamp(-1, 1))
        return rows.bytes_of(how)

    search(500)  # what only the first call takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak()
    return search(num), peak() - before


def test_the_stated_memory_is_what_a_search_takes() -> None:
    """Of 200,000 rows of 14 numbers, while it is made and when it is asked for 256 of them.

    In a new process that asks the system for each block: what tests before this one left free would be taken
    first, and kept.
    """
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("peaks of memory are read from Linux' /proc")
    ways = ("tree", "brute", "lists", "approximate")
    code = f"from test_neighbor_autotune import *; print(*(state_and_take(how, 200_000) for how in {ways}))"
    alone = {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": "65536"}
    told = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | alone, capture_output=True, check=True
    )
    for how, (stated, taken) in zip(ways, re.findall(rb"\((\d+), (\d+)\)", told.stdout), strict=True):
        assert 0.65 * int(stated) < int(taken) < 1.1 * int(stated) + 2**22, (how, stated, taken)


def test_a_way_without_room_is_not_tried(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(1000)
    monkeypatch.setattr(neighbor_autotune, "TIMED_FROM", 0)
    monkeypatch.setattr(neighbor_autotune, "fits", lambda size: size != rows.bytes_of("tree"))
    assert chosen("auto", rows).name == "lists"
    assert built == ["ListSearch"]


def test_one_search_at_a_time_is_in_memory(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster one is made again if it was not the last."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    seconds = iter([1.0, 2.0, 2.0, 1.0])

    def noted(search: Any, *_: Any) -> float:
        alive.add(search)
        assert len(alive) == 1
        return next(seconds)

    monkeypatch.setattr(neighbor_autotune, "TIMED_FROM", 0)
    monkeypatch.setattr(neighbor_autotune, "expected_seconds", noted)
    assert chosen("auto", rows_of(1000)).name == "tree"
    assert built == ["TreeSearch", "ListSearch", "TreeSearch"]
    assert chosen("auto", rows_of(1000)).name == "lists"
    assert built[3:] == ["TreeSearch", "ListSearch"]


def test_lists_among_many_rows_are_shorter() -> None:
    assert [usual_length(rows) for rows in (10, 2**19, 10**6, 10**8)] == [64, 53, 28, 8]


def test_a_stated_size_is_that_of_the_arrays() -> None:
    state, action = table(500, 0)
    search = ListSearch(state, action, 1.0, length=16)
    boxes = search._boxes
    assert boxes.state.data_ptr() == search._state.data_ptr() == state.data_ptr()  # no copies
    assert search._action.data_ptr() == action.data_ptr()
    stored = search._near.nbytes + boxes.order.nbytes + boxes.place.nbytes + boxes.tails.nbytes
    stored += sum(low.nbytes + high.nbytes for low, high in boxes.levels)
    rows = rows_of(500, length=16)
    assert stored <= (rows.bytes_of("lists") - max(listing_bytes(500, 3), pair_bytes(5))) * 1.2
