"""Pictures by matplotlib: film strips, and figures as PNG bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 130


def film_strip(frames: np.ndarray, *, title: str, columns: int = 6, rows: int = 2) -> bytes:
    """Draw evenly spaced frames of (F, height, width, 3), in reading order."""
    count = min(columns * rows, len(frames))
    chosen = np.linspace(0, len(frames) - 1, count).round().astype(int)
    rows = -(-count // columns)
    figure = new_figure(2.1 * columns, 1.75 * rows + 0.3)
    for place, index in enumerate(chosen):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.imshow(frames[index])
        axes.set_axis_off()
    figure.suptitle(title, fontsize=10)
    return to_png(figure)


def to_png(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """Return a figure (inches) that does not require a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
