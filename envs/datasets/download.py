"""Resumable downloads: continued by HTTP ranges, verified, and renamed into place when complete.

During download of a file `x`, `x.part` holds the received bytes and `x.part.json` the server's metadata
(size and entity tag), by which a later call requests the rest of the same file. The final name appears after
size and, if known, SHA-256 are verified, and after HDF5 and npz files could be opened: the servers of D4RL
and OGBench publish no checksums. Processes that request the same file wait for the first.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envs.datasets.files.hdf5 import read_hdf5
from envs.datasets.files.npz import peek_npz
from policies.errors import DatasetError, WriteError
from policies.storage.atomic_write import write_errors
from policies.storage.checksums import sha256

Progress = Callable[[int, int | None], None]
"""Called with the bytes received and their total (None if unknown)."""

_log = logging.getLogger(__name__)

_PIECE = 2**20
_TIMEOUT = 60.0  # seconds without data
_BROKEN = (OSError, http.client.HTTPException)  # errors of an interrupted connection
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LINKED = "X-Linked-ETag"  # header of Hugging Face with the SHA-256 of a large file, before redirection


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirections; keeps the entity tag of the first server."""

    tag = ""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        self.tag = self.tag or headers.get(_LINKED, "").strip('"')
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(
    url: str,
    target: str | Path,
    *,
    sha256: str | None = None,
    attempts: int = 3,
    progress: Progress | None = None,
) -> Path:
    """Download a file, resuming an interrupted call.

    Args:
        url: http or https.
        target: Target path; an existing file (with the right checksum) is kept.
        sha256: Expected checksum; None: the server's, if provided.
        attempts: Maximum number of connections.
        progress: See `Progress`.

    Raises:
        DatasetError: If the server refuses, the connection fails too often, or the content is wrong.
        WriteError: If the disk is full; received bytes are kept.
    """
    target = Path(target)
    if target.is_file():
        _check_sum(target, sha256, target, url)
        return target
    if not url.startswith(("http://", "https://")):
        raise DatasetError(f"url must begin with http:// or https://; got '{url}'.")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    with _locked(part):
        if target.is_file():  # downloaded meanwhile by another process
            _metadata(part).unlink()
            _check_sum(target, sha256, target, url)
        else:
            tag = _complete(url, target, part, attempts, progress)
            _check_sum(part, sha256 or (tag if _SHA256.fullmatch(tag) else None), target, url)
            _check_kind(part, target, url)
            with open(part, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(part, target)
            _metadata(part).unlink(missing_ok=True)
    return target


@contextmanager
def _locked(part: Path) -> Iterator[None]:
    """Lock an unfinished download through its metadata file, created if missing.

    The part file itself is not locked: HDF5 locks files while it checks them.
    """
    while True:
        with open(_metadata(part), "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("another process fetches %s; waiting for it", part.with_suffix(""))
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:  # file system without locks
                _log.debug("%s cannot be locked: %s", file.name, error)
            try:
                held = os.path.samestat(_metadata(part).stat(), os.fstat(file.fileno()))
            except FileNotFoundError:  # removed by the process that held it and has finished
                held = False
            if held:
                yield
                return


def _complete(url: str, target: Path, part: Path, attempts: int, progress: Progress | None) -> str:
    """Download the rest of a file in several attempts; returns the server's entity tag."""
    for attempt in range(1, attempts + 1):
        try:
            return _continue(url, part, progress)
        except WriteError:
            raise
        except _BROKEN as error:
            answered = (
                f"the server answered {error.code}" if isinstance(error, urllib.error.HTTPError) else ""
            )
            if not answered and attempt < attempts:
                continue
            if not part.is_file():
                _metadata(part).unlink()
            reason, have = getattr(error, "reason", None) or error, part.is_file() and part.stat().st_size
            advice = f"Check name and network, give mirror=<address>, or download it elsewhere to {target}."
            problem = answered or "cannot be reached"
            if have and not answered:
                problem, advice = f"the connection broke off after {have} bytes", "Repeat to continue there."
            raise DatasetError(f"{url}: {problem} ({reason}). {advice}") from error
    raise AssertionError("attempts is at least 1")


def _continue(url: str, part: Path, progress: Progress | None) -> str:
    known = _read_metadata(part)
    have = part.stat().st_size if part.is_file() and known else 0
    headers = {"User-Agent": "burnish", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": known["etag"]}
    redirects = _Redirects()
    opener = urllib.request.build_opener(redirects)
    try:
        answer = opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have == known.get("size"):  # the file is complete
            return str(known["tag"])
        if error.code != 416 or not have:
            raise
        part.unlink()
        return _continue(url, part, progress)
    with answer:
        have = have if answer.status == 206 else 0
        length = answer.headers.get("Content-Length")
        size = None if length is None else have + int(length)
        etag = answer.headers.get("ETag", "")
        tag = redirects.tag or etag.removeprefix("W/").strip('"')
        # Weak tags do not guarantee equal bytes; resuming requires a strong tag.
        metadata = {"tag": tag, "size": size, "etag": etag} if etag and not etag.startswith("W/") else {}
        _metadata(part).write_text(json.dumps(metadata), encoding="utf-8")
        with write_errors(part), open(part, "ab" if have else "wb") as file:
            while piece := answer.read(_PIECE):
                file.write(piece)
                have += len(piece)
                if progress is not None:
                    progress(have, size)
    got = part.stat().st_size
    if size is not None and got != size:
        raise http.client.IncompleteRead(b"", size - got)
    return tag


def _metadata(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _read_metadata(part: Path) -> dict[str, Any]:
    try:
        found = json.loads(_metadata(part).read_text(encoding="utf-8"))
        return found if {"tag", "size", "etag"} <= set(found) else {}
    except (OSError, ValueError, TypeError):
        return {}


def _check_sum(path: Path, expected: str | None, target: Path, url: str) -> None:
    """Refuse a file with another checksum; deletes an unfinished one."""
    if expected is None or (got := sha256(path)) == expected.lower():
        return
    if path != target:
        _remove(path)
    advice = "Remove the file and download" if path == target else "Download"
    raise DatasetError(f"{target}: expected the SHA-256 {expected} of {url}; got {got}. {advice} it again.")


def _check_kind(part: Path, target: Path, url: str) -> None:
    """Refuse and delete a file named HDF5 or npz that cannot be opened as such."""
    try:
        if target.suffix in (".hdf5", ".h5"):
            with read_hdf5(part):
                return
        if target.suffix == ".npz" and peek_npz(part) is None:
            raise DatasetError(f"{part}: expected a zip archive.")
    except DatasetError as error:
        size = part.stat().st_size
        _remove(part)
        raise DatasetError(
            f"{target}: expected a readable {target.suffix.removeprefix('.')} file from {url}; got {size} "
            f"bytes of another or incomplete file. Check the address, and download it again."
        ) from error


def _remove(part: Path) -> None:
    part.unlink(missing_ok=True)
    _metadata(part).unlink(missing_ok=True)
