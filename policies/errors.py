"""Errors that a user of the package can act on.

Every message states what was expected, what was received, where (config key, argument or file)
and what to do.
"""

from __future__ import annotations


class BurnishError(Exception):
    """Root of every error raised on purpose by this package."""


class ConfigError(BurnishError, ValueError):
    """A configuration value is unknown, of the wrong kind, or contradicts another one."""


class CapabilityError(BurnishError, TypeError):
    """An algorithm or a tool needs a capability that the policy lacks."""


class DatasetError(BurnishError, ValueError):
    """A dataset file is missing, malformed, or does not fit the task."""


class CheckpointError(BurnishError, ValueError):
    """A policy directory or a training state is missing, incomplete, or does not fit."""


class MissingExtraError(BurnishError, ImportError):
    """An optional package is needed; the message names the extra that installs it."""


class TrainingError(BurnishError, RuntimeError):
    """Training cannot go on (for example, a loss is not finite)."""


class EnvironmentFailure(BurnishError, RuntimeError):
    """An environment raised an error of its own, or gave a number that is not finite."""


class WorkerError(BurnishError, RuntimeError):
    """A worker process failed; the message carries its traceback."""


class ExportError(BurnishError, RuntimeError):
    """An exported model could not be made, or does not reproduce the policy."""


class WriteError(BurnishError, OSError):
    """A file cannot be written, because the disk is full for example; what was there before is unchanged."""


class ServingError(BurnishError, RuntimeError):
    """A policy server refuses a request, or does not answer.

    Attributes:
        reason: One word that a program can act on, e.g. `busy`, `late`, `shape`, `timeout`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
