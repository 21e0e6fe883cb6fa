"""Evaluation of a policy in a task, and its summary."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from envs.evaluation.evaluate import Evaluation
from envs.evaluation.evaluate import evaluate as run_episodes
from envs.evaluation.settings import EvaluationSettings
from policies.policy import Policy


def evaluate_with(
    policy: Policy, env: Any, settings: EvaluationSettings, num_workers: int, **options: Any
) -> Evaluation:
    """Evaluate with a protocol; options are those of `envs.evaluation.evaluate`."""
    protocol = {f.name: getattr(settings, f.name) for f in fields(EvaluationSettings)}
    return run_episodes(policy, env, num_workers=num_workers, **protocol, **options)


def headline(evaluation: Evaluation) -> dict[str, float]:
    """Return the defined means of an evaluation by name, with VaR and CVaR of the return."""
    summary = evaluation.summary()
    names = ("success", "return", "length", "d4rl_score", "return_value_at_risk", "return_cvar")
    return {name: float(summary[name]["value"]) for name in names if name in summary}
