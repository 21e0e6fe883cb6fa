"""Choose the settings of a method on seeds and episodes that nothing reports.

    python -m benchmarks.studies.tuning lift-varied pa_rl algo.actor_lr=1e-4,1e-5 algo.ema_decay=null,0.995
    python -m benchmarks.studies.tuning --report

Values by commas are tried in every combination, on top of the settings that the study has. Training seeds are
10 to 99, episodes begin at 3,000,000 and draw noise of their own: `learning` reports seeds 0 to 9, `table`
those from 100 on. Every run leaves one JSON file in docs/results/tuning; a run whose file is there is not
repeated, one that was stopped goes on. What is best is written into the study by hand; the page says of every
run whether the study has its settings now.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import burnish
from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.studies.definitions import STUDIES
from benchmarks.studies.learning import demonstrations, processes, reads_data, recipe
from benchmarks.studies.once import trained
from benchmarks.studies.rows import beside_baseline, busy, curve, describe_dataset
from burnish.config.saved import describe
from burnish.config.schema import compose_config
from envs.evaluation.intervals import Interval

PAGE = "tuning"
SEEDS = range(10, 100)
STUDIED = [name for name, study in STUDIES.items() if study.bases]
EPISODES: dict[str, Any] = {"episodes": 200, "first_seed": 3_000_000, "noise_seed": 1}


def grid(given: Iterable[str]) -> list[tuple[str, ...]]:
    """Return every combination of the values of `key=value,value`."""
    keys = [text.partition("=") for text in given]
    return list(itertools.product(*([f"{key}={one}" for one in many.split(",")] for key, _, many in keys)))


def run_one(
    name: str, algo: str, seed: int, settings: Sequence[str], root: Path, dataset: str | None = None
) -> Path:
    """Clone, fine-tune with the settings and evaluate one seed; returns the JSON file."""
    study, tag = STUDIES[name], hashlib.sha256(" ".join(settings).encode()).hexdigest()[:6]
    target = pages.RESULTS / PAGE / f"{name}-{algo}-{tag}-seed{seed}.json"
    if target.exists():
        return target
    demos = demonstrations(study, seed, dataset, root / name)
    place = root / name / f"{study.bases[algo].split()[0]}-seed{seed}"
    base = trained(place, *recipe(study.bases[algo]), dataset=str(demos), seed=seed)
    values = processes(algo, 0) | ({"dataset": str(demos)} if reads_data(study.tuned[algo]) else {})
    place = root / name / f"{algo}-{tag}-seed{seed}"
    run = trained(place, *recipe(study.tuned[algo]), *settings, init=str(base), seed=seed, **values)
    result = burnish.evaluate(run, baseline=str(base), **EPISODES)
    content = {
        "study": name, "algo": algo, "seed": seed, "experiment": study.tuned[algo], "tried": list(settings),
        "dataset": describe_dataset(demos), **beside_baseline(result),
        "curve": list(curve(run.directory.metrics_path)),
        "wall": {"tune_s": busy(run.directory.metrics_path)},
        "configuration": {
            "clone": pages.configuration(base.directory), "tune": pages.configuration(run.directory),
        },
    }  # fmt: skip
    return pages.keep(PAGE, target.stem, content)


def is_chosen(row: Mapping[str, Any]) -> bool:
    """Say whether the study has the settings of a row now."""
    now = describe(compose_config("train", recipe(STUDIES[row["study"]].tuned[row["algo"]])))
    then = row["configuration"]["tune"]
    keys = [text.partition("=")[0] for text in row["tried"]]
    keys += [f"algo.{key}" for key in then["algo"].keys() & now["algo"].keys()]
    return all(_value(now, key) == _value(then, key) for key in keys)


def _value(configuration: Any, key: str) -> Any:
    return functools.reduce(operator.getitem, key.split("."), configuration)


def lines() -> list[str]:
    """Return the page."""
    rows = sorted(pages.kept(PAGE), key=lambda row: (row["study"], row["algo"], row["seed"], row["tried"]))
    found = [
        "# Tuning",
        "",
        "`python -m benchmarks.studies.tuning <study> <algorithm> <key>=<value>,<value> …`: settings that "
        "were tried, on top of those of the study. Training seeds and episodes are others than those of the "
        f"pages that report: {EPISODES['episodes']} episodes from {EPISODES['first_seed']:,} on, with noise "
        "of their own. *Chosen*: the study has these settings now. What was chosen before this page began "
        "has no row.",
    ]
    for name, of_study in itertools.groupby(rows, key=lambda row: row["study"]):
        said = [
            [
                row["algo"], " ".join(f"`{text}`" for text in row["tried"]) or "of the study", row["seed"],
                pages.success(row["before"]["success"]), pages.success(row["after"]["success"]),
                pages.points(Interval(**row["difference"]["difference"])),
                f"{row['wall']['tune_s'] / 60:.1f} min", "yes" if is_chosen(row) else "",
            ]
            for row in of_study
        ]  # fmt: skip
        columns = ("algorithm", "settings", "seed", "clone", "after", "difference", "wall", "chosen")
        found += ["", f"## {name}", "", *pages.table(columns, said)]
    return [*found, "", f"Commits: {pages.commits(rows)}."]


def main() -> None:
    """Run what is asked for."""
    parser = study_parser(__doc__, seeds=str(SEEDS[0]), root="runs/tuning")
    parser.add_argument("study", nargs="?", choices=STUDIED)
    parser.add_argument("algo", nargs="?")
    parser.add_argument("settings", nargs="*", help="key=value,value")
    parser.add_argument("--dataset", help="of studies whose demonstrations are a file")
    options = parser.parse_args()
    if not options.report:
        known = STUDIES[options.study].bases if options.study else {}
        if options.algo not in known:
            parser.error(f"name a study and one of its algorithms: {', '.join(known) or 'avoid dppo'}")
        if any(seed not in SEEDS for seed in options.seeds):
            parser.error(f"seeds of tuning are {SEEDS[0]} to {SEEDS[-1]}; others are reported")
        for settings, seed in itertools.product(grid(options.settings), options.seeds):
            path = run_one(options.study, options.algo, seed, settings, options.root, options.dataset)
            print(f"written: {path}", flush=True)
    print(f"written: {pages.write(PAGE, lines())}")


if __name__ == "__main__":
    main()
