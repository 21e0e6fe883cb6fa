"""What a command knows beyond its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """Where a command may write by default, and what the person typed."""

    directory: Path
    overrides: tuple[str, ...] = ()
