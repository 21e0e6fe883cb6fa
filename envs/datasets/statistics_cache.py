"""Statistics of large arrays, kept in files that are found by the content of the arrays.

To hash an array takes about a fifth of the time of its statistics, so that a second policy from the same data
starts sooner; a file whose content changed has another name. What is small is not kept at all.

Legend: N rows, D entries of a row.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from envs.datasets.array_storage import pieces
from envs.datasets.catalogue import download_folder
from envs.datasets.moments import moments

LARGE = 2**26
"""Bytes of all arrays from which on their statistics are kept."""
_NAMES = ("min", "max", "mean", "std")
_VERSION = "1"  # of what is computed

_log = logging.getLogger(__name__)

Statistics = dict[str, dict[str, Tensor]]
"""`min`, `max`, `mean` and `std` (D,) by name of the array."""


def statistics_of(arrays: Mapping[str, Tensor]) -> Statistics:
    """Return the statistics of arrays (N, D) by name, kept ones where there are some.

    They are kept in `statistics/` of the folder of downloads; where it cannot be written, nothing is kept.
    """
    if sum(rows.nbytes for rows in arrays.values()) < LARGE:
        return {key: moments(rows) for key, rows in arrays.items()}
    path = download_folder() / "statistics" / f"{_content(arrays)}.safetensors"
    found = _kept(path, arrays)
    if found is None:
        found = {key: moments(rows) for key, rows in arrays.items()}
        _keep(path, found)
    return {key: {name: value.to(arrays[key].device) for name, value in found[key].items()} for key in found}


def _content(arrays: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of arrays with their names, types and shapes."""
    seen = hashlib.sha256(_VERSION.encode())
    for key, rows in sorted(arrays.items()):
        seen.update(f"{key} {rows.dtype} {tuple(rows.shape)}".encode())
        for part in pieces(rows):
            seen.update(rows[part].cpu().contiguous().numpy().data)
    return seen.hexdigest()


def _kept(path: Path, arrays: Mapping[str, Tensor]) -> Statistics | None:
    """Return what is in a file, None if there is none or it does not hold the statistics of these arrays."""
    try:
        flat = load_file(path)
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError) as error:
        _log.warning("%s: kept statistics cannot be read (%s); they are taken anew.", path, error)
        return None
    wanted = {f"{key}/{name}": rows.shape[1:] for key, rows in arrays.items() for name in _NAMES}
    if {name: value.shape for name, value in flat.items()} != wanted:
        _log.warning("%s: kept statistics have other names or shapes; they are taken anew.", path)
        return None
    return {key: {name: flat[f"{key}/{name}"] for name in _NAMES} for key in arrays}


def _keep(path: Path, found: Statistics) -> None:
    flat = {f"{key}/{name}": value.cpu() for key, one in found.items() for name, value in one.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as draft:
            pass
        try:
            save_file(flat, draft.name)
            os.replace(draft.name, path)
        except BaseException:
            Path(draft.name).unlink(missing_ok=True)
            raise
    except (SafetensorError, OSError) as error:
        _log.info("%s: statistics are not kept (%s).", path.parent, error)
