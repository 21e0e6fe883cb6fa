"""What evaluations share: playing, summary, the file to write, and errors of one of two policies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.console import Counting
from envs.evaluation.evaluate import Evaluation, evaluate
from envs.rollouts.fleet import LOCAL
from policies.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from burnish.config.evaluate import EvalConfig


def play(
    label: str, policy: Any, env: Any, config: EvalConfig, *, keep_observations: bool = False
) -> Evaluation:
    """Evaluate a policy by the protocol of a configuration, with a bar of progress."""
    with Counting(f"evaluating {label}", config.episodes) as counting:
        return evaluate(
            policy,
            env,
            config,
            num_workers=config.num_workers,
            fleet=config.fleet or LOCAL,
            on_progress=lambda done, _: counting.show(done),
            keep_observations=keep_observations,
        )


def means_of(evaluation: Evaluation) -> dict[str, float]:
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
