"""Pictures by matplotlib: film strips, and figures as PNG bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 130
_COLUMNS = 6  # of a film strip


def film_strip(frames: np.ndarray, *, title: str) -> bytes:
    """Draw frames (F, height, width, 3) in reading order."""
    rows = -(-len(frames) // _COLUMNS)
    figure = new_figure(2.1 * _COLUMNS, 1.75 * rows + 0.3)
    for place, frame in enumerate(frames, 1):
        axes = figure.add_subplot(rows, _COLUMNS, place)
        axes.imshow(frame)
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
