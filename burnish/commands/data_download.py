"""`burnish data download`: download a public dataset; interrupted downloads are resumed."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit, urlunsplit

from burnish.config.overrides import RunContext
from burnish.console import Counting, output, table
from burnish.runs.locate import check_folder_to_write
from envs.datasets.catalogue import Entry, RemoteFile, catalogue, download_folder, lookup
from envs.datasets.download import fetch
from policies.bounds import Checked, bounded
from policies.errors import ConfigError, DatasetError
from policies.paths import path_field
from policies.storage.atomic_write import write_text
from policies.storage.checksums import sha256

SUMS = "checksums.json"
"""File in the download folder: SHA-256 of every downloaded file, by path."""

_MEBI = 2**20


@dataclass(frozen=True)
class DataDownloadConfig(Checked):
    """Configuration of `burnish data download`; without `name` and `url` it lists the known names."""

    name: str | None = None  # public dataset, e.g. hopper-medium-v2
    url: str | None = None  # address of any other file
    sha256: str | None = None  # checksum of the file at url
    out: str | None = path_field()  # folder; null: $BURNISH_DATASETS, else .burnish/datasets at home
    mirror: str | None = None  # replaces scheme and host of addresses, e.g. http://data.example.org
    attempts: int = bounded(3, ge=1)  # connections per file before giving up

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and self.url is not None:
            raise ConfigError("data download takes name= or url=, not both.")
        if self.sha256 is not None and (
            self.url is None or not re.fullmatch(r"[0-9a-fA-F]{64}", self.sha256)
        ):
            raise ConfigError(f"sha256 must be 64 hexadecimal digits, with url=; got {self.sha256}.")


def run(config: DataDownloadConfig, context: RunContext) -> None:
    """Download a dataset and print its path, or list the names."""
    if config.name is None and config.url is None:
        output().print(table("", ("family", "names", "e.g."), _families()))
        output().print(
            table("", ("name=", "family"), ((one.name, one.family) for one in catalogue().values()))
        )
        return
    output().print(f"ready: {download(config)}", markup=False, soft_wrap=True)


def download(config: DataDownloadConfig) -> Path:
    """Download a dataset; return the value for `dataset=`: a file or a folder.

    Raises:
        DatasetError: If the name is unknown, or the download fails; partial files are kept.
    """
    folder = download_folder() if config.out is None else Path(config.out)
    check_folder_to_write(folder)
    entry = _entry(config)
    for file in entry.files:
        address = file.url
        if config.mirror is not None:
            address = urlunsplit(urlsplit(file.url)._replace(scheme="", netloc="", fragment=""))
            address = f"{config.mirror.rstrip('/')}{address}"
        is_here = (folder / file.path).is_file()
        known = file.sha256 or (_sums(folder).get(file.path) if is_here else None)
        with Counting(f"fetching {Path(file.path).name} (MiB)", 1) as counting:

            def show(have: int, size: int | None, counting: Counting = counting) -> None:
                counting.show(have // _MEBI, total=None if size is None else max(size // _MEBI, 1))

            place = fetch(address, folder / file.path, sha256=known, attempts=config.attempts, progress=show)
        _remember(folder, file.path, place, is_new=not is_here)
    return folder / entry.path


def _entry(config: DataDownloadConfig) -> Entry:
    if config.url is None:
        if config.name is None:
            raise ConfigError("data download needs name=<dataset> or url=<address>; without, it lists names.")
        return lookup(config.name)
    path = _path_of(config.url)
    return Entry(config.url, "", (RemoteFile(config.url, path, config.sha256),), path, path)


def _path_of(url: str) -> str:
    """Return the relative path for an address: url/<host>/<path>; files of one folder stay together.

    A query becomes a hash folder before the file name, which is kept: readers find related files by name.
    """
    parts = urlsplit(url)
    path = PurePosixPath(parts.path.lstrip("/"))
    if parts.path.endswith("/") or path.name == "" or ".." in path.parts:
        raise ConfigError(f"url must end in the name of a file, without '..'; got '{url}'.")
    host = parts.netloc.rpartition("@")[2].lower().replace(":", "_")
    query = [hashlib.sha256(parts.query.encode()).hexdigest()[:8]] if parts.query else []
    return str(PurePosixPath("url", host, path.parent, *query, path.name))


def _sums(folder: Path) -> dict[str, str]:
    path = folder / SUMS
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): str(value) for key, value in found.items()}
    except (ValueError, AttributeError) as error:
        raise DatasetError(
            f"{path}: expected checksums by file; reading failed with '{error}'. Remove it."
        ) from error


def _remember(folder: Path, name: str, place: Path, *, is_new: bool) -> None:
    """Store the checksum of a file, to detect later damage; a new download replaces it."""
    known = _sums(folder)
    if is_new or name not in known:
        write_text(folder / SUMS, json.dumps(known | {name: sha256(place)}, indent=1))


def _families() -> Iterator[tuple[object, ...]]:
    entries = catalogue().values()
    for family, count in Counter(entry.family for entry in entries).items():
        yield family, count, next(entry.name for entry in entries if entry.family == family)
