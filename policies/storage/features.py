"""Named observation and action entries with their shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Feature:
    """Shape and dtype of one row of an input or output, without the batch."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of one row; floats are counted in double precision."""
        return math.prod(self.shape) * (1 if self.dtype == "uint8" else 8)


def short(value: Any) -> str:
    """Return an untrusted value, shortened for messages."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
