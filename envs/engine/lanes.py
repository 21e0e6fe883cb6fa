"""Rows that have a place of their own in a block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


def distinct_groups(places: Iterable[Hashable]) -> list[list[int]]:
    """Split members 0, 1, … by their places into the fewest groups in which no place occurs twice."""
    groups: list[list[int]] = []
    used: dict[Hashable, int] = {}
    for member, place in enumerate(places):
        group = used.get(place, 0)
        used[place] = group + 1
        if group == len(groups):
            groups.append([])
        groups[group].append(member)
    return groups
