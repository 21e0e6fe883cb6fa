"""The task that a policy was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.config import restore_part
from burnish.locate import Located
from policies.errors import ConfigError


def task_of(found: Located, remedy: str = "") -> Any:
    """Return the configuration of the task that a policy was made for.

    Args:
        found: The policy.
        remedy: What the error adds, for commands that take the task themselves.

    Raises:
        ConfigError: If its provenance does not tell.
    """
    description = found.provenance().get("env")
    if not isinstance(description, Mapping):
        raise ConfigError(
            f"the policy {found.path} does not say which task it was made for: it was trained without "
            f"env=<name>, or saved without its provenance.{remedy}"
        )
    return restore_part("env", description)
