"""Settings are tried on seeds and episodes of their own, and the page says which ones a study has."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks.studies import tuning
from benchmarks.studies.definitions import STUDIES
from benchmarks.studies.learning import reads_data
from benchmarks.studies.table import SEEDS
from burnish.config.saved import describe
from burnish.config.schema import compose_config
from envs.evaluation.settings import EvaluationSettings


def row_of(tried: list[str]) -> dict[str, Any]:
    """Return what a row of `gorl` on `avoid` says of its settings."""
    composed = compose_config("train", [f"experiment={STUDIES['avoid'].tuned['gorl']}", *tried])
    return {"study": "avoid", "algo": "gorl", "tried": tried, "configuration": {"tune": describe(composed)}}


def test_values_are_tried_in_every_combination() -> None:
    assert tuning.grid(["a=1,2", "b.c=x"]) == [("a=1", "b.c=x"), ("a=2", "b.c=x")]
    assert tuning.grid([]) == [()]


def test_seeds_and_episodes_are_those_of_no_report() -> None:
    assert not set(tuning.SEEDS) & {0, 1, 2, *SEEDS}
    assert tuning.EPISODES["first_seed"] > EvaluationSettings.first_seed + 1_000_000
    assert tuning.EPISODES["noise_seed"] != EvaluationSettings.noise_seed


def test_a_run_takes_data_if_its_algorithm_learns_from_them() -> None:
    for experiment in ("avoid_idql", "avoid_rlpd", "avoid_dppo algo.demo_value_weight=1"):
        assert reads_data(experiment), experiment
    for experiment in ("avoid_dppo", "avoid_dsrl"):
        assert not reads_data(experiment), experiment


def test_what_a_study_has_now_is_chosen() -> None:
    rate = compose_config("train", [f"experiment={STUDIES['avoid'].tuned['gorl']}"]).algo.actor_lr
    assert tuning.is_chosen(row_of([f"algo.actor_lr={rate}"]))
    assert tuning.is_chosen(row_of([]))
    assert not tuning.is_chosen(row_of([f"algo.actor_lr={2 * rate}"]))


@pytest.mark.parametrize(("words", "message"), [
    (["avoid", "gorl", "--seeds", "10,100"], "seeds of tuning are 10 to 99"),
    (["avoid", "grl"], "name a study and one of its algorithms: dppo, "),
    ([], "name a study and one of its algorithms"),
])  # fmt: skip
def test_what_is_reported_and_what_is_unknown_are_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.options.describe_environment", lambda: {"commit": "0a1b2c3d"})
    monkeypatch.setattr(sys, "argv", ["tuning", *words])
    with pytest.raises(SystemExit):
        tuning.main()
    assert message in capsys.readouterr().err
