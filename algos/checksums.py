"""Checksums of the files of a folder, in a file that `sha256sum --check` reads too."""

from __future__ import annotations

import hashlib
from pathlib import Path

CHECKSUMS = "SHA256SUMS"


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of every file below a folder into the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{_sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def is_intact(folder: Path, file: Path) -> bool:
    """Whether a file has the checksum that was written for it; true where none was.

    Args:
        folder: Where the checksums are.
        file: The file, relative to the folder.
    """
    sums = folder / CHECKSUMS
    if not sums.is_file():
        return True
    lines = sums.read_text(encoding="utf-8", errors="replace").splitlines()
    known = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    expected = known.get(file.as_posix())
    return expected is None or expected == _sha256(folder / file)


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
