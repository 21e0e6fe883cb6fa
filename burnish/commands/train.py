"""`burnish train`: clone or fine-tune a policy; resumable at any time."""

from __future__ import annotations

from burnish.config.train import TrainConfig
from burnish.console import output
from burnish.runs.context import RunContext
from burnish.runs.launch import main_number, report_lines, train, train_seeds
from burnish.runs.resolve import has_seeds


def run(config: TrainConfig, context: RunContext) -> float | None:
    """Train or resume, print the path; return the last success rate or return, averaged over seeds."""
    results = train_seeds(config, context) if has_seeds(config) else [train(config, context)]
    output().print(report_lines(results), "")
    return main_number(results)
