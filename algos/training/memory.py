"""Memory of the C library: what is freed is kept for what is allocated next."""

from __future__ import annotations

import ctypes
import sys

KEPT_BLOCK, KEPT_BYTES = 32 << 20, 256 << 20
"""Largest block that is kept, glibc's own limit, and most free bytes at the end of the heap."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of `mallopt` in malloc.h


def keep_freed_memory() -> None:
    """Make glibc hand out blocks again that it would return to the system; elsewhere nothing happens.

    Steps of training free what they allocate. Memory that comes from the system costs a page fault for every
    4 KB, with a U-Net thousands a step.
    """
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library has none
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, KEPT_BLOCK)
        set_option(_TRIM_THRESHOLD, KEPT_BYTES)
