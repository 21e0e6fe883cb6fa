"""`burnish.evaluate` and `burnish.collect` play objects of this program in the place of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from torch import Tensor

import burnish
from envs.datasets import read_dataset
from envs.evaluation.evaluate import Evaluation, evaluate
from envs.evaluation.settings import EvaluationSettings
from envs.tasks.avoid.task import Avoid
from policies.errors import ConfigError
from policies.policy_config import ChunkSpec


class Forward:
    """Drives straight on."""

    chunk = ChunkSpec(action_dim=2, horizon=1, act_steps=1)
    noise_shape = chunk.shape
    images: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, speed: float) -> None:
        self.speed = speed

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.zeros(n, *self.noise_shape)

    def act(self, obs: dict[str, Tensor], *, noise: Tensor | None = None) -> Tensor:
        return torch.tensor([0.0, self.speed]).expand(len(obs["state"]), 1, 2)


def test_an_object_is_evaluated_and_compared_as_a_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fast, slow, few = Forward(1.0), Forward(0.5), EvaluationSettings(episodes=2)
    found = burnish.evaluate(fast, env="avoid", episodes=2, baseline=slow)
    assert found.label == "Forward" and found.comparison is not None and found.baseline is not None
    assert found.evaluation == evaluate(fast, Avoid(), few)
    assert found.baseline == evaluate(slow, Avoid(), few)
    assert Evaluation.from_json(found.path.read_text()) == found.evaluation
    assert burnish.evaluate(slow, "out=mine.json", env="avoid", episodes=1).path == Path("mine.json")


def test_an_object_is_recorded_as_a_run_is(tmp_path: Path) -> None:
    path = burnish.collect(
        policy=Forward(0.5), env="avoid", episodes=2, keep_failures=True, out=tmp_path / "played.hdf5"
    )
    data, played = read_dataset(path), evaluate(Forward(0.5), Avoid(), EvaluationSettings(2, 1_000_000))
    assert data.lengths.tolist() == [row.length for row in played.rows]
    assert (data.actions == torch.tensor([0.0, 0.5])).all()


def test_evaluations_of_objects_do_not_replace_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.api.dated_folder", lambda name: tmp_path / name)
    paths = {burnish.evaluate(Forward(v), env="avoid", episodes=1).path for v in (0.5, 1.0)}
    assert len(paths) == 2 and all(path.is_file() for path in paths)


def test_an_object_needs_a_task_and_the_members_of_a_policy() -> None:
    with pytest.raises(ConfigError, match=mentions("Forward task env=<name>")):
        burnish.evaluate(Forward(1.0), episodes=1)
    with pytest.raises(ConfigError, match=mentions("policy object chunk noise_shape sample_noise act")):
        burnish.evaluate(lambda obs: obs, env="avoid", episodes=1)
