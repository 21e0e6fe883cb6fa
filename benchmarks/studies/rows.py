"""What rows of the studies hold: the dataset, per-episode numbers, curves, seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from algos.training.metrics import read_jsonl
from burnish.commands.evaluate import Result
from envs.datasets import read_dataset

EPISODES = 100
"""Episodes of an evaluation."""


def describe_dataset(path: Path) -> dict[str, Any]:
    """Return what identifies a file of demonstrations and says how good they are."""
    dataset = read_dataset(path)
    return {
        "name": path.name,
        "sha256": dataset.digest(),
        "episodes": dataset.num_episodes,
        "steps": dataset.num_frames,
        "mean_return": round(float(dataset.returns.mean()), 3),
    }


def busy(path: Path) -> float:
    """Return the seconds a run has spent collecting and updating, or on gradient steps."""
    rows = list(read_jsonl(path))
    parts = [sum(float(row.get(f"time/{what}_s") or 0.0) for row in rows) for what in ("rollout", "update")]
    return sum(parts) or float(rows[-1].get("time/elapsed_s") or 0.0)


def episode_columns(evaluation: Any) -> dict[str, list[float]]:
    """Return the per-episode numbers by name."""
    names = ["return", "success", "length", *evaluation.rows[0].metrics]
    return {name: [round(float(v), 6) for v in evaluation.values(name)] for name in names}


def beside_baseline(result: Result) -> dict[str, Any]:
    """Return the episodes of a policy and of its baseline, their difference, and how both were played."""
    assert result.baseline is not None and result.comparison is not None
    return {
        "before": episode_columns(result.baseline),
        "after": episode_columns(result.evaluation),
        "difference": asdict(result.comparison),
        "protocol": result.evaluation.protocol,
    }


def curve(path: Path) -> Iterator[dict[str, float]]:
    """Yield training returns and success rates over environment steps, and the seconds they took.

    Seconds are those of collecting and updating, without checkpoints and evaluation. Gradient steps on data,
    before the task, count as seconds and not as environment steps.
    """
    wall_s, on_data, before = 0.0, 0, 0
    for row in read_jsonl(path):
        wall_s += _seconds(row, row["step"] - before)
        before = row["step"]
        if "time/steps_per_s" in row:
            on_data = before
        if row.get("rollout/return") is not None:
            yield {
                "step": before - on_data,
                "wall_s": round(wall_s, 2),
                "return": round(row["rollout/return"], 4),
                "success": round(row.get("rollout/success") or 0.0, 4),
            }


def _seconds(row: dict[str, Any], steps: int) -> float:
    """Return the seconds of a row, from its rate where it does not tell them apart."""
    parts = [row[key] for key in ("time/rollout_s", "time/update_s") if row.get(key) is not None]
    rate = row.get("time/steps_per_s") or row.get("time/env_steps_per_s")
    if parts or not rate:
        return float(sum(parts))
    return steps / float(rate)
