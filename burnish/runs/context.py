"""What a command knows beyond its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from burnish.config.overrides import NOTHING_TYPED, Overrides
from policies.errors import ConfigError


@dataclass(frozen=True)
class RunContext:
    """Where a command may write by default, and what was typed.

    Attributes:
        directory: Where.
        overrides: What was typed.
        is_proposed: Nobody chose the directory: where it is taken, one with a number behind its name will do.
    """

    directory: Path
    overrides: Overrides = NOTHING_TYPED
    is_proposed: bool = False


def goes_on_in_place(run: str | Path, got: str) -> ConfigError:
    """Return the error of a continuation that was given another directory than its run's own."""
    key = got.partition("=")[0]
    return ConfigError(
        f"resume={run} goes on in that run's own directory; got {got}. Leave {key} out; for a new run from "
        f"its policy give init={run} instead of resume."
    )
