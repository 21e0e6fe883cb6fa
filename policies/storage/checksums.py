"""Checksums of a folder's files, in the format of `sha256sum --check`."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from policies.storage.strict_json import own_file, read_small

CHECKSUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def write_checksums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write the SHA-256 of files to the folder; None: of all its files."""
    every = (path for path in folder.rglob("*") if path.is_file())
    files = sorted(every if names is None else (folder / name for name in names))
    lines = [f"{sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def is_intact(folder: Path, file: Path) -> bool:
    """Whether a file matches its recorded checksum, or has none.

    Raises:
        ValueError: If the checksums are damaged, or as `own_file` and `read_small`.
    """
    sums = folder / CHECKSUMS
    if not os.path.lexists(sums):
        return True
    text = read_small(own_file(sums))
    found = [_LINE.fullmatch(line) for line in text.splitlines() if line]
    known = {one[2]: one[1] for one in found if one is not None}
    is_cut = not text.endswith("\n") and not (folder / list(known or [""])[-1]).is_file()
    if None in found or is_cut:
        raise ValueError(f"{sums} is damaged. Copy it again, or remove it to read files without a check.")
    expected = known.get(file.as_posix())
    return expected is None or expected == sha256(folder / file)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
