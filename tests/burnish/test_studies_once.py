"""What studies make once: files and runs that are there are used, and only by the recipe that made them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions

import burnish
from algos.offline.config import plain_actor
from algos.rebrac import RebracConfig
from benchmarks.options import study_parser
from benchmarks.studies import learning
from benchmarks.studies.offline import correction_of
from benchmarks.studies.offline_data import JUDGED, settings_of
from benchmarks.studies.offline_page import rows_of, scores
from benchmarks.studies.once import _compared, demonstrations, first_seed, trained, with_own_episodes
from benchmarks.studies.sight import Blindfolded
from envs.datasets import read_dataset
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings as Settings
from envs.tasks.avoid.task import Avoid
from policies.build import build_policy
from policies.encoders.vit import VitEncoderConfig
from policies.normalizer import box_statistics
from policies.policy import PolicyConfig
from policies.processes.deterministic import DeterministicProcess

TINY = (
    "algo=bc", "env=avoid", "backbone.width=8", "algo.steps=8", "algo.warmup_steps=0", "algo.batch_size=4",
    "algo.log_every=4", "algo.validation_fraction=0", "num_threads=1", "progress=false",
)  # fmt: skip


def test_a_study_names_the_runs_that_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.options.describe_environment", lambda: {"commit": "0a1b2c3d"})
    monkeypatch.setattr("sys.argv", ["learning", "avoid", "--algos", "dppo,mine"])
    with pytest.raises(SystemExit):
        learning.main()
    assert "unknown: mine; avoid has dppo, ppo" in capsys.readouterr().err


def test_a_study_measures_nothing_in_a_working_copy_with_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows would name code that nobody can check out; a page of kept rows is written all the same."""
    parser = study_parser("A study.")
    for commit, words in (("0a1b2c3d", []), ("0a1b2c3d-dirty", ["--report"]), (None, [])):
        monkeypatch.setattr(
            "benchmarks.options.describe_environment", lambda commit=commit: {"commit": commit}
        )
        assert parser.parse_args(words).report == bool(words)
    monkeypatch.setattr("benchmarks.options.describe_environment", lambda: {"commit": "0a1b2c3d-dirty"})
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "commit first" in capsys.readouterr().err


def test_demonstrations_are_recorded_once(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "new" / "avoid.hdf5", "avoid", 2, seed=0)
    before = path.read_bytes()
    assert demonstrations(path, "avoid", 3, seed=1).read_bytes() == before
    assert first_seed(1) - first_seed(0) > 100 * 10  # a seed's attempts at a hundred demonstrations


def test_a_run_is_made_once_and_by_one_recipe(tmp_path: Path) -> None:
    demos, place = demonstrations(tmp_path / "avoid.hdf5", "avoid", 2, seed=0), tmp_path / "run"
    run = trained(place, *TINY, dataset=str(demos), seed=3)
    assert run.directory.latest() == 8
    weights = (place / "checkpoints" / "last" / "policy").resolve()
    made = {path: path.stat().st_mtime_ns for path in weights.rglob("*")}
    again = trained(place, *TINY, dataset=str(demos), seed=3, num_workers=1)  # of no influence
    assert again.directory.latest() == 8
    assert {path: path.stat().st_mtime_ns for path in weights.rglob("*")} == made
    with pytest.raises(SystemExit, match=mentions("seed=3 seed=4")):
        trained(place, *TINY, dataset=str(demos), seed=4)
    with pytest.raises(SystemExit, match=mentions("algo.lr=0.5")):
        trained(place, *TINY, "algo.lr=0.5", dataset=str(demos), seed=3)
    assert trained(place, *TINY, dataset=str(demos), seed=4, indifferent=["seed"]).directory.latest() == 8


def test_own_episodes_stand_behind_the_demonstrations_with_their_rewards(tmp_path: Path) -> None:
    demos, clone = demonstrations(tmp_path / "avoid.hdf5", "avoid", 2, seed=50), tmp_path / "run"
    trained(clone, *TINY, dataset=str(demos))
    shown = read_dataset(demos)
    path = with_own_episodes(tmp_path / "both.hdf5", demos, clone, 3, first=900)
    both = read_dataset(path)
    assert both.episode_extras["seed"].tolist() == [*shown.episode_extras["seed"].tolist(), 900, 901, 902]
    assert torch.equal(both.observations[: shown.num_frames], shown.observations)
    played = evaluate(burnish.load_policy(clone), Avoid(), Settings(episodes=3, first_seed=900)).rows
    assert both.lengths[2:].tolist() == [row.length for row in played]
    assert both.returns[2:].tolist() == pytest.approx([row.return_ for row in played])
    before = path.read_bytes()
    assert with_own_episodes(path, demos, clone, 9, first=0).read_bytes() == before


def test_a_run_that_was_shorter_goes_on(tmp_path: Path) -> None:
    (tmp_path / "overrides.txt").write_text("algo=td3_bc\nalgo.steps=8\nseed=0\n")
    assert _compared(tmp_path, ["algo=td3_bc", "algo.steps=8", "seed=0"], ()) == []
    assert _compared(tmp_path, ["algo=td3_bc", "algo.steps=16", "seed=0"], ()) == ["algo.steps=16"]
    for other in (["algo.steps=4", "seed=0"], ["algo.steps=16", "seed=1"], ["algo.total_steps=16", "seed=0"]):
        with pytest.raises(SystemExit, match=mentions("algo.steps=8")):
            _compared(tmp_path, ["algo=td3_bc", *other], ())


@pytest.mark.parametrize(
    ("data", "algo", "experiment", "more"),
    [
        ("hopper-medium", "iql", "hopper_medium_iql", []),
        ("hopper-medium-expert", "iql", "hopper_medium_expert_iql", []),
        ("hopper-medium", "study_prdc", "hopper_medium_study_prdc", []),
        ("hopper-medium-expert", "study_prdc", "hopper_study_prdc", []),
        ("hopper-medium-expert", "prdc", "hopper_prdc", []),
        ("walker2d-expert", "prdc", "walker2d_prdc", []),
        ("walker2d-expert", "study_prdc", "prdc_few_rows", ["env=walker2d"]),
    ],
)
def test_offline_settings_are_the_ones_of_the_data(
    data: str, algo: str, experiment: str, more: list[str]
) -> None:
    options = argparse.Namespace(steps=None, autocast=None, set=[])
    settings = [f"experiment={experiment}", *more, "algo.steps=100000"]
    assert settings_of(data, "", algo, options) == settings
    assert settings_of(data, "", f"{algo}@return", options) == [*settings, "curation.weighting=return"]


def test_actors_share_a_correction_where_they_see_states_alike(tmp_path: Path) -> None:
    def place(config: PolicyConfig, std: float = 0.1) -> Path:
        moments = {"mean": torch.full((3,), 4.0), "std": torch.full((3,), std)}
        box = box_statistics(-torch.ones(2), torch.ones(2))
        statistics = {"state": moments | {"min": -torch.ones(3), "max": torch.ones(3)}, "action": box}
        actor = build_policy(config, obs_dim=3, action_dim=2, statistics=statistics, seed=0)
        return correction_of(tmp_path, 7, actor)

    wide, narrow = (plain_actor(DeterministicProcess(), (width,)) for width in (16, 8))
    common = tmp_path / "actor-seed7-cdsa"
    assert place(wide) == place(narrow, std=0.101) == common, "where studies have left it"
    assert place(RebracConfig(normalize_states=True).actor_config()) == common
    recorded = RebracConfig().actor_config()
    assert place(recorded) == place(recorded, std=3.0) != common


def test_the_best_checkpoint_of_a_seed_may_be_its_last_and_rows_state_both_risks() -> None:
    protocol = {"env": {"reference_scores": [0.0, 200.0]}}

    def run(**returns: float) -> dict[str, Any]:
        evaluations = {name: {"return": [value] * (JUDGED + 2)} for name, value in returns.items()}
        return {"protocol": protocol, "evaluations": evaluations}

    (line,) = rows_of("iql", [run(last=value) | {"steps": 1000} for value in (100.0, 120.0)])
    assert line.split(" | ")[-1] == "50.0 |", "the best score of the worst tenth, here of two episodes"
    assert line.split(" | ")[-2].startswith("50.0 (")
    found = scores([run(last=100.0, best=150.0), run(last=120.0)], "best")
    assert found is not None and found.tolist() == [[75.0, 75.0], [60.0, 60.0]]
    assert scores([run(last=100.0), run(last=120.0)], "best") is None
    assert scores([run(last=100.0, corrected=1.0), run(last=120.0)], "corrected") is None


def test_a_blindfolded_policy_is_shown_other_frames() -> None:
    config = PolicyConfig(encoder=VitEncoderConfig(width=8, heads=2, features=5))
    ones = {name: box_statistics(-torch.ones(2), torch.ones(2)) for name in ("state", "action")}
    sizes = {"obs_dim": 2, "action_dim": 2, "images": {"ahead": (16, 16, 3)}, "statistics": ones}
    policy = build_policy(config, **sizes, seed=1).eval()
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (3, 1, 16, 16, 3), generator=generator, dtype=torch.uint8)
    obs = {"state": torch.zeros(3, 1, 2), "ahead": frames}
    noise = policy.sample_noise(3, generator=generator)
    seen = policy.act(obs, noise=noise)
    for name, shown in (("black", torch.zeros_like(frames)), ("another", frames[[2, 0, 1]])):
        found = Blindfolded(policy, name).act(obs, noise=noise)
        assert torch.equal(found, policy.act({**obs, "ahead": shown}, noise=noise))
        assert not torch.equal(found, seen)
