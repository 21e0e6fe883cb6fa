"""Whether anything can be drawn on this machine."""

from __future__ import annotations

from functools import cache

import pytest

from envs.engine.rendering import require_gl
from policies.errors import MissingExtraError


@cache
def _reason() -> str:
    try:
        require_gl()
    except MissingExtraError as error:
        return str(error)
    return ""


def require_drawing() -> None:
    """Skip a test, with the reason, where there is no GL stack."""
    if _reason():
        pytest.skip(_reason())
