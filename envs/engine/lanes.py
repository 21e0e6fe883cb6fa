"""Groups of rows that have a place of their own in a block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


def apart(places: Iterable[Hashable]) -> list[list[int]]:
    """Return the members of the fewest groups in which no place occurs twice."""
    groups: list[list[int]] = []
    used: dict[Hashable, int] = {}
    for member, place in enumerate(places):
        group = used.get(place, 0)
        used[place] = group + 1
        if group == len(groups):
            groups.append([])
        groups[group].append(member)
    return groups
