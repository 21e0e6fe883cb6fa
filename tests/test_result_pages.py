"""Pages of results: the intervals of several seeds, and what is said of the commits that measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algos.training.run_directory import RunDirectory
from benchmarks import pages
from benchmarks.speed import page as speed_page
from benchmarks.speed import products
from benchmarks.speed.__main__ import CASES
from benchmarks.studies import learning_page, offline_page, table, table_page, verify
from envs.evaluation.intervals import conditional_value_at_risk, success_rate, wilson


def measured(*commits: str) -> list[dict[str, Any]]:
    return [{"environment": {"commit": commit}} for commit in commits]


def test_success_of_a_page_covers_the_luck_of_seeds() -> None:
    seeds = np.arange(100) < np.array([[15], [15], [42]])
    assert pages.success(seeds) == pages.percent(success_rate(seeds)) == "24 % (12–41)"
    assert pages.success(seeds[0]) == pages.percent(wilson(15, 100))


def test_the_worst_tenth_of_a_page_covers_the_luck_of_seeds() -> None:
    returns = np.array([0.0, 10.0, 20.0])[:, None] + np.arange(20.0)  # seeds differ more than episodes
    run = {"steps": 1, "protocol": {"env": {"reference_scores": [0, 100]}}}
    runs = [run | {"evaluations": {"last": {"return": list(seed)}}} for seed in returns]
    worst = conditional_value_at_risk(returns)
    assert worst.high - worst.low > 5  # of the pooled episodes it is less than 3
    (row,) = offline_page.rows_of("iql", runs)
    assert f"{worst.value:.1f} ({worst.low:.1f} to {worst.high:.1f})" in row


def test_differences_on_a_page_are_paired_on_common_seeds_and_said_in_words() -> None:
    """Episodes are of very unequal difficulty, which cancels where they are paired."""
    episodes = np.linspace(0.0, 100.0, 20)

    def run(seed: int, **gains: float) -> dict[str, Any]:
        evaluations = {
            name.replace("_then_", ", "): {"return": [*(episodes + 10.0 * seed + gain)]}
            for name, gain in gains.items()
        }
        protocol = {"env": {"reference_scores": [0.0, 100.0]}}
        return {"seed": seed, "protocol": protocol, "evaluations": evaluations}

    found = {
        "bc": [run(seed, last=0.0) for seed in (0, 1, 2)],
        "flow+iql": [run(seed, last=5.0, cloned=2.0 - seed) for seed in (0, 1, 2)],
        "prdc": [run(5, last=50.0)],
        "study_td3_bc": [run(1, last=1.0)],
        "td3_bc": [
            run(seed, last=-2.0, corrected=-2.0, perturbed=-9.0, perturbed_then_corrected=-8.0)
            for seed in (1, 2, 3)
        ],
    }
    lines = list(offline_page.differences(found))
    assert lines[:5] == [
        "| flow+iql: last | bc: last | 3 | +5.0 (+5.0 to +5.0) | clearly above |",
        "| flow+iql: last | td3_bc: last | 2 | +7.0 (+7.0 to +7.0) | clearly above |",
        "| flow+iql: last | study_td3_bc: last | 1 | +4.0 (+4.0 to +4.0) | clearly above |",
        "| study_td3_bc: last | bc: last | 1 | +1.0 (+1.0 to +1.0) | clearly above |",
        "| study_td3_bc: last | td3_bc: last | 1 | +3.0 (+3.0 to +3.0) | clearly above |",
    ]
    assert lines[5] == "| td3_bc: last | bc: last | 2 | -2.0 (-2.0 to -2.0) | clearly below |"
    assert lines[6] == "| flow+iql: last | flow+iql: cloned | 3 | +4.0 (+3.0 to +5.0) | clearly above |"
    assert lines[7:] == [
        "| td3_bc: corrected | td3_bc: last | 3 | +0.0 (+0.0 to +0.0) | within noise (± 0.0) |",
        "| td3_bc: perturbed, corrected | td3_bc: perturbed | 3 | +1.0 (+1.0 to +1.0) | clearly above |",
    ]


def test_a_difference_of_few_episodes_says_nothing_and_of_unequal_ones_is_left_out() -> None:
    def runs(*returns: float) -> list[dict[str, Any]]:
        protocol = {"env": {"reference_scores": [0.0, 100.0]}}
        return [{"seed": 0, "protocol": protocol, "evaluations": {"last": {"return": [*returns]}}}]

    (few,) = offline_page.differences({"bc": runs(1.0, 2.0), "iql": runs(3.0, 4.0)})
    assert few == "| iql: last | bc: last | 1 | +2.0 (+2.0 to +2.0) | too few episodes to tell |"
    assert not list(offline_page.differences({"bc": runs(1.0), "iql": runs(3.0, 4.0)}))


def test_the_best_checkpoint_is_not_judged_by_the_episodes_that_chose_it() -> None:
    protocol = {"env": {"reference_scores": [0.0, 100.0]}}
    lucky = {"last": {"return": [10.0] * 20}, "best": {"return": [90.0] * 10 + [20.0] * 10}}
    run = {"seed": 0, "steps": 1, "protocol": protocol, "evaluations": lucky}
    _, best = offline_page.rows_of("iql", [run])
    assert "| best | 1 | 1 | 20.0 (20.0 to 20.0) |" in best
    scores = offline_page.scores([run, run | {"evaluations": {"last": lucky["last"]}}], "best")
    assert scores is not None and scores.shape == (2, 10) and scores[1].max() == 10.0
    few = {"last": {"return": [10.0] * 10}, "best": {"return": [90.0] * 10}}
    assert (
        len(list(offline_page.rows_of("iql", [run | {"evaluations": few}]))) == 1
    )  # nothing is left to judge


def test_a_digest_says_what_it_is_of() -> None:
    row = {"dataset": {"sha256": "abc"}}
    assert pages.digest(row) == "SHA-256 `abc`"
    assert pages.digest(row | {"configuration": {}}) == "SHA-256 of its contents `abc`"


def test_a_page_says_which_code_cannot_be_checked_out() -> None:
    found = pages.commits(measured("b" * 40 + "-dirty", "a" * 40, "b" * 40))
    assert found == "aaaaaaa, bbbbbbb, bbbbbbb with changes that are in no commit"


def test_a_page_says_which_gate_corrected_which_seeds() -> None:
    old: dict[str, Any] = {"seed": 0, "evaluations": {"corrected": {}}}  # of results that name no gate
    new = [{"seed": seed, "evaluations": {"corrected": {}}, "gate_quantile": 0.99} for seed in (1, 2)]
    tuned = {"seed": 0, "evaluations": {"cloned": {}}, "gate_quantile": None}
    line = offline_page.gates({"bc": [old], "flow+iql": [tuned], "iql": new, "td3_bc": [old, *new]})[1]
    assert (
        line
        == "Corrected with `gate_quantile` 0.9 for bc, td3_bc (seed 0); 0.99 for iql, td3_bc (seeds 1, 2)."
    )
    assert offline_page.gates({"flow+iql": [tuned]}) == []


def test_a_row_holds_the_composed_configuration_without_places_of_the_machine() -> None:
    run = RunDirectory.open(Path(__file__).parent / "fixtures/version_0_1/runs/tuned")
    row = json.loads(json.dumps(pages.configuration(run)))
    assert row["algo"] == run.config["algo"] and row["env"]["name"] == "avoid"
    assert Path(run.config["init"]).is_absolute() and row["init"] == Path(run.config["init"]).name


class Everything(verify.History):
    """A history that has every commit and file, but those of one commit."""

    def has(self, commit: str, path: str = "") -> bool:
        return commit != "gone"

    def follows(self, commit: str, earlier: str) -> bool:
        return True


ROOT = Path(__file__).resolve().parents[1]


def test_tables_of_learning_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for page, name, lines in learning_page.blocks():
        assert "\n".join([f"<!-- results: {name} -->", *lines, ""]) in Path(page).read_text()


def test_a_page_is_that_of_its_rows_and_a_number_changed_by_hand_is_found(tmp_path: Path) -> None:
    written = ("docs/results.md", "docs/algorithms/critics.md", *learning_page.MEASURED)
    for part in ("docs/results/lift-varied", "README.md", *written):
        target = tmp_path / part
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, target)
    shutil.copy(ROOT / "docs/results/lift-varied.md", tmp_path / "docs/results")
    history = Everything(tmp_path)
    wrong = verify.verify(["lift-varied"], tmp_path, history)[0]
    wrong = [one for one in wrong if not one.startswith("docs/")]  # of which most rows are not here
    assert wrong and all(" lacks " in one for one in wrong)  # its rows are older than whole ones
    row = next((tmp_path / "docs/results/lift-varied").glob("dsrl-seed*.json"))
    content = json.loads(row.read_text())
    content["after"]["success"][0] = 1.0 - content["after"]["success"][0]
    row.write_text(json.dumps(content))
    wrong = [one for one in verify.verify(["lift-varied"], tmp_path, history)[0] if " lacks " not in one]
    assert any(one.startswith("lift-varied.md: line") for one in wrong)
    assert any("mean after" in one and row.name in one for one in wrong)


def test_a_row_that_was_edited_by_hand_is_found_in_its_history(tmp_path: Path) -> None:
    """Also when its page is written again, and the edit is committed."""
    place = pages.RESULTS / "avoid" / "a-seed0.json"
    (tmp_path / place).parent.mkdir(parents=True)

    def commit(value: float, code: str) -> dict[str, Any]:
        content = {"seed": 0, "curve": [value], "after": [value], "environment": {"commit": code}}
        (tmp_path / place).write_text(json.dumps(content))
        author = ["-c", "user.name=a", "-c", "user.email=a"]
        for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "a"]):
            subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
        return content

    def found(row: dict[str, Any]) -> set[str]:
        return verify.edits(row, verify.History(tmp_path).versions(place))

    first = commit(0.5, "x")
    assert found(first) == set() and found(first | {"after": [1.0]}) == {"after"}
    assert found(commit(0.75, "x")) == {"after"}
    assert found(commit(1.0, "y")) == set()  # measured again


def test_every_page_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also those that are of no run, on whatever machine."""
    assert sorted(verify.REPORTS) == sorted(path.stem for path in (ROOT / pages.RESULTS).glob("*.md"))
    for part in ("draw", "lab", "scale"):
        shutil.copytree(ROOT / pages.RESULTS / part, tmp_path / pages.RESULTS / part)
    (tmp_path / "README.md").touch()
    monkeypatch.setattr(os, "cpu_count", lambda: 99)
    for name in ("draw", "fleet_learns", "lab"):
        shutil.copy(ROOT / pages.RESULTS / f"{name}.md", tmp_path / pages.RESULTS)
    assert not verify.verify(["draw", "fleet_learns", "lab"], tmp_path, Everything(tmp_path))[0]


def test_tables_on_other_pages_and_pictures_are_compared_too(tmp_path: Path) -> None:
    def keep_table(folder: Path, number: int) -> None:
        file = folder / "docs/results/table/avoid-a.svg"
        file.parent.mkdir(parents=True)
        file.write_text(f"<svg>{number}</svg>")
        (folder / "docs/results.md").write_text(f"a\n{number}\n")
        (folder / "docs/results/a.md").write_text(f"{number}")  # compared before

    for number, folder in enumerate(("page", "other", "same")):
        keep_table(tmp_path / folder, min(number, 1))
    page, other, same = (tmp_path / folder for folder in ("page", "other", "same"))
    compared = {pages.RESULTS / "a.md"}
    first, second = sorted(verify.elsewhere(compared, page, other))
    assert first.startswith("docs/results.md: line 2")
    assert second.startswith("docs/results/table/avoid-a.svg")
    assert list(verify.elsewhere(compared, same, other)) == []


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ({}, []),
        ({"commit": "gone"}, ["its commit, gone"]),
        ({"commit": "a" * 40 + "-dirty"}, ["its commit, " + "a" * 12]),
        ({"configuration": None}, ["its configuration"]),
        ({"processor": None}, ["its processor"]),
        ({"dataset": {"sha256": ""}}, ["the digest of its data"]),
    ],
)
def test_a_row_that_cannot_be_repeated_says_what_it_lacks(change: dict[str, Any], lacks: list[str]) -> None:
    given = {"commit": "a" * 40, "processor": "x", "configuration": {"seed": 0}, "dataset": {"sha256": "b"}}
    given |= change
    row = {"environment": {key: given.pop(key) for key in ("commit", "processor")}} | given
    assert list(verify.missing(row, Everything(ROOT))) == lacks


def row(name: str, seed: int, rates: dict[float, list[int]], *, limit: int = 100) -> dict[str, Any]:
    """Return a run of the table: successes of four episodes by share of its budget, before it at 0."""
    before, *later = rates.values()
    points = [
        {"share": share, "step": round(share * limit), "cpu_s": 2 * share * limit, "success": values}
        for share, values in zip([*rates][1:], later, strict=True)
    ]
    tune = {"algo": {"lr": 0.1}, "seed": seed, "name": f"{name}-{seed}"}
    ways = [0, 1, 2, 3]
    return {
        "task": "avoid", "algo": name, "seed": seed, "is_init": True, "points": points,
        "settings": [f"experiment=avoid_{name}"], "base": "avoid_bc",
        "before": {"success": before, "mode": ways}, "after": {"success": later[-1], "mode": ways},
        "configuration": {"tune": tune}, "settings_sha256": table_page.settings_digest(tune),
        "gradient_steps": {"actor": 3}, "peak_mb": 400 + seed, "decision_ms": 0.5 + seed,
    }  # fmt: skip


HALF, THREE, ALL = [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]


def test_the_table_compares_what_methods_reach_within_a_budget() -> None:
    (slow, quick) = table_page.rows_of(
        [row("slow", seed, {0: HALF, 0.5: THREE, 1: ALL}) for seed in (7, 8)]
        + [row("quick", seed, {0: HALF, 0.5: HALF, 1: THREE}, limit=20) for seed in (8, 7)]
    )["avoid"]
    assert (slow.name, quick.name) == ("slow", "quick")
    assert [run["seed"] for run in quick.runs] == [7, 8]
    for limit, reached in ((10, HALF), (50, THREE), (99, ALL), (10_000, None)):  # 5 % of tolerance
        found = slow.at("step", limit)
        assert found is None if reached is None else found.tolist() == [reached, reached]
    assert quick.at("step", 100) is None and quick.at("step", 50) is not None
    found = quick.at("cpu_s", 1000)  # it ended long before
    assert found is not None and found.tolist() == [THREE, THREE]
    assert (slow.area() == 0.5 * (0.5 + 0.75) / 2 + 0.5 * (0.75 + 1) / 2).all()
    assert slow.kept_modes() == 1.0
    alone = table_page.rows_of([row("late", 8, {0: HALF, 1: ALL})])["avoid"]
    common = table_page.on_common_seeds([slow, quick, *alone])
    assert [[run["seed"] for run in one.runs] for one in common] == [[8], [8], [8]]
    better = table_page.improvement(slow.before, slow.after)
    assert better.value == 0.75 and better.low < 0.75 < better.high
    cells = dict(zip(table_page.COLUMNS, table_page.cells(quick), strict=True))
    assert (cells["10 %"], cells["50 %"], cells["steps"], cells["MB"]) == ("–", "50 %", "20", "408")
    assert (cells["best on the way"], cells["core min"], cells["ms"]) == ("75 %", "0.7", "8.00")


def test_the_table_gives_nothing_of_the_clone_to_methods_without_it() -> None:
    given = row("rlpd", 0, {0: ALL, 0.5: HALF, 1: THREE})
    (found,) = table_page.rows_of([given | {"is_init": False}])["avoid"]
    assert found.curve()[1].tolist() == [[0.0, 0.5, 0.75]]
    assert found.area().tolist() == [0.5 * 0.25 + 0.5 * 0.625]
    assert found.at("step", 10) is None  # no checkpoint within it
    (tuned,) = table_page.rows_of([given])["avoid"]
    early = tuned.at("step", 10)
    assert early is not None and early.tolist() == [ALL]
    for one in (found, tuned):
        cells = dict(zip(table_page.COLUMNS, table_page.cells(one), strict=True))
        assert cells["best on the way"] == "75 %"  # not the clone's


def test_a_checkpoint_that_stands_for_several_shares_counts_where_it_was_taken() -> None:
    run = row("iql", 0, {0: [0, 0, 0, 0], 0.1: ALL, 0.3: ALL, 1: ALL})
    for point in run["points"][:2]:
        point["step"] = 25  # the nearest to both
    (found,) = table_page.rows_of([run])["avoid"]
    assert found.curve()[0].tolist() == [[0.0, 0.25, 0.25, 1.0]]
    assert found.area().tolist() == [0.25 * 0.5 + 0.75]
    assert found.at_share(0.1) is None and found.at_share(0.25) is not None


def test_the_table_says_which_methods_were_given_clones_made_anew() -> None:
    def rows(*digests: str) -> list[table_page.Rows]:
        runs = [
            row(name, 0, {0: HALF, 1: ALL}) | {"base_sha256": digest, "dataset": {"sha256": "d"}}
            for name, digest in zip("abc", digests, strict=True)
        ]
        return table_page.rows_of(runs)["avoid"]

    assert table_page.made_anew(rows("x", "x", "x")) == []
    (line,) = table_page.made_anew(rows("x", "y", "x"))
    assert line == "Made more than once, from the same seeds: the clones of `avoid_bc`, for a, c; for b."


def test_methods_are_put_in_an_order_once_all_have_enough_seeds() -> None:
    runs = [
        row(name, seed, {0: HALF, 1: last})
        for name, last in (("best", ALL), ("worse", THREE))
        for seed in range(table_page.ENOUGH)
    ]
    complete, one_less = (table_page.rows_of(found)["avoid"] for found in (runs, runs[:-1]))
    assert all("best" in line for line in table_page.budgets(complete)) and table_page.budgets(complete)
    assert table_page.budgets(one_less) == table_page.order(one_less) == []
    assert "4 to 5 of 5 seeds" in table_page.under_way(one_less)
    assert table_page.order(complete[:1]) == [] and table_page.under_way(complete[:1]) == "One method so far."


def test_the_table_refuses_rows_that_contradict_themselves_or_each_other() -> None:
    good = row("dppo", 0, {0: HALF, 1: ALL})
    for change in (
        {"after": good["after"] | {"success": THREE}},
        {"configuration": {"tune": {"algo": {"lr": 0.2}}}},
    ):
        with pytest.raises(SystemExit, match="avoid-dppo-seed0"):
            table_page.rows_of([good | change])
    other = {"algo": {"lr": 0.2}}
    changed = {"configuration": {"tune": other}, "settings_sha256": table_page.settings_digest(other)}
    with pytest.raises(SystemExit, match="different settings"):
        table_page.rows_of([good, row("dppo", 1, {0: HALF, 1: ALL}) | changed])


def test_scores_of_the_table_are_shares_of_an_expert_and_their_worst_is_a_tenth() -> None:
    few = [[0.0] * 20, [*np.linspace(0.0, 1000.0, 20)]]
    run = row("iql", 0, {0: HALF, 1: ALL}) | {"quantity": "return"}
    for point, told in zip(
        [run["before"], *run["points"], run["after"]], [few[0], few[1], few[1]], strict=True
    ):
        point["return"] = told
    run |= {"task": "hopper-medium", "protocol": {"env": {"reference_scores": [0.0, 2000.0]}}}
    del run["before"]["mode"], run["after"]["mode"]
    (found,) = table_page.rows_of([run])["hopper-medium"]
    cells = dict(zip(table_page.COLUMNS, table_page.cells(found), strict=True))
    assert cells["clone"] == "0 % (0–0)" and cells["last"].startswith("25 % (") and cells["ways"] == "–"
    assert cells["worst"] == f"{100 * np.mean(few[1][:2]) / 2000:.0f} %"


def test_every_method_of_the_table_has_an_experiment() -> None:
    for study in table.CHOSEN:
        for method in table.methods_of(study).values():
            name = method.tuned[0].partition("experiment=")[2]
            assert (ROOT / f"configs/experiment/{name}.yaml").exists() and method.base


def figure(ratio: float, **change: Any) -> dict[str, Any]:
    """Return a kept run of a figure, 2 ms of ours."""
    given = {"case": "offline", "figure": "TD3+BC step", "peer": "plain program", "dataset": None}
    rest = {"ours_s": 0.002, "floor": 1.1, "commit": "a" * 7, "load": 0.5, "date": "2026-11-27"}
    return {**given, **rest, "ratio": ratio, **change}


def test_of_every_figure_of_speed_the_last_two_runs_are_kept() -> None:
    others = [figure(4.0, dataset="a.hdf5"), figure(5.0, peer="CORL"), figure(6.0, figure="IQL step")]
    same = [figure(1.0), figure(2.0), figure(3.0)]
    assert speed_page.last_runs([same[0], *others, *same[1:]]) == [*same[1:], *others]
    assert speed_page.last_runs(same[:1]) == same[:1]


def test_processors_of_the_table_of_speed_stand_side_by_side() -> None:
    file = figure(12.34, dataset="a.hdf5", ours_s=None)
    found = {
        "one": [figure(1.5), figure(1.0, ours_s=0.004), file],
        "two": [figure(2.0, floor=1.2, date="2027")],
    }
    assert speed_page.theme(found, ("offline",))[2:] == [
        "| TD3+BC step | plain program | 3.00 | **1.5 / 1** | 2.00 | **2** | 1.2 |",
        "| TD3+BC step (a) | plain program | – | **12.3** | – | – | 1.1 |",
    ]


def block(page: str, name: str) -> list[str]:
    """Return the lines of a block of a page."""
    text = (ROOT / page).read_text().partition(f"<!-- results: {name} -->\n")[2]
    return text.partition(f"<!-- /results: {name} -->")[0].splitlines()


def test_the_page_of_speed_says_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = speed_page.records()
    assert block(speed_page.PAGE, "speed") == [*speed_page.lines(found)]
    assert block(speed_page.SUMMARY, "speed") == speed_page.summary(found)
    measured = pages.record("speed", "products")["processors"]
    assert block("docs/speed.md", "products") == products.lines(measured)


def test_every_case_of_speed_has_a_table_and_every_aim_a_figure() -> None:
    themes = [case for cases in speed_page.THEMES.values() for case in cases]
    assert sorted(themes) == sorted(CASES)
    known = {(run["figure"], run["peer"]) for runs in speed_page.records().values() for run in runs}
    assert known >= speed_page.AIMS.keys()
