"""Groups of states of about the same value, from which starts are drawn alike.

Legend: n states, k clusters.

Source: the clusters of SnapshotRL (arXiv 2403.00673). Deviation: k-means of one column is solved exactly, by
dynamic programming over the sorted values; the release iterates from one random start.
"""

from __future__ import annotations

import numpy as np

from envs.spec import Array


def value_clusters(values: Array, k: int) -> Array:
    """Return the cluster (n,) of each of n values, 0 for the smallest, with the least squared distances."""
    order = np.argsort(values, kind="stable")
    sorted_values = values[order].astype(np.float64)
    n, k = len(values), min(k, len(np.unique(values)))
    sums, squares = (np.concatenate([[0.0], np.cumsum(part)]) for part in (sorted_values, sorted_values**2))

    def squared_distance(begin: Array, end: int) -> Array:
        """Return the squared distances of values [begin, end) from their means."""
        total = sums[end] - sums[begin]
        return squares[end] - squares[begin] - total**2 / (end - begin)

    cost = np.full((k + 1, n + 1), np.inf)
    last = np.zeros((k + 1, n + 1), np.int64)  # where the last cluster begins
    cost[0, 0] = 0.0
    for count in range(1, k + 1):
        for end in range(count, n + 1):
            begins = np.arange(count - 1, end)
            total = cost[count - 1, begins] + squared_distance(begins, end)
            best = int(total.argmin())
            cost[count, end], last[count, end] = total[best], begins[best]
    labels, end = np.zeros(n, np.int64), n
    for count in range(k, 0, -1):
        begin = int(last[count, end])
        labels[order[begin:end]] = count - 1
        end = begin
    return labels


def even_shares(labels: Array) -> Array:
    """Return probabilities (n,): a cluster first, all alike, then one of its members."""
    sizes = np.bincount(labels)
    return np.asarray(1.0 / (np.count_nonzero(sizes) * sizes[labels]))
