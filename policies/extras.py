"""Optional packages: imported where they are used, and named with their extra where they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from policies.errors import MissingExtraError

SECOND_STEP = {
    "robomimic": ("robomimic==0.3.0",),
    "d4rl": ("d4rl==1.1", "gym==0.23.1"),
    "metaworld": ("metaworld==3.1.1",),
}
"""Extra -> packages that are installed in a second step, as their own requirements contradict the rest."""


def require(module: str, *, extra: str, what: str = "this", instead: str = "") -> ModuleType:
    """Import an optional package; `what` needs it, `instead` is an alternative, both for the error.

    Raises:
        MissingExtraError: If it is not importable; the message names the extra and the reason.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{what} needs the package '{module.partition('.')[0]}', which cannot be imported ({error}): "
            f"{install_command(extra)}{instead and f'; {instead}'}."
        ) from error


def install_command(extra: str) -> str:
    """Return what has to be typed to install an extra."""
    command, pins = f"pip install 'burnish[{extra}]'", SECOND_STEP.get(extra)
    return f"{command} && {second_command(extra)}" if pins else command


def second_command(extra: str) -> str:
    """Return what has to be typed for the packages of an extra that pip cannot bring along."""
    return f"pip install --no-deps {' '.join(SECOND_STEP[extra])}"
