"""Context of a command beside its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from burnish.config.overrides import NOTHING_TYPED, Overrides
from policies.errors import ConfigError


@dataclass(frozen=True)
class RunContext:
    """Default output directory and typed overrides of a command.

    Attributes:
        directory: Default output directory.
        overrides: Typed overrides.
        is_proposed: The directory was generated; if it exists, a number is appended.
    """

    directory: Path
    overrides: Overrides = NOTHING_TYPED
    is_proposed: bool = False


def goes_on_in_place(run: str | Path, got: str) -> ConfigError:
    """Return the error for a directory given together with `resume`."""
    key = got.partition("=")[0]
    return ConfigError(
        f"resume={run} goes on in that run's own directory; got {got}. Leave {key} out; for a new run from "
        f"its policy give init={run} instead of resume."
    )
