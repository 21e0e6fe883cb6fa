"""Optional packages: imported on use; a missing one is reported with its extra. Versions of packages."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import ModuleType

from policies.errors import MissingExtraError

# extra -> packages installed in a second step, as their own requirements contradict the rest
SECOND_STEP = {
    "robomimic": ("robomimic==0.3.0",),
    "d4rl": ("d4rl==1.1", "gym==0.23.1"),
    "metaworld": ("metaworld==3.1.1",),
}


def require(module: str, *, extra: str, what: str = "this", instead: str = "") -> ModuleType:
    """Import an optional package; `what` (the feature) and `instead` (an alternative) appear in the error.

    Raises:
        MissingExtraError: If the import fails; the message names the extra and the cause.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{what} needs the package '{module.partition('.')[0]}', which cannot be imported ({error}): "
            f"{install_command(extra)}{instead and f'; {instead}'}."
        ) from error


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None without it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def install_command(extra: str) -> str:
    """Return the pip command that installs an extra."""
    command, pins = f"pip install 'burnish[{extra}]'", SECOND_STEP.get(extra)
    return f"{command} && {second_command(extra)}" if pins else command


def second_command(extra: str) -> str:
    """Return the command for packages of an extra that pip cannot resolve together with it."""
    return f"pip install --no-deps {' '.join(SECOND_STEP[extra])}"
