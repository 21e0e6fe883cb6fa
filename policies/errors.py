"""Errors that a user of the package can act on.

Every message states what was expected, what was received, where (config key, argument or file) and the
remedy.
"""

from __future__ import annotations


def reason_of(error: Exception) -> str:
    """Return the class and the text of an error of another package, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class BurnishError(Exception):
    """Base class of all errors raised by this package."""


class ConfigError(BurnishError, ValueError):
    """A configuration value is unknown, of the wrong kind, or contradicts another one."""


class CapabilityError(BurnishError, TypeError):
    """An algorithm or a tool needs a capability that the policy lacks."""


class DatasetError(BurnishError, ValueError):
    """A dataset file is missing, malformed, or does not fit the task."""


class CheckpointError(BurnishError, ValueError):
    """A policy directory or a training state is missing, incomplete, or does not fit."""


class MissingExtraError(BurnishError, ImportError):
    """An optional package is missing; the message names the extra that installs it."""


class TrainingError(BurnishError, RuntimeError):
    """Training cannot continue (for example, a loss is not finite)."""


class EnvironmentFailure(BurnishError, RuntimeError):
    """An environment raised an error or returned a non-finite number."""


class WorkerError(BurnishError, RuntimeError):
    """A worker process failed; the message includes its traceback."""


class ExportError(BurnishError, RuntimeError):
    """An exported model could not be built or does not reproduce the policy."""


class WriteError(BurnishError, OSError):
    """A file cannot be written, for example on a full disk; existing content is unchanged."""


class ServingError(BurnishError, RuntimeError):
    """A policy server refused a request or did not answer.

    Attributes:
        reason: Machine-readable reason, e.g. `busy`, `late`, `shape`, `timeout`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
