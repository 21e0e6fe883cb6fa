"""N steps are k steps, a resume, and N - k steps, to the last bit on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from two_modes import two_mode_setup

from algos.base import Algorithm
from algos.bc import BcConfig
from algos.metrics import read_jsonl
from algos.state import RunDirectory
from algos.trainer import TrainerSettings, train
from policies.gaussian import GaussianProcess
from policies.processes import RectifiedFlow, VPDiffusion


def assert_equal(first: Any, second: Any, where: str = "state") -> None:
    """Nested states agree to the last bit."""
    assert type(first) is type(second), where
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key, value in first.items():
            if key not in ("elapsed_s", "metrics_bytes"):
                assert_equal(value, second[key], f"{where}[{key!r}]")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            assert_equal(a, b, f"{where}[{i}]")
    else:
        assert first == second, where


class Stopped(Exception):
    """Ends a run without warning."""


def train_until(
    algorithm: Algorithm, run: RunDirectory, settings: TrainerSettings, stop_at: int | None
) -> None:
    """Train; leave without warning before the first iteration after `stop_at` units."""
    advance = algorithm.advance

    def guarded() -> Any:
        if stop_at is not None and algorithm.progress >= stop_at:
            raise Stopped
        return advance()

    algorithm.advance = guarded  # type: ignore[method-assign]
    train(algorithm, run, settings, progress=False)


def assert_resumes_bit_exactly(
    build: Any, tmp_path: Path, settings: TrainerSettings, stops: list[int]
) -> None:
    """Compare an uninterrupted run with one that ends without warning at `stops` and is resumed."""
    whole, parts = (RunDirectory.create(tmp_path, name, {}) for name in ("whole", "parts"))
    algorithm = build()
    train_until(algorithm, whole, settings, None)
    algorithm.close()
    for stop_at in [*stops, None]:
        torch.manual_seed(1234 + (stop_at or 0))  # what the process drew before must not matter
        algorithm = build()
        try:
            train_until(algorithm, parts, settings, stop_at)
            assert stop_at is None
        except Stopped:
            assert stop_at is not None
        finally:
            algorithm.close()
    assert parts.checkpoints() == whole.checkpoints()
    assert_equal(parts.load_training_state(), whole.load_training_state())
    weights = [(run.policy_path() / "model.safetensors").read_bytes() for run in (parts, whole)]
    assert weights[0] == weights[1]
    rows = [
        [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(run.metrics_path)]
        for run in (parts, whole)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("process", [VPDiffusion(num_levels=5), RectifiedFlow(), GaussianProcess()])
def test_cloning_resumes_bit_exactly(process: object, tmp_path: Path) -> None:
    config = BcConfig(steps=24, batch_size=100, block_steps=3, warmup_steps=4, validation_fraction=0.1)
    assert_resumes_bit_exactly(
        lambda: config.build(two_mode_setup(process=process)),
        tmp_path,
        TrainerSettings(checkpoint_every=6),
        stops=[3, 9, 18],
    )
