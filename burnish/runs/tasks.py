"""Task of a policy."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from burnish.config.schema import restore_part
from burnish.runs.locate import Located
from envs.evaluation.protocol import describe_task
from policies.errors import ConfigError

_log = logging.getLogger(__name__)


def task_of(found: Located, remedy: str = "") -> Any:
    """Return the task configuration of a policy.

    Raises:
        ConfigError: If its provenance names no task; ends with `remedy`.
    """
    description = found.provenance().get("env")
    if not isinstance(description, Mapping):
        raise ConfigError(
            f"the policy {found.path} names no task: it was trained without env=<name>, or saved without its "
            f"provenance.{remedy}"
        )
    return restore_part("env", description)


def description_of(found: Located) -> dict[str, Any] | None:
    """Return the task description of a policy, in the protocols' format.

    None if its provenance names no task, or a file of the task is missing.
    """
    try:
        return describe_task(task_of(found))
    except (ConfigError, OSError):
        return None


def options_that_differ(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the options that differ between two task descriptions; unknown options are skipped."""
    one, two = own["options"], other["options"]
    return [name for name in one if name in two and one[name] != two[name]]


def warn_of_task_differences(found: Located, env: Any) -> None:
    """Log the options in which the requested task differs from the policy's."""
    own, asked = description_of(found), describe_task(env)
    if own is None or own["name"] != asked["name"]:
        return
    if names := options_that_differ(own, asked):
        _log.warning(
            "%s was made for another env=%s: %s.", found.label, asked["name"],
            ", ".join(f"env.{n}={own['options'][n]}, here {asked['options'][n]}" for n in names),
        )  # fmt: skip
