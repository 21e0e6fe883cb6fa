"""Metrics of a run: plain numbers, their means, and JSON lines."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from policies.errors import ConfigError
from policies.storage.atomic_write import write_errors

_log = logging.getLogger(__name__)

Scalars = dict[str, float]
"""`component/quantity` -> plain number."""

_LARGEST = sys.float_info.max
_VITAL_WORDS = frozenset({"loss", "norm"})


def read_out(metrics: Mapping[str, float | Tensor]) -> Scalars:
    """Convert metrics to plain numbers, in order; one host synchronisation per device.

    Raises:
        ConfigError: If a tensor holds more than one number.
    """
    by_device: dict[torch.device, list[str]] = {}
    for name, value in metrics.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ConfigError(f"metric '{name}' must be one number; got shape {tuple(value.shape)}.")
            by_device.setdefault(value.device, []).append(name)
    read: Scalars = {}
    for names in by_device.values():
        stacked = torch.stack([torch.as_tensor(metrics[n]).detach().reshape(()).double() for n in names])
        read |= dict(zip(names, stacked.tolist(), strict=True))
    return {name: read[name] if name in read else float(value) for name, value in metrics.items()}


def broken(values: Mapping[str, float]) -> list[str]:
    """Return the names of losses and norms that are not finite.

    Only these stop a run: other quantities may be undefined at times (before the first episode ends).
    """
    vital = [name for name in values if _VITAL_WORDS & set(name.rsplit("/", 1)[-1].split("_"))]
    return [name for name in vital if not math.isfinite(values[name])]


def append_jsonl(path: Path, values: Mapping[str, float], step: int) -> None:
    """Append one line; non-finite values are written as null, so that every line is valid JSON."""
    row: dict[str, Any] = {"step": step}
    row |= {name: value if math.isfinite(value) else None for name, value in values.items()}
    with write_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, numbers and None by name.

    What is damaged is left out, and a file that cannot be read: with a warning, unless a line is truncated.
    """
    try:
        return [row for _, row in _complete_rows(Path(path))]
    except OSError as error:
        _log.warning("%s cannot be read (%s) and is left out.", path, error.strerror)
        return []


def truncate_jsonl(path: Path, size: int, *, through: int | None = None) -> None:
    """Truncate a file, if it exists, to `size` bytes and later rows up to step `through`.

    A shorter file is truncated to complete rows.
    """
    if not path.exists():
        return
    if size > path.stat().st_size:
        size = max((end for end, _ in _complete_rows(path)), default=0)
    elif through is not None:
        later = ((end, row) for end, row in _complete_rows(path) if end > size)
        kept = takewhile(lambda found: _is_number(step := found[1].get("step")) and step <= through, later)
        size = max((end for end, _ in kept), default=size)
    os.truncate(path, size)


def _complete_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (byte offset of its end, row) for every complete row."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            end += len(line)
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                _log.warning("%s: line %d is no JSON object and is left out; it is damaged.", path, number)
                continue
            known = {name: value for name, value in row.items() if value is None or _is_number(value)}
            if odd := next((name for name in row if name not in known), ""):
                _log.warning("%s: '%s' of line %d is no number and is left out.", path, odd[:80], number)
            yield end, known


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and -_LARGEST <= value <= _LARGEST


class Means:
    """Running means of scalars by name; no host synchronisation before `read`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        known = [name for name in values if name in self._sums]
        if known:
            torch._foreach_add_([self._sums[name] for name in known], [values[name] for name in known])
        for name, value in values.items():
            if name in self._sums:
                self._counts[name] += 1
            else:
                self._sums[name], self._counts[name] = value.clone(), 1

    def read(self) -> dict[str, Tensor]:
        return {name: total / self._counts[name] for name, total in self._sums.items()}
