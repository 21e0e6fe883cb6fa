"""`burnish data inspect`: facts that can be counted by hand, measures with known answers, and bad files."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import repeated

import burnish
from burnish import cli
from envs.datasets import Episode, EpisodeDataset, write_d4rl, write_minari, write_robomimic
from envs.datasets.inspect import describe_file
from envs.datasets.quality import (
    action_divergence,
    cluster_variance,
    coverage,
    distinct_pairs,
    limits_of,
    own_row_rate,
    trajectory_quality,
)
from policies.errors import ConfigError, DatasetError


def made(states: np.ndarray, actions: np.ndarray, episodes: int = 4) -> EpisodeDataset:
    """Cut (N, Do) states and (N, Da) actions into episodes of one length, with rewards 1."""
    size = len(states) // episodes
    return EpisodeDataset.from_episodes(
        [
            Episode(
                observations=np.concatenate([part, part[-1:]]),
                actions=actions[first : first + size],
                rewards=np.ones(size),
                terminated=number % 2 == 0,
                truncated=number % 2 == 1,
                success=number == 0,
                seed=number,
            )
            for number in range(episodes)
            for first in [number * size]
            for part in [states[first : first + size]]
        ]
    )


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def noisy(rng: np.random.Generator) -> EpisodeDataset:
    """Actions that have nothing to do with states; one entry of either never moves."""
    states, actions = rng.normal(size=(400, 3)), rng.normal(size=(400, 2))
    states[:, 1], actions[:, 1] = 7.0, 0.25
    return made(states, actions)


# -- measures -------------------------------------------------------------------------------------------


def test_actions_that_follow_from_the_state_do_not_diverge(rng: np.random.Generator) -> None:
    states = np.tile(rng.normal(size=(100, 2)), (4, 1))  # every episode visits the same states
    assert action_divergence(made(states, states * 2), 400, rng) == 0
    assert cluster_variance(made(states, np.sign(states[:, :1])), 50, 400, rng) < 0.2


def test_actions_without_regard_to_the_state_diverge_fully(
    noisy: EpisodeDataset, rng: np.random.Generator
) -> None:
    assert action_divergence(noisy, 400, rng) == pytest.approx(1.0, abs=0.15)
    assert cluster_variance(noisy, 5, 400, rng) == pytest.approx(1.0, abs=0.05)


def test_measures_that_mean_nothing_are_nan(rng: np.random.Generator) -> None:
    still = made(rng.normal(size=(40, 2)), np.zeros((40, 2)))
    assert math.isnan(action_divergence(still, 10, rng)) and math.isnan(cluster_variance(still, 4, 40, rng))
    assert math.isnan(action_divergence(still.select([0]), 10, rng))


def test_undisturbed_actions_are_nearest_to_their_own_row(
    noisy: EpisodeDataset, rng: np.random.Generator
) -> None:
    assert own_row_rate(noisy, 2.0, 0.0, 400, rng) == 1.0
    assert own_row_rate(noisy, 1e-9, 100.0, 400, rng) < 0.1  # neither state nor action tells
    assert own_row_rate(noisy, 1e3, 1.0, 400, rng) == 1.0  # the state alone tells


def test_copies_of_a_frame_are_its_own_row(noisy: EpisodeDataset) -> None:
    twice = noisy.select([*range(noisy.num_episodes), *range(noisy.num_episodes)])
    assert own_row_rate(twice, 2.0, 0.0, 400, np.random.default_rng(0)) == 1.0


def test_own_rows_equal_a_search_through_all_rows(noisy: EpisodeDataset) -> None:
    beta, noise = 2.0, 0.7
    got = own_row_rate(noisy, beta, noise, 50, np.random.default_rng(3))
    again = np.random.default_rng(3)
    frames = again.permutation(noisy.num_frames)[:50]
    moved = noisy.actions.double().numpy()[frames] + noise * again.normal(size=(50, 2))
    states = noisy.observations.double().numpy()
    states = beta * (states - states.mean(0)) / (states.std(0) + 1e-3)
    rows = np.hstack([states, noisy.actions.double().numpy()])
    keys = np.hstack([states[frames], moved])
    nearest = ((rows[None] - keys[:, None]) ** 2).sum(2).argmin(1)
    assert got == np.mean(nearest == frames)


def test_distinct_pairs_are_counted_in_shared_bins() -> None:
    states = np.array([[0.0], [0.004], [0.5], [1.0]] * 2)
    data = made(states, np.zeros((8, 1)))
    assert distinct_pairs(data, limits_of(data)) == 3  # 0 and 0.004 share the first of 100 bins
    with pytest.raises(DatasetError, match=mentions("observation action 1")):
        coverage(data, made(np.zeros((8, 2)), np.zeros((8, 1))), np.random.default_rng(0))


def test_covering_half_of_the_reference_is_a_coverage_of_half(rng: np.random.Generator) -> None:
    places = np.arange(100.0)[:, None]
    whole = made(places, places)
    part = made(np.repeat(places[::2], 2, axis=0), np.repeat(places[::2], 2, axis=0))
    assert coverage(part, whole, rng) == pytest.approx(0.5, abs=0.02)
    assert coverage(whole, whole, rng) == 1.0


def test_quality_is_0_at_random_and_1_at_the_reference() -> None:
    assert trajectory_quality(np.array([1.0, 3.0]), 2.0, 10.0) == 0.0
    assert trajectory_quality(np.array([10.0]), 2.0, 10.0) == 1.0


# -- the schema -----------------------------------------------------------------------------------------


def test_every_key_is_described_with_what_is_wrong_in_it(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        for number, rows in enumerate((3, 5)):
            file[f"data/demo_{number}/actions"] = np.full((rows, 2), number + 0.5)
        file["data/demo_1/actions"][0, 0] = np.nan
        file["data/demo_1/actions"][0, 1] = -np.inf
        file["note"] = "hello"
    seen: list[int] = []
    found = {one.key: one for one in describe_file(tmp_path / "x.hdf5", seen.append)}
    one = found["data/demo_*/actions"]
    assert (one.arrays, one.rows, one.shapes, one.nan, one.infinite) == (2, 8, [(2,)], 1, 1)
    assert (one.low, one.high) == (0.5, 1.5)
    assert found["note"].low is None
    assert seen == sorted(seen) and seen[-1] == 8 * 2 * 8


def test_pieces_of_a_large_array_give_what_the_whole_gives(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.datasets.inspect._PIECE", 1000)
    values = rng.normal(size=(1000, 3))
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["x"] = values
    seen: list[int] = []
    (one,) = describe_file(tmp_path / "x.hdf5", seen.append)
    assert (one.low, one.high) == (values.min(), values.max()) and len(seen) > 20


# -- the command ----------------------------------------------------------------------------------------


def inspected(path: Path, **options: Any) -> dict[str, Any]:
    facts = burnish.inspect_data(path, out=path.parent / "found", **options)
    assert json.loads((path.parent / "found" / "inspection.json").read_text())["digest"] == facts["digest"]
    return facts


@pytest.mark.parametrize("write", repeated([write_robomimic, write_d4rl, write_minari]))
def test_facts_are_the_dataset_s(tmp_path: Path, noisy: EpisodeDataset, write: Any) -> None:
    write(tmp_path / "toy-v0", noisy)
    facts = inspected(tmp_path / "toy-v0", samples=50)
    assert (facts["episodes"], facts["frames"], facts["transitions"]) == (4, 400, 400)
    assert facts["ends"] == {"terminated": 2, "truncated": 2}
    assert facts["returns"]["mean"] == facts["lengths"]["max"] == 100
    assert facts["observation"]["constant"] == facts["action"]["constant"] == [1]
    assert facts["success"] == 0.25
    assert any("observation dimensions that do not move" in remark for remark in facts["remarks"])
    assert any("all rewards are 1" in remark for remark in facts["remarks"])
    png = (tmp_path / "found" / "inspection.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 5000


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("last", ["terminated", "truncated"])
def test_frames_are_told_to_be_lost_only_where_some_are(tmp_path: Path, last: str) -> None:
    rows = np.eye(9)
    np.savez(tmp_path / "a.npz", observations=rows, actions=rows, **{last: rows[8] > 0})
    remarks = inspected(tmp_path / "a.npz", measures=False)["remarks"]
    lost = [remark for remark in remarks if "successors are not recorded" in remark]
    assert len(lost) == (last == "truncated") and all("1 last frames" in remark for remark in lost)


@pytest.mark.usefixtures("no_picture")
def test_measures_follow_from_the_seed_and_can_be_left_out(tmp_path: Path, noisy: EpisodeDataset) -> None:
    write_d4rl(tmp_path / "toy.hdf5", noisy)
    one, two = (inspected(tmp_path / "toy.hdf5", samples=50, seed=3)["measures"] for _ in range(2))
    assert one == two and one != inspected(tmp_path / "toy.hdf5", samples=50, seed=4)["measures"]
    assert "measures" not in inspected(tmp_path / "toy.hdf5", measures=False)


@pytest.mark.usefixtures("no_picture")
def test_scores_quality_and_coverage_need_something_to_compare_with(
    tmp_path: Path, noisy: EpisodeDataset
) -> None:
    write_d4rl(tmp_path / "toy.hdf5", noisy)
    facts = inspected(
        tmp_path / "toy.hdf5", task="hopper-medium-v2", against=tmp_path / "toy.hdf5", samples=9
    )
    assert facts["measures"]["trajectory_quality"] == pytest.approx((100 + 20.272305) / (3234.3 + 20.272305))
    assert facts["d4rl_score"]["mean"] == pytest.approx(100 * facts["measures"]["trajectory_quality"])
    assert facts["measures"]["coverage"] == 1.0
    with pytest.raises(DatasetError, match=mentions("D4RL hoppper")):
        inspected(tmp_path / "toy.hdf5", task="hoppper")


@pytest.mark.usefixtures("no_picture")
def test_a_reference_is_read_with_the_options_that_fit_it(tmp_path: Path, noisy: EpisodeDataset) -> None:
    write_d4rl(tmp_path / "toy.hdf5", noisy)
    write_robomimic(tmp_path / "other.hdf5", noisy)
    shares = [
        inspected(tmp_path / "toy.hdf5", against=tmp_path / name, reader={"d4rl_compat": compat}, samples=9)[
            "measures"
        ]["coverage"]
        for name, compat in (("toy.hdf5", True), ("other.hdf5", False), ("other.hdf5", True))
    ]
    assert shares[:2] == [1.0, 1.0], "the same rows, read in the same way"
    assert shares[2] > 0, "robomimic's reader has no such option"


@pytest.mark.parametrize("kind", ["missing", "nan", "wide"])
def test_an_unusable_reference_is_refused_before_measuring(
    tmp_path: Path, noisy: EpisodeDataset, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.datasets.quality.own_row_rate", lambda *_: pytest.fail("measuring began"))
    write_d4rl(tmp_path / "toy.hdf5", noisy)
    if kind != "missing":
        wide = replace(noisy, observations=torch.zeros(400, 5), next_observations=None)
        write_robomimic(tmp_path / "other.hdf5", wide if kind == "wide" else noisy)
    if kind == "nan":
        with h5py.File(tmp_path / "other.hdf5", "a") as file:
            file["data/demo_2/actions"][3, 0] = np.nan
    message = {"missing": "no such file", "nan": "must be finite", "wide": "expected 3 observation entries"}
    with pytest.raises(DatasetError, match=mentions(f"other.hdf5 {message[kind]}")):
        inspected(tmp_path / "toy.hdf5", against=tmp_path / "other.hdf5")
    assert not (tmp_path / "found").exists()


@pytest.mark.usefixtures("no_picture")
def test_options_reach_the_reader(tmp_path: Path, noisy: EpisodeDataset) -> None:
    write_d4rl(tmp_path / "toy.hdf5", replace(noisy, extras={"x": torch.zeros(400)}))
    facts = inspected(tmp_path / "toy.hdf5", reader={"d4rl_compat": True}, measures=False)
    assert facts["frames"] == 398, "time-outs are no official transitions"
    with pytest.raises(ConfigError, match=mentions("reader.compact d4rl")):
        inspected(tmp_path / "toy.hdf5", reader={"compact": True})


def test_a_file_with_nan_is_described_and_then_refused(tmp_path: Path, noisy: EpisodeDataset) -> None:
    write_robomimic(tmp_path / "toy.hdf5", noisy)
    with h5py.File(tmp_path / "toy.hdf5", "a") as file:
        file["data/demo_2/actions"][3, 0] = np.nan
    with pytest.raises(DatasetError, match=mentions("actions finite")):
        burnish.inspect_data(tmp_path / "toy.hdf5", out=tmp_path / "found")
    facts = json.loads((tmp_path / "found" / "inspection.json").read_text())
    assert "must be finite" in facts["error"]
    assert [key["nan"] for key in facts["keys"] if key["key"] == "data/demo_*/actions"] == [1]


@pytest.mark.parametrize("keep", [0.02, 0.5, 0.95])
def test_a_truncated_file_is_one_clear_error(tmp_path: Path, noisy: EpisodeDataset, keep: float) -> None:
    path = tmp_path / "cut.hdf5"
    write_robomimic(path, noisy)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(DatasetError, match=mentions("cut.hdf5")):
        burnish.inspect_data(path, out=tmp_path / "found")
    assert not (tmp_path / "found").exists()


@pytest.mark.usefixtures("no_picture")
def test_the_command_takes_a_bare_path_and_prints_what_it_found(
    tmp_path: Path,
    noisy: EpisodeDataset,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_d4rl(tmp_path / "it's a toy.hdf5", noisy)
    monkeypatch.setattr(sys, "argv", ["burnish"])
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "inspect", "it's a toy.hdf5", "samples=20"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "own-row rate, noise 0.5" in shown and "written: inspection-it's a toy.hdf5" in shown
    assert (tmp_path / "inspection-it's a toy.hdf5" / "inspection.json").is_file()


def test_keys_of_a_refused_file_are_printed_with_a_way_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with h5py.File(tmp_path / "own.h5", "w") as file:
        file["take_0/joint_positions"] = np.zeros((7, 3))
    monkeypatch.setattr(sys, "argv", ["burnish"])
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "inspect", "own.h5"])
    told = capsys.readouterr()
    assert ended.value.code == 2 and re.search(r"take_0/joint_positions +1 +7 +\(3,\) +float64", told.out)
    assert "burnish.clone([{'observations'" in told.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "dataset="),
        (["samples=0"], "samples 1 0"),
        (["beta=-1"], "beta 0 -1.0"),
        (["nowhere.hdf5"], "nowhere.hdf5"),
        (["toy.hdf5", "against=other.hdf5", "measures=false"], "against="),
        (["nowhere.hdf5", "sample=1"], "sample"),
    ],
)
def test_mistakes_end_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["burnish"])
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "inspect", *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and re.search(mentions(message), error) and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
