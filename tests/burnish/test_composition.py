"""`burnish eval compose=[a,b]`: weights found, fresh episodes for all, a folder that is a policy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions

import burnish
from burnish import cli
from burnish.config.saved import describe_part
from envs.datasets import write_robomimic
from envs.make import env
from envs.rollouts.collect import collect
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.composition.policy import ComposedPolicy
from policies.errors import CapabilityError, ConfigError
from policies.policy import Policy, PolicyConfig
from policies.processes import RectifiedFlow, VPDiffusion
from policies.processes.gaussian import GaussianProcess
from policies.samplers.ddpm import DDIM
from policies.storage.policy_folder import save_policy

TASK = env("avoid", max_episode_steps=16)
SHORT: dict[str, Any] = {"episodes": 3, "num_workers": 0, "num_envs": 4}
SEARCH = {"divisions": 2, "episodes": [2, 3], "keep": [2]}


def tiny(process: Any, sampler: Any = None, seed: int = 0, **chunk: int) -> Policy:
    spec = TASK.spec
    width = {"state": spec.obs_dim, "action": spec.action_dim}
    parts = ("min", "max", "mean", "std")
    stats = {
        name: dict(
            zip(parts, (-torch.ones(dim), torch.ones(dim), torch.zeros(dim), torch.ones(dim)), strict=True)
        )
        for name, dim in width.items()
    }
    config = PolicyConfig(process=process, sampler=sampler, backbone=MlpConfig(width=8, time_dim=4), **chunk)
    return build_policy(config, obs_dim=spec.obs_dim, action_dim=spec.action_dim, statistics=stats, seed=seed)


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """A diffusion and a flow with a longer history, saved."""
    facts = {"env": describe_part("env", TASK)}
    policies = {"one": tiny(VPDiffusion(), DDIM(steps=3)), "two": tiny(RectifiedFlow(), seed=1, obs_steps=2)}
    return [str(save_policy(p, tmp_path / name, provenance=facts)) for name, p in policies.items()]


def test_weights_are_searched_and_every_member_is_compared(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level("INFO", "burnish"):
        result = burnish.compose(pair, search=SEARCH, out="found", **SHORT)
    assert result.search is not None
    assert [(t.round, len(t.evaluation.rows)) for t in result.search.trials] == [(0, 2)] * 3 + [(1, 3)] * 2
    seeds = [{row.seed for row in t.evaluation.rows} for t in result.search.trials]
    assert seeds[0] == {2_000_000, 2_000_001} and seeds[3] == {2_000_002, 2_000_003, 2_000_004}
    assert {row.seed for row in result.evaluation.rows} == {0, 1, 2}
    assert f"weights={list(result.search.best)}" in caplog.text
    assert list(result.members) == list(result.comparisons) == ["one", "two"]
    assert all(comparison.episodes == 3 for comparison in result.comparisons.values())
    again = burnish.load_policy("found")
    assert isinstance(again, ComposedPolicy) and again.composition.weights == result.search.best
    facts = json.loads(Path("found/composition.json").read_text())
    assert facts["weights_from"] == "searched by rollouts" and len(facts["search"]) == 5
    page = Path("found/composition.md").read_text()
    assert "## Search" in page and "## Fresh episodes (3, the same for all)" in page
    direct = burnish.evaluate("found", out="direct.json", **SHORT)  # the task is known
    assert direct.evaluation == result.evaluation
    single = burnish.evaluate(pair[1], out="two.json", **SHORT)
    assert single.evaluation == result.members["two"]


def test_weights_are_given_or_estimated(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = burnish.compose(pair, weights=[0.25, 0.75], **SHORT)
    assert given.path.parts[0] == "runs" and given.path.name.endswith("-compose")
    assert given.search is None and given.policy.composition.weights == (0.25, 0.75)
    knots = [[[0, 1], [1, 0]], [[0, 0], [1, 1]]]
    scheduled = burnish.compose(pair, weights=knots, out="scheduled", **SHORT)
    assert scheduled.policy.composition.weights[0] == ((0.0, 1.0), (1.0, 0.0))
    assert "[[0.0, 1.0], [1.0, 0.0]]" in Path("scheduled/composition.md").read_text()
    write_robomimic("held-out.hdf5", collect(env("avoid"), episodes=2, first_seed=5))
    options = {"dataset": "held-out.hdf5", "estimate": {"levels": 3, "windows": 20}}
    estimated = burnish.compose(pair, weights="estimate", out="estimated", **options, **SHORT)
    assert [one.t for one in estimated.estimate] == [None, 0.25, 0.5, 0.75]
    assert estimated.policy.composition.weights == pytest.approx(estimated.estimate[0].weights)
    assert "## Estimate from demonstrations" in Path("estimated/composition.md").read_text()


def test_a_mixture_is_sampled_as_it_must_be(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=mentions("operator=or sampler=ddpm")):
        burnish.compose(pair, operator="or", weights=[0.5, 0.5], **SHORT)
    result = burnish.compose(
        pair, "sampler=ddpm", operator="or", weights=[0.5, 0.5], temperature=2.0, **SHORT
    )
    assert result.policy.composition.operator == "or" and result.policy.composition.temperature == 2.0
    assert result.path.parent.parent == Path("runs")


def test_the_command_prints_what_it_found(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["weights=[0.5,0.5]", "episodes=2", "num_workers=0", "out=found"]
    monkeypatch.setattr(sys, "argv", ["burnish", "eval", f"compose=[{','.join(pair)}]", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr().out
    assert (
        not ended.value.code and "Fresh episodes" in shown and "composition - two: paired difference" in shown
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compose": ["a"]}, "compose=[a,b] ['a']"),
        ({"policy": "a"}, "compose policy baseline"),
        ({"weights": "estimate"}, "dataset="),
        ({"first_seed": 2_000_050}, "first_seed=2000050 search.first_seed=2000000"),
        ({"operator": "product"}, "operator=product"),
        ({"weights": [0.5, 0.6]}, "operator=convex operator=product 1"),
        ({"weights": [0.5, 0.5], "search": SEARCH}, "search weights"),
        ({"estimate": {"levels": 3}}, "dataset"),
        ({"weights": [0.5, 0.5], "temperature": 2.0}, "operator=convex"),
    ],
)
def test_what_makes_no_sense_is_refused(
    pair: list[str], changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    members = changes.pop("compose", pair)
    with pytest.raises(ConfigError, match=mentions(said)):
        burnish.compose(members, **{**SHORT, **changes})
    assert not (tmp_path / "runs").exists()


def test_members_and_keys_that_have_no_place_are_refused(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mean = save_policy(
        tiny(GaussianProcess()), tmp_path / "mean", provenance={"env": describe_part("env", TASK)}
    )
    with pytest.raises(CapabilityError, match=mentions("GaussianPolicy GaussianProcess")):
        burnish.compose([pair[0], str(mean)], weights=[0.5, 0.5], **SHORT)
    with pytest.raises(ConfigError, match=mentions("compose=")):
        burnish.evaluate(pair[0], weights=[0.5, 0.5], **SHORT)


def test_a_place_that_takes_nothing_is_refused_before_anything_is_played(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("burnish.runs.composition.play", lambda *_: pytest.fail("played"))
    for name in ("runs", "file"):
        Path(name).write_text("")
    for place in (None, "file", "file/inside"):
        with pytest.raises(ConfigError, match="is a file"):
            burnish.compose(pair, weights=[0.5, 0.5], out=place, **SHORT)


def test_what_was_played_is_shown_where_it_cannot_be_written(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("burnish.runs.composition._write", fails)
    with pytest.raises(OSError, match="no space left"):
        burnish.compose(pair, weights=[0.5, 0.5], **SHORT)
    shown = capsys.readouterr().out
    assert "Fresh episodes (3, the same for all)" in shown and "composition - two:" in shown


def test_evaluations_replace_evaluations_and_nothing_else(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        burnish.evaluate(pair[0], out="eval.json", **SHORT)
    for name, content in (("data.hdf5", b"\x89HDF"), ("notes.json", b'{"a": 1}')):
        Path(name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"out={name} exists and is no evaluation"):
            burnish.evaluate(pair[0], out=name, **SHORT)
        assert Path(name).read_bytes() == content
