"""Episodes of a recording that is not finished yet, in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from envs.datasets.episode import Episode
from policies.errors import DatasetError, reason_of
from policies.storage.atomic_write import atomic_file

_SCALARS = {"terminated": bool, "truncated": bool, "success": bool, "seed": int}
_ARRAYS = ("observations", "actions", "rewards")
_GROUPS = ("extras", "images")


class KeptEpisodes:
    """The kept episodes of consecutive attempts, each in a file of a folder, written when it has ended.

    A recording that was interrupted goes on after the last; attempts before it without a file failed.

    Attributes:
        attempts: Attempts with a file, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempts = sorted(int(path.stem) for path in folder.glob("[0-9]*.npz"))

    def add(self, attempt: int, episode: Episode) -> None:
        """Write the episode of an attempt.

        Raises:
            WriteError: If the disk is full.
        """
        values = {name: getattr(episode, name) for name in (*_ARRAYS, *_SCALARS)}
        for group in _GROUPS:
            values |= {f"{group}/{key}": value for key, value in getattr(episode, group).items()}
        with atomic_file(self._path(attempt)) as draft:
            np.savez(draft, **values)
        self.attempts.append(attempt)

    def read(self, attempt: int) -> Episode:
        """Return the episode of an attempt.

        Raises:
            DatasetError: If its file is damaged.
        """
        path = self._path(attempt)
        try:
            with np.load(path, allow_pickle=False) as file:
                values = {name: kind(file[name]) for name, kind in _SCALARS.items()}
                values |= {name: file[name] for name in _ARRAYS}
                for group in _GROUPS:
                    keys = [key for key in file.files if key.startswith(f"{group}/")]
                    values[group] = {key.removeprefix(f"{group}/"): file[key] for key in keys}
        except Exception as error:  # numpy and zipfile raise their own classes
            raise DatasetError(
                f"{path} cannot be read ({reason_of(error)}). Remove it with all later episodes of its "
                "folder: these are recorded again."
            ) from error
        return Episode(**values)

    def clear(self) -> None:
        """Remove the files, the last first: what an interruption leaves is a beginning."""
        while self.attempts:
            self._path(self.attempts.pop()).unlink()

    def _path(self, attempt: int) -> Path:
        return self.folder / f"{attempt:08d}.npz"
