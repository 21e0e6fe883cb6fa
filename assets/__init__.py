"""Files that travel with the package: MuJoCo models, reference numbers, small demonstration sets."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def path(name: str) -> Path:
    """Return the place of an asset on disk, in a checkout as in an installed wheel.

    Args:
        name: File name relative to this package, for example `avoid.xml`.

    Raises:
        FileNotFoundError: If there is no such asset.
    """
    found = Path(str(files(__name__).joinpath(name)))
    if not found.exists():
        raise FileNotFoundError(
            f"asset '{name}' expected at {found}; it is not there. Reinstall the package."
        )
    return found
