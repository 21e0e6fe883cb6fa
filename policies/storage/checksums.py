"""Checksums of a folder's files, in the format of `sha256sum --check`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from policies.storage.strict_json import own_file, read_small

CHECKSUMS = "SHA256SUMS"


def write_checksums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write the SHA-256 of files to the folder; None: of all its files."""
    every = (path for path in folder.rglob("*") if path.is_file())
    files = sorted(every if names is None else (folder / name for name in names))
    lines = [f"{sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def is_intact(folder: Path, file: Path) -> bool:
    """Whether a file matches its recorded checksum, or has none; raises as `own_file` and `read_small`."""
    sums = folder / CHECKSUMS
    if not os.path.lexists(sums):
        return True
    lines = read_small(own_file(sums)).splitlines()
    known = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    expected = known.get(file.as_posix())
    return expected is None or expected == sha256(folder / file)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
