"""What a command knows beyond its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """Where a command may write by default, and what the person typed.

    Attributes:
        directory: Where.
        overrides: What was typed.
        is_proposed: Nobody chose the directory: where it is taken, one with a number behind its name will do.
    """

    directory: Path
    overrides: tuple[str, ...] = ()
    is_proposed: bool = False
