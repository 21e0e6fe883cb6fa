"""What evaluations share: summary, the file they are written to, and errors of one of two policies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envs.evaluation.evaluate import Evaluation
from policies.errors import CapabilityError, ConfigError


def headline(evaluation: Evaluation) -> dict[str, float]:
    """Return the defined means of an evaluation by name, with VaR and CVaR of the return."""
    summary = evaluation.summary()
    names = ("success", "return", "length", "d4rl_score", "return_value_at_risk", "return_cvar")
    return {name: float(summary[name]["value"]) for name in names if name in summary}


def require_no_other_file(path: Path) -> None:
    """Refuse, with ConfigError, to replace a file that is not an evaluation."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        head = b"".join(file.read(64).split())
    if head and not head.startswith(b'{"protocol":'):
        raise ConfigError(f"out={path} exists and is no evaluation; choose another name.")


@contextmanager
def naming(key: str, path: object) -> Iterator[None]:
    """Begin errors of a policy that does not fit with the key that gives it: `baseline=runs/base: …`."""
    try:
        yield
    except (ConfigError, CapabilityError) as error:
        raise type(error)(f"{key}={path}: {error}") from error
