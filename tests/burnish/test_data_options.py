"""`reader.<option>`: how a dataset is read is typed once, saved with the run, and the same when resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from messages import mentions

import burnish
from envs.datasets import Episode, EpisodeDataset, write_d4rl
from policies.errors import CheckpointError, ConfigError

TINY = {
    "backbone.width": 16, "algo.steps": 8, "algo.warmup_steps": 0, "algo.batch_size": 4,
    "algo.log_every": 4, "algo.validation_fraction": 0, "trainer.checkpoint_every": 4, "policy.horizon": 2,
    "policy.act_steps": 1, "num_threads": 1, "progress": False,
}  # fmt: skip


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    """Three episodes of six frames that end by a time limit; two frames fewer are official transitions."""
    generator = torch.Generator().manual_seed(0)

    def one(seed: int) -> Episode:
        rows = torch.randn(7, 2, generator=generator).numpy()
        return Episode(rows, rows[:-1], rows[:-1, 0], terminated=False, truncated=True, seed=seed)

    write_d4rl(tmp_path / "toy.hdf5", EpisodeDataset.from_episodes([one(seed) for seed in range(3)]))
    return tmp_path / "toy.hdf5"


def train(demos: Path, *overrides: str, **values: Any) -> Any:
    return burnish.clone(demos, *overrides, directory=demos.parent / "run", **TINY, **values)


def test_a_run_reads_as_it_was_told_and_keeps_what_it_was_told(demos: Path) -> None:
    run = train(demos, "reader.d4rl_compat=true")
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert config["reader"] == {"d4rl_compat": True}
    provenance = json.loads((run.directory.policy_path() / "config.json").read_text())["provenance"]
    assert provenance["reader"] == {"d4rl_compat": True}
    burnish.train(resume=run.path)  # compares the data with what the checkpoint knows of it
    with pytest.raises(CheckpointError, match=mentions("init= data")):
        burnish.train("reader.d4rl_compat=false", resume=run.path)


def test_a_dataset_may_be_a_name(demos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_DATASETS", str(demos.parent / "downloads"))
    (demos.parent / "downloads" / "d4rl").mkdir(parents=True)
    place = demos.rename(demos.parent / "downloads" / "d4rl" / "hopper_medium-v2.hdf5")
    monkeypatch.chdir(demos.parent)
    run = burnish.clone("hopper-medium-v2", directory=demos.parent / "run", **TINY)
    assert yaml.safe_load((run.path / "config.yaml").read_text())["dataset"] == str(place)


def test_mistakes_are_refused_before_a_run_exists(demos: Path) -> None:
    with pytest.raises(ConfigError, match=mentions("reader.task d4rl")):
        train(demos, "reader.task=cube")
    with pytest.raises(ConfigError, match=mentions("reader={'task cube dataset=")):
        burnish.train("reader.task=cube", algo="dppo", env="avoid", directory=demos.parent / "run")
    with pytest.raises(ConfigError, match=mentions("reader={'task cube dataset=")):
        burnish.evaluate(demos.parent, "reader.task=cube")
    assert not (demos.parent / "run").exists()
