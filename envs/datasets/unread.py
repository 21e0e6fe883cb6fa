"""Saying what of a file did not become part of the dataset, so that nothing is dropped in silence."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

_log = logging.getLogger(__name__)


def log_skipped_fields(path: str | Path, left_out: Mapping[str, str]) -> list[str]:
    """Log what is left out and why; returns the keys, for `meta["not_read"]`.

    Args:
        path: The file.
        left_out: Reason by key, e.g. `{"images": "images"}`.
    """
    if left_out:
        reasons = ", ".join(f"{key} ({reason})" for key, reason in left_out.items())
        _log.warning("%s: not read: %s. Only vectors of numbers and images are observed.", path, reasons)
    return list(left_out)
