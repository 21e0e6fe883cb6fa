"""Picture of a dataset: returns, lengths, action ranges, and the distribution of states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from burnish.reports.figures import new_figure, to_png
from envs.datasets import EpisodeDataset

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 4000  # frames in the plot of states
_MOST = 40  # largest number of plotted action dimensions


def draw_dataset(data: EpisodeDataset, title: str) -> bytes:
    """Draw a dataset as PNG."""
    figure = new_figure(11.0, 6.4)
    panels = [figure.add_subplot(2, 2, place + 1) for place in range(4)]
    _histogram(panels[0], data.returns.numpy(), "return of an episode")
    _histogram(panels[1], data.lengths.double().numpy(), "length of an episode [steps]")
    _draw_actions(panels[2], data.actions.numpy())
    _draw_states(panels[3], data)
    figure.suptitle(f"{title}: {data.num_episodes} episodes, {data.num_frames} frames", fontsize=11)
    return to_png(figure)


def _histogram(axes: Axes, values: np.ndarray, label: str) -> None:
    axes.hist(values, bins=min(40, max(len(np.unique(values)), 1)), color="C0")
    axes.set_xlabel(label)
    axes.set_ylabel("episodes")


def _draw_actions(axes: Axes, actions: np.ndarray) -> None:
    """Draw range (thin), middle half (thick) and median of every action dimension."""
    from matplotlib.ticker import MaxNLocator

    shown = actions[:, :_MOST]
    low, first, middle, third, high = np.quantile(shown, [0.0, 0.25, 0.5, 0.75, 1.0], axis=0)
    place = np.arange(shown.shape[1])
    axes.vlines(place, low, high, color="C0", linewidth=1.2)
    axes.vlines(place, first, third, color="C0", linewidth=5)
    axes.plot(place, middle, "o", color="white", markeredgecolor="C0", markersize=4)
    axes.axhline(1, color="grey", linewidth=0.6)
    axes.axhline(-1, color="grey", linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("action dimension" + (f" (of {actions.shape[1]})" if actions.shape[1] > _MOST else ""))
    axes.set_ylabel("range, middle half, median")


def _draw_states(axes: Axes, data: EpisodeDataset) -> None:
    states = data.observations.double().numpy()
    scaled = (states - states.mean(axis=0)) / (states.std(axis=0) + 1e-3)
    chosen = np.linspace(0, len(states) - 1, min(_POINTS, len(states))).round().astype(int)
    _, _, directions = np.linalg.svd(scaled[chosen], full_matrices=False)
    flat = scaled[chosen] @ directions[:2].T
    across = flat[:, 1] if flat.shape[1] > 1 else np.zeros(len(flat))
    returns = np.repeat(data.returns.numpy(), data.lengths.numpy())[chosen]
    points = axes.scatter(flat[:, 0], across, c=returns, s=3, cmap="viridis")
    axes.figure.colorbar(points, ax=axes, label="return")
    axes.set_xlabel("states: first principal direction")
    axes.set_ylabel("second")
