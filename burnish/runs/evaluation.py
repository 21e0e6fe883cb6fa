"""Summary of an evaluation."""

from __future__ import annotations

from envs.evaluation.evaluate import Evaluation


def headline(evaluation: Evaluation) -> dict[str, float]:
    """Return the defined means of an evaluation by name, with VaR and CVaR of the return."""
    summary = evaluation.summary()
    names = ("success", "return", "length", "d4rl_score", "return_value_at_risk", "return_cvar")
    return {name: float(summary[name]["value"]) for name in names if name in summary}
