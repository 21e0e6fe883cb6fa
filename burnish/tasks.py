"""The task that a policy was made for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from burnish.config import describe_part, restore_part
from burnish.locate import Located
from policies.errors import ConfigError

_log = logging.getLogger(__name__)


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


def say_what_differs(found: Located, env: Any) -> None:
    """Log in which options a task that was asked for differs from the one that a policy was made for."""
    own, asked = found.provenance().get("env"), describe_part("env", env)
    if not isinstance(own, Mapping) or own.get("name") != asked["name"]:
        return
    names = [name for name, value in asked.items() if name in own and own[name] != value]
    if names:
        _log.warning(
            "%s was made for another env=%s: %s.", found.label, asked["name"],
            ", ".join(f"env.{name}={own[name]}, here {asked[name]}" for name in names),
        )  # fmt: skip
